"""Chunks of rows, made in workers: read, split into columns, written, and told about.

chunk number ──> samples first .. last ──> cells, images encoded
             ──64 MiB──> Chunk ──> chunk-000017.5e1f ──> Record

A chunk whose place in the file is not known when all of its rows are read is put off: they stay in
memory while the next chunk is read, until the chunks before it are.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch.utils.data import Dataset

from dataloaders.cache.checksums import crc32
from dataloaders.cache.chunk import Chunk
from dataloaders.cache.chunking import Chunking
from dataloaders.cache.cut import Call, Cut
from dataloaders.cache.disk import write_all, writing
from dataloaders.cache.encoding import Encoder
from dataloaders.cache.failure import Failure, fail, not_interrupted, told
from dataloaders.cache.images import Images
from dataloaders.cache.journal import Record
from dataloaders.cache.placing import Placement, Placer
from dataloaders.cache.reading import draws_refused, read_row
from dataloaders.cache.sample import Cell, Structure
from dataloaders.cache.seeds import DrawDetector, seed_for
from dataloaders.errors import CacheError
from dataloaders.seeding.states import random_states_kept

__all__ = [
    "BYTES_PER_CELL",
    "PART_BYTES",
    "Chunks",
    "Job",
    "Made",
    "digest_text",
]

PART_BYTES = 64 << 20
"""Rows beyond this are written before more are read, however many rows a chunk has."""

BYTES_PER_CELL = 400
"""What a cell takes in memory besides its values, about."""

_LOOK_S = 0.02  # between two looks at whether to stop
_NO_SAMPLE = 2_718_281_827  # its seed is one that datasets are unlikely to use themselves

Row = tuple[int, Structure, list[Cell]]


@dataclass(frozen=True)
class Job:
    """What a worker is to do.

    Attributes:
        choice: which of the study's cuts gives the rows.
        calls: how each of them must have gone through the transforms; None: however it did.
        allow_random: whether rows may draw from the process-wide generators, which are then seeded
            for each by its number.
        folder: where the chunks go.
        token: of this builder, in the names of its files. The workers of a builder that was killed
            live on for a moment; theirs have other names.
        chunking: which samples are in which chunk.
        first: the number in the dataset of the first sample.
        skip: whether a sample that fails is left out instead of ending the build.
        images: how images are kept.
        placement: where large columns go; None: into the chunks' own files.
        put_off: chunks with smaller numbers may be put off.
    """

    choice: int
    calls: tuple[Call, ...] | None
    allow_random: bool
    folder: str
    token: str
    chunking: Chunking
    first: int
    skip: bool
    images: Images
    placement: Placement | None = None
    put_off: int = 0

    @property
    def stop(self) -> str:
        """The file that tells workers to end before their chunk is finished."""
        return os.path.join(self.folder, f"stop.{self.token}")

    def numbers(self, chunk: int) -> range:
        """Of the samples in the chunk, in the dataset."""
        part = self.chunking.part(chunk)
        return range(self.first + part.start, self.first + part.stop)


@dataclass(frozen=True)
class Made:
    """What a worker has made since it was asked before.

    Attributes:
        records: of the chunks that are in their files now.
        failure: why the chunk that it was asked for is not, and will not be; None if it is.
    """

    records: tuple[Record, ...]
    failure: Failure | None = None


class Chunks(Dataset[Made]):
    """Chunk by number: in its file when this returns, or put off until another one is read.

    Args:
        job: which chunks there are, and where they go.
        cut: gives the rows.
    """

    def __init__(self, job: Job, cut: Cut) -> None:
        self._job = job
        self._cut = cut
        self._encoder = Encoder(job.images)
        self._writing = writing(job.folder)
        self._earlier: _Read | None = None  # the chunk that is put off
        self._done: list[Record] = []
        self._looked = float("-inf")

    def __len__(self) -> int:
        return len(self._job.chunking)

    def __getitem__(self, number: int) -> Made:
        job, failure = self._job, None
        name = f"chunk-{number:06d}.{job.token}"
        path = Path(job.folder) / f"{name}.{os.getpid()}.tmp"
        placer = None
        if job.placement is not None:
            placer = Placer(job.placement, number, job.chunking.part(number).start)
        writer = _Writer(path, placer)
        try:
            with random_states_kept(cuda=False):
                failed = self._write(number, writer)
            with self._writing:
                writer.tell()
                self._finish_earlier()
                read = _Read(number, job.numbers(number).start, name, writer, failed)
                if number < job.put_off and writer.waits():
                    self._earlier = read
                else:
                    self._done.append(read.finished())
        except BaseException as error:  # a worker that a sample's sys.exit() ends tells nothing
            not_interrupted(error)
            with suppress(Exception):  # the first error is the one to be told
                self._finish_earlier()
            failure = fail(error)
        finally:
            if self._earlier is None or self._earlier.writer is not writer:
                writer.close()
        done, self._done = tuple(self._done), []
        return Made(done, failure)

    def _finish_earlier(self) -> None:
        """Have the chunk that was put off in its file, at its place or not."""
        earlier, self._earlier = self._earlier, None
        if earlier is not None:
            try:
                self._done.append(earlier.finished())
            finally:
                earlier.writer.close()

    def _write(self, number: int, writer: _Writer) -> list[tuple[int, str]]:
        job, cut = self._job, self._cut
        failed: list[tuple[int, str]] = []
        detector = None if job.allow_random else DrawDetector(_NO_SAMPLE)
        for index in job.numbers(number):
            self._look()
            if job.allow_random:
                seed_for(index)
            row: Row | None = None
            try:
                structure, cells = read_row(cut, index, job.calls)
                row = index, structure, self._encoder.cells(index, structure, cells)
            except Exception as error:
                if not job.skip:
                    raise
                failed.append((index, told(error)))
                writer.place_no_more()  # the rows behind it move up
            # Also if it failed: which samples are left out must not depend on what is drawn.
            if detector is not None and (moved := detector.moved()):
                raise draws_refused(cut.name, index, moved)
            if row is not None:
                with self._writing:
                    writer.write(row)
        return failed

    def _look(self) -> None:
        """Now and then: end if that is wanted, and write what was put off as soon as it can be."""
        now = time.monotonic()
        if now - self._looked < _LOOK_S:
            return
        self._looked = now
        if os.path.exists(self._job.stop):
            raise CacheError("stopped")  # nobody reads this: the build has ended otherwise
        with self._writing:
            if self._earlier is not None and not self._earlier.writer.waits():
                self._finish_earlier()


class _Writer:
    """One chunk's file; opened with the first rows, gone unless `finished` was reached.

    Args:
        path: of the file.
        placer: puts the large columns where they belong; None: into this file as well.
    """

    def __init__(self, path: Path, placer: Placer | None) -> None:
        self._path = path
        self._placer = placer
        self._waiting: list[Row] = []
        self._room = PART_BYTES
        self._file = -1
        self._end = 0
        self._crc = 0
        self._parts: list[int] = []
        self._rows = 0
        self._structure: tuple[int, Structure] | None = None

    def write(self, row: Row) -> None:
        """Add ``row``, whose cells are the writer's from now on."""
        _, _, cells = row
        self._room -= sum(cell.array.nbytes + BYTES_PER_CELL for cell in cells)
        if self._placer is not None:
            self._room += self._placer.put(cells)
        self._waiting.append(row)
        if self._room <= 0:
            self._write_part()

    def place_no_more(self) -> None:
        """Have all columns of the rows to come in this file, and of those that wait."""
        if self._placer is not None:
            self._placer.stop()

    def tell(self) -> None:
        """All rows were written: tell those who make other chunks how large this one is."""
        if self._placer is not None:
            self._placer.tell()

    def waits(self) -> bool:
        """Whether there are rows whose place is not known yet."""
        return self._placer is not None and self._placer.waits()

    def _write_part(self) -> None:
        whole = values = frozenset[int]()
        if self._placer is not None:
            self._placer.settle()
            whole, values = self._placer.whole, self._placer.values
        rows, self._waiting, self._room = self._waiting, [], PART_BYTES
        if not rows:
            return
        if self._structure is None:
            self._structure = rows[0][:2]
        elif rows[0][1] != self._structure[1]:
            Chunk.of([(*self._structure, []), rows[0]])  # raises: they are built differently
        chunk = Chunk.of(rows, whole, values)
        assert chunk is not None
        self._rows += len(rows)
        rows.clear()
        if self._file < 0:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            self._file = os.open(self._path, flags, 0o666)
        self._parts.append(sum(map(self._append, chunk.to_bytes())))

    def _append(self, data: bytes | memoryview) -> int:
        """Write ``data`` behind what there is; how many bytes it is."""
        self._crc = crc32(data, self._crc)
        view = memoryview(data)
        write_all(self._file, self._end, view)
        self._end += len(view)
        return len(view)

    def finished(self, number: int, first: int, name: str, failed: list[tuple[int, str]]) -> Record:
        """The record, once the file has its ``name``; whoever gets it has it synced.

        Args:
            number: of the chunk.
            first: the number of its first sample.
            name: of its file.
            failed: the samples that were left out.
        """
        self._write_part()
        structure, sums = "", np.empty(0, "<u4")
        if self._file >= 0:
            if self._placer is not None:
                sums = np.array(self._placer.sums, "<u4")
                self._append(sums.tobytes())
            self._path.rename(self._path.with_name(name))
            structure = digest_of(self._structure[1]) if self._structure else ""
        return Record(
            chunk=number,
            file=name if self._parts else "",
            rows=self._rows,
            parts=tuple(self._parts),
            digest=digest_text(self._crc),
            structure=structure,
            failed=tuple(failed),
            spans=self._placer.spans if self._placer is not None and self._parts else (),
            sums=len(sums),
            size=self._placer.size if self._placer is not None else 0,
            first=first,
        )

    def close(self) -> None:
        """Close the file, and remove it if it was not renamed."""
        if self._placer is not None:
            self._placer.close()
            self._placer = None
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            self._path.unlink(missing_ok=True)


@dataclass(frozen=True)
class _Read:
    """A chunk whose rows are all read.

    Attributes:
        number: of it.
        first: the number of its first sample.
        name: of its file.
        writer: has its rows.
        failed: the samples that were left out.
    """

    number: int
    first: int
    name: str
    writer: _Writer
    failed: list[tuple[int, str]]

    def finished(self) -> Record:
        """Its record, once it is in its file."""
        return self.writer.finished(self.number, self.first, self.name, self.failed)


def digest_text(digest: int) -> str:
    """A checksum as a record has it."""
    return f"{digest:08x}"


def digest_of(structure: Structure) -> str:
    """Equal for equal structures."""
    text = json.dumps(structure, separators=(",", ":")).encode("ascii")
    return hashlib.blake2b(text, digest_size=8).hexdigest()
