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
from dataclasses import dataclass, replace
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
    MOST_VARIANTS,
    Checksums,
    ColumnEntry,
    Extent,
    Failed,
    Packing,
    Shard,
    is_shard_name,
)
from dataloaders.cache.format.fields import LARGEST, Malformed, loads, require, typed
from dataloaders.cache.printable import shown
from dataloaders.cache.sample.decode import is_encoded
from dataloaders.cache.sample.leaf import DTYPES, fits
from dataloaders.cache.sample.sample import column_names
from dataloaders.errors import CacheError

_FORMAT = "dataloaders cache"
_JOINED = "dataloaders cache, joined"
_MOST_DIMENSIONS = 64


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
        fields = {**vars(self), "format": self.format}
        for name in ("user_block", "identity", *(() if self.shards else ("shards",))):
            del fields[name]
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
    require(type(found) is dict, "it is no object")
    form = found.pop("format", None)
    own: dict[str, Any] = {"user_block": sealed.user_block, "identity": sealed.digest}
    if form == _FORMAT:
        own["shards"] = []
    require(not own.keys() & found.keys(), "it has fields that are no part of it")
    index: Index = typed({**found, **own}, Index, "it")
    require(index.format == form, f"format is {shown(form)}")
    _check(index, sealed.file_bytes)
    return index


def _check(index: Index, size: int) -> None:
    """Check that what it says follows from the rest of it, and fits a file of this size.

    Nobody is told every detail: its digest is right, so that no accident has changed it.
    """
    user_block, file_bytes = index.user_block, index.file_bytes
    is_power = user_block >= block.SMALLEST_BLOCK and not user_block & (user_block - 1)
    require(is_power, f"its block has {user_block} bytes")
    cut = ", so it is truncated" if size < file_bytes else ""
    built = f"the file has {size} bytes, and had {file_bytes} when it was built"
    require(file_bytes == size, built + cut)
    failed, left_out = index.failed.rows.size if index.failed else 0, index.samples - index.rows
    require(failed <= left_out, f"{failed} samples were left out, of {left_out}")
    try:
        names = [] if index.structure is None else column_names(index.structure)
    except (CacheError, RecursionError) as error:
        raise Malformed(str(error)) from error
    require(index.structure is not None or not index.rows, "structure is missing")
    is_like = [entry.name for entry in index.columns] == names
    require(is_like, f"structure has {len(names)} leaves, and the columns are others")
    for entry in index.columns:
        _check_column(entry, index.rows, is_joined=bool(index.shards))
    checks = index.checksums
    is_all = checks.values.size == -(-(file_bytes - user_block) // BLOCK)
    require(checks.block == BLOCK and is_all, "its checksums are not those of such a file")
    _check_shards(index)
    _check_places(index)


def _check_shards(index: Index) -> None:
    shards, is_digest = index.shards, re.compile("[0-9a-f]{32}").fullmatch
    for shard in shards:
        is_sound = is_shard_name(shard.name) and is_digest(shard.identity)
        require(is_sound and shard.rows <= shard.samples, f"shard {shown(shard.name)} cannot be")
    names = {shard.name for shard in shards}
    require(len(names) == len(shards), "two shards have the same name")
    for what in ("rows", "samples") if shards else ():
        found, whole = sum(getattr(shard, what) for shard in shards), getattr(index, what)
        require(found == whole, f"its shards have {found} {what}, and it says {whole}")


def _check_column(entry: ColumnEntry, rows: int, *, is_joined: bool) -> None:
    """Check that all that a column says, but for places, can be true of so many rows."""
    shape, kinds, packing = entry.shape, entry.variants, entry.packing

    def check(holds: object, field: str) -> None:
        if not holds:  # the text is made where it is needed
            value = shown(getattr(entry, field))
            raise Malformed(f"{field} of column {shown(entry.name)} is {value}, which cannot be")

    check(len(shape or ()) <= MOST_FIXED, "shape")
    # NumPy multiplies the sizes of an empty array too, leaving out what is 0.
    check(max(rows, 1) * math.prod(filter(None, shape or ())) <= LARGEST, "shape")
    check(0 < len(set(kinds)) == len(kinds) <= MOST_VARIANTS, "variants")
    check(entry.dtype in DTYPES, "dtype")
    for kind, of in kinds:
        is_like = shape is None or kind == "none" or of == len(shape)
        is_fit = of <= _MOST_DIMENSIONS and is_like and fits(kind, entry.dtype, of, shape)
        check(is_fit, "variants")
    like = ColumnEntry.of_rows(
        *(entry.name, entry.dtype, kinds, shape, rows),
        size=entry.values.size,
        most_values=entry.most_values,
        most_pixels=entry.most_pixels,
    )
    sizes = {name: Extent(0, each.size) for name, _, each in entry.sized() if name != "pieces"}
    for field, value in vars(replace(entry.placed(sizes), packing=None)).items():
        check(value == getattr(like, field), field)
    is_image = any(is_encoded(kind) for kind, _ in kinds)
    check(entry.most_pixels is None or (is_image and entry.most_pixels > 0), "most_pixels")
    check(packing is None or _is_packing(entry, packing), "packing")
    check(not entry.values.offset or not (is_joined or packing), "values")


def _is_packing(entry: ColumnEntry, packing: Packing) -> bool:
    width, size = np.dtype(entry.dtype).itemsize, entry.values.size
    row = math.prod(entry.shape or ())
    return (
        packing.codec in CODECS
        and 0 < packing.piece <= size
        and packing.piece % row == 0
        and packing.piece * width <= min(max(LARGEST_PIECE, row * width), LARGEST_ROW)
        and packing.pieces.size == 2 * -(-size // packing.piece)
        and (entry.most_values or 0) * width <= LARGEST_ROW
    )


def _check_places(index: Index) -> None:
    """Check that each array is between the user block and the end, and none on another one."""
    taken, begin, end = [], index.user_block, index.file_bytes
    for name, dtype, (offset, size) in index.places():
        last = offset + size * np.dtype(dtype).itemsize
        place = f"bytes {offset} to {last}, outside {begin} to {end}"
        is_inside = begin <= offset and last <= end
        require(is_inside if size else not offset, f"{name} is said to stand at {place}")
        if size:
            taken.append((offset, last, name))
    for (_, last, name), (offset, _, other) in pairwise(sorted(taken)):
        require(last <= offset, f"{name} and {other} overlap")
