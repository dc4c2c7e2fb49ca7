"""Check what an index says against itself and its file: whoever reads by it reads inside the file.

Index ──sizes that follow from each other──nothing outside the file, nothing on anything else──> ok
"""

from __future__ import annotations

import math
import re
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from dataloaders.cache.format.block import HEADER, SMALLEST_BLOCK
from dataloaders.cache.format.checksums import BLOCK
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

if TYPE_CHECKING:
    from dataloaders.cache.format.index import Index

_MOST_DIMENSIONS = 64


def check_index(index: Index, size: int) -> None:
    """Check an index whose fields have their types, of a file of this size.

    Raises:
        Malformed: something in it does not follow from the rest.
    """
    user_block, file_bytes = index.user_block, index.file_bytes
    if user_block < SMALLEST_BLOCK or user_block & (user_block - 1):
        raise Malformed(f"its block has {user_block} bytes, which is no power of two from 4096 on")
    if file_bytes != size:
        raise Malformed(
            f"the file has {size} bytes, and had {file_bytes} when it was built"
            + (", so it is truncated" if size < file_bytes else "")
        )
    number_in(index.samples, "samples", least=index.rows)
    _check_columns(index.columns, index.structure, index.rows)
    _check_extent(index.checksums, "checksums.values", -(-(file_bytes - user_block) // BLOCK))
    for place in (*(index.failed or ()), index.attributes):
        if place is not None:
            _check_extent(place, "failed or attributes", place.size)
    left_out = index.samples - index.rows
    if index.failed is not None and index.failed[0].size > left_out:
        raise Malformed(f"{index.failed[0].size} samples were left out, of {left_out}")
    if index.shards:
        _check_shards(index.shards, index.rows, index.samples)
        for column in index.columns:
            if column.values.offset:
                raise Malformed(
                    f"column {shown(column.name)}: values have a place, and stand in shards"
                )
    _check_places(index)


def _check_shards(shards: tuple[Shard, ...], rows: int, samples: int) -> None:
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


def _check_columns(columns: tuple[ColumnEntry, ...], structure: Any, rows: int) -> None:
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
        _check_extent(getattr(entry, part), f"{where}: {part}", wanted and wanted.size)


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
    _check_extent(packing.pieces, f"{where}: packing.pieces", 2 * -(-size // piece))
    if entry.most_values is not None:
        number_in(entry.most_values, f"{where}: most_values", most=LARGEST_ROW // width)


def _check_extent(extent: Extent | None, where: str, count: int | None) -> None:
    """Check that ``extent`` is of so many values; with None there must be none."""
    if extent is None:
        if count is not None:
            raise Malformed(f"{where} is no list of 2")
    elif count is None:
        raise Malformed(f"{where} should not be there")
    elif extent.size != count:
        raise Malformed(f"{where} has {extent.size} values, and should have {count}")
    elif extent.size == 0 and extent.offset != 0:
        raise Malformed(f"{where} has no values, and a place")


def _check_places(index: Index) -> None:
    """Check that each array is between the user block and the end, and none on another one."""
    taken, begin, end = [], index.user_block, index.file_bytes
    for name, dtype, (offset, size) in index.places():
        if size == 0:
            continue
        last = offset + size * np.dtype(dtype).itemsize
        if offset < begin or last > end:
            raise Malformed(
                f"{name} is said to stand at bytes {offset} to {last}, outside {begin} to {end}"
            )
        taken.append((offset, last, name))
    for (_, last, name), (offset, _, other) in pairwise(sorted(taken)):
        if offset < last:
            raise Malformed(f"{name} and {other} overlap")
