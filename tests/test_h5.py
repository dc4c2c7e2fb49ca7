"""backend="h5": whole batches out of the mapped file, equal to what torch makes of its samples."""

import gc
import pickle
import random
import re
import threading
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import BatchSampler, Sampler, Subset, default_collate
from torchvision.models import ResNet18_Weights
from torchvision.transforms import transforms as v1
from torchvision.transforms import v2

from backends.h5 import H5
from backends.h5.batches import finishes_floats
from backends.h5.images import obstacle_in
from backends.h5.threads import Threads
from backends.prefetch import Prefetch
from dataloaders import DataLoader
from dataloaders.cache import CachedDataset, precompute
from dataloaders.errors import BackendUnavailable, CacheError, OptionError
from helpers.cached import built, spoil, stored_file
from helpers.compare import assert_same
from helpers.datasets import CountingStream, Made, MapDataset
from helpers.pictures import Opened, folder, noise, smooth
from helpers.processes import is_true_in_a_fork

COUNT = 12
ONE, THREE = ((20, 24),), ((20, 24), (31, 17), (20, 16))
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
AT_ONCE = "batches are made at once"
pytestmark = pytest.mark.usefixtures("cache_folder")


class Images(MapDataset):
    """Images of one size or of several, whose head is empty if their first transform is random."""

    size, mode, sizes = COUNT, "RGB", ONE

    def __init__(self, *members, module=v2, **options):
        super().__init__(transform=module.Compose(list(members)), **options)

    def sample(self, index):
        image = smooth(index, *self.sizes[index % len(self.sizes)], self.mode)
        return {"image": self.transform(image), "label": index, "name": f"image {index}"}


def cropped(**options):
    chain = [v1.RandomCrop(16), v1.RandomHorizontalFlip(), v1.PILToTensor()]
    return Images(*chain, module=v1, **options)


@pytest.fixture
def caches(tmp_path_factory):
    """Where the cache of some images is: one that a test has built is opened by those after it."""

    def path_of(dataset, images="raw"):
        what = (type(dataset).__name__, dataset.mode, dataset.sizes, images)
        return tmp_path_factory.getbasetemp() / f"{hash(what)}.h5"

    return path_of


def epoch(loader, seed=6):
    torch.manual_seed(seed)
    return list(loader)


# The same batches as stock's


WINDOWS = {
    "crop": lambda lib: lib.RandomCrop(5),
    "border": lambda lib: lib.RandomCrop((8, 10), padding=(3, 2), pad_if_needed=True),
    "mirror": lambda lib: lib.RandomHorizontalFlip(),
    "turn": lambda lib: lib.RandomVerticalFlip(0.7),
}
STEPS = {
    **WINDOWS,
    "centre": lambda lib: lib.CenterCrop((6, 8)),
    "resized": lambda lib: lib.RandomResizedCrop((9, 7)),
    "resize": lambda lib: lib.Resize(9),
    "grey": lambda lib: lib.Grayscale(3),
}
FLOATS = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
HALVES = [v2.ToImage(), v2.ToDtype(torch.float16, scale=True)]
ENDS = {
    "bytes": lambda lib: [lib.PILToTensor()],
    "floats": lambda lib: [v1.ToTensor()] if lib is v1 else FLOATS,
    "normal": lambda lib: [*ENDS["floats"](lib), lib.Normalize([0.4], [0.3])],
    "halves": lambda lib: ENDS["bytes"](lib) if lib is v1 else HALVES,
    "after": lambda lib: [*ENDS["normal"](lib), lib.RandomVerticalFlip()],
    "tensors": lambda lib: [lib.PILToTensor(), lib.RandomVerticalFlip(), lib.RandomCrop(4)],
}  # fmt: skip


def assert_batches_are_stocks(dataset, backend, batch_size=4, *, at_once=True, **options):
    loader = DataLoader(dataset, batch_size, backend=backend, **options)
    batches = list(loader)
    assert_same(batches, list(DataLoader(dataset, batch_size, backend="stock", **options)))
    assert not at_once or (backend.path and AT_ONCE in str(loader.explain())), loader.explain()
    return batches


class Chains(Images):
    """Samples of eight images, each with transforms of its own."""

    def __init__(self, chains, **options):
        super().__init__(v2.CenterCrop(1), **options)
        for number, chain in enumerate(chains):
            setattr(self, f"transform{number}", chain)
        del self.transform

    def sample(self, index):
        image = smooth(index, *self.sizes[index % len(self.sizes)], self.mode)
        return [getattr(self, f"transform{number}")(image.copy()) for number in range(8)]


@pytest.mark.parametrize("number", range(30))
@pytest.mark.thinned(6)
def test_any_chain_of_any_images(caches, number):
    draw = random.Random(number)
    images = draw.choice(["raw", "raw", "png", "webp"])
    more = {"raw": ["CMYK", "YCbCr", "1", "LA", "HSV"], "png": ["1", "LA"], "webp": ["LA"]}
    mode = draw.choice(["RGB", "RGB", "L", "RGBA", *more[images]])
    sizes = draw.choice([ONE, THREE])

    def chain():
        lib, end = draw.choice([v1, v2]), draw.choice(sorted(ENDS))
        known = STEPS if mode in ("RGB", "L", "RGBA", "CMYK") and draw.random() < 0.3 else WINDOWS
        names = [draw.choice(sorted(WINDOWS)), *draw.choices(sorted(known), k=draw.randint(0, 6))]
        steps = [STEPS[step](lib) for step in names]
        return lib.Compose([*steps, lib.CenterCrop(5), *ENDS[end](lib)])

    dataset = Chains([chain() for _ in range(8)], mode=mode, sizes=sizes)
    options = {"sampler": draw.choices(range(COUNT), k=9), "seed": number}
    backend = H5(caches(dataset, images), images=images)
    assert_batches_are_stocks(dataset, backend, at_once=False, **options)


BORDERS = [  # each of them alone: around a part of an image there is no border
    lambda lib: lib.CenterCrop((30, 9)),
    lambda lib: lib.RandomCrop(8, padding=4),
    lambda lib: lib.RandomCrop((8, 6), padding=(1, 4)),
    lambda lib: lib.RandomCrop((8, 6), padding=[5, 1, 3, 2]),
    lambda lib: lib.RandomCrop(17, padding=2),
    lambda lib: lib.RandomCrop((12, 40), pad_if_needed=True),
    lambda lib: lib.RandomCrop((40, 22), padding=2, pad_if_needed=True),
    lambda lib: lib.RandomCrop(7, fill=9, padding_mode="edge"),
]


@pytest.mark.parametrize("number", range(8))
@pytest.mark.thinned(3)
def test_crops_and_flips_are_proved_and_not_made_sample_by_sample(caches, number):
    """What a few rows do not prove is right, too, but slow: nobody else would see it."""
    draw = random.Random(number)
    lib, mode = (v1, v2)[number % 2], ("RGB", "L")[number // 2 % 2]

    def chain(border):
        before = draw.choices(["mirror", "turn"], k=draw.randint(1, 2))
        after = draw.choices(["crop", "mirror", "turn"], k=draw.randint(0, 4))
        steps = [*map(WINDOWS.get, before), border, *map(WINDOWS.get, after)]
        return lib.Compose([*(step(lib) for step in steps), lib.CenterCrop(5), lib.PILToTensor()])

    dataset = Chains(list(map(chain, BORDERS)), sizes=(ONE, THREE)[number // 4], mode=mode)
    assert_batches_are_stocks(dataset, H5(caches(dataset)), seed=number)


@pytest.mark.parametrize("crop", [v2.RandomCrop, v2.RandomResizedCrop])
def test_one_channel_that_becomes_three_floats(crop):
    """v2's Normalize with three means: the bytes are not the planes of the image alone."""
    chain = [crop(16), *ENDS["floats"](v2), v2.Normalize(MEAN, STD)]
    for dataset, size in ((Images(*chain, mode="L"), 4), (Mixed(*chain), 1)):
        batches = assert_batches_are_stocks(dataset, H5(), size, at_once=False, seed=2)
        assert {batch["image"].shape for batch in batches} == {(size, 3, 16, 16)}


@pytest.mark.parametrize(("seed", "num_workers", "row"), [(None, 0, 5), (4, 1, 5), (4, 0, 0)])
def test_a_damaged_image_is_the_error_of_its_own_row(
    tmp_path, seed, num_workers, row, workers_end_fast
):
    dataset, path = cropped(size=10), tmp_path / "a.h5"
    cached = built(dataset, path, images="png")
    file = stored_file(cached, 0, row)
    spoil(path, path.read_bytes().find(file) + len(file) // 4, bytes(len(file) // 2))
    with pytest.raises(CacheError, match=f"row {row}:") as wanted:
        CachedDataset(path)[row]
    options = {"seed": seed, "num_workers": num_workers, "backend": H5(path)}
    iterator = iter(DataLoader(dataset, 4, **options))
    for batch in ([0, 1, 2, 3], [4, 5, 6, 7], [8, 9]):
        if row in batch:
            with pytest.raises(CacheError) as found:
                next(iterator)
            assert str(wanted.value) in str(found.value)
        else:
            assert next(iterator)["label"].tolist() == batch


class Pair(Images):
    """An image that becomes floats, a copy that stays bytes, and one of each other column."""

    def __init__(self):
        super().__init__(v2.RandomCrop(16), *ENDS["normal"](v2))
        self.other = cropped().transform

    def sample(self, index):
        sample = super().sample(index)  # which draws first, and stands last
        return {
            "copy": self.other(smooth(index)),
            "rest": [{
                "int": index - 3, "float": index / 3, "bool": index % 3 == 0, "text": "x" * index,
                "bytes": bytes([index]), "flags": torch.tensor([index % 2 == 0, True]),
                "tensor": torch.full((2, 3), index, dtype=torch.int16),
                "bfloat16": torch.tensor([index / 7], dtype=torch.bfloat16),
                "float8": torch.tensor([index / 7, torch.nan]).to(torch.float8_e4m3fn),
                "array": np.full((4,), index / 2, np.float32), "scalar": np.float32(index),
                "number": torch.tensor(index), "nested": (index, (index + 1,)),
                "kinds": np.int64(index) if index % 2 else index,
            }],
            **sample,
        }  # fmt: skip


def test_columns_of_all_kinds(caches):
    h5 = H5(caches(Pair()))
    for num_workers in (0, 1):
        options = {"sampler": [4, 4, 0, 11, 7], "seed": 4, "num_workers": num_workers}
        batches = assert_batches_are_stocks(Pair(), h5, **options)
        assert batches[0]["copy"].dtype is torch.uint8
        assert batches[0]["image"].dtype is torch.float32
        batches[0]["rest"][0]["tensor"].fill_(9)
    (batch,) = DataLoader(Pair(), 2, sampler=[-1, 0], backend=h5)
    assert batch["label"].tolist() == [COUNT - 1, 0]
    for collate_fn in (None, list):  # a batch sampler may yield iterators
        rows = map(iter, [[3, 1]])
        loader = DataLoader(Pair(), batch_sampler=rows, collate_fn=collate_fn, backend=h5)
        assert len(next(iter(loader))) == (len(batch) if collate_fn is None else 2)
    with pytest.raises(IndexError):
        list(DataLoader(Pair(), 2, sampler=[0, COUNT], backend=h5))


def test_without_a_seed_order_is_torchs_and_crops_follow_its_base_seed():
    dataset = cropped()
    loader = DataLoader(dataset, 5, backend=H5())
    assert AT_ONCE in str(loader.explain())
    first = epoch(loader)
    assert_same(epoch(loader), first)
    assert not torch.equal(epoch(loader, 2)[0]["image"], first[0]["image"])
    first = epoch(DataLoader(dataset, 5, shuffle=True, backend=H5()))
    on_torch = torch.utils.data.DataLoader(dataset, 5, shuffle=True, num_workers=1)
    for batch, wanted in zip(first, epoch(on_torch), strict=True):
        assert torch.equal(batch["label"], wanted["label"])
        assert batch["image"].shape == wanted["image"].shape
        assert batch["image"].dtype is wanted["image"].dtype


# What is made sample by sample


def turned_somehow(image):
    """Code of one's own that draws."""
    return image.rotate(float(torch.rand(1)) * 40 - 20)


def test_another_tail_runs_sample_by_sample(caches):
    dataset = Images(v1.RandomCrop(9), turned_somehow, v1.PILToTensor(), module=v1)
    options = {"backend": H5(caches(dataset)), "seed": 3}
    plan = str(DataLoader(dataset, 4, **options).explain())
    why = r"made one by one.*turned_somehow at .*\[1\] is not supported .*: it is code of your own"
    assert re.search(why, plan)
    assert_batches_are_stocks(dataset, **options, at_once=False, collate_fn=list)
    ahead = DataLoader(dataset, 4, backend=Prefetch(options["backend"]), seed=3)
    assert "the dataset's own code runs on the loop's thread" in str(ahead.explain())
    assert_same(list(ahead), list(DataLoader(dataset, 4, seed=3)))


TENSOR, NORMAL = v2.ToImage(), v2.Normalize([0.5], [0.5])
SCALED = v2.ToDtype(torch.float32, scale=True)


@pytest.mark.parametrize(
    ("members", "why"),
    [
        ([v1.CenterCrop((4, 0)), TENSOR], "at least 1 x 1"),
        ([v2.RandomCrop(4, padding=2, fill={"others": 3}), TENSOR], "only borders of zeros"),
        ([v2.RandomCrop(4, pad_if_needed=True, padding_mode="reflect"), TENSOR], "only borders"),
        ([v1.RandomCrop(3, padding=9), TENSOR], "from 0 to below size"),
        ([NORMAL, v2.RandomCrop(9), TENSOR], "Normalize .* only CenterCrop, Rand"),
        ([TENSOR, SCALED, NORMAL, v2.RandomCrop(9, 2)], "RandomCrop comes after Normalize"),
        ([v2.RandomCrop(9)], "makes no tensors"),
        ([v2.RandomCrop(9), SCALED], None),
    ],
)
def test_the_crops_and_flips_that_are_not_done_to_a_batch_say_why(members, why):
    found = obstacle_in(v1.Compose(members))
    assert found is None if why is None else re.search(why, str(found))


def test_other_default_dtypes_and_devices_make_torchvision_draw_other_numbers(tmp_path):
    chain = v1.Compose([v1.RandomHorizontalFlip(), v1.RandomCrop(9), v1.PILToTensor()])
    try:
        torch.set_default_dtype(torch.float64)
        images = Images(*chain.transforms, module=v1)
        assert_batches_are_stocks(images, H5(tmp_path / "a.h5"), seed=3)
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        assert "set_default_device()" in str(obstacle_in(chain))
    assert obstacle_in(chain) is None


@pytest.mark.parametrize("flip", [False, True])
def test_transforms_of_weights_are_one_deterministic_member(flip, tmp_path):
    preset = ResNet18_Weights.DEFAULT.transforms()
    preset.crop_size, preset.resize_size = [24], [28]  # for 224 out of 256
    chain = v1.Compose([v1.RandomHorizontalFlip(), preset]) if flip else preset
    dataset, path = folder(chain), tmp_path / "small.h5"
    precompute(dataset, path)
    assert_batches_are_stocks(dataset, H5(path), shuffle=True, seed=3, at_once=not flip)
    image = CachedDataset(path).columns[0]
    assert [kind for kind, _ in image.variants] == ["image:RGB" if flip else "tensor:float32"]
    plan = DataLoader(dataset, 4, backend=Prefetch(tail=True)).explain()
    assert "normalise" in [stage.name for stage in plan.stages], "without the cache"


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize(("mode", "sizes"), [("RGB", THREE), ("1", ONE), ("LA", ONE)])
@pytest.mark.parametrize("lib", [v1, v2])
def test_floats_of_images_that_are_made_one_by_one(caches, lib, mode, sizes, seed):
    """Without a seed torch's own generator is drawn from, as under stock."""
    end = ENDS["normal" if mode == "RGB" else "floats"](lib)
    dataset = Images(lib.RandomResizedCrop(9), *end, module=lib, mode=mode, sizes=sizes)
    options = {"seed": seed, "num_workers": int(lib is v2)}
    batches, wanted = (
        epoch(DataLoader(dataset, 5, backend=backend, **options))
        for backend in (H5(caches(dataset)), "stock")
    )
    assert_same(batches, wanted)
    assert finishes_floats(H5(caches(dataset)).cached(DataLoader(dataset)))


@pytest.mark.parametrize("seed", [None, 1])
def test_an_image_smaller_than_its_crop_is_torchvisions_error(seed):
    iterator = iter(DataLoader(cropped(sizes=ONE * 11 + ((8, 8),)), 6, seed=seed, backend=H5()))
    state = torch.get_rng_state()
    assert len(next(iterator)["label"]) == 6
    with pytest.raises(ValueError, match="is larger than input image size"):
        next(iterator)
    assert seed is None or torch.equal(torch.get_rng_state(), state)
    flipped = Images(v2.RandomHorizontalFlip(), v2.ToImage(), sizes=THREE)
    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
        next(iter(DataLoader(flipped, 4, seed=seed, backend=H5())))


def test_without_workers_a_thread_makes_the_batches_ahead():
    threads = set()

    class OnTheLoopsThread(Sampler):
        def __iter__(self):
            for index in range(COUNT):
                threads.add(threading.get_ident())
                yield index

    options = {"sampler": OnTheLoopsThread(), "seed": 4}
    loader = DataLoader(cropped(), 5, backend=Prefetch(H5()), **options)
    assert "a thread takes up to" in str(loader.explain())
    stock = DataLoader(cropped(), 5, **options)
    assert_same([list(loader), list(loader)], [list(stock), list(stock)])
    assert threads == {threading.get_ident()}


# The backend


def test_the_file_is_built_once_and_named_after_what_is_in_it(cache_folder, capfd):
    for _ in range(2):
        list(DataLoader(cropped(), 4, backend=H5()))
    (path,) = (cache_folder / "h5").glob("*.h5")
    assert capfd.readouterr().err.count(f"backend 'h5' builds {path}") == 1
    list(DataLoader(Subset(cropped(), [1, 2]), 4, backend="h5"))
    list(DataLoader(cropped(), 4, backend=H5(images="jpeg")))
    list(DataLoader(cropped(), 4, backend=H5(images="raw")))  # as it is anyway
    assert len(list((cache_folder / "h5").glob("*.h5"))) == 3
    with pytest.raises(CacheError, match="length: 12 when it was built, 2 now"):
        list(DataLoader(Subset(cropped(), [0, 1]), 4, backend=H5(path)))


def test_never_build(tmp_path):
    path = tmp_path / "train.h5"
    backend = H5(path, build="never")
    assert pickle.loads(pickle.dumps(backend)) == backend
    loader = DataLoader(cropped(), 4, backend=backend)
    assert "there is no cache at" in str(loader.explain())
    with pytest.raises(BackendUnavailable, match="dataloaders cache build"):
        list(loader)
    built(cropped(), path)
    assert len(list(loader)) == 3
    with pytest.raises(OptionError, match="needs a path"):
        H5(build="never")


def test_the_plan(tmp_path):
    path = tmp_path / "train.h5"
    members = [v1.Resize(20), v1.CenterCrop(18), v1.RandomCrop(16), v1.ToTensor()]
    dataset = Images(*members, module=v1)
    dataset.loader = Image.open  # as an ImageFolder has one: stock says that it decodes
    loader = DataLoader(dataset, 4, backend=H5(path))
    assert "built at the first iter()" in str(loader.explain())
    assert not path.exists()
    list(loader)
    assert f"rows of {path}\n" in str(loader.explain())
    stages = loader.explain().stages
    (live,) = [stage.how for stage in stages if stage.name == "augment"]
    assert live == "RandomCrop, ToTensor; in the cache: Resize, CenterCrop"
    assert not {"decode", "gather"} & {stage.name for stage in stages}
    stream = DataLoader(CountingStream(), backend=H5(path))
    assert "an iterable dataset has no samples by index" in str(stream.explain())
    lists = BatchSampler(range(4), 2, drop_last=False)
    by_lists = DataLoader(torch.arange(4), None, sampler=lists, backend=H5(path))
    assert "the sampler gives lists of indices" in str(by_lists.explain())
    dataset = Mixed(*cropped().transform.transforms)
    list(DataLoader(dataset, 1, backend=H5(tmp_path / "a.h5")))
    why = "samples are made one by one: column 'image': its tail works on image:RGB, image:L"
    assert why in str(DataLoader(dataset, 2, backend=H5(tmp_path / "a.h5")).explain())


class Mixed(Images):
    """Images of two modes."""

    def sample(self, index):
        return {"image": self.transform(smooth(index, mode=("RGB", "L")[index % 2]))}


# What changes between epochs


def test_transforms_that_are_changed_between_epochs_are_those_of_the_next():
    """Workers that stay keep those that they began with, as torch's do."""
    images = Images(v2.RandomCrop(16), v2.RandomHorizontalFlip(0.0), turned_somehow, v2.ToImage())
    options = {"shuffle": True, "seed": 5, "num_workers": 1}
    h5, stock = (DataLoader(images, 4, backend=each, **options) for each in (H5(), "stock"))
    stay = DataLoader(images, 4, num_workers=1, persistent_workers=True, backend=H5())
    members = images.transform.transforms
    for change in (
        lambda: None,
        lambda: members.__setitem__(0, v2.RandomCrop(9)),
        lambda: members.pop(2),
        lambda: None,
    ):
        change()
        assert_same(list(h5), list(stock))
        assert next(iter(stay))["image"].shape == (4, 3, 16, 16)


def test_another_head_more_samples_dataset_and_collate_fn_count_from_the_next_epoch(tmp_path):
    def chain(side):
        return v2.Compose([v2.Resize((side, side)), v2.RandomCrop(8), v2.ToImage()])

    images = Images(*chain(10).transforms)
    loader, fixed = (DataLoader(images, 4, backend=H5(path)) for path in (None, tmp_path / "a.h5"))
    list(loader), list(fixed)
    images.transform = chain(12)
    list(loader)
    with pytest.raises(CacheError, match=r"head: .*10, 10.* when it was built, .*12, 12.* now"):
        list(fixed)
    images.size = 16
    assert [int(label) for batch in loader for label in batch["label"]] == list(range(16))
    loader.__dict__["dataset"] = [{"a": 1}] * 4
    assert set(next(iter(loader))) == {"a"}
    loader.collate_fn = len
    assert next(iter(loader)) == 4
    loader.collate_fn = default_collate
    assert isinstance(next(iter(loader)), dict)


def test_samples_that_were_left_out_have_no_row(tmp_path):
    partly = Made(int, 5, failing={3})
    built(partly, tmp_path / "a.h5", on_error="skip")
    with pytest.raises(CacheError, match="left out 1 samples"):
        list(DataLoader(partly, 4, backend=H5(tmp_path / "a.h5")))
    cached = CachedDataset(tmp_path / "a.h5")
    batches = [batch.tolist() for batch in DataLoader(cached, 2, backend="h5")]
    assert batches == [[0, 1], [2, 4]]


def test_a_cached_dataset_is_read_as_it_is(tmp_path, cache_folder):
    cached = built(cropped(), tmp_path / "a.h5")
    loader = DataLoader(cached, 4, backend="h5", num_workers=1, seed=1)
    assert f"rows of {cached.path}" in str(loader.explain())
    assert_same(list(loader), list(DataLoader(cropped(), 4, seed=1)))
    cached.transform = lambda sample: sample["label"]
    assert next(iter(loader)).tolist() == [0, 1, 2, 3]
    assert not cache_folder.exists()  # no second cache is built
    as_jpeg = built(cropped(), tmp_path / "b.h5", images="jpeg")
    assert "images as jpeg" in str(DataLoader(as_jpeg, 4, backend="h5").explain())


# Batches made by several threads


LARGE = 1 << 30


def running():
    return {each for each in threading.enumerate() if each.name.startswith("dataloaders-h5")}


def test_each_part_is_made_once_in_a_thread_that_torch_does_not_split():
    before, others, seen = torch.get_num_threads(), running(), []
    together = threading.Barrier(3, timeout=20)

    def part(begin, end):
        together.wait()
        seen.append((begin, end, torch.get_num_threads()))
        if begin == 0:
            raise ValueError("the first part")

    for most, size in ((1, LARGE), (3, 1000)):  # nothing is started where it does not pay
        Threads(most).split(10, size, lambda *ends: seen.append((*ends, threading.get_ident())))
    assert (seen, running()) == ([(0, 10, threading.get_ident())] * 2, others)
    threads = Threads(3)
    seen.clear()
    with pytest.raises(ValueError, match="the first part"):
        threads.split(10, LARGE, part)

    def is_split():
        done = []
        threads.split(3, LARGE, lambda begin, _: done.append(begin))
        return sorted(done) == [0, 1, 2]

    assert is_true_in_a_fork(is_split)  # by threads of its own
    threads.close()
    assert sorted(seen) == [(0, 3, 1), (3, 6, 1), (6, 10, 1)]
    assert (torch.get_num_threads(), running()) == (before, others)


@pytest.mark.parametrize("end", ["bytes", "normal"])
def test_batches_by_threads_are_the_same_and_no_thread_stays(end, tmp_path):
    def loader(threads):
        backend = H5(tmp_path / "a.h5", threads=threads)
        return DataLoader(dataset, 20, seed=2, backend=backend)

    steps = [v2.RandomCrop(480), v2.RandomHorizontalFlip(), *ENDS[end](v2)]
    dataset = Opened(v2.Compose(steps), size=20, picture=partial(noise, 500, 500, 3))  # 14 MB
    others = running()
    wanted, by_three = list(loader(1)), loader(3)
    assert AT_ONCE in str(by_three.explain())
    assert running() == others
    batches = list(by_three)
    started = running() - others
    assert 0 < len(started) <= 3  # an idle one takes the next part
    del by_three
    gc.collect()
    for thread in started:
        thread.join(timeout=20)
    assert_same(batches, wanted)
    assert running() <= others
