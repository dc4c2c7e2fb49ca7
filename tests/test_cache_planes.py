"""Channels taken out of PIL images: those of `getchannel`, whatever the mode and size."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from dataloaders.cache.planes import PLANES, Planes, has_planes, put_planes

BLOCK = 1 << 16  # Pillow's own pieces, in bytes


def noise(mode: str, size: tuple[int, int], seed: int = 0) -> Image.Image:
    width, height = size
    rng = np.random.default_rng(seed)
    bands = [Image.fromarray(rng.integers(0, 256, (height, width), np.uint8)) for _ in PLANES[mode]]
    return bands[0] if mode == "L" else Image.merge(mode, bands)


def joined(image: Image.Image) -> np.ndarray:
    planes = Planes(image)
    shape, size, before = planes.shape, planes.nbytes, b"".join(planes.pieces)
    found = planes.joined()
    assert (found.shape, found.nbytes, found.dtype, found.ndim) == (shape, size, planes.dtype, 3)
    assert b"".join(planes.pieces) == before == found.tobytes()
    assert planes.joined() is found
    return found


def channels(image: Image.Image) -> np.ndarray:
    return np.stack([np.asarray(image.getchannel(n)) for n in range(len(image.getbands()))])


@given(
    mode=st.sampled_from(sorted(PLANES)),
    width=st.integers(1, 70),
    height=st.integers(1, 70),
    seed=st.integers(0, 99),
)
def test_planes_are_the_channels(mode: str, width: int, height: int, seed: int) -> None:
    image = noise(mode, (width, height), seed)
    expected = channels(image)
    np.testing.assert_array_equal(joined(image), expected)
    placed = np.zeros(expected.shape, np.uint8)
    put_planes(image, placed)
    np.testing.assert_array_equal(placed, expected)


@pytest.mark.parametrize("mode", sorted(PLANES))
@pytest.mark.parametrize(
    "size", [(256, 256), (257, 256), (1, BLOCK + 1), (BLOCK + 1, 1), (640, 481), (3, 50_000)]
)
def test_sizes_around_and_beyond_pillows_pieces(mode: str, size: tuple[int, int]) -> None:
    image = noise(mode, size)
    np.testing.assert_array_equal(joined(image), channels(image))


def test_an_image_whose_file_is_not_read_yet() -> None:
    file = io.BytesIO()
    image = noise("RGB", (300, 250))
    image.save(file, "PNG")
    np.testing.assert_array_equal(joined(Image.open(file)), channels(image))


def test_planes_for_another_shape_are_refused() -> None:
    image = noise("RGB", (5, 4))
    for shape in ((2, 4, 5), (4, 4, 5), (3, 5, 4)):
        with pytest.raises(ValueError, match=r"zip|shape"):
            put_planes(image, np.empty(shape, np.uint8))


def test_what_has_no_planes() -> None:
    for mode in ("1", "P", "I", "F", "I;16", "LA"):
        assert not has_planes(Image.new(mode, (2, 2)))
    assert not has_planes(Image.new("RGB", (0, 3)))
    assert not has_planes(Image.new("RGB", (3, 0)))


def test_they_are_right_where_the_encoder_gives_less_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As an older or newer Pillow's may: then it is `tobytes` that makes them."""
    image = noise("RGB", (300, 250))
    expected = channels(image)
    original = Image._getencoder

    class Short:
        def __init__(self, encoder: object) -> None:
            self.encoder = encoder
            self.calls = 0

        def __getattr__(self, name: str) -> object:
            return getattr(self.encoder, name)

        def encode(self, room: int) -> object:
            return self.encoder.encode(1200)  # type: ignore[attr-defined]

    monkeypatch.setattr(Image, "_getencoder", lambda *args: Short(original(*args)))
    np.testing.assert_array_equal(joined(image), expected)
