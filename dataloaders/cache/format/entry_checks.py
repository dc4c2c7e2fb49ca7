"""The entries of an index that anybody may have written, checked as they are read.

JSON ──columns_in, shards_in, ...──> entries, or Malformed: what is wrong with which
Index ──check_places──> nothing stands outside the file, or on anything else
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np

from dataloaders.cache.format.block import DIGEST, HEADER
from dataloaders.cache.format.codecs import CODECS
from dataloaders.cache.format.entries import (
    LARGEST_PIECE,
    LARGEST_ROW,
    MOST_FIXED,
    MOST_SHARDS,
    MOST_VARIANTS,
    ColumnEntry,
    Extent,
    Packing,
    Shard,
    is_shard_name,
)
from dataloaders.cache.format.fields import (
    LARGEST,
    Malformed,
    fields_in,
    list_in,
    number_in,
    typed,
)
from dataloaders.cache.printable import shown
from dataloaders.cache.sample.decode import is_encoded
from dataloaders.cache.sample.sample import DTYPES, column_names, fits
from dataloaders.errors import CacheError

__all__ = ["check_places", "columns_in", "extent_in", "failed_in", "shards_in"]

_MOST_DIMENSIONS = 64


def shards_in(found: Any, rows: int, samples: int) -> tuple[Shard, ...]:
    """The shards of a joined cache of so many rows and samples."""
    entries = list_in(found, "shards")
    if not 0 < len(entries) <= MOST_SHARDS:
        raise Malformed(f"there are {len(entries)} shards, and not 1 to {MOST_SHARDS}")
    shards: list[Shard] = []
    for number, each in enumerate(entries):
        where = f"shard {number}"
        shard = typed(each, Shard, where)
        if not is_shard_name(shard.name):
            raise Malformed(
                f"{where} is named {shown(shard.name)}, which is no file beside this one"
            )
        if len(shard.identity) != 2 * DIGEST or set(shard.identity) - set("0123456789abcdef"):
            raise Malformed(f"{where}: identity is {shown(shard.identity)}, and no digest")
        number_in(shard.samples, f"{where}: samples", least=shard.rows)
        number_in(shard.file_bytes, f"{where}: file_bytes", least=HEADER)
        shards.append(shard)
    if len({shard.name for shard in shards}) != len(shards):
        raise Malformed("two shards have the same name")
    for what, whole, sizes in (
        ("rows", rows, [shard.rows for shard in shards]),
        ("samples", samples, [shard.samples for shard in shards]),
    ):
        if sum(sizes) != whole:
            raise Malformed(f"its shards have {sum(sizes)} {what}, and it says {whole}")
    return tuple(shards)


def columns_in(structure: Any, found: list[Any], rows: int) -> tuple[ColumnEntry, ...]:
    """The columns of so many rows, one for each leaf of ``structure``."""
    if structure is None:
        if rows or found:
            raise Malformed("structure is missing")
        return ()
    try:
        names = column_names(structure)
    except (CacheError, RecursionError) as error:
        raise Malformed(str(error)) from error
    if len(names) != len(found):
        raise Malformed(f"structure has {len(names)} leaves, and there are {len(found)} columns")
    return tuple(_column(each, name, rows) for each, name in zip(found, names, strict=True))


def _column(found: Any, name: str, rows: int) -> ColumnEntry:
    where = f"column {shown(name)}"
    entry: ColumnEntry = typed(found, ColumnEntry, where)
    if entry.name != name:
        raise Malformed(f"{where} is named {shown(entry.name)}")
    if entry.dtype not in DTYPES:
        raise Malformed(f"{where} has dtype {shown(entry.dtype)}")
    shape = entry.shape
    if shape is not None and len(shape) > MOST_FIXED:
        raise Malformed(f"{where} has {len(shape)} dimensions, of at most {MOST_FIXED}")
    _check_variants(entry, where)
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
        own, wanted = getattr(entry, part), getattr(like, part)
        if part == "values" and entry.packing is not None:
            own = own._replace(offset=wanted.offset)
        check_extent(own, f"{where}: {part}", None if wanted is None else wanted.size)
    return entry


def _check_packing(entry: ColumnEntry, packing: Packing, where: str) -> None:
    """How the values are compressed."""
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


def _check_variants(entry: ColumnEntry, where: str) -> None:
    for kind, of in entry.variants:
        number_in(of, f"{where}: a variant's dimensions", most=_MOST_DIMENSIONS)
        if not fits(kind, entry.dtype, of, entry.shape):
            raise Malformed(
                f"{where} cannot hold {shown(kind)} with {of} dimensions in {entry.dtype}"
            )
        if kind != "none" and entry.shape is not None and of != len(entry.shape):
            raise Malformed(f"{where} has rows of {len(entry.shape)} dimensions, and one kind {of}")
    count = len(entry.variants)
    if not 0 < count <= MOST_VARIANTS or len(set(entry.variants)) != count:
        raise Malformed(f"{where} has no, too many or twice the same variants")


def failed_in(found: Any, most: int) -> tuple[Extent, Extent] | None:
    """Where the numbers and messages of samples stand that were left out, ``most`` of them."""
    if found is None:
        return None
    fields = fields_in(found, "failed", ("rows", "messages"))
    rows = extent_in(fields["rows"], "failed.rows")
    if rows.size > most:
        raise Malformed(f"{rows.size} samples were left out, of {most}")
    return rows, extent_in(fields["messages"], "failed.messages")


def check_places(places: Iterable[tuple[str, str, Extent]], begin: int, end: int) -> None:
    """Nothing if each extent is from byte ``begin`` to ``end``, and none on another one.

    Args:
        places: what each of them is called, its dtype and place.
        begin: of the HDF5 part.
        end: of the file.
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


def extent_in(found: Any, where: str, count: int | None = None) -> Extent:
    """The place of some values; of ``count`` of them, unless that is None."""
    extent: Extent = typed(found, Extent, where)
    check_extent(extent, where, extent.size if count is None else count)
    return extent


def check_extent(extent: Extent | None, where: str, count: int | None) -> None:
    """Nothing if ``extent`` is of so many values; with None there must be none."""
    if extent is None and count is not None:
        raise Malformed(f"{where} is no list of 2")
    if extent is not None and count is None:
        raise Malformed(f"{where} should not be there")
    if extent is not None and extent.size != count:
        raise Malformed(f"{where} has {extent.size} values, and should have {count}")
    if extent is not None and extent.size == 0 and extent.offset != 0:
        raise Malformed(f"{where} has no values, and a place")
