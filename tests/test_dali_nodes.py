"""Each node of DALI's graph beside torchvision's function on PIL images: the same, or as it says.

The nodes for a CUDA device are tried on the CPU too: the same graph, the same arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    Equalize,
    GaussianBlur,
    Grayscale,
    Hue,
    Invert,
    Posterize,
    Saturation,
    Sharpness,
    Solarize,
)
from dataloaders.transforms.primitives.erasing import Erase, EraseByNoise
from dataloaders.transforms.primitives.geometry import Crop
from dataloaders.transforms.primitives.turns import Affine, Perspective, Rotate
from helpers.pictures import pixels as pixels_like

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


def photos(channels: int = 3) -> list[np.ndarray]:
    """As photographs are; of several sizes."""
    sizes = [(61 + 9 * place, 150 - 7 * place) for place in range(COUNT)]
    made = [pixels_like("photo", channels, *size, seed=9) for size in sizes]
    return [np.ascontiguousarray(image.permute(1, 2, 0).numpy()) for image in made]


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
    images: list[np.ndarray] | None = None,
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
    pixels = pixels_of(channels) if images is None else images
    action = Action(primitive, numbers, where)
    graph.feed(pixels, [action])
    differences = []
    for place, image in enumerate(graph.take()):
        expected = np.asarray(action.apply(place, pictured(pixels[place])))
        made = image.permute(1, 2, 0).cpu().numpy()
        assert made.shape == (*expected.shape[:2], channels)
        made = made.reshape(expected.shape)
        differences.append(np.abs(made.astype(int) - expected).ravel())
    return np.concatenate(differences)


def assert_as_applied(
    nodes: Sequence[Any],
    actions: Sequence[Action],
    images: list[np.ndarray],
    sizes: Sizes | None = None,
) -> None:
    """That a graph of ``nodes`` makes what the actions make of each image, to the bit."""
    graph = Graph(
        nodes,
        batch_size=COUNT,
        device=torch.device("cpu"),
        threads=2,
        encoded=False,
        channels=images[0].shape[2],
    )
    graph.feed(images, actions, sizes)
    for place, image in enumerate(graph.take()):
        expected: Any = pictured(images[place])
        for action in actions:
            expected = action.apply(place, expected)
        assert np.array_equal(image.permute(1, 2, 0).numpy(), np.asarray(expected))


SOME = np.arange(COUNT) % 4 != 2

BOXES = {
    "top": np.arange(COUNT),
    "left": np.array([0, 3] * 6),
    "height": np.array([0, 1, 17] * 4),
    "width": np.arange(COUNT) + 5,
}

EXACT = [
    (Brightness(), factors(0.0, 1.0, 2.0, 0.3333)),
    (Contrast(), factors(0.0, 1.0, 2.0, 0.3333)),
    (Saturation(), factors(0.0, 1.0, 2.0, 0.3333)),
    (Grayscale(3), {}),
    (Grayscale(), {}),
    (Invert(), {}),
    (Posterize(), {"bits": np.arange(COUNT) % 8 + 1}),
    (Solarize(), {"threshold": np.linspace(0, 256, COUNT)}),
    (Solarize(share=True), {"threshold": np.linspace(0, 1, COUNT)}),
    (Sharpness(), factors(0.0, 1.0, 2.0, 0.3333, -3.0)),
    (Autocontrast(), {}),
    (Erase((7.9,)), BOXES),
    (Erase((0.0, 200.2, 255.0)), BOXES),
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
    [each for each in EXACT if each[0] != Grayscale(3) and len(getattr(each[0], "levels", ())) < 2],
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


def test_a_grey_image_has_no_hue() -> None:
    numbers = {"factor": np.linspace(-0.5, 0.5, COUNT)}
    assert off_by(Hue(), numbers, None, channels=1).max() == 0


def test_sharpness_of_images_that_have_no_inside() -> None:
    rng = np.random.default_rng(2)
    sides = [(1, 1), (1, 9), (9, 1), (2, 2), (2, 7), (7, 2), (3, 3), (3, 4), (1, 2), (4, 3)]
    sides += [(2, 1), (5, 5)]
    images = [rng.integers(0, 256, (*side, 3), np.uint8) for side in sides]
    assert off_by(Sharpness(), factors(0.0, 5.0), None, images=images).max() == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(3))
def test_autocontrast_of_every_span_of_levels(device: str, seed: int) -> None:
    # Where a level comes out on a whole number, one rounding more would lead to another byte.
    rng = np.random.default_rng(seed)
    images = []
    for _ in range(COUNT):
        low, high = np.sort(rng.integers(0, 256, (2, 40, 1, 3)), 0)
        images.append((low + (high - low) * np.linspace(0, 1, 300)[:, None]).astype(np.uint8))
    rows = [np.ascontiguousarray(row[None]) for image in images for row in image][: 2 * COUNT]
    for some in (rows[:COUNT], rows[COUNT:]):
        assert off_by(Autocontrast(), {}, None, device=device, images=some).max() == 0


ANGLES = {"angle": np.linspace(-180, 170, COUNT)}
QUARTERS = {"angle": np.resize([0.0, 90.0, 180.0, 270.0, 360.0, -90.0], COUNT)}
MOVES = {
    "angle": np.linspace(-40, 40, COUNT),
    "translate": np.stack([np.arange(COUNT) - 5, 7 - np.arange(COUNT)], 1),
    "scale": np.linspace(0.6, 1.5, COUNT),
    "shear": np.stack([np.linspace(-20, 20, COUNT), np.linspace(15, -5, COUNT)], 1),
}
CORNERS = {
    "corners": np.array(
        [
            [[place, 3], [150 - place, 9], [140, 60 + place], [2, 70 - place]]
            for place in range(COUNT)
        ]
    )
}
COLOUR = (10, 200, 30)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("where", [None, SOME], ids=["all", "some"])
@pytest.mark.parametrize(
    ("primitive", "numbers"),
    [
        (Rotate(), ANGLES),
        (Rotate(expand=True, fill=COLOUR), ANGLES),
        (Rotate(center=(3.0, -9.5), fill=77), ANGLES),
        (Affine(), MOVES),
        (Affine(fill=COLOUR), MOVES),
        (Perspective("nearest"), CORNERS),
        (Perspective("nearest", 77), CORNERS),
        (Perspective("nearest", COLOUR), CORNERS),
    ],
)
def test_of_the_nearest_pixels_few_are_their_neighbours(
    primitive: Primitive, numbers: dict[str, np.ndarray], where: Any, device: str
) -> None:
    off = off_by(primitive, numbers, where, device=device, images=photos())
    assert (off > 0).mean() < 0.003
    # Only who takes it: the others are themselves.
    assert off_by(primitive, numbers, np.zeros(COUNT, np.bool_), images=photos()).max() == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("where", [None, SOME], ids=["all", "some"])
@pytest.mark.parametrize(
    ("primitive", "numbers"),
    [
        (Rotate("bilinear"), ANGLES),
        (Rotate("bilinear", True, fill=COLOUR), ANGLES),
        (Affine("bilinear", fill=9), MOVES),
        (Perspective(), CORNERS),
        (Perspective(fill=COLOUR), CORNERS),
    ],
)
def test_of_bilinear_warps_few_levels_are_one_off(
    primitive: Primitive, numbers: dict[str, np.ndarray], where: Any, device: str
) -> None:
    off = off_by(primitive, numbers, where, device=device, images=photos())
    # DALI 2.0 knows less places between two pixels in a perspective than 2.4.
    assert (off > 0).mean() < (0.08 if isinstance(primitive, Perspective) else 0.01)
    # At the edges a pixel may be outside by the one way and inside by the other.
    assert (off > 1).mean() < 0.0002


def test_quarter_turns_are_exact_and_grow_as_torchvisions_do() -> None:
    for primitive in (Rotate(expand=True), Rotate("bilinear", expand=True, fill=3)):
        assert off_by(primitive, QUARTERS, SOME, images=photos()).max() == 0
    grey = off_by(Rotate("bilinear", True, fill=90), QUARTERS, None, 1, images=photos(1))
    assert grey.max() == 0


@pytest.mark.parametrize("device", DEVICES)
def test_dalis_equalize_is_another_one_and_leaves_out_who_is_left_out(device: str) -> None:
    off = off_by(Equalize(), {}, None, device=device, images=photos())
    assert 1 < off.max() < 40
    none = np.zeros(COUNT, np.bool_)
    assert off_by(Equalize(), {}, none, device=device, images=photos()).max() == 0


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
        (Hue(), "pil", "cuda", "'hue' in `fast` allows it"),
        (GaussianBlur(3, 3), "pil", "cpu", "'blur' in `fast` allows it"),
        (Autocontrast(), "pil", "cpu", "less time on the CPU"),
        (Sharpness(), "bytes", "cuda", "of a tensor rounds otherwise"),
        (Equalize(), "pil", "cuda", "'equalize' in `fast` allows it"),
        (Equalize(), "pil", "cpu", "less time on the CPU"),
        (EraseByNoise(), "bytes", "cuda", "EraseByNoise is not among"),
        (Erase((300.0,)), "bytes", "cuda", "no level of a byte"),
        (Erase((-1.0,)), "pil", "cpu", "no level of a byte"),
        (Erase(), "bytes", "cpu", "less time on the CPU"),
        (Rotate(), "pil", "cuda", "'turn' in `fast` allows it"),
        (Rotate(), "pil", "cpu", "warps take longer than Pillow's"),
        (Rotate("bicubic"), "pil", "cuda", "no filter that is torchvision's bicubic"),
        (Affine(), "bytes", "cuda", "of a tensor is another one"),
        (Perspective(), "pil", "cuda", "'perspective' in `fast` allows it"),
        (Perspective("nearest"), "pil", "cpu", "'perspective' in `fast` allows it"),
        (Perspective(), "pil", "cpu", "warps take longer than Pillow's"),
    ],
)
def test_why_there_is_none(primitive: Primitive, form: str, device: str, reason: str) -> None:
    found = node_for(primitive, form=form, device=device)
    assert isinstance(found, str)
    assert reason in found


def test_grey_images_get_three_channels_where_that_is_asked_for() -> None:
    primitives = [Grayscale(3), Brightness(), Contrast()]
    numbers = [{}, factors(0.7), factors(1.4)]
    actions = [Action(*each) for each in zip(primitives, numbers, strict=True)]
    nodes = [node_for(primitive, form="pil", device="cuda") for primitive in primitives]
    assert_as_applied(nodes, actions, pixels_of(1))


def test_a_whole_chain_of_them() -> None:
    """ColorJitter in one of its orders: each step is given the last one's bytes."""
    primitives = [Brightness(), Contrast(), Saturation(), Invert(), Grayscale(3), Solarize()]
    numbers: list[dict[str, np.ndarray]] = [factors(1.4), factors(0.6), factors(1.9), {}, {}]
    numbers.append({"threshold": np.full(COUNT, 130.5)})
    masks = [np.roll(SOME, place) for place in range(len(primitives))]
    actions = [Action(*each) for each in zip(primitives, numbers, masks, strict=True)]
    nodes = [node_for(primitive, form="pil", device="cuda") for primitive in primitives]
    pixels = pixels_of()
    sizes = Sizes([len(p) for p in pixels], [p.shape[1] for p in pixels])
    assert_as_applied(nodes, actions, pixels, sizes)


def test_what_follows_a_growing_turn_knows_the_new_sizes() -> None:
    primitives = [Rotate("bilinear", expand=True, fill=5), Crop()]
    nodes = [node_for(p, form="pil", device="cuda", fast=("turn",)) for p in primitives]
    window = {
        name: np.full(COUNT, side) for name, side in zip(Crop.numbers, (3, -4, 50, 60), strict=True)
    }
    actions = [Action(primitives[0], QUARTERS, SOME), Action(primitives[1], window, ~SOME)]
    assert_as_applied(nodes, actions, photos())


def test_a_fill_that_does_not_fit_the_image_is_refused_before_anything_is_made() -> None:
    node = node_for(Rotate(fill=COLOUR), form="pil", device="cuda", fast=("turn",))
    assert isinstance(node, Node)
    with pytest.raises(ValueError, match="does not match the number of channels"):
        off_by(Rotate(fill=COLOUR), ANGLES, None, 1, images=photos(1))
