"""The index of a cache: where in the file each value stands, read without HDF5.

    block.py ──text──> fields.py ──Index, typed──> entry_checks.py ──> whoever maps the file

A joined cache has the same index, and with it the list of its shards, which have the values.

Nothing in a file is believed: `Index.parse` takes a bounded number of bytes, and checks the type
and range of each field, so that whoever reads by an `Index` reads inside the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dataloaders.cache.format.block import AGAIN, LONGEST, Sealed, open_file, read_block
from dataloaders.cache.format.checksums import BLOCK
from dataloaders.cache.format.entries import MOST_SHARDS, ColumnEntry, Extent, Shard
from dataloaders.cache.format.entry_checks import check_index
from dataloaders.cache.format.fields import (
    Malformed,
    fields_in,
    list_in,
    loads,
    number_in,
    require,
    typed,
)
from dataloaders.cache.printable import shown
from dataloaders.errors import CacheError

_FORMAT = "dataloaders cache"
_JOINED = "dataloaders cache, joined"
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
    # The numbers (uint64) and the messages (JSON, a list) of samples left out.
    failed: tuple[Extent, Extent] | None = None
    attributes: Extent | None = None  # what the dataset says of its classes (JSON)
    shards: tuple[
        Shard, ...
    ] = ()  # that have the values, in the order of rows; none: they are here
    checksums: Extent = Extent(0, 0)  # uint32, a crc32 for each BLOCK after the user block
    checksums_digest: str = ""  # of their bytes, in hexadecimal
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
        yield "the table of checksums", "<u4", self.checksums
        for column in self.columns:
            name = f"column {shown(column.name)}"
            for part, dtype, extent in column.parts():
                if part != "values":
                    yield f"{name} ({part})", dtype, extent
                elif not self.shards:
                    yield name, dtype, extent
        if self.failed is not None:
            yield "the list of failed samples", "<u8", self.failed[0]
            yield "the messages of the list of failed samples", "|u1", self.failed[1]
        if self.attributes is not None:
            yield "the dataset's classes", "|u1", self.attributes

    def text(self) -> bytes:
        """Return the JSON in it.

        Raises:
            CacheError: it is too long, or the fingerprint is nothing that JSON keeps.
        """
        fields: dict[str, Any] = {
            **{name: getattr(self, name) for name in _KEYS},
            "checksums": {"digest": self.checksums_digest, "values": self.checksums},
            "failed": self.failed and {"rows": self.failed[0], "messages": self.failed[1]},
        }
        fields["checksums"]["block"] = BLOCK
        if self.shards:
            fields["shards"] = self.shards
        try:
            text = json.dumps(
                fields, default=vars, sort_keys=True, allow_nan=False, separators=(",", ":")
            )
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
    def parse(cls, source: str | os.PathLike[str] | int, name: str = "") -> Index:
        """Return the index of the file at this path, or of this open descriptor of file ``name``.

        Raises:
            CacheError: there is none, or it is malformed, truncated or damaged.
        """
        name = name or str(source)
        descriptor = source if isinstance(source, int) else open_file(name)
        try:
            return _index(read_block(descriptor, name))
        except Malformed as error:
            raise CacheError(
                f"the index of the cache {name} is malformed: {error}; {AGAIN}"
            ) from error
        finally:
            if descriptor != source:
                os.close(descriptor)


def _index(block: Sealed) -> Index:
    found = loads(block.text)
    is_joined = type(found) is dict and found.get("format") == _JOINED
    fields = dict(fields_in(found, "the index", [*_KEYS, *(["shards"] if is_joined else [])]))
    form = fields.pop("format")
    require(is_joined or form == _FORMAT, f"format is {shown(form)}")
    if is_joined:
        count = len(list_in(fields["shards"], "shards"))
        require(0 < count <= MOST_SHARDS, f"there are {count} shards, and not 1 to {MOST_SHARDS}")
    checks = fields_in(fields["checksums"], "checksums", ("block", "digest", "values"))
    number_in(checks["block"], "checksums.block", least=BLOCK, most=BLOCK)
    if fields["failed"] is not None:
        failed = fields_in(fields["failed"], "failed", ("rows", "messages"))
        fields["failed"] = [failed["rows"], failed["messages"]]
    others = {
        "checksums": checks["values"],
        "checksums_digest": checks["digest"],
        "user_block": block.user_block,
        "identity": block.digest,
        "shards": fields.get("shards", []),
    }
    index: Index = typed({**fields, **others}, Index, "", "")
    check_index(index, block.file_bytes)
    return index
