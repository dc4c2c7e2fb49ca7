"""The index of a cache: where in the file each value stands, read without HDF5.

    block.py ──text──> fields.py ──typed──> Index ──compared with itself──> MappedFile

A joined cache has the same index, and with it the list of its shards, which have the values.
Nothing in a file is trusted: a parsed `Index` names only places inside the file.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from dataloaders.cache.format import block
from dataloaders.cache.format.checksums import BLOCK
from dataloaders.cache.format.codecs import CODECS
from dataloaders.cache.format.entries import (
    LARGEST_PIECE,
    LARGEST_ROW,
    MOST_FIXED,
    MOST_SHARDS,
    MOST_VARIANTS,
    Checksums,
    ColumnEntry,
    Extent,
    Failed,
    Packing,
    Shard,
    is_shard_name,
)
from dataloaders.cache.format.fields import (
    LARGEST,
    Malformed,
    fields_in,
    list_in,
    loads,
    number_in,
    require,
    typed,
)
from dataloaders.cache.printable import shown
from dataloaders.cache.sample.decode import is_encoded
from dataloaders.cache.sample.leaf import DTYPES, fits
from dataloaders.cache.sample.sample import column_names
from dataloaders.errors import CacheError

_FORMAT = "dataloaders cache"
_JOINED = "dataloaders cache, joined"
_MOST_DIMENSIONS = 64
_KEYS = (
    "format", "file_bytes", "rows", "samples", "structure", "columns", "checksums", "failed",
    "fingerprint", "head", "tail", "attributes",
)  # fmt: skip


@dataclass(frozen=True)
class Index:
    """What a cache says of itself; decoded as it is annotated."""

    rows: int
    samples: int  # of the dataset that it was built from, those left out included
    structure: Any  # of each sample; None without rows
    columns: tuple[ColumnEntry, ...]  # in the order of the sample's leaves
    fingerprint: dict[str, Any]  # of what it was built from
    head: tuple[str, ...]  # the transforms whose result it holds
    tail: tuple[str, ...]  # those that are still to be applied
    checksums: Checksums
    failed: Failed | None = None  # None: no sample was left out
    attributes: Extent | None = None  # what the dataset says of its classes (JSON)
    shards: tuple[Shard, ...] = ()  # whose rows it joins, in their order; none: it has its own
    file_bytes: int = 0  # of the whole file
    user_block: int = 0  # bytes in front of the HDF5 file
    identity: str = ""  # the index's own digest; it differs if any bit of the file does

    @property
    def format(self) -> str:
        """What kind of file it is."""
        return _JOINED if self.shards else _FORMAT

    @property
    def all_bytes(self) -> int:
        """The size of the file, and of its shards."""
        return self.file_bytes + sum(shard.file_bytes for shard in self.shards)

    def places(self) -> Iterator[tuple[str, str, Extent]]:
        """Yield what stands somewhere in the file: what it is called, its dtype and place."""
        yield "the table of checksums", "<u4", self.checksums.values
        for column in self.columns:
            name = f"column {shown(column.name)}"
            for part, dtype, extent in column.parts():
                if part != "values":
                    yield f"{name} ({part})", dtype, extent
                elif not self.shards:
                    yield name, dtype, extent
        if self.failed is not None:
            yield "the list of failed samples", "<u8", self.failed.rows
            yield "the messages of the list of failed samples", "|u1", self.failed.messages
        if self.attributes is not None:
            yield "the dataset's classes", "|u1", self.attributes

    def encode(self) -> bytes:
        """Return the user block, header and zeros included."""
        return block.seal(self.text(), self.user_block)

    def text(self) -> bytes:
        """Return the JSON in it; CacheError: it is too long, or JSON does not keep all of it."""
        fields = {name: getattr(self, name) for name in _KEYS}
        if self.shards:
            fields["shards"] = self.shards
        try:
            text = json.dumps(
                fields, default=vars, sort_keys=True, allow_nan=False, separators=(",", ":")
            )
        except (TypeError, ValueError, RecursionError) as error:
            raise CacheError(f"the fingerprint cannot be written as JSON: {error}") from error
        if len(text) > block.LONGEST:
            shards = f", or {len(self.shards)} shards," if self.shards else ""
            raise CacheError(
                f"the index of the cache takes {len(text)} bytes, of {block.LONGEST} that it may: "
                f"{len(self.columns)} columns{shards} are too many; return fewer and larger leaves"
            )
        return text.encode("ascii")

    @classmethod
    def parse(cls, source: str | os.PathLike[str] | int, name: str = "") -> Index:
        """Return the index of the file at this path, or of this descriptor of a file ``name``."""
        name = name or str(source)
        descriptor = source if isinstance(source, int) else block.open_file(name)
        try:
            return _index(block.read_block(descriptor, name))
        except Malformed as error:
            raise CacheError(
                f"the index of the cache {name} is malformed: {error}; {block.AGAIN}"
            ) from error
        finally:
            if descriptor != source:
                os.close(descriptor)


def _index(sealed: block.Sealed) -> Index:
    found = loads(sealed.text)
    is_joined = type(found) is dict and found.get("format") == _JOINED
    fields = dict(fields_in(found, "the index", [*_KEYS, *(["shards"] if is_joined else [])]))
    form = fields.pop("format")
    require(is_joined or form == _FORMAT, f"format is {shown(form)}")
    if is_joined:
        count = len(list_in(fields["shards"], "shards"))
        require(0 < count <= MOST_SHARDS, f"there are {count} shards, and not 1 to {MOST_SHARDS}")
    others = {
        "user_block": sealed.user_block,
        "identity": sealed.digest,
        "shards": fields.get("shards", []),
    }
    index: Index = typed({**fields, **others}, Index, "", "")
    _check(index, sealed.file_bytes)
    return index


def _check(index: Index, size: int) -> None:
    """Check that what it says follows from the rest of it, and fits a file of this size."""
    user_block, file_bytes = index.user_block, index.file_bytes
    is_power = user_block >= block.SMALLEST_BLOCK and not user_block & (user_block - 1)
    require(is_power, f"its block has {user_block} bytes, which is no power of two from 4096 on")
    cut = ", so it is truncated" if size < file_bytes else ""
    built = f"the file has {size} bytes, and had {file_bytes} when it was built"
    require(file_bytes == size, built + cut)
    number_in(index.samples, "samples", least=index.rows)
    _check_columns(index.columns, index.structure, index.rows)
    checks = index.checksums
    require(checks.block == BLOCK, f"checksums.block is {checks.block}, not {BLOCK}")
    _check_extent(checks.values, "checksums.values", -(-(file_bytes - user_block) // BLOCK))
    for name, _, extent in index.places():  # those whose size follows from nothing else
        _check_extent(extent, name, extent.size)
    failed, left_out = index.failed.rows.size if index.failed else 0, index.samples - index.rows
    require(failed <= left_out, f"{failed} samples were left out, of {left_out}")
    if index.shards:
        _check_shards(index.shards, index.rows, index.samples)
        for column in index.columns:
            where = f"column {shown(column.name)}"
            require(not column.values.offset, f"{where}: values have a place, and stand in shards")
    _check_places(index)


def _check_shards(shards: tuple[Shard, ...], rows: int, samples: int) -> None:
    is_digest = re.compile("[0-9a-f]{32}").fullmatch
    for number, shard in enumerate(shards):
        where = f"shard {number}"
        if not is_shard_name(shard.name):
            name = shown(shard.name)
            raise Malformed(f"{where} is named {name}, which is no file beside this one")
        if not is_digest(shard.identity):
            raise Malformed(f"{where}: identity is {shown(shard.identity)}, and no digest")
        number_in(shard.samples, f"{where}: samples", least=shard.rows)
        number_in(shard.file_bytes, f"{where}: file_bytes", least=block.HEADER)
    names = {shard.name for shard in shards}
    require(len(names) == len(shards), "two shards have the same name")
    for what, whole in (("rows", rows), ("samples", samples)):
        found = sum(getattr(shard, what) for shard in shards)
        require(found == whole, f"its shards have {found} {what}, and it says {whole}")


def _check_columns(columns: tuple[ColumnEntry, ...], structure: Any, rows: int) -> None:
    if structure is None:
        require(not rows and not columns, "structure is missing")
        return
    try:
        names = column_names(structure)
    except (CacheError, RecursionError) as error:
        raise Malformed(str(error)) from error
    counts = f"structure has {len(names)} leaves, and there are {len(columns)} columns"
    require(len(names) == len(columns), counts)
    for entry, name in zip(columns, names, strict=True):
        _check_column(entry, name, rows)


def _check_column(entry: ColumnEntry, name: str, rows: int) -> None:
    where, shape, kinds = f"column {shown(name)}", entry.shape, entry.variants
    require(entry.name == name, f"{where} is named {shown(entry.name)}")
    require(entry.dtype in DTYPES, f"{where} has dtype {shown(entry.dtype)}")
    has = 0 if shape is None else len(shape)
    require(has <= MOST_FIXED, f"{where} has {has} dimensions, of at most {MOST_FIXED}")
    for kind, of in kinds:
        number_in(of, f"{where}: a variant's dimensions", most=_MOST_DIMENSIONS)
        what = f"{shown(kind)} with {of} dimensions in {entry.dtype}"
        require(fits(kind, entry.dtype, of, shape), f"{where} cannot hold {what}")
        is_like = kind == "none" or shape is None or of == has
        require(is_like, f"{where} has rows of {has} dimensions, and one kind {of}")
    is_set = 0 < len(kinds) <= MOST_VARIANTS and len(set(kinds)) == len(kinds)
    require(is_set, f"{where} has no, too many or twice the same variants")
    if entry.most_pixels is not None:
        is_image = any(is_encoded(kind) for kind, _ in kinds)
        require(is_image, f"{where}: most_pixels is there, and no encoded image")
        number_in(entry.most_pixels, f"{where}: most_pixels", least=1)
    if shape is not None:
        is_known = entry.most_values is not None
        require(not is_known, f"{where}: most_values is there, and all rows have one shape")
        # NumPy multiplies the sizes of an empty array too, leaving out what is 0.
        size = max(rows, 1) * math.prod(filter(None, shape))
        require(size <= LARGEST, f"{where} has too many values")
    like = ColumnEntry.of_rows(name, entry.dtype, kinds, shape, rows, size=entry.values.size)
    same = entry.dimensions == like.dimensions
    require(same, f"{where} has {entry.dimensions} dimensions, and its variants do not")
    if entry.packing is not None:
        _check_packing(entry, entry.packing, where)
    for part in ("values", "offsets", "shapes", "codes"):
        wanted = getattr(like, part)
        _check_extent(getattr(entry, part), f"{where}: {part}", wanted and wanted.size)


def _check_packing(entry: ColumnEntry, packing: Packing, where: str) -> None:
    offset, size = entry.values
    values = f"{where} is compressed, and its values are {shown([offset, size])}"
    require(not offset and size > 0, values)
    known = f"{shown(packing.codec)}, of {', '.join(CODECS)}"
    require(packing.codec in CODECS, f"{where} is compressed with {known}")
    width = np.dtype(entry.dtype).itemsize
    piece = number_in(packing.piece, f"{where}: packing.piece", least=1, most=size)
    row = 1 if entry.shape is None else math.prod(entry.shape)
    most = LARGEST_PIECE if entry.shape is None else max(LARGEST_PIECE, row * width)
    is_sound = piece * width <= min(most, LARGEST_ROW) and piece % row == 0
    require(is_sound, f"{where} cannot be compressed in pieces of {piece} values")
    _check_extent(packing.pieces, f"{where}: packing.pieces", 2 * -(-size // piece))
    if entry.most_values is not None:
        number_in(entry.most_values, f"{where}: most_values", most=LARGEST_ROW // width)


def _check_extent(extent: Extent | None, where: str, count: int | None) -> None:
    """Check that ``extent`` is of so many values; with None there must be none."""
    if extent is None:
        require(count is None, f"{where} is no list of 2")
        return
    require(count is not None, f"{where} should not be there")
    require(extent.size == count, f"{where} has {extent.size} values, and should have {count}")
    require(extent.size > 0 or extent.offset == 0, f"{where} has no values, and a place")


def _check_places(index: Index) -> None:
    """Check that each array is between the user block and the end, and none on another one."""
    taken, begin, end = [], index.user_block, index.file_bytes
    for name, dtype, (offset, size) in index.places():
        if size:
            last = offset + size * np.dtype(dtype).itemsize
            place = f"bytes {offset} to {last}, outside {begin} to {end}"
            is_inside = begin <= offset and last <= end
            require(is_inside, f"{name} is said to stand at {place}")
            taken.append((offset, last, name))
    for (_, last, name), (offset, _, other) in pairwise(sorted(taken)):
        require(last <= offset, f"{name} and {other} overlap")
