"""The entries of an index that anybody may have written, checked as they are read.

JSON ──columns_in, shards_in, ...──> entries, or Malformed: what is wrong with which
Index ──check_places──> nothing stands outside the file, or on anything else
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
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
    Variant,
    is_shard_name,
)
from dataloaders.cache.format.fields import (
    LARGEST,
    Malformed,
    fields_in,
    list_in,
    number_in,
    text_in,
)
from dataloaders.cache.printable import shown
from dataloaders.cache.sample.decode import is_encoded
from dataloaders.cache.sample.sample import DTYPES, column_names, fits
from dataloaders.errors import CacheError

__all__ = ["check_places", "columns_in", "extent_in", "failed_in", "shards_in"]

_MOST_DIMENSIONS = 64
_SHARD_FIELDS = Shard._fields
_COLUMN_FIELDS = (
    "name", "dtype", "variants", "shape", "dimensions", "values", "offsets", "shapes", "codes",
    "packing", "most_values", "most_pixels",
)  # fmt: skip


def shards_in(found: Any, rows: int, samples: int) -> tuple[Shard, ...]:
    """The shards of a joined cache of so many rows and samples."""
    entries = list_in(found, "shards")
    if not 0 < len(entries) <= MOST_SHARDS:
        raise Malformed(f"there are {len(entries)} shards, and not 1 to {MOST_SHARDS}")
    shards = []
    for number, each in enumerate(entries):
        where = f"shard {number}"
        fields = fields_in(each, where, _SHARD_FIELDS)
        name = text_in(fields["name"], f"{where}: name")
        if not is_shard_name(name):
            raise Malformed(f"{where} is named {shown(name)}, which is no file beside this one")
        own = number_in(fields["rows"], f"{where}: rows")
        identity = text_in(fields["identity"], f"{where}: identity")
        if len(identity) != 2 * DIGEST or set(identity) - set("0123456789abcdef"):
            raise Malformed(f"{where}: identity is {shown(identity)}, and no digest")
        shards.append(
            Shard(
                name,
                own,
                number_in(fields["samples"], f"{where}: samples", least=own),
                number_in(fields["file_bytes"], f"{where}: file_bytes", least=HEADER),
                identity,
            )
        )
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
    fields = fields_in(found, where, _COLUMN_FIELDS)
    if fields["name"] != name:
        raise Malformed(f"{where} is named {shown(fields['name'])}")
    dtype = text_in(fields["dtype"], f"{where}: dtype")
    if dtype not in DTYPES:
        raise Malformed(f"{where} has dtype {shown(dtype)}")
    dimensions = number_in(fields["dimensions"], f"{where}: dimensions", most=_MOST_DIMENSIONS)
    shape = None if fields["shape"] is None else _shape(fields["shape"], f"{where}: shape")
    variants = _variants(fields["variants"], where, dtype, shape)
    if dimensions != max((of for _, of in variants), default=0):
        raise Malformed(f"{where} has {dimensions} dimensions, and its variants do not")
    several = len(variants) > 1
    codes = _optional(fields["codes"], f"{where}: codes", rows if several else None)
    most_pixels = None
    if fields["most_pixels"] is not None:
        if not any(is_encoded(kind) for kind, _ in variants):
            raise Malformed(f"{where}: most_pixels is there, and no encoded image")
        most_pixels = number_in(fields["most_pixels"], f"{where}: most_pixels", least=1)
    if shape is not None:
        if fields["most_values"] is not None:
            raise Malformed(f"{where}: most_values is there, and all rows have one shape")
        # NumPy multiplies the sizes of an empty array too, leaving out what is 0.
        if max(rows, 1) * math.prod(filter(None, shape)) > LARGEST:
            raise Malformed(f"{where} has too many values")
        count = rows * math.prod(shape)
        values, packing = _values(fields, where, dtype, count, math.prod(shape))
        _optional(fields["offsets"], f"{where}: offsets", None)
        _optional(fields["shapes"], f"{where}: shapes", None)
        return ColumnEntry(
            name, dtype, variants, shape, dimensions, values, None, None, codes, packing, None,
            most_pixels,
        )  # fmt: skip
    values, packing = _values(fields, where, dtype, None, None)
    offsets = extent_in(fields["offsets"], f"{where}: offsets", rows + 1)
    needed = rows * dimensions if dimensions > 1 else None
    shapes = _optional(fields["shapes"], f"{where}: shapes", needed)
    most_values = None
    if fields["most_values"] is not None:
        most = LARGEST if packing is None else LARGEST_ROW // np.dtype(dtype).itemsize
        most_values = number_in(fields["most_values"], f"{where}: most_values", most=most)
    return ColumnEntry(
        name, dtype, variants, None, dimensions, values, offsets, shapes, codes, packing,
        most_values, most_pixels,
    )  # fmt: skip


def _values(
    fields: Mapping[str, Any], where: str, dtype: str, count: int | None, row: int | None
) -> tuple[Extent, Packing | None]:
    """The values, so many if that is known, and how they are compressed.

    Args:
        row: values of a row of a fixed column.
    """
    if fields["packing"] is None:
        return extent_in(fields["values"], f"{where}: values", count), None
    packing = fields_in(fields["packing"], f"{where}: packing", ("codec", "piece", "pieces"))
    offset, size = (
        number_in(each, f"{where}: values")
        for each in list_in(fields["values"], f"{where}: values", 2)
    )
    if offset or not size or count not in (None, size):
        raise Malformed(f"{where} is compressed, and its values are {shown([offset, size])}")
    codec = text_in(packing["codec"], f"{where}: packing.codec")
    if codec not in CODECS:
        raise Malformed(f"{where} is compressed with {shown(codec)}, of {', '.join(CODECS)}")
    width = np.dtype(dtype).itemsize
    piece = number_in(packing["piece"], f"{where}: packing.piece", least=1, most=size)
    most = LARGEST_PIECE if row is None else max(LARGEST_PIECE, row * width)
    if piece * width > min(most, LARGEST_ROW) or (row is not None and piece % row):
        raise Malformed(f"{where} cannot be compressed in pieces of {piece} values")
    pieces = extent_in(packing["pieces"], f"{where}: packing.pieces", 2 * -(-size // piece))
    return Extent(0, size), Packing(codec, piece, pieces)


def _variants(
    found: Any, where: str, dtype: str, shape: tuple[int, ...] | None
) -> tuple[Variant, ...]:
    variants = []
    for each in list_in(found, f"{where}: variants"):
        pair = list_in(each, f"{where}: a variant", 2)
        kind = text_in(pair[0], f"{where}: a variant's kind")
        of = number_in(pair[1], f"{where}: a variant's dimensions", most=_MOST_DIMENSIONS)
        if not fits(kind, dtype, of, shape):
            raise Malformed(f"{where} cannot hold {shown(kind)} with {of} dimensions in {dtype}")
        if kind != "none" and shape is not None and of != len(shape):
            raise Malformed(f"{where} has rows of {len(shape)} dimensions, and one kind {of}")
        variants.append((kind, of))
    if not 0 < len(variants) <= MOST_VARIANTS or len(set(variants)) != len(variants):
        raise Malformed(f"{where} has no, too many or twice the same variants")
    return tuple(variants)


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


def _shape(found: Any, where: str) -> tuple[int, ...]:
    shape = tuple(number_in(each, where) for each in list_in(found, where))
    if len(shape) > MOST_FIXED:
        raise Malformed(f"{where} has {len(shape)} dimensions, of at most {MOST_FIXED}")
    return shape


def extent_in(found: Any, where: str, count: int | None = None) -> Extent:
    """The place of some values; of ``count`` of them, unless that is None."""
    pair = list_in(found, where, 2)
    offset, values = (number_in(each, where) for each in pair)
    if count is not None and values != count:
        raise Malformed(f"{where} has {values} values, and should have {count}")
    if values == 0 and offset != 0:
        raise Malformed(f"{where} has no values, and a place")
    return Extent(offset, values)


def _optional(found: Any, where: str, count: int | None) -> Extent | None:
    """The extent of so many values; with None there must be none."""
    if count is None:
        if found is not None:
            raise Malformed(f"{where} should not be there")
        return None
    return extent_in(found, where, count)
