"""backend="dali": stock's samples, order and crops; endings and errors; what it says of itself.

Pixels on the CPU are held against stock's to the bit: with fast=().
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    RandomSampler,
    Subset,
    WeightedRandomSampler,
    default_collate,
)
from torch.utils.data.distributed import DistributedSampler
from torchvision import transforms
from torchvision.transforms import v2

from dataloaders import DataLoader, wrap
from dataloaders.errors import BackendUnavailable, OptionError
from helpers.compare import assert_same, run_epochs, seed_everything
from helpers.datasets import CountingStream
from helpers.photos import SIZE, Digits, Files, Opened, Tiny, folder, picture

pytest.importorskip("nvidia.dali", reason="needs NVIDIA DALI")

from backends.dali import Dali
from backends.dali.job import Job, job_of
from backends.dali.memory import BatchMemory, batch_memory
from backends.dali.nodes import FAST

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]

V1 = transforms.Compose(
    [
        transforms.RandomResizedCrop(16),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize(MEAN, STD),
    ]
)
V2 = v2.Compose(
    [
        v2.ToImage(),
        v2.RandomResizedCrop(16, antialias=True),
        v2.RandomHorizontalFlip(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(MEAN, STD),
    ]
)
BYTES = transforms.Compose([transforms.RandomResizedCrop(12), transforms.PILToTensor()])
FIXED = transforms.Compose([transforms.Resize((14, 18)), transforms.ToTensor()])
ERASED = transforms.Compose(
    [transforms.RandomCrop(12), transforms.ToTensor(), transforms.RandomErasing(p=0.5)]
)
GUIDE = transforms.Compose(
    [
        transforms.Resize((16, 16)),
        transforms.RandomHorizontalFlip(),
        transforms.RandomVerticalFlip(),
        transforms.RandomRotation(10),
        transforms.ColorJitter(0.05, 0.05, 0.05, 0.05),
        transforms.ToTensor(),
    ]
)
POLICY = transforms.Compose(
    [
        transforms.RandomCrop(20, padding=4),
        transforms.RandomChoice([transforms.RandAugment(), transforms.TrivialAugmentWide()]),
        transforms.RandomApply([transforms.GaussianBlur(3)]),
        transforms.RandomGrayscale(0.3),
        transforms.ToTensor(),
        transforms.Normalize(MEAN, STD),
        transforms.RandomErasing(value="random"),
    ]
)
V2_POLICY = v2.Compose(
    [
        v2.RandomResizedCrop(20, antialias=True),
        v2.AugMix(),
        v2.ToImage(),
        v2.AutoAugment(),
        v2.RandomPhotometricDistort(),
        v2.ToDtype(torch.float16, scale=True),
        v2.ToPureTensor(),
    ]
)
GREY = v2.Compose([v2.Grayscale(), v2.CenterCrop(18), v2.ToImage(), v2.ToDtype(torch.uint8)])

ERASED_IMAGES = v2.Compose([v2.CenterCrop(18), v2.RandomErasing(0.7, value=9), v2.ToImage()])
MIXED = v2.Compose([v2.CenterCrop(18), v2.AugMix(), v2.ElasticTransform(sigma=1.0), v2.ToImage()])


class Odd:
    def __call__(self, image: Any) -> Any:
        return image

    def __repr__(self) -> str:
        return "Odd()"


CHAINS = {
    "v1": V1,
    "v2": V2,
    "bytes": BYTES,
    "fixed": FIXED,
    "erased": ERASED,
    "guide": GUIDE,
    "policy": POLICY,
    "v2 policy": V2_POLICY,
    "grey": GREY,
    "erased images": ERASED_IMAGES,
    "mixed": MIXED,
}


def pair(dataset: Any, **options: Any) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """The same loader on stock and on dali."""
    options = {"batch_size": 4, **options}
    ours: DataLoader[Any] = DataLoader(dataset, backend=Dali(fast=()), device="cpu", **options)
    return DataLoader(dataset, **options), ours


# The same as stock under seed=


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
@pytest.mark.covering
def test_crops_are_stocks_to_the_bit(chain: Any) -> None:
    theirs, ours = pair(folder(chain), shuffle=True, seed=5)
    assert_same([list(ours), list(ours)], [list(theirs), list(theirs)])


@pytest.mark.parametrize(
    "dataset",
    [
        lambda: folder(V1, target_transform=str),
        lambda: Files(V1),
        lambda: Tiny(V1),
        lambda: Digits(transforms.Compose([transforms.RandomCrop(20), transforms.ToTensor()])),
        lambda: Subset(folder(V1), [3, 1, 1, 8, 2]),
        lambda: ConcatDataset([folder(V1), Subset(folder(V1), range(4))]),
        lambda: Opened(V1),
        lambda: Noisy(ERASED),
        lambda: folder(transforms.Compose([Odd(), V1])),
    ],
    ids=[
        "target_transform",
        "protocol",
        "CIFAR10",
        "MNIST",
        "subset",
        "concat",
        "own",
        "draws",
        "own code first",
    ],
)
@pytest.mark.thinned(2)
def test_samples_of_every_kind_of_dataset_are_stocks(dataset: Callable[[], Any]) -> None:
    theirs, ours = pair(dataset(), shuffle=True, seed=1, drop_last=True)
    assert_same([list(ours), list(ours)], [list(theirs), list(theirs)])


class Noisy(Opened):
    """Draws random numbers of its own before its transform does."""

    def __getitem__(self, index: int) -> Any:
        if torch.rand(()) < 0.5:
            torch.randperm(5)
        image, label = super().__getitem__(index)
        return {"image": image, "label": label}


@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}], ids=str)
def test_datasets_with_code_of_their_own_are_read_in_torchs_workers(
    options: dict[str, Any],
) -> None:
    theirs, ours = pair(Noisy(V1), shuffle=True, seed=8, num_workers=2, **options)
    assert_same([list(ours), list(ours)], [list(theirs), list(theirs)])
    assert "2 worker processes" in str(ours.explain())
    del theirs, ours
    _, unseeded = pair(Opened(V1), num_workers=1, **options)
    one, two = (torch.cat([images for images, _ in unseeded]) for _ in range(2))
    assert one.shape == (SIZE, 3, 16, 16)
    assert not torch.equal(one, two)


def test_stocks_workers_and_set_epoch_change_nothing() -> None:
    theirs, ours = pair(folder(V1), shuffle=True, seed=2, num_workers=2)
    for loader in (theirs, ours):
        loader.set_epoch(7)
    first = list(ours)
    assert_same(first, list(theirs))
    ours.set_epoch(8)
    assert not torch.equal(next(iter(ours))[0], first[0][0])


@pytest.mark.parametrize(
    "sampler",
    [
        lambda data: RandomSampler(data, replacement=True, num_samples=17),
        lambda data: WeightedRandomSampler([float(n + 1) for n in range(SIZE)], 9),
        lambda data: DistributedSampler(data, num_replicas=3, rank=1, seed=4),
    ],
    ids=["replacement", "weighted", "distributed"],
)
def test_samplers_are_torchs(sampler: Callable[[Any], Any]) -> None:
    data = folder(V1)
    theirs, ours = pair(data, sampler=sampler(data), seed=3)
    assert_same([list(ours), list(ours)], [list(theirs), list(theirs)])


def test_the_users_random_target_transform_finds_the_generators_as_under_stock() -> None:
    theirs, ours = pair(folder(V1, target_transform=blurred), seed=6)
    before = torch.get_rng_state()
    got = list(ours)
    assert torch.equal(torch.get_rng_state(), before)
    assert_same(got, list(theirs))


def blurred(target: int) -> float:
    return target + float(torch.rand(()))


# Without seed=


@pytest.mark.parametrize("num_workers", [0, 2])
def test_without_a_seed_order_and_generators_are_torchs(num_workers: int) -> None:
    data = folder(FIXED)
    theirs: Any = torch.utils.data.DataLoader(data, 4, shuffle=True, num_workers=num_workers)
    ours: Any = DataLoader(data, 4, shuffle=True, num_workers=num_workers, backend=Dali(fast=()))
    expected, got = run_epochs(theirs), run_epochs(ours)
    assert_same(got.batches, expected.batches)
    assert_same(got.states, expected.states)
    assert got.length == expected.length == 3


def test_without_a_seed_crops_follow_torchs_base_seed() -> None:
    _, ours = pair(folder(V1))
    epochs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        epochs.append(torch.cat([images for images, _ in ours]))
    assert torch.equal(epochs[0], epochs[1])
    assert not torch.equal(epochs[0], epochs[2])
    torch.manual_seed(1)
    twice = [torch.cat([images for images, _ in ours]) for _ in range(2)]
    assert not torch.equal(twice[0], twice[1])


def test_a_loader_that_somebody_else_made() -> None:
    theirs: Any = torch.utils.data.DataLoader(folder(FIXED), 4, shuffle=True)
    ours = wrap(theirs, backend=Dali(fast=()), device="cpu")
    expected, got = run_epochs(theirs), run_epochs(ours)
    assert_same(got.batches, expected.batches)
    assert_same(got.states, expected.states)


def test_an_iterator_tells_how_full_it_is() -> None:
    data = folder(V1)
    batches: Any = iter(DataLoader(data, 1, backend=Dali(depth=3), device="cpu"))
    next(batches)
    deadline = time.monotonic() + 30
    while batches.counts()[0] < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert batches.counts() == (2, 2)


# Collation


def test_a_collate_fn_of_the_users_own_gets_samples_and_stocks_random_numbers() -> None:
    theirs, ours = pair(folder(V2), seed=4, collate_fn=mixed)
    assert_same(list(ours), list(theirs))


def mixed(samples: list[Any]) -> Any:
    images, targets = v2.MixUp(num_classes=3)(*default_collate(samples))
    return {"images": images, "targets": targets, "type": type(samples[0][0]).__name__}


def test_samples_one_by_one() -> None:
    theirs, ours = pair(folder(V1), seed=4, batch_size=None)
    assert_same(list(ours), list(theirs))
    assert len(ours) == len(list(ours)) == SIZE


def test_images_of_several_sizes_meet_torchs_error_or_the_users_collate_fn() -> None:
    theirs, ours = pair(folder(transforms.ToTensor()), seed=1)
    for loader in (theirs, ours):
        with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
            next(iter(loader))
    theirs, ours = pair(folder(transforms.ToTensor()), seed=1, collate_fn=list)
    assert_same(list(ours), list(theirs))


def test_an_image_that_is_twice_in_a_sample_is_twice_in_the_batch() -> None:
    data = Twice(V1)
    theirs, ours = pair(data, seed=1)
    got = list(ours)
    assert_same(got, list(theirs))
    got[0]["one"].zero_()
    assert got[0]["two"].any()


class Twice(Files):
    def assemble(self, image: Any, target: int) -> dict[str, Any]:
        return {"one": image, "two": image}


def test_batches_may_be_kept_and_written_to() -> None:
    _, ours = pair(folder(BYTES), seed=1)
    kept = list(ours)
    before = [images.clone() for images, _ in kept]
    for images, _ in ours:
        images.zero_()
    assert_same([images for images, _ in kept], before)


def test_state_of_the_loops_own_generators_is_left_alone_between_batches() -> None:
    _, ours = pair(folder(ERASED), shuffle=True, seed=1)
    seed_everything()
    states = [torch.get_rng_state() for _ in ours]
    assert all(torch.equal(state, states[0]) for state in states)


# What it says of itself


def test_the_plan_names_each_transform_and_where_it_runs() -> None:
    _, ours = pair(folder(GUIDE), num_workers=2)
    text = str(ours.explain())
    for number, member in enumerate(GUIDE.transforms):
        assert f"{type(member).__name__} at transform.transforms[{number}]" in text
    assert "ToTensor at transform.transforms[5]: by batch, torchvision's values to the bit" in text
    assert "! not in DALI: on the CPU DALI's filters take longer than Pillow's" in text
    assert "num_workers=2 is not used" in text
    windows = str(pair(folder(V1))[1].explain())
    assert "only the window that is cut out" in windows
    assert "Crop of RandomResizedCrop at transform.transforms[0]: torchvision's pixels" in windows
    assert "Resize of RandomResizedCrop at transform.transforms[0], RandomHorizontal" in windows


@pytest.mark.parametrize(
    ("dataset", "says"),
    [
        (
            lambda: folder(transforms.Compose([transforms.RandomCrop(8), Odd(), V1])),
            r"dali cannot run Odd\(\) at transform.transforms\[1\]: it is code of your own; repl",
        ),
        (lambda: folder(transforms.RandomCrop(8)), "ends in a PIL image, .* end it in ToTensor"),
        (lambda: folder(), "ends in a PIL image"),
        (lambda: torch.utils.data.TensorDataset(torch.zeros(3, 2)), "nor can its own code"),
        (
            lambda: folder(v2.Compose([v2.RandomApply([v2.ToImage()]), v2.CenterCrop(8)])),
            "makes tensors of some images and not of others",
        ),
    ],
    ids=["own code", "pil", "none", "tensors", "sometimes"],
)
def test_what_stands_in_the_way_is_named(dataset: Callable[[], Any], says: str) -> None:
    _, ours = pair(dataset())
    plan = ours.explain()
    assert not plan.runs
    assert plan.obstacle is not None
    with pytest.raises(BackendUnavailable, match=says):
        iter(ours)


def test_an_iterable_dataset_is_refused_with_what_to_do() -> None:
    ours: DataLoader[Any] = DataLoader(CountingStream(), backend=Dali(fast=()))
    with pytest.raises(BackendUnavailable, match="no samples by index; give it __getitem__"):
        iter(ours)


@pytest.mark.parametrize(
    "options",
    [
        {"threads": 0},
        {"depth": True},
        {"threads": "many"},
        {"fast": "resize"},
        {"fast": ("speed",)},
    ],
)
def test_options_that_cannot_be_taken(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(OptionError, match=rf"Dali\({name}="):
        Dali(**options)


def test_options_change_no_sample_but_fast_ones() -> None:
    data = folder(V1)
    expected = list(DataLoader(data, 4, seed=2))
    plain = DataLoader(data, 4, seed=2, device="cpu", backend=Dali(threads=1, depth=1, fast=()))
    assert_same(list(plain), expected)
    fast = DataLoader(data, 4, seed=2, device="cpu", backend=Dali(fast=("resize",)))
    for (images, targets), (wanted, same) in zip(fast, expected, strict=True):
        assert_same(targets, same)
        levels = (images - wanted).abs() * torch.tensor(STD).reshape(3, 1, 1) * 255
        assert 0 < levels.max() < 1.01
    assert Dali(fast=["resize"]) == Dali(fast=("resize",))
    assert hash(Dali(fast=())) == hash(Dali(fast=()))


def test_a_perspective_by_name_is_dalis_and_told() -> None:
    nearest = transforms.InterpolationMode.NEAREST
    tilted = transforms.RandomPerspective(0.4, 0.8, nearest, fill=(9, 200, 30))
    data = folder(transforms.Compose([transforms.CenterCrop(18), tilted, transforms.PILToTensor()]))
    expected = next(iter(DataLoader(data, 16, seed=2)))[0]
    loader = DataLoader(data, 16, seed=2, device="cpu", backend=Dali(fast=("perspective",)))
    (stage,) = [stage for stage in loader.explain().stages if "Perspective" in stage.how]
    assert "DALI's CPU operators" in stage.where
    assert FAST["perspective"] in stage.how
    off = (next(iter(loader))[0].int() - expected.int()) != 0
    assert off.float().mean() < 0.01
    exact = DataLoader(data, 16, seed=2, device="cpu", backend=Dali(fast=()))
    told = str(exact.explain())
    assert "'perspective' in `fast` allows it" in told
    assert torch.equal(next(iter(exact))[0], expected)


@pytest.mark.filterwarnings("error::dataloaders.errors.BackendWarning")
@pytest.mark.parametrize("fast", [(), ("resize",)])
def test_what_takes_tensors_only_gets_them(fast: tuple[str, ...]) -> None:
    members = [transforms.CenterCrop(12), transforms.PILToTensor(), transforms.RandomErasing(1)]
    data = folder(transforms.Compose(members))
    expected = list(DataLoader(data, 4, seed=2))
    assert_same(list(DataLoader(data, 4, seed=2, device="cpu", backend=Dali(fast=fast))), expected)


class Decoded(Opened):
    """Images that the dataset's own code decodes to tensors, as torchvision.io.read_image does."""

    def __getitem__(self, index: int) -> Any:
        return self.transform(v2.functional.pil_to_tensor(picture(index))), index


FLOATS = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]


@pytest.mark.filterwarnings("error::dataloaders.errors.BackendWarning")
@pytest.mark.parametrize(
    ("dataset", "members"),
    [
        (
            Decoded,
            [
                transforms.RandomCrop(16),
                transforms.ConvertImageDtype(torch.float32),
                transforms.Normalize([0.5] * 3, [0.2] * 3),
                transforms.RandomErasing(0.5),
            ],
        ),
        (Digits, [transforms.ToTensor(), transforms.RandomErasing(1, value="random")]),
        (Digits, [v2.RandomChannelPermutation(), v2.RandomCrop(20), *FLOATS]),
        (Digits, [v2.ToImage(), v2.RandomPhotometricDistort(p=0.5), *FLOATS]),
    ],
)
def test_images_of_one_channel_and_tensors_are_told_to_the_transforms(
    dataset: Any, members: list[Any]
) -> None:
    data = dataset(transforms.Compose(members))
    expected = list(DataLoader(data, 4, seed=2))
    assert_same(list(DataLoader(data, 4, seed=2, device="cpu", backend="dali")), expected)


def test_a_device_that_is_not_there_is_torchs_error() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    ours: DataLoader[Any] = DataLoader(folder(V1), backend=Dali(fast=()), device="cuda:0")
    plan = ours.explain()
    assert not plan.runs
    assert "device='cuda:0': there is no CUDA device" in str(plan.obstacle)


def test_the_plan_for_a_gpu_says_what_runs_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    plan = DataLoader(folder(GUIDE), 4, backend=Dali(fast=())).explain()
    assert plan.delivers == "cuda:1"
    text = str(plan)
    assert "decode     DALI on cuda:1" in text
    assert "JPEG files by nvJPEG, near to Pillow's pixels and not equal to them" in text
    assert "Resize at transform.transforms[0], RandomHorizontalFlip" in text
    assert "RandomRotation at transform.transforms[3], ColorJitter at" in text
    assert "by batch, kernels: " in text
    assert "on cuda:1 are at most 2 batches inside DALI, 3 finished ones" in text
    assert re.search(r"that is about \d+ MiB inside DALI.*, 0\.0 MiB each, if all images", text)
    assert "not yet run on a GPU" in text


@pytest.mark.parametrize(
    "chain", [GUIDE, V1, transforms.Compose([transforms.CenterCrop(9), transforms.PILToTensor()])]
)
def test_what_batches_take_is_foretold(chain: Any) -> None:
    loader = DataLoader(folder(chain), 4, device="cpu", backend=Dali(fast=()))
    job = Dali(depth=2).job(loader)
    assert isinstance(job, Job)
    memory = batch_memory(job)
    images = next(iter(loader))[0]
    height, width = picture(0).height, picture(0).width
    assert memory == BatchMemory(
        images.nbytes, 2 * (4 * 3 * height * width + images.numel()), 2 * images.nbytes
    )


def test_what_batches_take_is_not_guessed() -> None:
    too_large = transforms.Compose([transforms.RandomCrop(500), transforms.ToTensor()])
    for data in (Opened(V1), folder(too_large)):
        job = job_of(Dali(fast=()), DataLoader(data, 4))
        assert isinstance(job, Job)
        assert batch_memory(job) is None


@pytest.mark.gpu
@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_on_a_gpu_crops_are_stocks_and_pixels_close(chain: Any) -> None:
    theirs = DataLoader(folder(chain), 4, shuffle=True, seed=5)
    ours = DataLoader(folder(chain), 4, shuffle=True, seed=5, backend=Dali(fast=()))
    for (images, targets), (wanted, same) in zip(ours, theirs, strict=True):
        assert {images.device.type, targets.device.type} == {"cuda"}
        assert_same(targets.cpu(), same)
        assert (images.shape, images.dtype) == (wanted.shape, wanted.dtype)
        off = (images.cpu().double() - wanted.double()).abs()
        # Other decoders and filters: another crop or flip would be many times as far off.
        assert off.mean() < 0.05 * (wanted.double().max() - wanted.double().min())
