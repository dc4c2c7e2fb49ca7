"""Turned, moved, sheared, tilted and padded images: kernels against Pillow, byte by byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as v1
from torchvision.transforms.v2 import functional as v2

from dataloaders.transforms.kernels.place import erase, pad
from dataloaders.transforms.kernels.recorded import Move, recorder
from dataloaders.transforms.kernels.warp import warped
from helpers.batches import assert_images, batch, bytes_of, pil
from helpers.pictures import KINDS

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
MODES = [InterpolationMode.NEAREST, InterpolationMode.BILINEAR, InterpolationMode.BICUBIC]

BATCHES = st.builds(
    batch,
    st.integers(1, 4),
    st.sampled_from(KINDS),
    st.sampled_from([1, 3]),
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(0, 1 << 20),
)
ANGLES = st.one_of(
    st.floats(-400, 400), st.sampled_from([0.0, 90.0, 180.0, 270.0, -90.0, 360.0, 45.0, 1e-9])
)
FILLS = st.one_of(st.none(), st.integers(0, 255), st.just(300), st.floats(0, 255))


def check(step: Callable[[Any, int], Any], images: torch.Tensor, device: str) -> None:
    """Assert that ``step(image, sample)``, recorded and computed, is what it gives itself."""
    moves = [step(recorder(*images.shape[1:]), sample) for sample in range(len(images))]
    assert all(isinstance(move, Move) for move in moves)
    got = warped(images.to(device), moves)
    expected = [bytes_of(step(pil(image), sample)) for sample, image in enumerate(images)]
    assert_images(got, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", MODES)
@given(images=BATCHES, fill=FILLS, data=st.data())
@settings(max_examples=60, deadline=None)
def test_rotations(
    device: str, mode: InterpolationMode, images: torch.Tensor, fill: Any, data: Any
) -> None:
    angles = data.draw(st.lists(ANGLES, min_size=len(images), max_size=len(images)))
    places = st.floats(-50, 50)
    center = data.draw(st.one_of(st.none(), st.tuples(places, places).map(list)))
    expand = data.draw(st.booleans())
    functional = data.draw(st.sampled_from([v1, v2]))

    def step(image: Any, sample: int) -> Any:
        return functional.rotate(image, angles[sample], mode, expand, center, fill)

    check(step, images, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", MODES)
@given(images=BATCHES, fill=FILLS, data=st.data())
@settings(max_examples=80, deadline=None)
@pytest.mark.thinned(2)
def test_affine(
    device: str, mode: InterpolationMode, images: torch.Tensor, fill: Any, data: Any
) -> None:
    # Scales so small that Pillow leaves its fixed point; no turn nor shear, where it only scales.
    scales = st.one_of(st.floats(0.3, 3), st.sampled_from([1.0, 0.5, 2.0, 1e-3, 1e-5, 30.0]))
    shears = st.one_of(st.just(0.0), st.floats(-80, 80))
    shifts = st.integers(-60, 60)
    own = [
        (
            data.draw(st.one_of(st.just(0.0), ANGLES)),
            [data.draw(shifts), data.draw(shifts)],
            data.draw(scales),
            [data.draw(shears), data.draw(shears)],
        )
        for _ in images
    ]
    places = st.floats(-50, 50)
    center = data.draw(st.one_of(st.none(), st.just([0.0, 0.0]), st.tuples(places, places)))
    center = None if center is None else list(center)
    functional = data.draw(st.sampled_from([v1, v2]))

    def step(image: Any, sample: int) -> Any:
        return functional.affine(image, *own[sample], interpolation=mode, fill=fill, center=center)

    check(step, images, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", MODES)
@given(images=BATCHES, fill=FILLS, data=st.data())
@settings(max_examples=40, deadline=None)
def test_perspective(
    device: str, mode: InterpolationMode, images: torch.Tensor, fill: Any, data: Any
) -> None:
    height, width = images.shape[-2:]
    start = [[0, 0], [width, 0], [width, height], [0, height]]
    away = st.integers(0, 9)
    ends = [
        [
            [data.draw(away), data.draw(away)],
            [width + 20 - data.draw(away), data.draw(away)],
            [width + 20 - data.draw(away), height + 20 - data.draw(away)],
            [data.draw(away), height + 20 - data.draw(away)],
        ]
        for _ in images
    ]
    functional = data.draw(st.sampled_from([v1, v2]))

    def step(image: Any, sample: int) -> Any:
        return functional.perspective(image, start, ends[sample], mode, fill)

    check(step, images, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.covering
def test_colours_outside_and_large_images(device: str, mode: InterpolationMode) -> None:
    images = batch(5, "photo", 3, 224, 301).to(memory_format=torch.channels_last)
    fill = [10, 200.9, 0]

    def step(image: Any, sample: int) -> Any:
        return v2.affine(image, 17.0 * sample, [3, -7], 0.8, [5.0, 2.0 * sample], mode, fill=fill)

    check(step, images, device)


def test_both_ways_of_pillow_in_one_batch() -> None:
    # One only scales, one is within the fixed point, one is far outside of it.
    images = batch(3, "noise", 3, 33, 29)
    own = [(0.0, 1.3), (25.0, 1.0), (25.0, 1e-5)]

    def step(image: Any, sample: int) -> Any:
        angle, scale = own[sample]
        return v2.affine(image, angle, [0, 0], scale, [0.0, 0.0], fill=[9, 8, 7])

    check(step, images, "cpu")


def test_places_so_far_outside_that_16_bits_would_lead_back_in() -> None:
    # Every fourth column comes from 65537 pixels further on: in 16.16 bits, from the next one.
    images = batch(2, "noise", 3, 20, 40)
    for data in ((16384.25, 0.01, -8192, 0.001, 1, 0), (0.5, 0.01, 0, -16384.25, 1, 8197)):
        check(
            lambda image, sample, data=data: image.transform(
                image.size, Image.Transform.AFFINE, data, fillcolor=0
            ),
            images,
            "cpu",
        )


@pytest.mark.parametrize("method", list(Image.Transpose))
def test_every_transposition(method: Image.Transpose) -> None:
    images = batch(2, "noise", 3, 5, 8)
    check(lambda image, sample: image.transpose(method), images, "cpu")


@pytest.mark.parametrize("device", DEVICES)
@given(
    images=BATCHES,
    mode=st.sampled_from(["constant", "edge", "reflect", "symmetric"]),
    sides=st.tuples(*[st.integers(-3, 90)] * 4),
    fill=st.integers(0, 255),
)
@settings(max_examples=120, deadline=None)
def test_padding(
    device: str, images: torch.Tensor, mode: Any, sides: tuple[int, ...], fill: int
) -> None:
    left, top, right, bottom = sides
    height, width = images.shape[-2:]
    if min(height, height + top, height + bottom, height + min(top, 0) + min(bottom, 0)) < 1:
        return
    if min(width, width + left, width + right, width + min(left, 0) + min(right, 0)) < 1:
        return
    got = pad(images.to(device), left, top, right, bottom, (fill,), mode)
    expected = [bytes_of(v1.pad(pil(image), list(sides), fill, mode)) for image in images]
    assert_images(got, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16])
def test_erased_boxes(device: str, dtype: torch.dtype) -> None:
    images = batch(5, "noise", 3, 20, 30).to(dtype)
    sides = [np.array(side) for side in ([0, 3, 19, 5, 0], [0, 9, 29, 0, 0])]
    sides += [np.array(side) for side in ([20, 4, 1, 0, 1], [30, 9, 1, 4, 7])]
    for levels in (torch.tensor([7.9]), torch.tensor([0.5, 200.2, 3.0])):
        got = erase(images.to(device), *sides, levels)
        for sample, image in enumerate(images):
            place = [int(side[sample]) for side in sides]
            expected = v1.erase(image, *place, levels[:, None, None])
            assert torch.equal(got[sample].cpu(), expected)
