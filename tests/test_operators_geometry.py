"""Geometric transforms drawn for a batch: torchvision's own pixels for the same seeds."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
import torchvision.transforms as v1
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode as Mode
from torchvision.transforms import v2
from torchvision.transforms.functional import _get_perspective_coeffs

from dataloaders.seeding.seeded import seed_generators
from dataloaders.transforms.actions import Sizes
from dataloaders.transforms.draws import Draws
from dataloaders.transforms.operators import chain_of
from dataloaders.transforms.operators.options import affine32, times32
from dataloaders.transforms.primitives.geometry import Crop, Pad
from helpers.drawn import seeds_of
from helpers.exact import assert_exact, images

LIBRARIES = {"v1": v1, "v2": v2}
KINDS = ("RGB", "L", "bytes", "floats")

BOTH: dict[str, Any] = {
    "resize to the shorter side": lambda t: t.Resize(8),
    "resize a list of one": lambda t: t.Resize([8]),
    "resize to a pair": lambda t: t.Resize((11, 6)),
    "resize at most": lambda t: t.Resize(8, max_size=14),
    "resize nearest": lambda t: t.Resize(8, interpolation=Mode.NEAREST),
    "resize nearest-exact": lambda t: t.Resize((4, 30), interpolation=Mode.NEAREST_EXACT),
    "resize bicubic": lambda t: t.Resize((4, 30), interpolation=Mode.BICUBIC),
    "resize lanczos": lambda t: t.Resize((4, 30), interpolation=Mode.LANCZOS),
    "resize box": lambda t: t.Resize((4, 30), interpolation=Mode.BOX),
    "resize hamming": lambda t: t.Resize((4, 30), interpolation=Mode.HAMMING),
    "resize by Pillow's number": lambda t: t.Resize((4, 30), interpolation=PIL.Image.BICUBIC),
    "resize not antialiased": lambda t: t.Resize((4, 5), antialias=False),
    "resize antialias None": lambda t: t.Resize((4, 5), antialias=None),
    "centre": lambda t: t.CenterCrop(10),
    "centre of odd": lambda t: t.CenterCrop((9, 14)),
    "centre of one pixel": lambda t: t.CenterCrop([1]),
    "pad": lambda t: t.Pad(3),
    "pad two": lambda t: t.Pad((1, 4)),
    "pad one in a list": lambda t: t.Pad([2]),
    "pad four": lambda t: t.Pad((1, 2, 3, 4), fill=7),
    "pad colour": lambda t: t.Pad(2, fill=(10, 20, 30)),
    "pad edge": lambda t: t.Pad((1, 2, 3, 4), padding_mode="edge"),
    "pad reflect": lambda t: t.Pad((1, 2, 3, 4), padding_mode="reflect"),
    "pad symmetric": lambda t: t.Pad((1, 2, 3, 4), padding_mode="symmetric"),
    "pad less": lambda t: t.Pad((-1, 2, 1, -2)),
    "crop": lambda t: t.RandomCrop(7),
    "crop of a pair": lambda t: t.RandomCrop((5, 7)),
    "crop padded": lambda t: t.RandomCrop(8, padding=4),
    "crop padded wider than the crop": lambda t: t.RandomCrop(3, padding=9),
    "crop padded by two": lambda t: t.RandomCrop((8, 6), padding=(1, 4)),
    "crop padded by four": lambda t: t.RandomCrop((8, 6), padding=[5, 1, 3, 2]),
    "crop padded by nothing": lambda t: t.RandomCrop(5, padding=0),
    "crop of the padded image": lambda t: t.RandomCrop(17, padding=2),
    "crop padded grey": lambda t: t.RandomCrop(8, padding=4, fill=128),
    "crop padded with a colour": lambda t: t.RandomCrop(8, padding=4, fill=(1, 2, 3)),
    "crop padded edge": lambda t: t.RandomCrop(8, padding=4, padding_mode="edge"),
    "crop padded reflect": lambda t: t.RandomCrop(8, padding=4, padding_mode="reflect"),
    "crop padded symmetric": lambda t: t.RandomCrop(8, padding=4, padding_mode="symmetric"),
    "crop if needed": lambda t: t.RandomCrop(12, pad_if_needed=True),
    "crop if needed grey": lambda t: t.RandomCrop((12, 9), pad_if_needed=True, fill=9),
    "crop if needed edge": lambda t: t.RandomCrop(12, pad_if_needed=True, padding_mode="edge"),
    "crop both": lambda t: t.RandomCrop((12, 20), padding=2, pad_if_needed=True),
    "crop both reflect": lambda t: t.RandomCrop(
        (12, 20), padding=(1, 0), pad_if_needed=True, padding_mode="reflect"
    ),
    "crop both grey": lambda t: t.RandomCrop((12, 20), padding=2, pad_if_needed=True, fill=3),
    "crop none fill": lambda t: t.RandomCrop(8, padding=4, fill=None),
    "resized crop": lambda t: t.RandomResizedCrop(8),
    "resized crop of a pair": lambda t: t.RandomResizedCrop((6, 9), antialias=True),
    "resized crop bicubic": lambda t: t.RandomResizedCrop(8, interpolation=Mode.BICUBIC),
    "resized crop never fits": lambda t: t.RandomResizedCrop(8, scale=(2.0, 3.0)),
    "resized crop tall": lambda t: t.RandomResizedCrop(8, ratio=(0.1, 0.2)),
    "resized crop wide": lambda t: t.RandomResizedCrop(8, ratio=(5, 9)),
    "resized crop whole": lambda t: t.RandomResizedCrop(8, scale=(1.0, 1.0), ratio=(1.0, 1.0)),
    "resized crop tiny": lambda t: t.RandomResizedCrop(8, scale=(0.0, 0.01)),
    "resized crop of ints": lambda t: t.RandomResizedCrop(8, scale=(0, 1), ratio=(1, 2)),
    "flip": lambda t: t.RandomHorizontalFlip(),
    "flip often": lambda t: t.RandomHorizontalFlip(0.9),
    "flip always": lambda t: t.RandomHorizontalFlip(1),
    "flip never": lambda t: t.RandomVerticalFlip(0.0),
    "flip over": lambda t: t.RandomVerticalFlip(0.3),
    "rotate": lambda t: t.RandomRotation(30),
    "rotate to one angle": lambda t: t.RandomRotation((90, 90)),
    "rotate not at all": lambda t: t.RandomRotation(0),
    "rotate bilinear": lambda t: t.RandomRotation((-10, 200), interpolation=Mode.BILINEAR),
    "rotate bicubic": lambda t: t.RandomRotation(40, interpolation=Mode.BICUBIC),
    "rotate expand": lambda t: t.RandomRotation(180, expand=True),
    "rotate expand 90": lambda t: t.RandomRotation((90, 90), expand=True),
    "rotate expand 180": lambda t: t.RandomRotation((180, 180), expand=True),
    "rotate expand 270": lambda t: t.RandomRotation((270, 270), expand=True),
    "rotate expand 360": lambda t: t.RandomRotation((-360, -360), expand=True),
    "rotate expand center": lambda t: t.RandomRotation(50, expand=True, center=(1, 2)),
    "rotate center": lambda t: t.RandomRotation(50, center=[3.5, 2]),
    "rotate fill": lambda t: t.RandomRotation(50, fill=99),
    "rotate fill list": lambda t: t.RandomRotation(50, fill=[1, 2, 3]),
    "rotate fill one": lambda t: t.RandomRotation(50, fill=(55,)),
    "rotate fill none": lambda t: t.RandomRotation(50, fill=None),
    "affine": lambda t: t.RandomAffine(20),
    "affine moved": lambda t: t.RandomAffine(0, translate=(0.3, 0.1)),
    "affine scaled": lambda t: t.RandomAffine(0, scale=(0.5, 2)),
    "affine sheared": lambda t: t.RandomAffine((5, 60), shear=10),
    "affine sheared pair": lambda t: t.RandomAffine(0, shear=(-5, 20)),
    "affine sheared four": lambda t: t.RandomAffine(0, shear=[-5, 20, 3, 9]),
    "affine all": lambda t: t.RandomAffine(
        20, (0.1, 0.2), (0.8, 1.2), (-5, 20, 3, 9), interpolation=Mode.BILINEAR, fill=7
    ),
    "affine fill": lambda t: t.RandomAffine(20, fill=(7, 8, 9), center=(0, 0)),
    "perspective": lambda t: t.RandomPerspective(p=1.0),
    "perspective half": lambda t: t.RandomPerspective(0.3, fill=3, interpolation=Mode.NEAREST),
    "perspective none": lambda t: t.RandomPerspective(0.0, p=0.9),
    "erase": lambda t: t.RandomErasing(),
    "erase always": lambda t: t.RandomErasing(1, value=0.3),
    "erase whole numbers": lambda t: t.RandomErasing(0.9, value=3),
    "erase colour": lambda t: t.RandomErasing(0.9, value=(0.1, 0.2, 0.3)),
    "erase a list of one": lambda t: t.RandomErasing(0.9, value=[0.7]),
    "erase two levels": lambda t: t.RandomErasing(0.5, value=(1, 2)),
    "erase noise": lambda t: t.RandomErasing(0.7, value="random"),
    "erase little noise": lambda t: t.RandomErasing(1.0, (0.0, 0.02), value="random"),
    "erase tall": lambda t: t.RandomErasing(1.0, (0.4, 0.9), (1, 9)),
    "erase too much": lambda t: t.RandomErasing(1.0, (0.99, 1.0), (1.0, 1.0)),
    "erase in place": lambda t: t.RandomErasing(1.0, inplace=True),
}  # fmt: skip

ONLY_V2: dict[str, Any] = {
    "resize the longer side": lambda: v2.Resize(None, max_size=9),
    "pad by type": lambda: v2.Pad(2, fill={PIL.Image.Image: 3, "others": 4}),
    "pad by type of tensor": lambda: v2.Pad(2, fill={torch.Tensor: 3, tv_tensors.Image: (4, 5, 6)}),
    "crop by type": lambda: v2.RandomCrop(8, 4, fill={PIL.Image.Image: (1, 2, 3), "others": 9}),
    "rotate by type": lambda: v2.RandomRotation(40, fill={tv_tensors.Image: 3, "others": None}),
    "affine by type": lambda: v2.RandomAffine(40, fill={"others": 3, torch.Tensor: [4]}),
    "perspective by type": lambda: v2.RandomPerspective(p=1.0, fill={"others": 3}),
    "zoom out": lambda: v2.RandomZoomOut(),
    "zoom out of a colour": lambda: v2.RandomZoomOut((1, 2, 3), (1.0, 1.7), p=0.9),
    "zoom out by nothing": lambda: v2.RandomZoomOut(side_range=(1, 1), p=1),
    "random size": lambda: v2.RandomResize(5, 20),
    "shortest size": lambda: v2.RandomShortestSize([5, 8, 11, 30]),
    "shortest size at most": lambda: v2.RandomShortestSize(20, max_size=33),
    "scale jitter": lambda: v2.ScaleJitter((20, 30)),
    "scale jitter bicubic": lambda: v2.ScaleJitter((20, 30), (0.5, 0.9), Mode.BICUBIC, False),
}


# Torchvision raises for most of these images, and our error has to be the same.
_TENSORS = ("bytes", "floats")
REFUSED: dict[str, dict[str, tuple[str, ...]]] = {
    "resize lanczos": {"v1": _TENSORS, "v2": _TENSORS},  # v2 takes it from torchvision 0.27 on
    "resize box": {"v1": _TENSORS, "v2": _TENSORS},
    "resize hamming": {"v1": _TENSORS, "v2": _TENSORS},
    "pad colour": {"v1": ("L", *_TENSORS), "v2": ("L",)},
    "crop padded with a colour": {"v1": ("L", *_TENSORS), "v2": ("L",)},
    "crop by type": {"v2": ("L",)},
    "zoom out of a colour": {"v2": ("L",)},
    "rotate bicubic": {"v1": _TENSORS, "v2": _TENSORS},
    "rotate fill list": {"v1": ("L",), "v2": ("L",)},
    "affine fill": {"v1": ("L",), "v2": ("L",)},
    "erase colour": {"v1": ("RGB", "L"), "v2": ("L",)},
    **{
        name: {"v1": ("RGB", "L")}
        for name in BOTH
        if name.startswith("erase") and name != "erase colour"
    },
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.thinned(8)
def test_what_is_drawn_and_done_is_torchvisions(library: str, name: str, kind: str) -> None:
    done = assert_exact(BOTH[name](LIBRARIES[library]), images(kind))
    assert done >= 6 or kind in REFUSED[name][library]


@pytest.mark.parametrize("kind", [*KINDS, "tv"])
@pytest.mark.parametrize("name", ONLY_V2)
def test_what_only_v2_has_is_too(name: str, kind: str) -> None:
    done = assert_exact(ONLY_V2[name](), images(kind))
    assert done >= 6 or kind in REFUSED[name]["v2"]


@pytest.mark.parametrize("mode", ["P", "RGBA", "LA", "CMYK", "F", "1"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_images_of_other_modes_are_too(library: str, mode: str) -> None:
    t = LIBRARIES[library]
    given = [one.convert(mode) for one in images("RGB", ((13, 13), (20, 9), (3, 5)))]
    chain = t.Compose(
        [t.RandomCrop(9, padding=4, pad_if_needed=True), t.CenterCrop((20, 5)), t.Pad(2, fill=1)]
    )
    assert assert_exact(t.Compose([chain, t.RandomRotation(20, expand=True)]), given) == 9


# Lists of heights and widths, for numbers that only large images bring out.
LARGE = [(375, 500), (2448, 3264), (719, 1281), (1001, 600)]
ODD = [(1, 40000), (6001, 37), (1, 1), (2, 3)]


# What make_params gives, as the numbers of the first action.
NUMBERS: list[tuple[Any, Any]] = [
    (v2.RandomResizedCrop(224), lambda p: [p["top"], p["left"], p["height"], p["width"]]),
    (
        v2.RandomResizedCrop(224, (0.3, 0.35), (0.9, 1.3)),
        lambda p: [p["top"], p["left"], p["height"], p["width"]],
    ),
    (v2.RandomCrop(9, padding=8), lambda p: [p["top"] - 8, p["left"] - 8, 9, 9]),
    (
        v2.RandomAffine(10, (0.13, 0.7), (0.9, 1.1), (-3, 3, 4, 5)),
        lambda p: [p["angle"], list(p["translate"]), p["scale"], list(p["shear"])],
    ),
    (v2.RandomRotation(77.7), lambda p: [p["angle"]]),
    (v2.RandomErasing(1.0), lambda p: [p["i"], p["j"], p["h"], p["w"]]),
    (v2.RandomZoomOut(side_range=(1.0, 3.3), p=1.0), lambda p: p["padding"]),
    (v2.ScaleJitter((1024, 777)), lambda p: list(p["size"])),
    (v2.RandomShortestSize([480, 512, 700], max_size=1333), lambda p: list(p["size"])),
    (v2.RandomPerspective(0.37, p=1.0), lambda p: p["coefficients"]),
]


@pytest.mark.parametrize(
    ("transform", "numbers"), NUMBERS, ids=[type(transform).__name__ for transform, _ in NUMBERS]
)
def test_numbers_on_large_images_are_those_of_make_params(transform: Any, numbers: Any) -> None:
    """No pixels: thousands of draws, each number compared, and the stream after them."""
    odd = isinstance(transform, (v2.RandomResizedCrop, v2.RandomAffine, v2.RandomErasing))
    shapes = (LARGE + ODD * odd) * 100
    rows = seeds_of(len(shapes), 7)
    (operator,) = chain_of(transform).operators
    draws = Draws(rows)
    action = operator.draw(draws, Sizes(*zip(*shapes, strict=True), tensors=True))[0]
    after = draws.rand()
    for sample, shape in enumerate(shapes):
        seed_generators(tuple(rows[sample].tolist()))
        if hasattr(transform, "p"):
            torch.rand(1)  # which `make_params` leaves to its caller
        expected = numbers(transform.make_params([torch.zeros(1).expand(3, *shape)]))
        assert torch.rand(1).item() == after[sample]
        if not action.takes(sample):
            assert expected == [0, 0, *shape]  # nothing is erased
            continue
        found = [action.numbers[name][sample].tolist() for name in action.primitive.numbers]
        if isinstance(transform, v2.RandomPerspective):
            right, lower = shape[1] - 1, shape[0] - 1
            ends = [[0, 0], [right, 0], [right, lower], [0, lower]]
            found = _get_perspective_coeffs(ends, found[0])
        assert found == expected


def test_numbers_of_tensors_and_of_python_meet_in_float32() -> None:
    """Of as many as it takes to see the last bit."""
    values = torch.rand(100_000, generator=torch.Generator().manual_seed(0))
    expected = (3264 * (1.0 + values * 2.3)).to(torch.int64).numpy()
    found = times32(np.full(len(values), 3264), affine32(values.numpy(), 2.3, 1.0))
    assert np.array_equal(found, expected)
    in_float64 = (3264 * (1.0 + values.numpy().astype(float) * 2.3)).astype(int)
    assert not np.array_equal(in_float64, expected)


def drawn_numbers(transform: Any, count: int, shape: tuple[int, int]) -> dict[str, np.ndarray]:
    """The numbers of the first action on so many images of one shape."""
    (operator,) = chain_of(transform).operators
    action = operator.draw(Draws(seeds_of(count)), Sizes([shape[0]] * count, [shape[1]] * count))[0]
    return dict(action.numbers)


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """Kolmogorov and Smirnov's: the largest difference of the two distributions."""
    everywhere = np.sort(np.concatenate([one, other]))
    shares = [
        np.searchsorted(np.sort(values), everywhere, "right") / len(values)
        for values in (one, other)
    ]
    return float(np.abs(shares[0] - shares[1]).max())


def test_windows_are_distributed_as_those_of_get_params() -> None:
    """Other seeds on either side; equal distributions exceed the limit once in a thousand."""
    count, shape = 4000, (300, 400)
    for transform in (v1.RandomResizedCrop(9), v1.RandomResizedCrop(9, (0.5, 0.9), (0.7, 2))):
        ours = drawn_numbers(transform, count, shape)
        torch.manual_seed(1)
        black = torch.zeros(1).expand(3, *shape)
        theirs = np.array(
            [transform.get_params(black, transform.scale, transform.ratio) for _ in range(count)]
        )
        for column, name in enumerate(("top", "left", "height", "width")):
            assert distance(ours[name], theirs[:, column]) < 1.95 / np.sqrt(count / 2)


def test_angles_and_corners_are_distributed_as_those_of_get_params() -> None:
    count, shape = 4000, (30, 40)
    angles = drawn_numbers(v1.RandomRotation((-20, 50)), count, shape)["angle"]
    corners = drawn_numbers(v1.RandomPerspective(0.9, p=1), count, shape)["corners"]
    torch.manual_seed(1)
    limit = 1.95 / np.sqrt(count / 2)
    theirs = np.array([v1.RandomRotation.get_params([-20.0, 50.0]) for _ in range(count)])
    assert distance(angles, theirs) < limit
    ends = np.array([v1.RandomPerspective.get_params(40, 30, 0.9)[1] for _ in range(count)])
    for corner in range(4):
        for axis in range(2):
            assert distance(corners[:, corner, axis], ends[:, corner, axis]) < limit


# How it is read


def test_a_crop_in_a_border_of_zeros_is_one_window() -> None:
    """CIFAR's: no image is framed, a window reaches out of it."""
    for t in LIBRARIES.values():
        (operator,) = chain_of(t.RandomCrop(32, padding=4)).operators
        assert operator.primitives == (Crop(t is v2),)
        window = operator.draw(Draws(seeds_of(200)), Sizes([32] * 200, [32] * 200))[0].numbers
        assert {window["top"].min(), window["top"].max()} == {-4, 4}


def test_a_window_beside_the_image_is_not_left_to_a_crop_of_a_tensor() -> None:
    for t in LIBRARIES.values():
        (operator,) = chain_of(t.RandomCrop(3, padding=9)).operators
        assert [type(primitive) for primitive in operator.primitives] == [Pad, Crop]


@pytest.mark.parametrize(
    ("transform", "why"),
    [
        (v1.Resize((4, 4), interpolation="bilinear"), r"InterpolationMode\('bilinear'\)"),
        (v2.Resize((4, 4), interpolation="cubic"), "none of torchvision's"),
        (v1.Resize(4, max_size=4), "max_size above size"),
        (v1.Resize((4, 4), max_size=9), "with one side only"),
        (v1.CenterCrop((4, 0)), "at least 1 x 1"),
        (v1.RandomCrop((4.5, 4)), "a whole number is read"),
        (v1.Pad(1.5), "a whole number is read"),
        (v1.RandomCrop(4, fill="red"), "a number, or a list or tuple of numbers"),
        (v1.RandomRotation(4, center=range(2)), "a list or tuple"),
        (v1.RandomRotation((9, 4)), "is no range to draw from"),
        (v1.RandomAffine(0, scale=(2.0, 1.0)), "is no range to draw from"),
        (v1.RandomErasing(ratio=(0.0, 1.0)), "above 0"),
        (v1.RandomErasing(value=()), "numbers for each channel"),
        (v1.RandomPerspective(1.5), "from 0 to 1"),
        (v2.RandomResize(5, 5), "raise max_size"),
        (v2.RandomShortestSize([]), "nothing to draw from"),
        (v1.FiveCrop(3), r"v2.functional.five_crop\(images, \[3, 3\]\)"),
        (v2.TenCrop((4, 3)), r"v2.functional.ten_crop\(images, \[4, 3\]\)"),
        (v2.RandomIoUCrop(), "RandomIoUCrop changes boxes or key points along with the image"),
        (v2.CutMix(num_classes=2), "CutMix mixes the samples of a batch; call it in collate_fn"),
    ],
)
def test_what_is_not_read_exactly_is_not_read_and_says_why(transform: Any, why: str) -> None:
    chain = chain_of(transform)
    assert not chain.operators
    assert chain.why is not None
    assert re.search(why, chain.why)


def test_five_and_ten_crops_may_be_cut_out_of_whole_batches_as_their_refusal_says() -> None:
    images = torch.randint(0, 256, (4, 3, 9, 8), dtype=torch.uint8)
    for transform, function in (
        (v2.FiveCrop(3), v2.functional.five_crop),
        (v2.TenCrop((4, 3)), v2.functional.ten_crop),
    ):
        crops = function(images, list(transform.size))
        for number, image in enumerate(images):
            for crop, own in zip(crops, transform(image), strict=True):
                assert torch.equal(crop[number], own)


def test_a_crop_scaled_downwards_is_not_read() -> None:
    with pytest.warns(UserWarning, match="should be of kind"):
        transform = v1.RandomResizedCrop(4, scale=(1.0, 0.1))
    assert "is no range to draw from; give (low, high) not below 0" in (
        chain_of(transform).why or ""
    )


def test_other_numbers_than_those_that_are_read_are_not_taken_for_them() -> None:
    flip, resize = v1.RandomHorizontalFlip(), v1.Resize(4)
    try:
        torch.set_default_dtype(torch.float64)
        assert "set_default_dtype(torch.float64)" in (chain_of(flip).why or "")
        assert chain_of(resize).why is None
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        assert "set_default_device('meta')" in (chain_of(flip).why or "")
    assert chain_of(flip).why is None


@pytest.mark.parametrize("library", LIBRARIES)
def test_conversions_between_images_and_tensors_are_followed(library: str) -> None:
    t = LIBRARIES[library]
    turned = t.RandomRotation(50, expand=True)
    chain = t.Compose([turned, t.PILToTensor(), turned, t.ToPILImage(), turned])
    assert assert_exact(chain, images("RGB"), repeats=2) == 16
    floats = t.Compose(
        [
            t.PILToTensor(),
            t.ConvertImageDtype(torch.float32),
            t.Resize(9),
            t.Normalize([0.5], [0.3]),
            t.RandomErasing(0.7, value="random"),
            t.RandomAffine(20, fill=0.5),
        ]
    )
    assert assert_exact(floats, images("RGB"), repeats=2) == 16


@pytest.mark.parametrize("kind", ["L", "RGB"])
def test_v2_knows_how_many_channels_are_erased(kind: str) -> None:
    chain = v2.Compose(
        [
            v2.RGB(),
            v2.Identity(),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.RandomErasing(0.8, value="random"),
            v2.ToPureTensor(),
            v2.Pad(1, fill={torch.Tensor: 0.25, "others": 0.75}),
        ]
    )
    assert assert_exact(chain, images(kind)) == 24
