"""Check what an index says against itself: whoever reads by it then reads inside the file.

entries ──check_columns, check_shards──> sizes that follow from each other, or Malformed
places  ──check_places──> nothing outside the file, nothing on anything else
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from dataloaders.cache.format.block import HEADER
from dataloaders.cache.format.codecs import CODECS
from dataloaders.cache.format.entries import (
    LARGEST_PIECE,
    LARGEST_ROW,
    MOST_FIXED,
    MOST_VARIANTS,
    ColumnEntry,
    Extent,
    Packing,
    Shard,
    is_shard_name,
)
from dataloaders.cache.format.fields import LARGEST, Malformed, number_in
from dataloaders.cache.printable import shown
from dataloaders.cache.sample.decode import is_encoded
from dataloaders.cache.sample.sample import DTYPES, column_names, fits
from dataloaders.errors import CacheError

_MOST_DIMENSIONS = 64


def check_shards(shards: Sequence[Shard], rows: int, samples: int) -> None:
    """Check the shards of a joined cache of so many rows and samples."""
    for number, shard in enumerate(shards):
        where = f"shard {number}"
        if not is_shard_name(shard.name):
            raise Malformed(
                f"{where} is named {shown(shard.name)}, which is no file beside this one"
            )
        if not re.fullmatch("[0-9a-f]{32}", shard.identity):
            raise Malformed(f"{where}: identity is {shown(shard.identity)}, and no digest")
        number_in(shard.samples, f"{where}: samples", least=shard.rows)
        number_in(shard.file_bytes, f"{where}: file_bytes", least=HEADER)
    if len({shard.name for shard in shards}) != len(shards):
        raise Malformed("two shards have the same name")
    for what, whole in (("rows", rows), ("samples", samples)):
        found = sum(getattr(shard, what) for shard in shards)
        if found != whole:
            raise Malformed(f"its shards have {found} {what}, and it says {whole}")


def check_columns(columns: Sequence[ColumnEntry], structure: Any, rows: int) -> None:
    """Check the columns of so many rows, one for each leaf of ``structure``."""
    if structure is None:
        if rows or columns:
            raise Malformed("structure is missing")
        return
    try:
        names = column_names(structure)
    except (CacheError, RecursionError) as error:
        raise Malformed(str(error)) from error
    if len(names) != len(columns):
        raise Malformed(f"structure has {len(names)} leaves, and there are {len(columns)} columns")
    for entry, name in zip(columns, names, strict=True):
        _check_column(entry, name, rows)


def _check_column(entry: ColumnEntry, name: str, rows: int) -> None:
    where, shape = f"column {shown(name)}", entry.shape
    if entry.name != name:
        raise Malformed(f"{where} is named {shown(entry.name)}")
    if entry.dtype not in DTYPES:
        raise Malformed(f"{where} has dtype {shown(entry.dtype)}")
    if shape is not None and len(shape) > MOST_FIXED:
        raise Malformed(f"{where} has {len(shape)} dimensions, of at most {MOST_FIXED}")
    for kind, of in entry.variants:
        number_in(of, f"{where}: a variant's dimensions", most=_MOST_DIMENSIONS)
        if not fits(kind, entry.dtype, of, shape):
            raise Malformed(
                f"{where} cannot hold {shown(kind)} with {of} dimensions in {entry.dtype}"
            )
        if kind != "none" and shape is not None and of != len(shape):
            raise Malformed(f"{where} has rows of {len(shape)} dimensions, and one kind {of}")
    count = len(entry.variants)
    if not 0 < count <= MOST_VARIANTS or len(set(entry.variants)) != count:
        raise Malformed(f"{where} has no, too many or twice the same variants")
    if entry.most_pixels is not None:
        if not any(is_encoded(kind) for kind, _ in entry.variants):
            raise Malformed(f"{where}: most_pixels is there, and no encoded image")
        number_in(entry.most_pixels, f"{where}: most_pixels", least=1)
    if shape is not None:
        if entry.most_values is not None:
            raise Malformed(f"{where}: most_values is there, and all rows have one shape")
        # NumPy multiplies the sizes of an empty array too, leaving out what is 0.
        if max(rows, 1) * math.prod(filter(None, shape)) > LARGEST:
            raise Malformed(f"{where} has too many values")
    like = ColumnEntry.of_rows(
        name, entry.dtype, entry.variants, shape, rows, size=entry.values.size
    )
    if entry.dimensions != like.dimensions:
        raise Malformed(f"{where} has {entry.dimensions} dimensions, and its variants do not")
    if entry.packing is not None:
        _check_packing(entry, entry.packing, where)
    for part in ("values", "offsets", "shapes", "codes"):
        wanted = getattr(like, part)
        check_extent(getattr(entry, part), f"{where}: {part}", wanted and wanted.size)


def _check_packing(entry: ColumnEntry, packing: Packing, where: str) -> None:
    offset, size = entry.values
    if offset or not size:
        raise Malformed(f"{where} is compressed, and its values are {shown([offset, size])}")
    if packing.codec not in CODECS:
        raise Malformed(
            f"{where} is compressed with {shown(packing.codec)}, of {', '.join(CODECS)}"
        )
    width = np.dtype(entry.dtype).itemsize
    piece = number_in(packing.piece, f"{where}: packing.piece", least=1, most=size)
    row = None if entry.shape is None else math.prod(entry.shape)
    most = LARGEST_PIECE if row is None else max(LARGEST_PIECE, row * width)
    if piece * width > min(most, LARGEST_ROW) or (row is not None and piece % row):
        raise Malformed(f"{where} cannot be compressed in pieces of {piece} values")
    check_extent(packing.pieces, f"{where}: packing.pieces", 2 * -(-size // piece))
    if entry.most_values is not None:
        number_in(entry.most_values, f"{where}: most_values", most=LARGEST_ROW // width)


def check_extent(extent: Extent | None, where: str, count: int | None) -> None:
    """Check that ``extent`` is of so many values; with None there must be none."""
    if extent is None and count is not None:
        raise Malformed(f"{where} is no list of 2")
    if extent is not None and count is None:
        raise Malformed(f"{where} should not be there")
    if extent is not None and extent.size != count:
        raise Malformed(f"{where} has {extent.size} values, and should have {count}")
    if extent is not None and extent.size == 0 and extent.offset != 0:
        raise Malformed(f"{where} has no values, and a place")


def check_places(places: Iterable[tuple[str, str, Extent]], begin: int, end: int) -> None:
    """Check that each extent is from byte ``begin`` to ``end``, and none on another one.

    ``places`` are what each is called, its dtype and place.
    """
    taken = []
    for name, dtype, (offset, size) in places:
        if size == 0:
            continue
        last = offset + size * np.dtype(dtype).itemsize
        if offset < begin or last > end:
            raise Malformed(
                f"{name} is said to stand at bytes {offset} to {last}, outside {begin} to {end}"
            )
        taken.append((offset, last, name))
    taken.sort()
    for (_, last, name), (offset, _, other) in pairwise(taken):
        if offset < last:
            raise Malformed(f"{name} and {other} overlap")
