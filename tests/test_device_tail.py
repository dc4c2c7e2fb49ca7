"""The device tail of Prefetch: batches equal the dataset's own to the bit; without one, why."""

import random
from collections import namedtuple
from typing import ClassVar

import numpy as np
import pytest
import torch
import torchvision.transforms as v1
from PIL import Image
from torch.utils.data import ConcatDataset, StackDataset, TensorDataset, default_collate
from torchvision.datasets import FakeData
from torchvision.transforms import v2

from backends.h5 import H5
from backends.prefetch import Prefetch
from backends.stock import Stock
from dataloaders import DataLoader
from dataloaders.errors import BackendUnavailable
from dataloaders.replaying.pointwise import Pointwise
from helpers.codes import padded
from helpers.compare import assert_same, run_epochs
from helpers.datasets import CountingStream, CustomBatch, MapDataset, as_list
from helpers.pictures import noise
from helpers.recorded import recording

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
F32, CPU = torch.float32, torch.device("cpu")
SIZE = 9


def picture(index, mode="RGB", size=(12, 10)):
    """A PIL image of ``size`` (width, height) with every sort of value."""
    channels = 4 if mode in ("LA", "RGBA", "CMYK") else 3
    return noise(*size[::-1], channels, index).convert(mode)


class Pictures(MapDataset):
    """(transform(image), index), or what ``read`` makes of the dataset and the index."""

    def __init__(self, transform, read=None, size=SIZE, **held):
        super().__init__(None, size, transform=transform, read=read or plain, **held)

    def sample(self, index):
        return self.read(self, index)


def plain(own, index):
    return own.transform(picture(index)), index


def tailed(dataset, **options):
    return DataLoader(dataset, **{"batch_size": 4, "backend": Prefetch(tail=True), **options})


def saved_by(value):
    """The bytes that floats are larger than the bytes that they are made of."""
    if isinstance(value, torch.Tensor):
        return value.is_floating_point() * (value.element_size() - 1) * value.numel()
    values = value.values() if isinstance(value, dict) else value
    return sum(map(saved_by, values)) if isinstance(value, (dict, tuple, list)) else 0


def check(make, *, whole=True, **options):
    """Two epochs through the tail are torch's to the bit, random states included.

    With ``whole``, the bytes of all floats of a sample are what is copied.
    """
    options = {"batch_size": 4, **options}
    loader = tailed(make(), **options)
    plan = str(loader.explain())
    assert "equal to the bit" in plan
    assert not whole or f": {saved_by(make()[0])} bytes a sample less to collate" in plan
    on_torch = torch.utils.data.DataLoader(make(), **options)
    assert_same(run_epochs(loader), run_epochs(on_torch))


def chain(*members):
    return v1.Compose([*members])


BYTES2 = v2.ToImage(), v2.ToDtype(F32, scale=True)
FLOATS = v1.ToTensor(), v1.Normalize(MEAN, STD)
FLOATS2 = *BYTES2, v2.Normalize(MEAN, STD)
CONVERTED = v1.PILToTensor(), v1.ConvertImageDtype(F32), FLOATS[1]
TAILS = {
    "v1": chain(*FLOATS),
    "v1, PILToTensor": chain(*CONVERTED),
    "v1, in place": chain(v1.ToTensor(), v1.Normalize(MEAN, STD, inplace=True)),
    "v1, one number": chain(v1.ToTensor(), v1.Normalize(0.5, 0.25)),
    "v1, twice": chain(*FLOATS, v1.Normalize(torch.tensor([0.1]), torch.tensor([3.0]))),
    "v1, nested": chain(v1.Resize(8), chain(v1.RandomCrop(6), v1.ToTensor()), FLOATS[1]),
    "v1, random head": chain(v1.RandomResizedCrop(7), v1.ColorJitter(0.2), *FLOATS),
    "v2": v2.Compose([*FLOATS2]),
    "v2, on tensors": v2.Compose([BYTES2[0], v2.RandomResizedCrop(7), *FLOATS2[1:]]),
    "v2, pure at the end": v2.Compose([v2.PILToTensor(), *FLOATS2[1:], v2.ToPureTensor()]),
    "v2, unscaled": v2.Compose([v2.ToImage(), v2.ToDtype(F32)]),
    "v2, functional, unscaled": lambda image: v2.functional.to_dtype(BYTES2[0](image), F32),
    "v2, half": v2.Compose([v2.ToImage(), v2.ToDtype(torch.float16, scale=True)]),
    "v2, double": v2.Compose([v2.ToImage(), v2.ToDtype(torch.float64, True), FLOATS2[2]]),
    "mixed": v2.Compose([v1.ToTensor(), v2.Normalize(MEAN, STD)]),
    "Sequential": torch.nn.Sequential(v2.ToImage(), v2.RandomCrop(5), *FLOATS2[1:]),
}


def each_tail(own, index):
    return {name: tail(picture(index)) for name, tail in own.transform.items()}


def test_every_sort_of_tail_is_the_users_own_to_the_bit():
    """In batches; sample by sample, every code of a dataset: test_recording."""
    check(lambda: Pictures(TAILS, each_tail), shuffle=True)


# Datasets and batches


def normalized(lib=v1):
    return lib.Compose([lib.RandomCrop(8), *(FLOATS if lib is v1 else FLOATS2)])


Named = namedtuple("Named", "image label")


def own_generator(own, index):
    image = picture(index + (own.rng.random() < 0.5))
    return own.transform(image), own.rng.randrange(99)


def of_modes(own, index):
    made = {}
    for mode in ("1", "P", "LA", "RGBA", "CMYK"):
        image = picture(index, mode)
        channels = len(image.getbands())
        normalize = v1.Normalize((MEAN * 2)[:channels], (STD * 2)[:channels])
        made[mode] = chain(v1.ToTensor(), normalize)(image)
    return made


def test_every_sort_of_dataset():
    held = {
        "fake": lambda: FakeData(SIZE, (3, 12, 12), transform=normalized()),
        "named": lambda: Pictures(normalized(), lambda *own: Named(*plain(*own))),
        "generator": lambda: Pictures(normalized(), own_generator, rng=random.Random(4)),
        "function": lambda: Pictures(chain(*FLOATS, lambda image: image)),
        "modes": lambda: Pictures(None, of_modes),
    }
    check(lambda: StackDataset(**{name: make() for name, make in held.items()}))


class Watching(Prefetch):
    """Notes the dtype of the first image of each batch that is sent."""

    seen: ClassVar[list[torch.dtype]] = []

    def transfer(self, device):
        transfer = super().transfer(device)
        send = transfer.send
        transfer.send = lambda batch: (self.seen.append(batch[0][0].dtype), send(batch))[1]
        return transfer


def test_workers_send_bytes_of_samples_and_of_a_cache(tmp_path):
    data = Pictures(chain(v1.Resize(20), v1.RandomCrop(16), *FLOATS))
    options = {"batch_size": 4, "num_workers": 1, "seed": 3, "persistent_workers": True}
    for inner in (Stock(), H5(tmp_path / "small.h5")):
        Watching.seen.clear()
        loader = tailed(data, backend=Watching(inner=inner, tail=True), **options)
        on_torch = DataLoader(data, **options)
        assert_same([list(loader), list(loader)], [list(on_torch), list(on_torch)])
        assert set(Watching.seen) == {torch.uint8}
    plan = tailed(data, backend=Prefetch(device="cpu")).explain()
    assert plan.stages[-1].name == "transfer", "nothing moves to the CPU unless asked"


def test_a_transform_that_changes_between_epochs_is_followed():
    data = Pictures(chain(*FLOATS))
    with_tail, on_torch = tailed(data), torch.utils.data.DataLoader(data, 4)
    for mean in (MEAN, (0.5,) * 3):
        data.transform.transforms[-1] = v1.Normalize(mean, STD)
        assert_same(list(with_tail), list(on_torch))


def now_and_then(samples):
    images, labels = default_collate(samples)
    return images.mul(0.5) if random.random() < 0.3 else images, labels


def sizes(own, index):
    return own.transform(picture(index, size=(8, 9))), index, own.transform(picture(index))


def erasing(own, index):
    """Only now and then: zero is another thing before Normalize than after it."""
    erase = torch.rand(1) < 0.15
    image = own.transform(picture(index))
    if erase:
        image[:, :3, :3] = 0
    return image, index


def beside_others(own, index):
    """An image, and floats that are worked on."""
    return own.transform(picture(index)), v1.functional.to_tensor(picture(index, "L")).sqrt()


def once(odd):
    """A ``read`` whose seventh image is another one."""
    return lambda own, index: (own.transform(odd if index == 7 else picture(index)), index)


def arrays(own, index):
    return torch.from_numpy(np.random.default_rng(index).random((3, 8, 8), np.float32)), index


def one_channel(own, index):
    image = picture(index, "L")
    return own.transform(image), own.transform(np.array(image))


def test_batches_of_other_sorts():
    check(lambda: Pictures(v1.ToTensor(), one_channel), whole=False, batch_size=None)
    check(lambda: Pictures(normalized(), size=1), batch_size=8)
    check(lambda: Pictures(normalized()), batch_sampler=[[1, 2], [4]], batch_size=1)
    check(lambda: Pictures(normalized()), collate_fn=CustomBatch)
    check(lambda: Pictures(TAILS["v2"], sizes), collate_fn=as_list)
    check(lambda: Pictures(normalized()), collate_fn=now_and_then)


def test_floats_of_other_origin_stay_floats():
    data = StackDataset(
        erased=Pictures(normalized(), erasing),
        beside_others=Pictures(normalized(), beside_others),
        beside_arithmetic=Pictures(
            normalized(), lambda *own: (image := plain(*own)[0], image * 1.5)
        ),
        beside_arrays=ConcatDataset([Pictures(normalized(), size=5), Pictures(None, arrays, 4)]),
        ints=Pictures(v1.ToTensor(), once(Image.new("I", (12, 10)))),
        floats=Pictures(v1.ToTensor(), once(np.ones((10, 12, 3), np.float32))),
    )
    check(lambda: data, whole=False, batch_size=1)


@pytest.mark.parametrize(
    ("odd", "error", "message"),
    [(picture(7, "L"), RuntimeError, "shape"), ("no image", TypeError, "pic should be PIL Image")],
)
def test_a_sample_unlike_those_that_were_proved_raises_its_own_error(odd, error, message):
    with pytest.raises(error, match=message):
        list(tailed(Pictures(TAILS["v1"], once(odd)), batch_size=1))


def test_the_datasets_own_arrays_are_not_handed_out():
    pixels = np.zeros((4, 6, 5), np.uint8)
    dataset = Pictures(v1.ToTensor(), lambda own, index: own.transform(pixels[index]), size=4)
    loader = torch.utils.data.DataLoader(dataset, batch_size=None)
    for image in recording(loader, "tail"):
        assert not np.shares_memory(image.pixels.numpy(), pixels)


# Refusals


ERASING = chain(v1.ToTensor(), v1.RandomErasing(1.0), FLOATS[1])
REFUSED = {
    "no transform": (TensorDataset(torch.ones(4, 3, 2, 2)), "no float image of TensorDat"),
    "ends in a function": (
        Pictures(chain(*FLOATS, v1.Lambda(torch.sqrt))), "Pictures .* floats: Tensor.sqrt at"
    ),
    "erasing": (Pictures(ERASING), "v1t.erase, after"),
    "unreadable": (
        Pictures(normalized(), lambda *own: 1 // 0),
        r"reading samples \[0, 3, 5, 8\] of Pictures failed: ZeroDivisionError",
    ),
    "stream": (CountingStream(), "CountingStream has no samples by index"),
}  # fmt: skip


@pytest.mark.parametrize(("dataset", "why"), REFUSED.values(), ids=REFUSED)
@pytest.mark.thinned(2)
def test_refusals_and_their_reasons(dataset, why):
    with pytest.raises(BackendUnavailable, match=why):
        next(iter(tailed(dataset, backend=Prefetch(dtype=torch.float16))))


def test_a_collate_fn_that_works_on_floats_and_a_batch_without_images_are_reasons():
    plan = str(tailed(Pictures(normalized()), collate_fn=padded).explain())
    assert "normalised before the copy" in plan
    assert "works on the floats" in plan

    def read(own, index):
        return torch.rand(3, 8, 8) if index == 7 else own.transform(picture(index))

    backend = Prefetch(tail=True, dtype=torch.float16)
    with pytest.raises(BackendUnavailable, match="a batch has no image whose floats"):
        list(tailed(Pictures(normalized(), read), backend=backend, batch_size=1))


# Values


def test_what_torchvision_refuses_to_normalise_is_refused():
    for mean, std in ((MEAN, (0.2, 0, 0.2)), (MEAN[:2], 0.5)):
        with pytest.raises(ValueError, match="3 channels cannot be normalised by"):
            Pointwise([("v1t.normalize", (mean, std), (), F32, None)], 3)
    Pointwise([("v1t.normalize", ((0.0, 1.0, 0.5), (1.0, 0.5, 0.2)), (), F32, None)], 3)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("asked", [None, torch.bfloat16])
@pytest.mark.parametrize("dtype", [F32, torch.float16])
@pytest.mark.parametrize("lib", [v1, v2], ids=["v1", "v2"])
def test_every_byte_in_every_channel_is_torchvisions(lib, dtype, asked, device):
    """In both layouts, one image and several, in one piece and in several pieces."""
    scale = lib.ConvertImageDtype(dtype) if lib is v1 else v2.ToDtype(dtype, scale=True)
    chain = lib.Compose([scale, lib.Normalize(MEAN, STD)])
    every = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).repeat(3, 5, 3)
    one = Pictures(chain, lambda own, index: own.transform(every), size=1)
    (sent,) = recording(torch.utils.data.DataLoader(one, None), "tail")
    tail = Pointwise(sent.steps, 3)
    assert tail.dtype is dtype
    for pixels in (every, every.repeat(2, 3, 1, 1, 1), every.repeat(40, 1, 1, 1)):
        for each in (pixels, pixels.movedim(-3, -1).contiguous().movedim(-1, -3)):
            out = torch.empty_like(each, dtype=asked or dtype, device=device)
            tail(each.to(device), out)
            assert_same(out.cpu().contiguous(), chain(pixels).to(asked or dtype))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("memory_format", [torch.preserve_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float64])
@pytest.mark.covering
def test_dtypes_and_memory_formats(dtype, memory_format, device):
    """Each value is rounded to once."""
    tails = {name: TAILS[name] for name in ("v1", "v1, PILToTensor", "v2")}
    dataset = Pictures(tails, each_tail)
    backend = Prefetch(tail=True, dtype=dtype, memory_format=memory_format, device=device)
    loader = tailed(dataset, backend=backend, num_workers=int(device == "cuda"))
    assert ("rounded to" in str(loader.explain())) == (dtype is not None)
    for batch, wanted in zip(loader, torch.utils.data.DataLoader(dataset, 4), strict=True):
        for name, image in batch.items():
            assert image.device.type == device
            if memory_format is torch.channels_last:
                assert image.is_contiguous(memory_format=memory_format)
            assert_same(image.cpu().contiguous(), wanted[name].to(dtype or F32).contiguous())
