"""Precompute a dataset's samples into one file, in parallel, so that nothing is lost half-way.

    dataset ──study──> cut, estimate
            ──Chunks, in workers──> train.h5.building/chunk-000017.5e1f + a line of the journal
            ──assemble──> train.h5.building/assembled ──rename──> train.h5 ──> CachedDataset

Whatever is killed, and whenever: what the journal names is kept, and the next call goes on. The
finished file is the same to the bit.
"""

from __future__ import annotations

import itertools
import json
import mmap
import multiprocessing
import os
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils.data import DataLoader, Dataset

from dataloaders.cache.chunk import Chunk
from dataloaders.cache.cut import Finish
from dataloaders.cache.disk import sync_folder, writing
from dataloaders.cache.estimate import (
    Estimate,
    estimate_of,
    refuse_small_disk,
    rows_of_chunk,
    workers_for,
)
from dataloaders.cache.fingerprint import changes, fingerprint_of, length_of
from dataloaders.cache.journal import Journal, Record, read_journal
from dataloaders.cache.lock import BuildLock, builder_of
from dataloaders.cache.progress import BuildProgress
from dataloaders.cache.rows import Chunks, Failure, Job, end_with
from dataloaders.cache.study import Findings, Study
from dataloaders.errors import CacheError, MissingDependency, OptionError, add_note
from dataloaders.workers import usable_cores

if TYPE_CHECKING:
    from dataloaders.cache.reader import CachedDataset

__all__ = ["BuildProgress", "building_folder", "estimate", "precompute"]

_FORMAT = 1
_POLL_S = 0.1
_TELL_S = 0.5
_VERIFIED_AT_START = 4
_ATTEMPTS = 3

Report = Callable[[BuildProgress], None]


def precompute(
    dataset: Any,
    path: str | os.PathLike[str],
    *,
    num_workers: int | Literal["auto"] = "auto",
    rows: int | None = None,
    allow_random: bool = False,
    on_error: Literal["raise", "skip"] = "raise",
    resume: bool = True,
    overwrite: bool = False,
    progress: Report | None = None,
    wait: bool = True,
    multiprocessing_context: Any = None,
) -> CachedDataset:
    """The samples of ``dataset`` from a file at ``path``, which is built if it is not there.

    Where the dataset's transforms are a torchvision Compose that a few samples prove to be
    separable, the file holds what its members give up to the first one that draws random numbers or
    is code of your own, and the rest runs live when a sample is read. If all are deterministic, a
    last run of ToTensor, ConvertImageDtype, ToDtype and Normalize stays live too, so that images
    are kept as uint8: also where that run comes just before the first random member. With any
    other dataset whole samples are kept, and must be the same each time they are read.

    Nothing is lost: after Ctrl-C, a crash or a power cut the same call goes on from
    ``<path>.building``, and the finished file is the same to the bit.

    Args:
        dataset: map-style, with samples made of tensors, arrays, numbers, bool, str, bytes, PIL
            images and None, in dicts, lists and tuples.
        path: of the file.
        num_workers: processes that read samples; "auto": one a core. 0: this process.
        rows: samples in a chunk, the part that is lost when a build is interrupted; None: by their
            size and cost. The file does not depend on it.
        allow_random: keep one draw of a dataset whose samples differ each time they are read. Each
            sample is read with the generators of torch, NumPy and ``random`` seeded by its number.
        on_error: "skip" leaves samples out that cannot be read or kept; the file lists them.
        resume: go on with an unfinished build; False begins anew.
        overwrite: build though there is a file, or an unfinished build of something else. A file
            stays in place until the new one is finished.
        progress: called with a `BuildProgress` now and then, on this thread.
        wait: if another process or thread builds this file, wait for it; False: raise.
        multiprocessing_context: how workers start, as a DataLoader takes it.

    Raises:
        CacheError: the file, or an unfinished build, is of something else (names what changed);
            samples are random, or cannot be kept; the disk is too small or full.
        OptionError: an option has a value that it cannot take.
        Exception: the sample's own, with a note that names the sample, if ``on_error="raise"``.
    """
    _check(num_workers, rows, on_error)
    target = Path(os.path.realpath(path))
    builder = _Builder(
        dataset,
        target,
        num_workers=num_workers,
        rows=rows,
        allow_random=allow_random,
        skip=on_error == "skip",
        report=progress or _silent,
        context=multiprocessing_context,
    )
    if target.exists() and not overwrite:
        builder.remove_leftover()
        return builder.open()
    if not target.parent.is_dir():
        raise CacheError(f"{target.parent} is no folder, so no cache can be built in it; make it")
    before = _identity(target)
    lock = BuildLock(builder.folder)
    builder.await_lock(lock, wait=wait)
    empty = False
    try:
        # Whoever was waited for has built it: also where each was told to overwrite.
        if _identity(target) == before:
            builder.build(resume=resume, overwrite=overwrite)
        empty = builder.clear()
    except BaseException as error:
        empty = builder.tell_how_to_go_on(error)
        raise
    finally:
        lock.release(remove=empty)
    return builder.open()


def estimate(
    dataset: Any,
    path: str | os.PathLike[str],
    *,
    num_workers: int | Literal["auto"] = "auto",
    multiprocessing_context: Any = None,
) -> Estimate:
    """What `precompute` with these arguments will take; reads a few samples and writes nothing."""
    _check(num_workers, None, "raise")
    builder = _Builder(
        dataset,
        Path(os.path.realpath(path)),
        num_workers=num_workers,
        rows=None,
        allow_random=True,
        skip=True,
        report=_silent,
        context=multiprocessing_context,
    )
    return builder.estimate(written=None)


def building_folder(path: str | os.PathLike[str]) -> Path:
    """Where the file at ``path`` is built."""
    target = Path(os.path.realpath(path))
    return target.with_name(target.name + ".building")


class _Builder:
    """One call of `precompute`."""

    def __init__(
        self,
        dataset: Any,
        path: Path,
        *,
        num_workers: int | Literal["auto"],
        rows: int | None,
        allow_random: bool,
        skip: bool,
        report: Report,
        context: Any,
    ) -> None:
        self.folder = building_folder(path)
        self._dataset = dataset
        self._path = path
        self._asked_workers = num_workers
        self._rows = rows
        self._allow_random = allow_random
        self._skip = skip
        self._report = report
        self._context = context
        self._samples = length_of(dataset)
        self._study: Study | None = None
        self._found = Findings()
        self._journal: Journal | None = None

    # What the dataset is

    def _studied(self) -> Study:
        """The study of the dataset; it is done once."""
        if self._study is None:
            study = Study(self._dataset, self._samples, skip=self._skip)
            if self._asked_workers == 0 or not self._samples:
                self._found = study()
            else:
                # In a worker: a file that a sample opens must not be shared by all later workers.
                with self._results(_Once(study), [0], 1) as results:
                    self._found = next(results)
            if self._found.failure is not None:
                self._found.failure.reraise()
            self._study = study
            if self._found.random and not self._allow_random:
                raise CacheError(self._random_text())
        return self._study

    def _random_text(self) -> str:
        assert self._study is not None
        text = f"{type(self._dataset).__name__} is random: {self._found.random}"
        if self._found.reason and self._found.choice == len(self._study.cuts) - 1:
            text += f", and nothing can stay live: {self._found.reason}"
        return (
            f"{text}. A cache would keep one draw for ever. Take what is random out of the dataset "
            "(a torchvision Compose as transform= stays live from its first random member on), or "
            "pass allow_random=True to keep one draw of each sample"
        )

    @property
    def _workers(self) -> int:
        if self._asked_workers == "auto":
            self._asked_workers = workers_for(self._found, self._samples)
        return self._asked_workers

    def estimate(self, written: int | None) -> Estimate:
        """What it will take; refused if ``written`` bytes are there and the disk is too small."""
        self._studied()
        workers = self._workers
        rows = self._rows or rows_of_chunk(self._found, self._samples, workers)
        folder = self.folder.parent
        told = estimate_of(
            self._found, folder, samples=self._samples, num_workers=workers, rows=rows
        )
        if written is not None:
            refuse_small_disk(told, folder, written)
        return told

    def open(self) -> CachedDataset:
        """The finished file, compared with what the dataset is now."""
        from dataloaders.cache.reader import CachedDataset

        study, found = self._studied(), self._found
        cut, calls = study.cuts[found.choice], found.calls or ()
        expect = fingerprint_of(study, found, self._dataset, self._samples)
        if not found.at_leaves:  # FiveCrop gives a tuple, and what is left takes all of it
            return CachedDataset(self._path, transform=Finish(cut.tails, calls), expect=expect)
        tails = [(keys, cut.tails[number]) for number, keys in calls]
        return CachedDataset(self._path, tails=tails, expect=expect)

    # Waiting

    def await_lock(self, lock: BuildLock, *, wait: bool) -> None:
        """Take ``lock``, telling meanwhile how far its owner is.

        Raises:
            CacheError: somebody has it, and it is not to be waited for.
        """
        started, told = time.monotonic(), float("-inf")
        while not lock.try_acquire():
            if not wait:
                raise CacheError(
                    f"{self._path} is being built by {builder_of(self.folder)} (wait=False); "
                    "wait for it, or give another path"
                )
            now = time.monotonic()
            if now - told >= _TELL_S:
                told = now
                self._report(_progress_of_others(self.folder, now - started))
            time.sleep(_POLL_S)

    # Building

    def build(self, *, resume: bool, overwrite: bool) -> None:
        """Make the file; the lock is held."""
        if find_spec("h5py") is None:  # needed at the very end: told at the beginning
            raise MissingDependency(
                "building a cache needs h5py, which is not installed; install it with: "
                "pip install h5py"
            )
        if self._is_leftover() or not resume:
            self._wipe()
        study = self._studied()
        self._settle(study, overwrite=overwrite)
        self._drop_bad_records()
        self._sweep()
        records = self._opened.records.values()
        told = self.estimate(sum(record.bytes for record in records))
        token = os.urandom(4).hex()
        for attempt in itertools.count():
            self._compute(study, told, token)
            self._refuse_nothing_left()
            damaged = self._damaged()
            if not damaged:
                break
            if attempt >= _ATTEMPTS:
                raise CacheError(
                    f"{self.folder} gives other bytes than were written to it, again and again; "
                    "the disk or the memory is faulty: build on another one"
                )
            for chunk in damaged:
                self._opened.forget(chunk)
        self._assemble(study)

    @property
    def _opened(self) -> Journal:
        assert self._journal is not None
        return self._journal

    def _settle(self, study: Study, *, overwrite: bool) -> None:
        """Have a folder whose settings are ours, with its journal open."""
        now = {
            "format": _FORMAT,
            **fingerprint_of(study, self._found, self._dataset, self._samples),
        }
        settings = self.folder / "build.json"
        if settings.exists():
            before = _loaded(settings)
            changed = ["it cannot be read"] if before is None else []
            if before is not None:
                rows = before.pop("rows")
                changed = changes(before, now)
                if self._rows not in (None, rows):
                    changed.append(f"rows: {rows} when it was begun, {self._rows} now")
            if not changed:
                self._rows = rows
            elif overwrite:
                self._wipe()
            else:
                raise CacheError(
                    f"{self.folder} holds an unfinished build of something else; "
                    f"{'; '.join(changed)}. Pass overwrite=True to begin anew, or give what it was "
                    "begun with to go on"
                )
        if not settings.exists():
            self._wipe()
            self._rows = self._rows or rows_of_chunk(self._found, self._samples, self._workers)
            text = json.dumps({**now, "rows": self._rows}, indent=1, sort_keys=True)
            with writing(self.folder):
                _write_whole(settings, text.encode())
        with writing(self.folder):
            self._journal = Journal(self.folder / "journal")
            # Before the file that it speaks of is swept away: else it would look as if in place.
            self._journal.set_assembled(False)
            sync_folder(self.folder)

    def _drop_bad_records(self) -> None:
        """Forget chunks whose files are not what the journal says; of most, the size tells."""
        journal = self._opened
        newest = list(journal.records)[-_VERIFIED_AT_START:]
        for chunk, record in list(journal.records.items()):
            path = self.folder / record.file
            good = not record.file or (path.is_file() and path.stat().st_size == record.bytes)
            if good and record.file and chunk in newest:
                good = self._is_good(record)
            if not good or (record.failed and not self._skip):
                journal.forget(chunk)

    def _sweep(self) -> None:
        """Remove the files that no record names: of builders and workers that were killed."""
        keep = {"lock", "builder", "build.json", "journal"}
        keep |= {record.file for record in self._opened.records.values()}
        for path in self.folder.iterdir():
            if path.name not in keep:
                path.unlink(missing_ok=True)

    def _compute(self, study: Study, told: Estimate, token: str) -> None:
        journal = self._opened
        assert self._rows is not None
        job = Job(
            cut=study.cuts[self._found.choice],
            calls=self._found.calls,
            folder=str(self.folder),
            token=token,
            rows=self._rows,
            samples=self._samples,
            skip=self._skip,
        )
        chunks = Chunks(job)
        missing = [number for number in range(len(chunks)) if number not in journal.records]
        workers = min(self._workers, len(missing))
        pace = _Pace(self._samples, told.bytes)
        self._report(pace.progress(journal.records.values()))
        if not missing:
            return
        with self._results(chunks, missing, workers, job.stop) as results:
            for result in results:
                if isinstance(result, Failure):
                    result.reraise()
                self._refuse_other_structure(result)
                with writing(self.folder):
                    sync_folder(self.folder)  # the chunk's name, before the line that relies on it
                    journal.append(result)
                self._report(pace.progress(journal.records.values()))

    @contextmanager
    def _results(
        self, dataset: Dataset[Any], numbers: list[int], workers: int, stop: str | None = None
    ) -> Iterator[Iterator[Any]]:
        """The samples of ``dataset`` with these numbers, as they are finished; no worker stays."""
        context = self._context
        if not isinstance(context, BaseContext):
            context = multiprocessing.get_context(context)
        ours = context.get_start_method() != "forkserver"
        loader = DataLoader(
            dataset,
            batch_size=None,
            sampler=numbers,
            num_workers=workers,
            collate_fn=_as_it_is,
            generator=torch.Generator(),  # else it draws a seed from the process-wide one
            worker_init_fn=partial(end_with, os.getpid() if ours else None),
            multiprocessing_context=context if workers else None,
            in_order=not workers,
        )
        results = iter(loader)
        try:
            yield results
        except BaseException:
            if stop is not None:
                with suppress(OSError):  # then they end with their chunks
                    Path(stop).touch()
            raise
        finally:
            # Not left to the collector: an error's traceback holds the iterator, and its workers
            # would go on writing after the lock is given back.
            shutdown = getattr(results, "_shutdown_workers", None)
            if shutdown is not None:
                shutdown()

    def _refuse_other_structure(self, new: Record) -> None:
        if not new.structure:
            return
        for record in self._opened.records.values():
            if record.structure:
                if record.structure != new.structure:
                    assert self._rows is not None
                    raise CacheError(
                        f"samples from {record.chunk * self._rows} on and from "
                        f"{new.chunk * self._rows} on are built differently; a cache needs the "
                        "same keys and lengths in all of them. Return what varies as one tensor, "
                        "array, str or plain list"
                    )
                return

    def _refuse_nothing_left(self) -> None:
        records = self._opened.records.values()
        failed = [one for record in records for one in record.failed]
        if failed and not any(record.rows for record in records):
            index, why = min(failed)
            raise CacheError(
                f"none of the {self._samples} samples could be read; the first failed with {why!r} "
                f"(sample {index})"
            )

    def _assemble(self, study: Study) -> None:
        from dataloaders.cache.file import assemble

        journal = self._opened
        records = [journal.records[number] for number in sorted(journal.records)]
        unfinished = self.folder / "assembled"
        pace = _Pace(self._samples, 0)
        cut = study.cuts[self._found.choice]

        def chunks() -> Iterator[Chunk]:
            for record in records:
                if record.file:
                    yield from self._parts(record)

        def report(done: int, total: int) -> None:
            self._report(pace.assembling(records, done, total))

        try:
            with writing(self.folder):
                assemble(
                    chunks,
                    unfinished,
                    samples=self._samples,
                    failed=[one for record in records for one in record.failed],
                    fingerprint=fingerprint_of(study, self._found, self._dataset, self._samples),
                    head=cut.head,
                    tail=cut.tail,
                    progress=report,
                )
                sync_folder(self.folder)
                journal.set_assembled(True)
                unfinished.rename(self._path)
                sync_folder(self._path.parent)
        except BaseException:
            if not journal.assembled:
                unfinished.unlink(missing_ok=True)  # the chunks are what is kept
            raise

    def _damaged(self) -> list[int]:
        """The chunks whose files are not, to the bit, what was written."""
        records = [record for record in self._opened.records.values() if record.file]
        with ThreadPoolExecutor(usable_cores()) as threads:  # hashing lets go of the interpreter
            good = list(threads.map(self._is_good, records))
        return [record.chunk for record, fine in zip(records, good, strict=True) if not fine]

    def _is_good(self, record: Record) -> bool:
        try:
            data = self._mapped(record)
        except (OSError, ValueError):  # ValueError: it is empty
            return False
        return len(data) == record.bytes and _digest_of(data) == record.digest

    def _mapped(self, record: Record) -> memoryview:
        with open(self.folder / record.file, "rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

    def _parts(self, record: Record) -> Iterator[Chunk]:
        """The chunks in one file, as views of it."""
        data = self._mapped(record)
        begin = 0
        for size in record.parts:
            yield Chunk.from_buffer(data[begin : begin + size])
            begin += size

    # Endings

    def remove_leftover(self) -> None:
        """Remove the folder if its file is in place and nobody builds."""
        if not self.folder.is_dir():
            return
        with suppress(OSError, CacheError):  # it may well be a disk that can only be read
            lock = BuildLock(self.folder)
            if lock.try_acquire():
                leftover = self._is_leftover()
                if leftover:
                    self._wipe()
                lock.release(remove=leftover)

    def _is_leftover(self) -> bool:
        """Whether the folder's file is finished and in place, and only the folder was left."""
        if not (self.folder / "build.json").exists():
            return True
        entries = read_journal(self.folder / "journal")
        return entries.assembled and not (self.folder / "assembled").exists()

    def clear(self) -> bool:
        """Empty the folder after the file is in place; whether it may be removed."""
        self._close()
        self._wipe()
        return True

    def tell_how_to_go_on(self, error: BaseException) -> bool:
        """Add to ``error`` what is kept; whether nothing is, and the folder may be removed."""
        ours = self._journal is not None
        records = self._journal.records.values() if self._journal is not None else ()
        done = sum(record.rows + len(record.failed) for record in records)
        self._close()
        if not done:
            if ours:
                self._wipe()
            return all(path.name in ("lock", "builder") for path in self.folder.iterdir())
        text = (
            f"{done} of {self._samples} samples are kept in {self.folder}; call precompute again "
            "with the same arguments to go on"
        )
        if isinstance(error, KeyboardInterrupt) and not error.args:
            error.args = (f"interrupted: {text}",)  # a note would not be shown before Python 3.11
        else:
            add_note(error, f"dataloaders: {text}")
        return False

    def _wipe(self) -> None:
        """Remove all but the lock: first what says that there is a build."""
        self._close()
        (self.folder / "build.json").unlink(missing_ok=True)
        for path in self.folder.iterdir():
            if path.name not in ("lock", "builder"):
                path.unlink(missing_ok=True)

    def _close(self) -> None:
        if self._journal is not None:
            self._journal.close()
            self._journal = None


class _Once(Dataset[Any]):
    """A function's result as the only sample."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function

    def __getitem__(self, index: int) -> Any:
        return self._function()


class _Pace:
    """How fast it goes, from when this call began."""

    def __init__(self, samples: int, expected: int) -> None:
        self._samples = samples
        self._expected = expected
        self._started = time.monotonic()
        self._before: int | None = None

    def progress(self, records: Any) -> BuildProgress:
        """Of the phase that reads samples."""
        done = sum(record.rows + len(record.failed) for record in records)
        if self._before is None:
            self._before = done
        seconds = time.monotonic() - self._started
        made = done - self._before
        rate = made / seconds if made and seconds else None
        return BuildProgress(
            phase="compute",
            waiting=False,
            samples=self._samples,
            samples_done=done,
            failed=sum(len(record.failed) for record in records),
            bytes_done=sum(record.bytes for record in records),
            bytes_expected=self._expected,
            seconds=seconds,
            samples_per_second=rate,
            seconds_left=(self._samples - done) / rate if rate else None,
        )

    def assembling(self, records: Any, done: int, total: int) -> BuildProgress:
        """Of the phase that makes the file."""
        seconds, done = time.monotonic() - self._started, min(done, total)
        return replace(
            self.progress(records),
            phase="assemble",
            bytes_done=done,
            bytes_expected=total,
            samples_per_second=None,
            seconds_left=seconds * (total - done) / done if done else None,
        )


def _progress_of_others(folder: Path, seconds: float) -> BuildProgress:
    records = read_journal(folder / "journal").records.values()
    settings = _loaded(folder / "build.json") or {}
    done = sum(record.rows + len(record.failed) for record in records)
    return BuildProgress(
        phase="assemble" if (folder / "assembled").exists() else "compute",
        waiting=True,
        samples=int(settings.get("length", 0)),
        samples_done=done,
        failed=sum(len(record.failed) for record in records),
        bytes_done=sum(record.bytes for record in records),
        bytes_expected=0,
        seconds=seconds,
        samples_per_second=None,
        seconds_left=None,
    )


def _check(num_workers: object, rows: object, on_error: object) -> None:
    if num_workers != "auto" and (
        not isinstance(num_workers, int) or isinstance(num_workers, bool) or num_workers < 0
    ):
        raise OptionError(f'num_workers={num_workers!r}: it must be "auto" or an int from 0 on')
    if rows is not None and (not isinstance(rows, int) or isinstance(rows, bool) or rows < 1):
        raise OptionError(f"rows={rows!r}: it must be None or an int from 1 on, samples in a chunk")
    if on_error not in ("raise", "skip"):
        raise OptionError(f'on_error={on_error!r}: it must be "raise" or "skip"')


def _loaded(path: Path) -> dict[str, Any] | None:
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    good = isinstance(values, dict) and isinstance(values.get("rows"), int) and values["rows"] > 0
    return values if good else None


def _write_whole(path: Path, data: bytes) -> None:
    """Write ``path`` so that it is there whole or not at all, whatever happens."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    sync_folder(path.parent)


def _identity(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns


def _digest_of(data: memoryview) -> str:
    return f"{zlib.crc32(data):08x}"


def _as_it_is(value: Any) -> Any:
    return value


def _silent(progress: BuildProgress) -> None:
    pass
