"""Build caches of given samples; strategies that draw samples of every kind."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps
from PIL import Image

from dataloaders.cache import CachedDataset, precompute
from dataloaders.cache.build.rows import RowBuffer
from dataloaders.cache.format.writing import About, write_cache
from dataloaders.cache.sample.leaf import DTYPES, Leaf
from dataloaders.cache.sample.sample import split
from dataloaders.errors import CacheError

from .compare import assert_same, seed_everything

Point = namedtuple("Point", "x y")
MODES = ("1", "L", "LA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV", "LAB", "I;16", "I", "F")
TORCH_DTYPES = (
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16,
    torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip


def built(dataset: Any, path: Path, **options: Any) -> CachedDataset:
    """Return the cache of a dataset, built by this process unless options give it workers."""
    return precompute(dataset, path, **{"num_workers": 0, **options})


def refused(rule: str, action: Any, *given: Any, error: Any = CacheError, **options: Any) -> Any:
    """Assert that ``action`` of these arguments raises this error, and return it."""
    with pytest.raises(error, match=rule) as caught:
        action(*given, **options)
    return caught.value


@contextmanager
def newer_pillow(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[None]:
    """Have version 999.0 of Pillow installed, as caches see it, inside."""
    installed = folder / "installed" / "pillow-999.0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: pillow\nVersion: 999.0\n")
    with monkeypatch.context() as newer:
        newer.syspath_prepend(installed.parent)
        yield


def build(path: Path, samples: Sequence[Any], **said: Any) -> Any:
    """Build a cache of these samples and return its index; ``said`` goes to `About`."""
    return build_of_leaves(path, [split(sample) for sample in samples], **said)


def build_of_leaves(path: Path, samples: Sequence[tuple[Any, Any]], **said: Any) -> Any:
    """Build a cache of samples given as structures and leaves; return its index."""
    said.setdefault("samples", len(samples) + len(said.get("failed", ())))
    rows = RowBuffer()
    for number, (structure, leaves) in enumerate(samples):
        rows.add(number, structure, leaves)
    return write_cache(path, About(**said), rows.table())


def build_of_bytes(path: Path, kind: str, data: bytes, rows: int = 2) -> CachedDataset:
    """Return a cache, sound otherwise, whose rows are these bytes and claim to be of ``kind``."""
    leaf = Leaf(kind, np.frombuffer(data, np.uint8))
    build_of_leaves(path, [(0, [leaf])] * rows)
    return CachedDataset(path)


def seeded(dataset: Any, index: int) -> Any:
    """Return a sample, drawn with the process-wide generators seeded for it."""
    seed_everything(index)
    return dataset[index]


def assert_all_equal(cached: Any, dataset: Any) -> None:
    """Assert that all samples are the dataset's, to the bit, for the same seeds."""
    assert len(cached) == len(dataset)
    for index in range(len(dataset)):
        assert_same(seeded(cached, index), seeded(dataset, index), strides=False)


def stored_file(cached: CachedDataset, number: int, row: int) -> bytes:
    """Return the bytes of an encoded image, as of a file: of this column and row."""
    ((_, columns, own),) = cached.located([row])
    _, values = columns[number].stored(own)
    assert values is not None
    return values.tobytes()


def spoil(path: Path, offset: int, data: bytes | None = None, whole: bytes = b"") -> None:
    """Write ``data`` at an offset of the file, by default the byte there with one bit flipped.

    ``whole`` is written to the file first.
    """
    if whole:
        path.write_bytes(whole)
    with path.open("r+b") as file:
        file.seek(offset)
        new = bytes([file.read(1)[0] ^ 1]) if data is None else data
        file.seek(offset)
        file.write(new)


def mixed(rows: int) -> list[Any]:
    """Return samples with every kind of column: fixed, ragged, with shapes, None, images."""
    random = np.random.default_rng(rows)
    return [
        {
            "image": Image.fromarray(random.integers(0, 256, (6, 5, 3), np.uint8)),
            "photo": Image.fromarray(random.integers(0, 256, (3 + row % 3, 4, 3), np.uint8)),
            "label": row,
            "score": None if row % 3 == 1 else row / 7,
            "name": "é" * (row % 5),
            "boxes": torch.arange(row % 4 * 4).reshape(-1, 4).to(torch.bfloat16),
            "words": [["a", row], None] * (row % 3),
            "either": np.int64(row) if row % 2 else np.arange(2),
            "nested": (Point(row % 2 == 0, b"ab"), {1: None}),
            "empty": np.zeros((0, 3), ">f4"),
        }
        for row in range(rows)
    ]


_FEW = st.integers(0, 3)
_SHAPES = st.lists(_FEW, max_size=3).map(tuple)


ARRAYS = nps.arrays(st.sampled_from([np.dtype(name) for name in sorted(DTYPES)]), _SHAPES)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype, shape = draw(st.sampled_from(TORCH_DTYPES)), draw(_SHAPES)
    count = int(np.prod(shape)) * dtype.itemsize
    raw = np.frombuffer(bytearray(draw(st.binary(min_size=count, max_size=count))), np.uint8)
    tensor = torch.from_numpy(raw % 2 if dtype == torch.bool else raw).view(dtype).reshape(shape)
    return tensor.transpose(0, -1) if shape and draw(st.booleans()) else tensor


@st.composite
def images(draw: st.DrawFn, modes: Sequence[str] = MODES, smallest: int = 0) -> Image.Image:
    mode, side = draw(st.sampled_from(modes)), st.integers(smallest, 9)
    size = draw(st.tuples(side, side))
    made = Image.new(mode, size)
    if 0 in size:
        return made
    count = len(made.tobytes())
    return Image.frombytes(mode, size, draw(st.binary(min_size=count, max_size=count)))


@st.composite
def palettes(draw: st.DrawFn, transparent: st.SearchStrategy[Any] | None = None) -> Image.Image:
    """Draw images of mode P, with any colours and transparency that a PNG file can have."""
    size = draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    pixels = draw(st.binary(min_size=size[0] * size[1], max_size=size[0] * size[1]))
    count = draw(st.integers(0, 256))
    if count and draw(st.booleans()):
        pixels = bytes(index % count for index in pixels)
    image = Image.frombytes("P", size, pixels)
    if count:
        first = draw(st.binary(min_size=1, max_size=8))
        image.putpalette((first * 1024)[: count * 3])
    # One that is 0, and all others 255, is an int as Pillow reads it.
    alphas = st.binary(max_size=256).map(lambda alpha: alpha[:254] + b"\x01\x02")
    known = st.none() | st.integers(0, 255) | alphas
    found = draw(known if transparent is None else transparent)
    if found is not None:
        image.info["transparency"] = found
    return image


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
TEXT = st.text(st.characters(codec=None, categories=None))
"""Any code points: halves of characters too."""
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.complex_numbers(),
    TEXT,
    st.binary(),
    st.binary().map(bytearray),
    st.lists(PLAIN | TEXT, max_size=3),
    ARRAYS,
    ARRAYS.map(lambda array: array.transpose() if array.ndim else array[()]),
    tensors(),
    images(),
    palettes(),
)
KEYS = st.text(max_size=4) | st.integers(-9, 9)
SAMPLES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.dictionaries(KEYS, inner, max_size=3),
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.tuples(inner, inner).map(lambda pair: Point(*pair)),
    ),
    max_leaves=5,
)


@st.composite
def datasets(draw: st.DrawFn) -> list[Any]:
    """Draw samples that one cache can hold: like the first, with other values, shapes, None."""
    first = draw(SAMPLES)
    return [first, *(_like(first, draw) for _ in range(draw(st.integers(0, 4))))]


def _like(value: Any, draw: st.DrawFn) -> Any:
    if type(value) is dict:
        return {key: _like(inner, draw) for key, inner in value.items()}
    if isinstance(value, tuple):
        made = [_like(inner, draw) for inner in value]
        return Point(*made) if isinstance(value, Point) else tuple(made)
    if type(value) is list and split(value)[0] != 0:
        return value  # with None for what JSON does not keep it would be one leaf
    others = [value, None]
    if type(value) in (int, float, bool, complex):
        others.append(type(value)(draw(st.integers(0, 9))))
    elif isinstance(value, (np.ndarray, torch.Tensor)) and value.ndim:
        others += [value[:1], value[0, ...] if len(value) else value]
    elif isinstance(value, (str, bytes, bytearray, list)):
        others += [value[:0], value + value]
    return draw(st.sampled_from(others))
