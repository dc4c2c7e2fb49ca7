"""The folder in which a file is built: what it is a build of, its chunks, and what is to go.

    train.h5.building/  lock, builder     who builds                        lock.py
                        build.json        what it is a build of
                        journal           which chunks are finished         journal.py
                        chunk-000017.5e1f                                   rows.py
                        placed.5e1f       the file itself, filled meanwhile    placing.py
                        placing.json      where things stand in it
                        sizes.5e1f        which chunk begins where             sizes.py
                        assembled         the file itself, made of chunks at the end

All but `is_leftover` and `progress_of_others` is for whoever holds the lock.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dataloaders.cache.changes import changes
from dataloaders.cache.checksums import crc32
from dataloaders.cache.chunk import Chunk
from dataloaders.cache.chunking import Chunking
from dataloaders.cache.disk import sync, writing
from dataloaders.cache.index import Index
from dataloaders.cache.journal import MOST, Journal, Record, read_journal
from dataloaders.cache.placing import Placed
from dataloaders.cache.progress import BuildProgress
from dataloaders.cache.rows import digest_text
from dataloaders.cache.sizes import Sizes
from dataloaders.cache.syncing import Syncing
from dataloaders.errors import CacheError
from dataloaders.machine.resources import usable_cores

__all__ = ["BuildFolder", "building_folder"]

_FORMAT = 3
_VERIFIED_AT_START = 4
_LOCK = ("lock", "builder")
# What `Chunk.from_buffer` makes of anything else.
_NO_CHUNK = (CacheError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError,
             RecursionError, MemoryError)  # fmt: skip


def building_folder(path: str | os.PathLike[str]) -> Path:
    """Where the file at ``path`` is built."""
    target = Path(os.path.realpath(path))
    return target.with_name(target.name + ".building")


class BuildFolder:
    """What there is of the build of one file."""

    def __init__(self, target: Path) -> None:
        self.path = building_folder(target)
        self.assembled = self.path / "assembled"
        self.placed: Placed | None = None
        self._target = target
        self._settings = self.path / "build.json"
        self._journal: Journal | None = None
        self._new: set[int] = set()
        self._syncing: Syncing | None = None

    # What it is a build of

    def settle(
        self,
        fingerprint: Mapping[str, Any],
        samples: int,
        rows: int | None,
        *,
        overwrite: bool,
        default: Callable[[], Chunking],
    ) -> Chunking:
        """Have a folder that is a build of this, its journal open; what its chunks are.

        Args:
            fingerprint: of what is built.
            samples: that it consists of.
            rows: of a chunk; None: as it was begun.
            overwrite: whether a build of something else is begun anew.
            default: the chunks, where there is no build to go on with.

        Raises:
            CacheError: it is an unfinished build of something else; or the disk is full.
        """
        now = {"format": _FORMAT, **fingerprint}
        chunking = None
        if self._settings.exists():
            before = _loaded(self._settings)
            changed = ["it cannot be read"]
            if before is not None:
                begun, last = before.pop("rows"), before.pop("last_rows")
                changed = changes(before, now, "when it was begun")
                if rows not in (None, begun):
                    changed.append(f"rows: {begun} when it was begun, {rows} now")
                if not changed:
                    chunking = Chunking(samples, begun, last)
            if changed and not overwrite:
                raise CacheError(
                    f"{self.path} holds an unfinished build of something else; "
                    f"{'; '.join(changed)}. Pass overwrite=True (--overwrite) to begin anew, "
                    "or give what it was "
                    "begun with to go on"
                )
            if changed:
                self.wipe()
        if chunking is None:
            chunking = default() if rows is None else Chunking(samples, rows, rows)
        if not self._settings.exists():
            self.wipe()
            told = {**now, "rows": chunking.rows, "last_rows": chunking.last_rows}
            text = json.dumps(told, indent=1, sort_keys=True)
            with writing(self.path):
                _write_whole(self._settings, text.encode())
        with writing(self.path):
            self._journal = Journal(self.path / "journal")
            # Before the file that it speaks of is swept away: else it would look as if in place.
            self._journal.set_assembled("")
            sync(self.path)
        return chunking

    def place(self, laid_out: Callable[[Path], Index], columns: Sequence[int]) -> Placed:
        """The file in which large columns get their places at once, now `placed`.

        Args:
            laid_out: makes it, if there is none yet, and gives its index.
            columns: the numbers of those columns.
        """
        settings = self.path / "placing.json"
        self.placed = Placed.load(settings)
        if self.placed is None:
            name = f"placed.{os.urandom(4).hex()}"  # workers that live on know others
            with writing(self.path):
                self.placed = Placed(self.path, name, laid_out(self.path / name), columns)
                sync(self.placed.path)
                _write_whole(settings, self.placed.save())
        return self.placed

    # Chunks

    @property
    def is_open(self) -> bool:
        """Whether its journal is."""
        return self._journal is not None

    @property
    def records(self) -> Collection[Record]:
        """Of the finished chunks."""
        return () if self._journal is None else self._journal.records.values()

    def samples_kept(self) -> int:
        """How many samples are finished, those left out included; also before `settle`."""
        records = self.records if self.is_open else self._read().values()
        return sum(record.rows + len(record.failed) for record in records)

    def has(self, chunk: int) -> bool:
        """Whether this chunk is finished."""
        return chunk in self._opened.records

    def keep(self, record: Record) -> None:
        """Have a chunk that was just written survive a kill, and soon a power loss.

        Raises:
            CacheError: the disk is full.
        """
        with writing(self.path):
            self._opened.append(record)
        self._new.add(record.chunk)
        if self._syncing is not None:
            files = [self.path / record.file] if record.file else []
            if record.placed and self.placed is not None:
                files.append(self.placed.path)
            self._syncing.add(files)

    @contextmanager
    def syncing(self) -> Iterator[Syncing]:
        """Inside, what is kept is put on the disk every now and then, and when it is asked for.

        Raises:
            CacheError: the disk did not take it.
        """
        journal = self._opened

        def finish() -> None:
            sync(self.path)
            journal.sync()

        try:
            with Syncing(self.path, finish) as self._syncing:
                yield self._syncing
        finally:
            self._syncing = None

    def drop_bad(self, samples: range, chunking: Chunking, *, with_failures: bool) -> None:
        """Forget chunks whose files are not what the journal says; of most, the size tells.

        Args:
            samples: what is built.
            chunking: what the chunks are; those that are not of these samples are forgotten, too.
            with_failures: also those that samples were left out of.
        """
        self.placed = Placed.load(self.path / "placing.json")
        newest = [record.chunk for record in self.records][-_VERIFIED_AT_START:]
        for record in list(self.records):
            path = self.path / record.file
            part = chunking.part(record.chunk)
            own = samples[part.start : part.stop]
            good = not record.file or (path.is_file() and path.stat().st_size == record.bytes)
            good = good and _is_of(record, own) and self._fits(record)
            if good and record.file and record.chunk in newest:
                good = self._is_good(record)
            if not good or (record.failed and with_failures):
                self._opened.forget(record.chunk)

    def drop_damaged(self) -> bool:
        """Forget chunks of earlier calls whose files are not, to the bit, what was written then.

        Returns:
            Whether there were any.
        """
        old = [record for record in self.records if record.file and record.chunk not in self._new]
        with ThreadPoolExecutor(usable_cores()) as threads:  # crc32 lets go of the interpreter
            good = list(threads.map(self._is_good, old))
        damaged = [record.chunk for record, fine in zip(old, good, strict=True) if not fine]
        for chunk in damaged:
            self._opened.forget(chunk)
        return bool(damaged)

    def sizes(self, name: str, chunks: int) -> Path:
        """A new file of `Sizes` for so many chunks, with those that are finished in it."""
        path = self.path / name
        with writing(self.path):
            Sizes.create(path, chunks, {record.chunk: record.size for record in self.records})
        return path

    def chunks(self, records: Iterable[Record], *, complete: bool = True) -> Iterator[Chunk]:
        """The chunks of these records, in their order, as views of their files.

        Args:
            records: the records.
            complete: whether with the values that are placed.
        """
        for record in records:
            if not record.file:
                continue
            data, begin = self._mapped(record), 0
            offsets = [offset for offset, _ in record.spans]
            for size in record.parts:
                try:
                    chunk = Chunk.from_buffer(data[begin : begin + size])
                except _NO_CHUNK as error:
                    raise CacheError(
                        f"{self.path / record.file} is no chunk of a build, though its checksum is "
                        "right; begin anew with resume=False"
                    ) from error
                if complete and record.placed and self.placed is not None:
                    chunk, taken = self.placed.completed(chunk, offsets)
                    offsets = [o + count for o, count in zip(offsets, taken, strict=True)]
                yield chunk
                begin += size

    def in_place(self, index: Index, records: Iterable[Record]) -> bool:
        """Whether all that is placed stands where a file that is as ``index`` says has it.

        Args:
            index: of the whole cache.
            records: all, in order.
        """
        placed = self.placed
        if placed is None or not placed.stands_as(index):
            return False
        ends = [place.offset for place in placed.places]
        for record in records:
            offsets = [offset for offset, _ in record.spans] or ends
            for chunk in self.chunks([record], complete=False):
                for n, place in enumerate(placed.places):
                    there = placed.bytes_in(place, chunk)
                    if there and offsets[n] != ends[n]:
                        return False
                    width = np.dtype(place.dtype).itemsize
                    column = chunk.columns[place.column]
                    ends[n] += there or width * len(column.values)
                    offsets[n] = ends[n]
        return True

    def known_blocks(
        self, records: Iterable[Record]
    ) -> Iterator[tuple[int, npt.NDArray[np.uint32]]]:
        """Checksums of blocks that are placed: the number of one, and those from it on."""
        placed = self.placed
        assert placed is not None
        for record in records:
            if not record.sums:
                continue
            there = 0
            for chunk in self.chunks([record], complete=False):
                there += sum(placed.bytes_in(place, chunk) for place in placed.places)
            if there == record.placed:  # else some of it was taken back
                yield from placed.known_blocks(record.spans, self._sums(record))

    def put_in_place(self, whole: Path) -> None:
        """Rename a file of the folder, which is whole and on the disk, to the cache's own name."""
        sync(self.path)
        self._opened.set_assembled(whole.name)
        whole.rename(self._target)
        sync(self._target.parent)

    def drop_assembled(self) -> None:
        """Remove `assembled`, unless it is whole: the chunks are what is kept."""
        if not self._opened.assembled:
            self.assembled.unlink(missing_ok=True)

    def _fits(self, record: Record) -> bool:
        """Whether what it says of places can be."""
        if not record.placed:
            return True
        placed = self.placed
        if placed is None or len(record.spans) != len(placed.places):
            return False
        end = placed.path.stat().st_size
        return all(begin + size <= end for begin, size in record.spans)

    def _read(self) -> dict[int, Record]:
        if not self._settings.exists():
            return {}
        return read_journal(self.path / "journal").records

    @property
    def _opened(self) -> Journal:
        assert self._journal is not None
        return self._journal

    def _is_good(self, record: Record) -> bool:
        try:
            data = self._mapped(record)
        except (OSError, ValueError):  # ValueError: it is empty
            return False
        if len(data) != record.bytes or digest_text(crc32(data)) != record.digest:
            return False
        if not record.placed:
            return True
        placed, sums = self.placed, self._sums(record).tolist()
        return placed is not None and placed.sums(record.spans) == sums

    def _sums(self, record: Record) -> npt.NDArray[np.uint32]:
        """The checksums of what of it is placed."""
        data = self._mapped(record)
        return np.frombuffer(data[sum(record.parts) :], "|u1").view("<u4")

    def _mapped(self, record: Record) -> memoryview:
        with open(self.path / record.file, "rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

    # Endings

    def is_leftover(self) -> bool:
        """Whether the file is finished and in place, and only the folder was left."""
        if not self._settings.exists():
            return True
        entries = read_journal(self.path / "journal")
        return bool(entries.assembled) and not (self.path / entries.assembled).exists()

    def is_empty(self) -> bool:
        """Whether nothing but the lock is in it."""
        return all(path.name in _LOCK for path in self.path.iterdir())

    def sweep(self) -> None:
        """Remove the files that no record names: of builders and workers that were killed."""
        keep = {*_LOCK, "build.json", "journal", *(record.file for record in self.records)}
        if self.placed is not None:
            keep |= {"placing.json", self.placed.name}
        for path in self.path.iterdir():
            if path.name not in keep:
                path.unlink(missing_ok=True)

    def wipe(self) -> None:
        """Remove all but the lock: first what says that there is a build."""
        self.close()
        self._settings.unlink(missing_ok=True)
        for path in self.path.iterdir():
            if path.name not in _LOCK:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the journal."""
        self.placed = None
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    # For those who wait

    def progress_of_others(self, seconds: float) -> BuildProgress:
        """How far the build is that somebody else does; waited for since so many ``seconds``."""
        settings = _loaded(self._settings) or {}
        records = self._read().values()
        progress = BuildProgress.of_records(records, int(settings.get("length", 0)), seconds)
        if self.assembled.exists():
            progress = replace(progress, phase="assemble")
        return replace(progress, waiting=True)


def _is_of(record: Record, samples: range) -> bool:
    """Whether it is the record of these samples, each of which is kept or left out."""
    left_out = [index for index, _ in record.failed]
    return (
        record.first == samples.start
        and record.rows + len(left_out) == len(samples) > 0
        and all(index in samples for index in left_out)
        and sorted(set(left_out)) == left_out
        and bool(record.rows) == bool(record.file)
    )


def _loaded(path: Path) -> dict[str, Any] | None:
    try:
        values = json.loads(path.read_bytes().decode("ascii"))
    except (OSError, ValueError, RecursionError):
        return None
    if type(values) is not dict:
        return None
    least = {"rows": 1, "last_rows": 1, "length": 0}
    numbers = {name: values.get(name, 0) for name in least}
    good = all(type(each) is int and least[name] <= each < MOST for name, each in numbers.items())
    return values if good else None


def _write_whole(path: Path, data: bytes) -> None:
    """Write ``path`` so that it is there whole or not at all, whatever happens."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    sync(path.parent)
