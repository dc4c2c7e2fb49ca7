"""Whole chains: what torchvision makes of PIL images one by one, `run` makes of them at once.

words of each sample ──seed_generators──> transform(PIL image)              expected
                     ──Chain.draw──> actions ──run──> uint8 [n, C, H, W]    got
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torchvision import transforms as v1
from torchvision.transforms import InterpolationMode, v2

from dataloaders.seeding.seeded import seed_generators
from dataloaders.seeding.states import random_states_kept
from dataloaders.transforms.actions import Action, applied, drawn
from dataloaders.transforms.draws import Draws
from dataloaders.transforms.kernels import kernel_for, run
from dataloaders.transforms.operators import chain_of
from dataloaders.transforms.primitives.colour import Brightness, Grayscale, Hue
from dataloaders.transforms.primitives.geometry import HorizontalFlip, Pad
from helpers.batches import assert_images, batch, bytes_of, pil
from helpers.drawn import seeds_of, sizes_of
from helpers.pictures import pixels

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

BICUBIC = InterpolationMode.BICUBIC
BILINEAR = InterpolationMode.BILINEAR

CHAINS: dict[str, Callable[[Any], list[Any]]] = {
    "imagenet": lambda t: [t.RandomResizedCrop(33), t.RandomHorizontalFlip()],
    "evaluation": lambda t: [t.Resize(40), t.CenterCrop(32)],
    "cifar": lambda t: [t.RandomCrop(32, padding=4), t.RandomHorizontalFlip()],
    "reflected": lambda t: [t.RandomCrop(60, 7, True, padding_mode="reflect")],
    "simclr": lambda t: [
        t.RandomResizedCrop(24, interpolation=BICUBIC),
        t.RandomHorizontalFlip(),
        t.RandomApply([t.ColorJitter(0.8, 0.8, 0.8, 0.2)], p=0.8),
        t.RandomGrayscale(0.3),
        t.RandomSolarize(128, 0.3),
    ],
    "colour": lambda t: [t.ColorJitter(0.4, 0.4, 0.4, 0.5), t.RandomInvert(), t.RandomEqualize()],
    "levels": lambda t: [
        t.RandomPosterize(3),
        t.RandomAdjustSharpness(2.5),
        t.RandomAutocontrast(),
        t.RandomVerticalFlip(),
    ],
    "turned": lambda t: [
        t.RandomRotation(180, fill=(9, 8, 7)),
        t.RandomAffine(30, (0.1, 0.2), (0.7, 1.4), (-20, 20, -9, 9), BILINEAR, 128),
    ],
    "grown": lambda t: [t.RandomRotation(45, BICUBIC, expand=True), t.Resize((31, 29))],
    "tilted": lambda t: [t.RandomPerspective(0.6, 0.8, fill=50), t.Pad((1, 2, 3, 4), (5, 6, 7))],
    "autoaugment": lambda t: [t.AutoAugment()],
    "autoaugment svhn": lambda t: [t.AutoAugment(t.AutoAugmentPolicy("svhn"), fill=[1, 2, 3])],
    "randaugment": lambda t: [t.RandAugment(3, 14, interpolation=BILINEAR)],
    "trivialaugment": lambda t: [t.TrivialAugmentWide(fill=77)],
    "one of": lambda t: [
        t.RandomChoice([t.RandomRotation(20), t.ColorJitter(hue=0.3), t.Grayscale(3)]),
        t.RandomOrder([t.RandomInvert(), t.RandomHorizontalFlip(), t.Resize((20, 30))]),
    ],
}


def torchvision(transform: Any, images: Any, seeds: Any) -> list[torch.Tensor]:
    """What the transform makes of each image, its generators seeded as for each sample."""
    with random_states_kept(None):
        found = []
        for words, image in zip(seeds, images, strict=True):
            seed_generators(words.tolist())
            found.append(bytes_of(transform(pil(image))))
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("module", [v1, v2], ids=["v1", "v2"])
@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.thinned(3)
def test_chains(device: str, module: Any, name: str) -> None:
    transform = module.Compose(CHAINS[name](module))
    samples = 24
    seeds = seeds_of(samples, seed=3)
    alike = batch(samples, "photo", 3, 48, 57)
    odd = [pixels("photo", 3, 40 + 7 * (i % 4), 39 + 5 * (i % 3), i) for i in range(samples)]
    for images in (alike, odd):
        chain = chain_of(transform)
        assert chain.why is None
        actions = drawn(chain.operators, Draws(seeds), sizes_of([pil(image) for image in images]))
        assert all(kernel_for(action.primitive) is not None for action in actions)
        kept = [image.clone() for image in images]
        on_device: Any = [image.to(device) for image in images]
        if isinstance(images, torch.Tensor):
            on_device = torch.stack(on_device)
        got = run(actions, on_device)
        assert all(image.device.type == device for image in got)
        assert_images(got, torchvision(transform, images, seeds))
        assert all(torch.equal(*pair) for pair in zip(images, kept, strict=True))


def test_tensors_in_mid_chain_are_computed_as_torchvision_computes_tensors() -> None:
    transform = v2.Compose(
        [
            v2.ColorJitter(0.4, 0.4, 0.4, 0.1),
            v2.ToImage(),
            v2.ColorJitter(0.4, 0.4, 0.4, 0.1),
            v2.RandomAffine(20, interpolation=BILINEAR),
            v2.RandomHorizontalFlip(),
            v2.RandomErasing(0.7),
            v2.RandomErasing(0.7, value="random"),
            v2.ToPureTensor(),
        ]
    )
    seeds = seeds_of(12)
    images = batch(12, "photo", 3, 30, 37)
    chain = chain_of(transform)
    assert chain.why is None
    actions = drawn(chain.operators, Draws(seeds), sizes_of([pil(image) for image in images]))
    got = run(actions, images)
    assert type(got) is torch.Tensor
    with random_states_kept(None):
        for words, image, one in zip(seeds, images, got, strict=True):
            seed_generators(words.tolist())
            assert torch.equal(one, transform(pil(image)))


def test_floats_are_moved_and_erased() -> None:
    transform = v2.Compose(
        [v2.RandomCrop(20), v2.RandomVerticalFlip(), v2.RandomErasing(0.9, value="random")]
    )
    images = torch.rand(12, 5, 30, 37)
    seeds = seeds_of(12)
    actions = drawn(chain_of(transform).operators, Draws(seeds), sizes_of(list(images)))
    got = run(actions, images, "floats")
    with random_states_kept(None):
        for words, image, one in zip(seeds, images, got, strict=True):
            seed_generators(words.tolist())
            assert torch.equal(one, transform(image))


def test_what_is_ours_is_written_into_and_what_is_not_is_copied() -> None:
    some = np.array([True, False, True])
    actions = [Action(HorizontalFlip(), {}, some), Action(Brightness(), {"factor": np.ones(3) * 2})]
    images = batch(3, "photo", 3, 9, 9)
    before = images.clone()
    expected = [bytes_of(applied(actions, i, pil(image))) for i, image in enumerate(images)]
    assert_images(run(actions, images), expected)
    assert torch.equal(images, before)
    assert_images(run(actions, images, ours=True), expected)
    assert not torch.equal(images, before)


@pytest.mark.parametrize("fill", [0, 300, 7.9, (1, 2, 3), (9,), None])
def test_each_image_may_have_its_own_border(fill: Any) -> None:
    images = batch(3, "photo", 3, 9, 12)
    sides = {name: np.array([0, 3, 5]) for name in ("left", "top")}
    sides |= {name: np.array([2, -1, 0]) for name in ("right", "bottom")}
    action = Action(Pad(fill), sides)
    expected = [bytes_of(action.apply(i, pil(image))) for i, image in enumerate(images)]
    assert_images(run([action], images), expected)


def test_grey_images_go_through_the_same_chain() -> None:
    chain = v2.Compose(CHAINS["simclr"](v2) + CHAINS["turned"](v2)[1:])
    images = batch(16, "photo", 1, 48, 57)
    seeds = seeds_of(16)
    actions = drawn(chain_of(chain).operators, Draws(seeds), sizes_of([pil(i) for i in images]))
    got = run(actions, images)
    assert_images(got, torchvision(chain, images, seeds))
    assert kernel_for(Hue(), "bytes") is not None
    assert kernel_for(Grayscale(), "floats") is not None
