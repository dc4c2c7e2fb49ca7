"""Every flipped bit is found, wherever it is, and what it hit is named."""

from pathlib import Path

import numpy as np
import pytest

from dataloaders.cache import verify
from dataloaders.errors import CacheError
from helpers.cached import build, mixed, spoil
from helpers.hostile import BLOCK, HEADER


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A file of a few blocks, with every sort of column, and failed samples."""
    path = tmp_path_factory.mktemp("whole") / "a.h5"
    samples = [{**sample, "large": np.full(20_000, row, np.uint8)}
               for row, sample in enumerate(mixed(16))]  # fmt: skip
    index = build(path, samples, failed=[(3, "broken")], fingerprint={"a": "b"}, head=["c"])
    return path.read_bytes(), index


def flipped(path, whole, offset, bit):
    spoil(path, offset, bytes([whole[offset] ^ 1 << bit]), whole)
    return verify(path)


def test_what_a_flipped_bit_hits_is_named(tmp_path, whole):
    data, index = whole
    assert index.failed is not None
    places = [
        ("the index:", HEADER // 2),
        ("the zeros after the index", index.user_block - 1),
        ("HDF5's own records", index.user_block),
        ("the table of checksums", index.checksums.values.offset),
        *(("list of failed", extent.offset) for extent in vars(index.failed).values()),
    ]
    for column in index.columns:
        for part, _, extent in column.parts():
            if extent.size:
                name = f"column {column.name!r}" + ("" if part == "values" else f" ({part})")
                places.append((name, extent.offset))
    assert len(places) > 20
    for name, offset in places:
        damages = flipped(tmp_path / "a.h5", data, offset, offset % 8)
        hit = [each for each in damages if each.offset <= offset < each.offset + each.bytes]
        assert any(name in damage.what for damage in hit), (offset, name, damages)
        assert all(damage.bytes <= max(BLOCK, index.user_block) for damage in hit)


def test_every_bit_of_the_header_counts(tmp_path, whole):
    for offset in range(HEADER):
        for bit in range(8):
            (damage,) = flipped(tmp_path / "a.h5", whole[0], offset, bit)
            assert damage.what.startswith("the index: ")


def test_several_damages_in_the_order_of_the_file(path, tmp_path):
    index = build(path, [np.full(BLOCK, row % 250, np.uint8) for row in range(300)])
    data, seen = path.read_bytes(), []
    assert verify(str(path), lambda done, of: seen.append((done, of))) == []
    size = len(data) - index.user_block
    assert seen == [(256 * BLOCK, size), (size, size)]
    spoil(path, index.user_block - 1)
    one, other = index.user_block + 2 * BLOCK, index.user_block + 5 * BLOCK
    spoil(path, one, data[other : other + BLOCK])  # swapped
    spoil(path, other, data[one : one + BLOCK])
    damages = verify(path)
    assert [damage.offset for damage in damages][1:] == [one, other]
    assert "zeros" in damages[0].what
    assert "column 'sample'" in damages[1].what
    with pytest.raises(CacheError, match="there is no cache at"):
        verify(tmp_path / "b.h5")
    (damage,) = verify(Path(__file__))
    assert "is no cache: it does not begin with" in damage.what
