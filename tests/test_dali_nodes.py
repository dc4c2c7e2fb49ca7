"""Each node of DALI's graph beside torchvision's function on PIL images: the same, or as it says.

The nodes for a CUDA device are tried on the CPU too: the same graph, the same arithmetic.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from dataloaders.transforms.actions import Action, Primitive, Sizes
from dataloaders.transforms.primitives.colour import (
    Autocontrast,
    Brightness,
    Contrast,
    GaussianBlur,
    Grayscale,
    Hue,
    Invert,
    Posterize,
    Saturation,
    Solarize,
)

pytest.importorskip("nvidia.dali", reason="needs NVIDIA DALI")

from backends.dali.graph import Graph
from backends.dali.nodes import FAST, Node, node_for

COUNT = 12


def pixels_of(channels: int = 3) -> list[np.ndarray]:
    """Noise, flat colours, gradients; of several sizes."""
    rng = np.random.default_rng(channels)
    made = []
    for place in range(COUNT):
        height, width = 17 + 5 * place, 40 - 2 * place
        image = rng.integers(0, 256, (height, width, channels), np.uint8)
        if place % 3 == 1:
            image[:] = np.linspace(0, 255, width).astype(np.uint8)[None, :, None]
        elif place % 3 == 2:
            image[:] = rng.integers(0, 256, channels)
        made.append(image)
    return made


def pictured(pixels: np.ndarray) -> Image.Image:
    return Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)


def factors(*first: float) -> dict[str, np.ndarray]:
    drawn = np.random.default_rng(3).uniform(0, 2.5, COUNT).astype(np.float32)
    drawn[: len(first)] = first
    return {"factor": drawn.astype(np.float64)}


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def off_by(
    primitive: Primitive,
    numbers: dict[str, np.ndarray],
    where: Any,
    channels: int = 3,
    device: str = "cpu",
) -> np.ndarray:
    """How far each level is off."""
    node = node_for(primitive, form="pil", device="cuda", fast=tuple(FAST))
    assert isinstance(node, Node), node
    graph = Graph(
        [node],
        batch_size=COUNT,
        device=torch.device(device),
        threads=2,
        encoded=False,
        channels=channels,
    )
    pixels = pixels_of(channels)
    action = Action(primitive, numbers, where)
    graph.feed(pixels, [action])
    differences = []
    for place, image in enumerate(graph.take()):
        expected = np.asarray(action.apply(place, pictured(pixels[place])))
        made = image.permute(1, 2, 0).cpu().numpy().reshape(expected.shape)
        differences.append(np.abs(made.astype(int) - expected).ravel())
    return np.concatenate(differences)


SOME = np.arange(COUNT) % 4 != 2

EXACT = [
    (Brightness(), factors(0.0, 1.0, 2.0, 0.3333)),
    (Contrast(), factors(0.0, 1.0, 2.0, 0.3333)),
    (Saturation(), factors(0.0, 1.0, 2.0, 0.3333)),
    (Grayscale(3), {}),
    (Invert(), {}),
    (Posterize(), {"bits": np.arange(COUNT) % 8 + 1}),
    (Solarize(), {"threshold": np.linspace(0, 256, COUNT)}),
    (Solarize(share=True), {"threshold": np.linspace(0, 1, COUNT)}),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("where", [None, SOME], ids=["all", "some"])
@pytest.mark.parametrize(
    ("primitive", "numbers"), EXACT, ids=[type(each[0]).__name__ for each in EXACT]
)
def test_pillows_levels_to_the_bit(
    primitive: Primitive, numbers: dict[str, np.ndarray], where: Any, device: str
) -> None:
    node = node_for(primitive, form="pil", device="cuda")
    assert isinstance(node, Node)
    assert node.exact == "exact"
    assert off_by(primitive, numbers, where, device=device).max() == 0


@pytest.mark.parametrize(
    ("primitive", "numbers"),
    [each for each in EXACT if not isinstance(each[0], Grayscale)],
    ids=lambda each: type(each).__name__,
)
def test_of_grey_images_too(primitive: Primitive, numbers: dict[str, np.ndarray]) -> None:
    assert off_by(primitive, numbers, SOME, channels=1).max() == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("where", [None, SOME], ids=["all", "some"])
@pytest.mark.parametrize(("width", "height"), [(5, 5), (3, 7), (13, 1)])
def test_a_blur_is_one_level_off_at_most(width: int, height: int, where: Any, device: str) -> None:
    numbers = {"sigma": np.linspace(0.1, 3.0, COUNT)}
    off = off_by(GaussianBlur(width, height), numbers, where, device=device)
    assert off.max() <= 1
    assert (off == 0).mean() > 0.999


def test_dalis_hue_is_another_one_and_leaves_out_who_is_left_out() -> None:
    numbers = {"factor": np.linspace(-0.5, 0.5, COUNT)}
    off = off_by(Hue(), numbers, None)
    assert 20 < off.max() <= 255
    assert off_by(Hue(), numbers, np.zeros(COUNT, np.bool_)).max() == 0


@pytest.mark.parametrize(
    ("primitive", "form", "device", "reason"),
    [
        (Brightness(), "pil", "cpu", "less time on the CPU"),
        (Contrast(), "bytes", "cuda", "of a tensor rounds otherwise"),
        (Grayscale(1), "pil", "cuda", "number of channels changes"),
        (Grayscale(), "pil", "cuda", "number of channels changes"),
        (Hue(), "pil", "cuda", "'hue' in `fast` allows it"),
        (GaussianBlur(3, 3), "pil", "cpu", "'blur' in `fast` allows it"),
        (Autocontrast(), "pil", "cuda", "Autocontrast is not among"),
    ],
)
def test_why_there_is_none(primitive: Primitive, form: str, device: str, reason: str) -> None:
    found = node_for(primitive, form=form, device=device)
    assert isinstance(found, str)
    assert reason in found


def test_a_whole_chain_of_them() -> None:
    """ColorJitter in one of its orders: each step is given the last one's bytes."""
    primitives = [Brightness(), Contrast(), Saturation(), Invert(), Grayscale(3), Solarize()]
    numbers: list[dict[str, np.ndarray]] = [factors(1.4), factors(0.6), factors(1.9), {}, {}]
    numbers.append({"threshold": np.full(COUNT, 130.5)})
    masks = [np.roll(SOME, place) for place in range(len(primitives))]
    actions = [Action(*each) for each in zip(primitives, numbers, masks, strict=True)]
    nodes = [node_for(primitive, form="pil", device="cuda") for primitive in primitives]
    graph = Graph(
        nodes,  # type: ignore[arg-type]
        batch_size=COUNT,
        device=torch.device("cpu"),
        threads=2,
        encoded=False,
    )
    pixels = pixels_of()
    graph.feed(pixels, actions, Sizes([len(p) for p in pixels], [p.shape[1] for p in pixels]))
    for place, image in enumerate(graph.take()):
        expected: Any = pictured(pixels[place])
        for action in actions:
            expected = action.apply(place, expected)
        assert np.array_equal(image.permute(1, 2, 0).numpy(), np.asarray(expected))
