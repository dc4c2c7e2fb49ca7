"""What a build has finished, one line a chunk; a line that a crash tore ends the list before it.

    1c291ca3 {"chunk":17,"digest":"9f...","failed":[],"file":"chunk-000017.5e1f","parts":[8390],...}
    crc32    JSON

A line is written after the file that it names. A power loss may leave a line without its file, or
a file without its contents: a later call compares checksums before it relies on them.
"""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dataloaders.cache.disk import write_all

__all__ = ["MOST", "Journal", "Record", "read_journal"]

MOST = 1 << 48
"""More than there is of anything in a build: no disk has so many bytes."""

_ASSEMBLED = "assembled"


@dataclass(frozen=True)
class Record:
    """One finished chunk.

    Attributes:
        chunk: its number.
        file: its name in the build's folder; "" if no row of it is kept.
        rows: how many are kept.
        parts: bytes of each `Chunk` in the file, one after the other.
        digest: crc32 of the file, in hex: it is our own and short-lived, and this is quick.
        structure: digest of the structure of its samples; "" without rows.
        failed: (sample, why) of those that could not be read and were left out.
        spans: of each column that is placed, the byte of the whole cache's file at which the
            chunk's values begin, and how many bytes they are.
        sums: how many checksums of these bytes, four bytes each, stand at the end of its file.
        size: bytes of the placed column whose rows are of several shapes, wherever they are.
        first: the number in the dataset of its first sample, kept or left out.
    """

    chunk: int
    file: str
    rows: int
    parts: tuple[int, ...]
    digest: str
    structure: str
    failed: tuple[tuple[int, str], ...] = ()
    spans: tuple[tuple[int, int], ...] = ()
    sums: int = 0
    size: int = 0
    first: int = 0

    @property
    def bytes(self) -> int:
        """The size of its file."""
        return sum(self.parts) + 4 * self.sums

    @property
    def placed(self) -> int:
        """Bytes of it that stand in the file of the whole cache, at their places."""
        return sum(size for _, size in self.spans)


@dataclass(frozen=True)
class Entries:
    """What a journal says.

    Attributes:
        records: by chunk; of two lines for one chunk the later one.
        assembled: the file in the folder that is the whole cache, and is then renamed; "": none.
        good: bytes up to the end of the last line that is whole.
    """

    records: dict[int, Record]
    assembled: str = ""
    good: int = 0


def read_journal(path: Path) -> Entries:
    """The lines of ``path`` up to the first one that is torn or damaged; none without a file."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return Entries({})
    entries = Entries({})
    for line in data.splitlines(keepends=True):
        values = _parsed(line)
        if values is None:
            break
        good = entries.good + len(line)
        if isinstance(values, dict) and values.keys() == {_ASSEMBLED}:
            if not _is_name(values[_ASSEMBLED]):
                break
            entries = replace(entries, assembled=values[_ASSEMBLED], good=good)
            continue
        record = _record(values)
        if record is None:
            break
        entries.records[record.chunk] = record
        entries = replace(entries, good=good)
    return entries


class Journal:
    """The journal of a build that is under way; what follows its last whole line is cut off.

    Attributes:
        records: the finished chunks, by number.
        assembled: the file in the folder that is the whole cache; "": none.
    """

    def __init__(self, path: Path) -> None:
        entries = read_journal(path)
        self.records = entries.records
        self.assembled = entries.assembled
        self._end = entries.good
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        if os.fstat(self._file).st_size != self._end:
            self._cut()

    def append(self, record: Record) -> None:
        """Write ``record``; it is on the disk after `sync`."""
        self._append(asdict(record))
        self.records[record.chunk] = record

    def set_assembled(self, name: str) -> None:
        """Write that this file is the whole cache, and may be renamed; "": it is made again.

        It is on the disk when this returns.
        """
        if name != self.assembled:
            self._append({_ASSEMBLED: name})
            self.sync()
            self.assembled = name

    def sync(self) -> None:
        """Wait until all lines are on the disk."""
        os.fsync(self._file)

    def forget(self, chunk: int) -> None:
        """Have ``chunk`` made again; its next line replaces the one that there is."""
        self.records.pop(chunk, None)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _append(self, values: dict[str, Any]) -> None:
        text = json.dumps(values, sort_keys=True, separators=(",", ":")).encode("ascii")
        line = b"%08x %s\n" % (zlib.crc32(text), text)
        try:
            write_all(self._file, self._end, line)
        except OSError:
            self._cut()  # a full disk: what is there stays readable, and can be gone on with
            raise
        self._end += len(line)

    def _cut(self) -> None:
        os.ftruncate(self._file, self._end)
        os.fsync(self._file)


def _parsed(line: bytes) -> Any:
    if not line.endswith(b"\n") or line[8:9] != b" ":
        return None
    text = line[9:-1]
    if line[:8] != b"%08x" % zlib.crc32(text):
        return None
    try:
        return json.loads(text.decode("ascii"))
    except (ValueError, RecursionError):
        return None


def _record(values: Any) -> Record | None:
    try:
        record = Record(**values)
        parts = tuple(record.parts)
        failed = tuple((index, why) for index, why in record.failed)
        spans = tuple((begin, size) for begin, size in record.spans)
    except (TypeError, ValueError):
        return None
    counts = (record.chunk, record.rows, record.sums, record.size, record.first)
    ends = (end for span in spans for end in span)
    numbers = (*counts, *parts, *(index for index, _ in failed), *ends)
    texts = (record.file, record.digest, record.structure, *(why for _, why in failed))
    if (
        not all(type(number) is int and 0 <= number < MOST for number in numbers)
        or not all(type(text) is str for text in texts)
        or not _is_name(record.file)
    ):
        return None
    return replace(record, parts=parts, failed=failed, spans=spans)


def _is_name(value: Any) -> bool:
    """Whether it can be the name of a file in the folder, or empty."""
    return type(value) is str and os.path.basename(value) == value
