"""The index of a cache: where in the file each value stands, read without HDF5.

    block.py ──text──> fields.py, entry_checks.py ──> Index ──> whoever maps the file

A joined cache has the same index, and with it the list of its shards, which have the values.

Nothing in a file is believed: `Index.parse` takes a bounded number of bytes, and checks the type
and range of each field, so that whoever reads by an `Index` reads inside the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dataloaders.cache.format.block import (
    AGAIN,
    LONGEST,
    SMALLEST_BLOCK,
    Sealed,
    open_file,
    read_block,
    seal,
)
from dataloaders.cache.format.checksums import BLOCK
from dataloaders.cache.format.entries import ColumnEntry, Extent, Shard
from dataloaders.cache.format.entry_checks import (
    check_places,
    columns_in,
    extent_in,
    failed_in,
    shards_in,
)
from dataloaders.cache.format.fields import (
    Malformed,
    fields_in,
    list_in,
    loads,
    number_in,
    text_in,
    texts_in,
)
from dataloaders.cache.printable import shown
from dataloaders.cache.sample.sample import Structure
from dataloaders.errors import CacheError

__all__ = ["Index"]

_FORMAT = "dataloaders cache"
_JOINED = "dataloaders cache, joined"
_FIELDS = (
    "format", "file_bytes", "rows", "samples", "structure", "columns", "checksums", "failed",
    "fingerprint", "head", "tail", "attributes",
)  # fmt: skip


@dataclass(frozen=True)
class Index:
    """What a cache says of itself.

    Attributes:
        user_block: bytes in front of the HDF5 file.
        file_bytes: of the whole file.
        rows: samples in it.
        samples: of the dataset that it was built from, those left out included.
        structure: of each sample; None without rows.
        columns: in the order of the sample's leaves.
        checksums: uint32, a crc32 for each BLOCK behind the user block.
        checksums_digest: of their bytes, in hexadecimal.
        failed: the numbers (uint64) and the messages (JSON, a list) of samples left out; or None.
        fingerprint: of what it was built from.
        head: the transforms whose result it holds, one text a member.
        tail: those that are still to be applied.
        attributes: what the dataset says of its classes (JSON); None: nothing.
        shards: the files that have the values, in the order of their rows; none: they are here.
        identity: the index's own digest in hexadecimal; it differs if any bit of the file does.
    """

    user_block: int
    file_bytes: int
    rows: int
    samples: int
    structure: Structure | None
    columns: tuple[ColumnEntry, ...]
    checksums: Extent
    checksums_digest: str
    failed: tuple[Extent, Extent] | None
    fingerprint: Mapping[str, Any]
    head: tuple[str, ...]
    tail: tuple[str, ...]
    attributes: Extent | None = None
    shards: tuple[Shard, ...] = ()
    identity: str = ""

    @property
    def format(self) -> str:
        """What kind of file it is."""
        return _JOINED if self.shards else _FORMAT

    @property
    def all_bytes(self) -> int:
        """The size of the file, and of its shards."""
        return self.file_bytes + sum(shard.file_bytes for shard in self.shards)

    def parts(self, column: ColumnEntry) -> Iterable[tuple[str, str, Extent]]:
        """What there is of ``column`` in this very file: name, dtype and place."""
        for name, dtype, extent in column.parts():
            if name != "values" or not self.shards:
                yield name, dtype, extent

    def places(self) -> Iterator[tuple[str, str, Extent]]:
        """Yield what stands somewhere in the file: what it is called, its dtype and place."""
        yield "the table of checksums", "<u4", self.checksums
        for column in self.columns:
            for part, dtype, extent in self.parts(column):
                name = f"column {shown(column.name)}"
                yield name if part == "values" else f"{name} ({part})", dtype, extent
        if self.failed is not None:
            yield "the list of failed samples", "<u8", self.failed[0]
            yield "the messages of the list of failed samples", "|u1", self.failed[1]
        if self.attributes is not None:
            yield "the dataset's classes", "|u1", self.attributes

    def encode(self) -> bytes:
        """The user block, header and zeros included.

        Raises:
            CacheError: it is too long, or the fingerprint is nothing that JSON keeps.
        """
        return seal(self.text(), self.user_block)

    def text(self) -> bytes:
        """The JSON in it.

        Raises:
            CacheError: as `encode`.
        """
        fields: dict[str, Any] = {
            "format": self.format,
            "file_bytes": self.file_bytes,
            "rows": self.rows,
            "samples": self.samples,
            "structure": self.structure,
            "columns": [
                {**vars(column), "packing": column.packing and vars(column.packing)}
                for column in self.columns
            ],
            "checksums": {
                "block": BLOCK,
                "digest": self.checksums_digest,
                "values": self.checksums,
            },
            "failed": None
            if self.failed is None
            else {"rows": self.failed[0], "messages": self.failed[1]},
            "attributes": self.attributes,
            "fingerprint": dict(self.fingerprint),
            "head": self.head,
            "tail": self.tail,
        }
        if self.shards:
            fields["shards"] = [vars(shard) for shard in self.shards]
        try:
            text = json.dumps(fields, sort_keys=True, allow_nan=False, separators=(",", ":"))
        except (TypeError, ValueError, RecursionError) as error:
            raise CacheError(f"the fingerprint cannot be written as JSON: {error}") from error
        if len(text) > LONGEST:
            shards = f", or {len(self.shards)} shards," if self.shards else ""
            raise CacheError(
                f"the index of the cache takes {len(text)} bytes, of {LONGEST} that it may: "
                f"{len(self.columns)} columns{shards} are too many; return fewer and larger leaves"
            )
        return text.encode("ascii")

    @classmethod
    def parse(cls, source: str | os.PathLike[str] | int, name: str | None = None) -> Index:
        """The index of the file at this path, or of this open file descriptor.

        Args:
            source: the path or descriptor.
            name: of the file, for messages.

        Raises:
            CacheError: there is none, or it is malformed, truncated or damaged.
        """
        if isinstance(source, int):
            name = name or f"in file descriptor {source}"
            return _parsed(read_block(source, name), name)
        name = name or os.fspath(source)
        descriptor = open_file(name)
        try:
            return _parsed(read_block(descriptor, name), name)
        finally:
            os.close(descriptor)


def _parsed(block: Sealed, name: str) -> Index:
    try:
        return _index(loads(block.text), block)
    except Malformed as error:
        raise CacheError(f"the index of the cache {name} is malformed: {error}; {AGAIN}") from error


def _index(found: Any, block: Sealed) -> Index:
    joined = type(found) is dict and found.get("format") == _JOINED
    fields = fields_in(found, "the index", [*_FIELDS, *(["shards"] if joined else [])])
    user_block, size = block.user_block, block.file_bytes
    if not joined and fields["format"] != _FORMAT:
        raise Malformed(f"format is {shown(fields['format'])}")
    if user_block < SMALLEST_BLOCK or user_block & (user_block - 1):
        raise Malformed(f"its block has {user_block} bytes, which is no power of two from 4096 on")
    file_bytes = number_in(fields["file_bytes"], "file_bytes")
    if file_bytes != size:
        raise Malformed(
            f"the file has {size} bytes, and had {file_bytes} when it was built"
            + (", so it is truncated" if size < file_bytes else "")
        )
    rows = number_in(fields["rows"], "rows")
    samples = number_in(fields["samples"], "samples", least=rows)
    entries = list_in(fields["columns"], "columns")
    columns = columns_in(fields["structure"], entries, rows)
    checks = fields_in(fields["checksums"], "checksums", ("block", "digest", "values"))
    if checks["block"] != BLOCK or type(checks["block"]) is not int:
        raise Malformed(f"checksums.block is {shown(checks['block'])} and not {BLOCK}")
    blocks = -(-(file_bytes - user_block) // BLOCK)
    checksums = extent_in(checks["values"], "checksums.values", blocks)
    failed = failed_in(fields["failed"], samples - rows)
    attributes = None
    if fields["attributes"] is not None:
        attributes = extent_in(fields["attributes"], "attributes")
    fingerprint = fields["fingerprint"]
    if type(fingerprint) is not dict:
        raise Malformed("fingerprint is no object")
    index = Index(
        user_block,
        file_bytes,
        rows,
        samples,
        fields["structure"],
        columns,
        checksums,
        text_in(checks["digest"], "checksums.digest"),
        failed,
        fingerprint,
        texts_in(fields["head"], "head"),
        texts_in(fields["tail"], "tail"),
        attributes,
        shards_in(fields["shards"], rows, samples) if joined else (),
        block.digest,
    )
    for column in columns:
        if joined and column.values.offset:
            raise Malformed(
                f"column {shown(column.name)}: values have a place, and stand in shards"
            )
    check_places(index.places(), user_block, file_bytes)
    return index
