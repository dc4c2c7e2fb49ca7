"""Every flipped bit is found, wherever it is, and what it hit is named."""

import random
from pathlib import Path

import numpy as np
import pytest

from dataloaders.cache import verify
from dataloaders.errors import CacheError
from helpers.cached import build, mixed
from helpers.hostile import BLOCK, HEADER

FLIPS = 400


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A file of a few blocks, with every sort of column, and failed samples."""
    path = tmp_path_factory.mktemp("whole") / "a.h5"
    samples = [{**sample, "large": np.full(20_000, row, np.uint8)}
               for row, sample in enumerate(mixed(16))]  # fmt: skip
    index = build(path, samples, failed=[(3, "broken")], fingerprint={"a": "b"}, head=["c"])
    return path.read_bytes(), index


def what_is_at(index, text, offset):
    """What stands at ``offset``, by the index alone."""
    if offset < HEADER + text:
        return "the index: "
    if offset < index.user_block:
        return "the zeros behind the index"
    places = [("the table of checksums", 4, index.checksums)]
    for column in index.columns:
        for part, dtype, extent in column.parts():
            name = f"column {column.name!r}" + ("" if part == "values" else f" ({part})")
            places.append((name, np.dtype(dtype).itemsize, extent))
    assert index.failed is not None
    places += [("list of failed", 8, index.failed[0]), ("list of failed", 1, index.failed[1])]
    for name, width, (begin, size) in places:
        if begin <= offset < begin + size * width:
            return name
    return "HDF5's own records"


def flipped(path, whole, offset, bit):
    data = bytearray(whole)
    data[offset] ^= 1 << bit
    path.write_bytes(data)
    return verify(path)


def test_an_undamaged_file(tmp_path, whole):
    (tmp_path / "a.h5").write_bytes(whole[0])
    assert verify(tmp_path / "a.h5") == []
    assert verify(str(tmp_path / "a.h5")) == []


@pytest.mark.parametrize("where", ["anywhere", "user block", "index", "records", "checksums"])
@pytest.mark.nightly
def test_every_flipped_bit_is_found(tmp_path, whole, where):
    data, index = whole
    text = len(index.text())
    draw = random.Random(where)
    records = [
        offset
        for offset in range(index.user_block, len(data), 37 if where == "records" else len(data))
        if what_is_at(index, text, offset).startswith("HDF5")
    ]
    for _ in range(FLIPS if where == "anywhere" else FLIPS // 4):
        offset = {
            "anywhere": lambda: draw.randrange(len(data)),
            "user block": lambda: draw.randrange(index.user_block),
            "index": lambda: draw.randrange(HEADER + text),
            "records": lambda: draw.choice(records),
            "checksums": lambda: index.checksums.offset + draw.randrange(4 * index.checksums.size),
        }[where]()
        damages = flipped(tmp_path / "a.h5", data, offset, draw.randrange(8))
        assert damages, offset
        name = what_is_at(index, text, offset)
        hit = [
            damage for damage in damages if damage.offset <= offset < damage.offset + damage.bytes
        ]
        if name == "the index: ":
            assert len(damages) == 1
            assert damages[0].what.startswith(name)
        else:
            assert len(hit) >= 1, (offset, damages)
            assert any(name in damage.what for damage in hit), (offset, name, damages)
        if where in ("anywhere", "records"):
            assert all(damage.bytes <= max(BLOCK, index.user_block) for damage in damages)


def test_every_bit_of_the_header_counts(tmp_path, whole):
    for offset in range(HEADER):
        for bit in range(8):
            (damage,) = flipped(tmp_path / "a.h5", whole[0], offset, bit)
            assert damage.what.startswith("the index: ")


def test_several_damages_in_the_order_of_the_file(tmp_path):
    path = tmp_path / "a.h5"
    index = build(path, [np.full(BLOCK, row, np.uint8) for row in range(6)])
    data = bytearray(path.read_bytes())
    place = index.columns[0].values.offset
    for row in (1, 4):
        data[place + BLOCK * row + BLOCK // 2] ^= 1
    data[index.user_block - 1] = 1
    path.write_bytes(data)
    damages = verify(path)
    assert [damage.offset for damage in damages] == sorted(damage.offset for damage in damages)
    assert len(damages) == 3
    assert "zeros" in damages[0].what
    assert "column 'sample'" in damages[1].what


def test_swapped_blocks_are_found(tmp_path):
    path = tmp_path / "a.h5"
    index = build(path, [np.full(BLOCK, row, np.uint8) for row in range(8)])
    data = path.read_bytes()
    one = index.user_block + 2 * BLOCK
    other = one + 3 * BLOCK
    path.write_bytes(
        data[:one] + data[other : other + BLOCK] + data[one + BLOCK : other]
        + data[one : one + BLOCK] + data[other + BLOCK :]
    )  # fmt: skip
    assert [damage.offset for damage in verify(path)] == [one, other]


@pytest.mark.parametrize("change", [-1, -BLOCK, 1, 5000])
def test_a_file_of_another_length(tmp_path, whole, change):
    data = whole[0]
    (tmp_path / "a.h5").write_bytes(data[:change] if change < 0 else data + bytes(change))
    (damage,) = verify(tmp_path / "a.h5")
    assert f"the file has {len(data) + change} bytes, and had {len(data)}" in damage.what
    assert ("truncated" in damage.what) == (change < 0)


def test_progress(tmp_path):
    build(tmp_path / "a.h5", [np.zeros(BLOCK, np.uint8)] * 600)
    seen = []
    verify(tmp_path / "a.h5", lambda done, of: seen.append((done, of)))
    assert len(seen) == 3
    assert seen[-1][0] == seen[-1][1] == (tmp_path / "a.h5").stat().st_size - 4096
    assert [done for done, _ in seen[:-1]] == [256 * BLOCK, 512 * BLOCK]


def test_no_file(tmp_path):
    with pytest.raises(CacheError, match="there is no cache at"):
        verify(tmp_path / "a.h5")
    (damage,) = verify(Path(__file__))
    assert "is no cache: it does not begin with" in damage.what
