"""Chains that leave the usual way: classes and dtypes of tensors, back to PIL, changed by hand.

What comes out is stock's, to the bit and of the same class, or the loader is refused with what
to do; never something else in silence.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.transforms import v2

from dataloaders import DataLoader
from dataloaders.errors import BackendUnavailable
from helpers.photos import Digits, Files, Opened, folder

pytest.importorskip("nvidia.dali", reason="needs NVIDIA DALI")

from backends.dali import Dali
from backends.dali.plan import Behind, Work, work_of

FLOATS = {torch.Tensor: torch.float32, "others": None}


def as_list(samples: list[Any]) -> list[Any]:
    return samples


def loaders(dataset: Any, **options: Any) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """On stock and on dali, samples one beside the other, so that their classes show."""
    own = {"batch_size": 4, "seed": 5, "collate_fn": as_list, **options}
    ours: DataLoader[Any] = DataLoader(dataset, backend=Dali(fast=(), threads=1), **own)
    return DataLoader(dataset, **own), ours


def assert_stocks(dataset: Any) -> None:
    stock, ours = loaders(dataset)
    for theirs, made in zip(stock, ours, strict=True):
        for (image, target), (other, same) in zip(theirs, made, strict=True):
            assert type(image) is type(other)
            assert image.dtype is other.dtype
            assert torch.equal(image, other)
            assert target == same


def middle(lib: Any) -> Any:
    return lib.CenterCrop(16)


CHAINS: dict[str, Callable[[], list[Any]]] = {
    "int16": lambda: [
        v2.ToImage(),
        middle(v2),
        v2.ToDtype(torch.int16, scale=True),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize([0.5], [0.25]),
    ],
    "int16 of v1": lambda: [
        middle(v1),
        v1.ToTensor(),
        v1.ConvertImageDtype(torch.int16),
        v1.ConvertImageDtype(torch.float32),
    ],
    "PIL again": lambda: [
        v2.ToImage(),
        v2.RandomCrop(16),
        v2.ToPILImage(),
        v2.RandomRotation(30),
        v1.ToTensor(),
    ],
    "PIL of floats": lambda: [v1.ToTensor(), v1.ToPILImage(), middle(v1), v1.PILToTensor()],
    "HSV": lambda: [v2.ToImage(), middle(v2), v2.ToPILImage("HSV"), v1.ToTensor()],
    "dtypes by class": lambda: [v2.ToImage(), middle(v2), v2.ToDtype(FLOATS)],
    "colours by class": lambda: [
        v2.ToImage(),
        middle(v2),
        v2.RandomAffine(30, fill={tv_tensors.Image: 200, torch.Tensor: 50}),
    ],
    "colours by class, plain": lambda: [
        v2.ToImage(),
        middle(v2),
        v2.ToPureTensor(),
        v2.Pad(3, fill={tv_tensors.Image: 200, torch.Tensor: 50}),
    ],
    "colours by class, of floats": lambda: [
        v2.ToImage(),
        v2.ToDtype(torch.float32, scale=True),
        v2.RandomErasing(),
        v2.ToPureTensor(),
        v2.ToImage(),
        v2.Pad(3, fill={tv_tensors.Image: 0.5, torch.Tensor: 0.25}),
    ],
    "colours by class in a policy": lambda: [
        v2.ToImage(),
        v2.AugMix(fill={tv_tensors.Image: 200, torch.Tensor: 50}),
    ],
    "v1's Normalize": lambda: [
        v2.ToImage(),
        v2.ToDtype(torch.float32, scale=True),
        v1.Normalize([0.5], [0.25]),
    ],
    "sums of floats": lambda: [
        v2.RandomCrop(16),
        v2.ToImage(),
        v2.ToDtype(torch.float32, scale=True),
        v2.ColorJitter(contrast=0.9),
    ],
    "sums of floats behind a turn": lambda: [
        v2.RandomRotation(20),
        v2.CenterCrop(16),
        v2.ToImage(),
        v2.ToDtype(torch.float32, scale=True),
        v2.ColorJitter(contrast=0.9),
    ],
    "sums of floats behind ToTensor": lambda: [
        v1.RandomRotation(20),
        v1.RandomCrop(16),
        v1.ToTensor(),
        v1.ColorJitter(contrast=0.9),
    ],
    "plain behind v1": lambda: [v2.ToImage(), v1.RandomHorizontalFlip(), v2.ToPureTensor()],
}


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
@pytest.mark.thinned(7)
def test_samples_are_stocks_and_of_its_classes(chain: Callable[[], list[Any]]) -> None:
    assert_stocks(folder(v2.Compose(chain())))
    assert_stocks(Opened(v1.Compose(chain())))


def test_grey_ones_too() -> None:
    assert_stocks(Digits(v2.Compose([v2.ToImage(), v2.ToPILImage(), v1.Pad(2), v1.ToTensor()])))


REFUSED: dict[str, tuple[Callable[[], list[Any]], str]] = {
    "ends in PIL": (lambda: [v1.ToTensor(), v1.ToPILImage()], "ends in a PIL image"),
    "PILToTensor of tensors": (
        lambda: [v1.PILToTensor(), v1.PILToTensor()],
        r"PILToTensor at transform.transforms\[1\]: it is given tensors, at which torchvision",
    ),
    "ToTensor of tensors": (lambda: [v2.ToImage(), v1.ToTensor()], "it is given tensors"),
    "ToPILImage of PIL": (lambda: [v1.ToPILImage(), v1.ToTensor()], "it is given PIL images"),
    "PIL of int16": (
        lambda: [v2.ToImage(), v2.ToDtype(torch.int16), v2.ToPILImage(), v1.ToTensor()],
        "other than 8 bits a value",
    ),
    "PIL of mode F": (
        lambda: [v2.Grayscale(), v1.ToTensor(), v2.ToPILImage("F"), v1.ToTensor()],
        "other than 8 bits a value",
    ),
    "classes that differ": (
        lambda: [v2.ToImage(), v1.RandomHorizontalFlip()],
        r"take all of them from torchvision.transforms.v2, or put ToPureTensor\(\) at the end",
    ),
    "classes that differ in a container": (
        lambda: [v2.ToImage(), v2.RandomApply([v2.ToPureTensor()])],
        r"put ToPureTensor\(\) at the end",
    ),
    "classes that differ and matter": (
        lambda: [v2.ToImage(), v1.RandomVerticalFlip(), v2.Pad(1, fill={torch.Tensor: 3})],
        r"Pad at transform.transforms\[2\]: it looks at the class of a tensor",
    ),
    "bytes of some images": (
        lambda: [v2.ToImage(), v2.RandomApply([v2.ToDtype(torch.float32)])],
        "makes tensors of some images and not of others",
    ),
}


@pytest.mark.parametrize(("chain", "says"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_known_is_refused(chain: Callable[[], list[Any]], says: str) -> None:
    _, ours = loaders(Files(v2.Compose(chain())))
    with pytest.raises(BackendUnavailable, match=says):
        iter(ours)


def test_stacked_images_have_no_class_to_differ_in() -> None:
    chain = v2.Compose([v2.ToImage(), v1.RandomHorizontalFlip(), v1.CenterCrop(16)])
    stock, ours = loaders(folder(chain), collate_fn=None)
    for (images, _), (others, _) in zip(stock, ours, strict=True):
        assert type(images) is type(others) is torch.Tensor
        assert torch.equal(images, others)


def test_a_quick_resize_is_of_pictures_only() -> None:
    chain = v2.Compose([v2.RandomRotation(9), v2.ToImage(), v2.Resize((9, 7), antialias=False)])
    dataset = folder(chain)
    ours: DataLoader[Any] = DataLoader(dataset, batch_size=4, seed=2, backend="dali")
    for (images, _), (others, _) in zip(DataLoader(dataset, 4, seed=2), ours, strict=True):
        assert torch.equal(images, others)


def test_on_a_device_what_looks_at_classes_is_not_for_kernels() -> None:
    chain = v2.Compose([v2.ToImage(), v2.RandomAffine(9, fill={tv_tensors.Image: 9})])
    found = work_of(chain, form="pil", device="cuda")
    assert isinstance(found, Work)
    (part,) = found.parts
    assert isinstance(part, Behind)
    assert (part.by_type, part.wraps) == (True, False)  # ToImage is in it, and wraps them itself


# Changed by hand


def hooked(transform: Any) -> Any:
    transform.register_forward_hook(lambda module, given, made: made.rotate(90))
    return transform


def hooked_before(transform: Any) -> Any:
    transform.register_forward_pre_hook(lambda module, given: (given[0].rotate(90),))
    return transform


def replaced(transform: Any, name: str, function: Any) -> Any:
    setattr(transform, name, function)
    return transform


WINDOW = {"top": 0, "left": 1, "height": 9, "width": 9}
BY_HAND: dict[str, Callable[[], Any]] = {
    "hook": lambda: hooked(v1.CenterCrop(16)),
    "hook, v2": lambda: hooked(v2.RandomCrop(16)),
    "hook before": lambda: hooked_before(v1.CenterCrop(16)),
    "hook of a Sequential": lambda: hooked(nn.Sequential(v1.CenterCrop(16))),
    "hook of a container": lambda: hooked(v2.RandomApply([v2.CenterCrop(16)], p=1.0)),
    "hook within a container": lambda: v2.RandomApply([hooked(v2.CenterCrop(16))], p=1.0),
    "forward": lambda: replaced(v1.CenterCrop(16), "forward", lambda x: x.crop((1, 2, 17, 18))),
    "get_params": lambda: replaced(v1.RandomCrop(16), "get_params", lambda *_: (1, 2, 16, 16)),
    "make_params": lambda: replaced(v2.RandomResizedCrop(16), "make_params", lambda _: WINDOW),
}


@pytest.mark.parametrize("make", BY_HAND.values(), ids=BY_HAND)
@pytest.mark.thinned(3)
def test_what_was_changed_by_hand_is_code_of_the_users_own(make: Callable[[], Any]) -> None:
    assert_stocks(folder(v1.Compose([make(), v1.ToTensor()])))  # in front: it runs as it is
    _, ours = loaders(folder(v1.Compose([v1.RandomHorizontalFlip(), make(), v1.ToTensor()])))
    with pytest.raises(BackendUnavailable, match=r"dali cannot run .* and may do anything"):
        iter(ours)


def test_classes_changed_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    crop = v1.CenterCrop.forward
    monkeypatch.setattr(v1.CenterCrop, "forward", lambda self, x: crop(self, x).rotate(90))
    assert_stocks(folder(v1.Compose([v1.CenterCrop(16), v1.ToTensor()])))
    _, ours = loaders(folder(v1.Compose([v1.Pad(1), v1.CenterCrop(16), v1.ToTensor()])))
    assert "CenterCrop.forward was replaced" in str(ours.explain())


@pytest.mark.parametrize("dataset", [folder, Files, Opened])
def test_what_is_read_otherwise_than_it_runs_is_found_on_samples(dataset: Any) -> None:
    chain = v1.Compose([v1.CenterCrop(16), v1.RandomHorizontalFlip(), v1.ToTensor()])

    def turned(module: Any, given: Any, made: Any) -> Any:
        return made.rotate(90) if isinstance(module, v1.CenterCrop) else None

    handle = register_module_forward_hook(turned)
    try:
        _, ours = loaders(dataset(chain))
        with pytest.raises(BackendUnavailable, match="is another"):
            iter(ours)
    finally:
        handle.remove()


def test_a_chain_that_always_raises_is_served_and_raises_its_own_error() -> None:
    grey = v1.Compose([v1.Grayscale(), v1.RandomRotation(9, fill=(1, 2, 3)), v2.GaussianBlur(99)])
    stock, ours = loaders(folder(v1.Compose([grey, v1.ToTensor()])))
    texts = {raised_by(loader) for loader in (stock, ours)}
    gc.collect()  # what the error still holds, threads that read among it
    assert len(texts) == 1
    assert "The number of elements in 'fill' does not match" in texts.pop()


def raised_by(loader: Any) -> str:
    """The text of its first batch's error."""
    try:
        next(iter(loader))
    except ValueError as error:
        return str(error)
    raise AssertionError("nothing was raised")
