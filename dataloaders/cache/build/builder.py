"""Precompute a dataset's samples into a cache, part by part, so that nothing is lost half-way.

    dataset ──a few samples, elsewhere──> Findings ──> cut, rows of a part, estimate
    samples 500 to 999 ──a worker──> train.parts/00500.h5, finished, synced, renamed
    all parts there ──joined, or copied into one file──> train.h5 ──> CachedDataset

Whatever is killed, and whenever: finished parts stay, and the next call makes the others. A rank
makes the parts of its own samples. Then it waits for the locks of the others, one after the other,
and makes the parts that are missing: those of a rank that failed, was killed or has not begun.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from dataloaders.cache.build.estimation import Estimate
from dataloaders.cache.build.joining import combined
from dataloaders.cache.build.locks import locked
from dataloaders.cache.build.parts import (
    BuildFolder,
    Part,
    missing_in,
    parts_joined,
    samples_of,
    target_of,
)
from dataloaders.cache.build.progress import BuildProgress, Pace
from dataloaders.cache.build.rows import other_structure
from dataloaders.cache.build.source import ONE_FILE_BYTES, Options, Source, warn_of_versions
from dataloaders.cache.build.workers import make_parts
from dataloaders.cache.format.codecs import refuse_missing
from dataloaders.cache.format.compress import Compressed
from dataloaders.cache.format.disk import rename
from dataloaders.cache.format.entries import is_shard_name
from dataloaders.cache.format.hdf5 import refuse_no_h5py
from dataloaders.cache.format.index import Index
from dataloaders.cache.read.reader import CachedDataset
from dataloaders.cache.read.shards import check_shards
from dataloaders.cache.sample.images import Choice
from dataloaders.errors import CacheError, add_note
from dataloaders.options import option

_REPORT_S = 0.5


def precompute(
    dataset: Any,
    path: str | os.PathLike[str],
    *,
    images: Choice = None,
    num_workers: int | Literal["auto"] = "auto",
    rows: int | None = None,
    allow_random: bool = False,
    on_error: Literal["raise", "skip"] = "raise",
    resume: bool = True,
    overwrite: bool = False,
    compress: str | Compressed | None = None,
    progress: Callable[[BuildProgress], None] | None = None,
    announce: Callable[[Estimate], None] | None = None,
    wait: bool = True,
    multiprocessing_context: Any = None,
    worker_init_fn: Callable[[int], None] | None = None,
    shard: tuple[int, int] | None = None,
    check: Literal["contents"] | None = None,
    expect: Mapping[str, Any] | None = None,
    single_file: bool | None = None,
    build_id: str | None = None,
) -> CachedDataset:
    """Return the samples of ``dataset`` from the cache at ``path``; build it if it is missing.

    The members of the dataset's torchvision Compose before the first one that draws random numbers
    or is your own code are computed, and the rest runs live when a sample is read; ToTensor and
    Normalize before that point stay live too, so that images are stored as uint8. A few samples
    prove it. Of any other dataset whole samples are stored, the same each time they are read.

    Workers build parts, each a finished file in the folder ``train.parts`` of ``train.h5``, which
    joins them; a cache of less than 128 MiB is one file. After Ctrl-C, a crash or a power cut the
    same call makes the parts that are missing.

    Args:
        dataset: map-style, with samples made of tensors, arrays, numbers, bool, str, bytes, PIL
            images and None, in dicts, lists and tuples.
        path: the path of the file.
        images: how PIL images are stored: "raw" (as None), "jpeg" (lossy), "png", "webp" (both
            lossless), an `Encoded`, a dict of these by column; or "packed": the files that the
            dataset opens with Pillow, with all transforms live. None takes an existing file as it
            is.
        num_workers: processes that read samples; "auto": one a core. 0: this process.
        rows: samples in a part, which a worker loses when it is interrupted; more where there would
            be over 65,536 parts. None: some 96 MiB. A part that takes a worker longer than half a
            minute is closed early.
        allow_random: keep one draw of each sample, read with the generators of torch, NumPy and
            ``random`` seeded by its number. False: refuse a dataset that draws from one of them or
            seeds it for what is stored, or of which a few samples differ when they are read again.
        on_error: "skip" leaves out samples that cannot be read or stored; the file lists them.
        resume: continue an unfinished build, also one that overwrites; False begins again, for
            samples that have changed meanwhile. Not for a ``shard``: delete the folder of the parts
            before the ranks are started.
        overwrite: build even if there is a file, or an unfinished build of something else. The
            old file stays in place until the new one is finished.
        compress: "zstd", "gzip" or a `Compressed` with its level, for columns that are large
            enough. None: build without; an existing file may be compressed or not.
        progress: called with a `BuildProgress` now and then, on this thread.
        announce: called with the `Estimate` before anything is computed, on this thread.
        wait: if another process or thread builds this file, wait for it; False: raise.
        multiprocessing_context: how workers start, as a DataLoader takes it.
        worker_init_fn: called in each worker with its number, as a DataLoader takes it.
        shard: (rank, of), where ``of`` processes, on one machine or many, call this with the same
            dataset and path: each builds the parts of its samples, then those that are left by a
            rank that ended or has not begun. One joins all, and each returns the whole. With
            ``wait=False`` a rank returns a cache of its own samples as soon as these are built, and
            nothing is joined: copy the folders of all into one, and call this without ``shard``.
        check: "contents" compares a few samples, read in another process, with the file that is
            there. None: its class, length, transforms, classes and the indices of a Subset are
            compared, and none is read.
        expect: entries that the fingerprint must have: ``{"torchvision": "0.29.2"}`` refuses
            another version. "dataset" and "head" count in place of those of the dataset, to accept
            a file of a renamed class, or of transforms that are printed otherwise.
        single_file: True: one file, copied from its parts, so that the disk has to hold the rows
            twice meanwhile. False: never. None: if all parts take less than 128 MiB.
        build_id: where ranks overwrite, a text that all of them share and that is another one for
            each build, such as a job's number: a rank that is started again, or late, then knows
            whether the cache that is there is the one that it is to build.

    Raises:
        CacheError: the file, or an unfinished build, is of something else (names what changed);
            samples are random, or cannot be stored; the disk is too small or full.
        OptionError: an option has a value that it cannot take.
        MissingDependency: h5py, or a package that compression needs, is not installed.
        Exception: the sample's own, with a note that names the sample, if ``on_error="raise"``.
    """
    options = {n: each for n, each in locals().items() if n not in ("dataset", "path")}
    target = target_of(path)
    builder = _Builder(Source(dataset, Options(**options)), target)
    path = builder.built()
    return builder.source.open(path, is_whole=path == target)


def estimate(
    dataset: Any,
    path: str | os.PathLike[str],
    *,
    images: Choice = None,
    num_workers: int | Literal["auto"] = "auto",
    multiprocessing_context: Any = None,
    single_file: bool | None = None,
) -> Estimate:
    """Estimate what `precompute` will take. Reads a few samples and writes nothing."""
    options = {n: each for n, each in locals().items() if n not in ("dataset", "path")}
    return Source(dataset, Options(**options)).estimate(target_of(path).parent)


class _Builder:
    """One call of `precompute`. Without ``shard=`` it is the only rank."""

    def __init__(self, source: Source, path: Path) -> None:
        self.source, self.path, self.folder = source, path, BuildFolder(path)
        self._watched = BuildFolder(path)  # of a build that another process has begun
        self._options = source.options
        self._is_alone = source.options.shard is None
        self._is_apart = not (self._is_alone or source.options.wait)
        self._rank, self._of = source.options.shard or (0, 1)
        self._report = source.options.progress or _silent
        self._reported = -math.inf  # when this call last reported that it waits
        self._before = _identity(path)  # another builder may rename its file into place meanwhile

    def built(self) -> Path:
        """Build what is missing, and return the cache; of a rank that does not wait, its own."""
        if self._is_apart:
            with self._locked(self._rank):
                self._make(self._rank)
                return self._own_cache()
        if not self._is_done():
            for turn in range(self._of):  # this rank, then what others have left unfinished
                rank = (self._rank + turn) % self._of
                with self._locked(rank):
                    self._make(rank)
            with self._locked():
                if not self._is_done():
                    self._finish(self.folder.finished())
        self._end_finished()
        return self.path

    @contextmanager
    def _locked(self, rank: int | None = None) -> Iterator[None]:
        """Hold the lock of a rank, or that of the whole; an error says what is kept."""
        name = "" if rank is None or self._is_alone else f"{rank:05d}-of-{self._of:05d}"
        waits = self._options.wait or not self._is_alone
        waiting = self._report_waiting if waits else None
        with locked(self.path, name, waiting=waiting):
            try:
                yield
            except BaseException as error:
                self._say_how_to_go_on(error)
                raise

    def _is_done(self) -> bool:
        """Return whether the cache is there, with all of its parts, and is not to be replaced."""
        own, now = self._options.build_id, _identity(self.path)
        is_own = self.folder.has_made(own) if own else now != self._before  # in any rank or call
        if now is None or (self._options.overwrite and not is_own):
            return False
        if self.folder.begun() is None:
            return all(map(os.path.lexists, parts_joined(self.path)))
        index = Index.parse(str(self.path))  # any other file is left as it is
        with suppress(CacheError):
            # While it is mended, a part of the same name may have other samples than that joined.
            check_shards(self.path, index, by_digest=True)
            return True
        return False

    def _end_finished(self) -> None:
        """Remove what a builder that was killed at the very end has left.

        An interrupted build that is to replace the cache stays, to go on.
        """
        begun = self.folder.begun()
        if begun is not None:
            with suppress(OSError, CacheError), locked(self.path):  # the disk may be read-only
                if self.folder.has_made(begun.get("build")):
                    self.folder.keep_only(parts_joined(self.path))

    def _make(self, rank: int) -> None:
        """Make the missing parts of a rank, whose lock is held."""
        if not self._is_apart and self._is_done():
            return  # another call has built it meanwhile, also where each call overwrites
        is_first = not self.folder.fingerprint
        if is_first and not self._begin():
            return
        samples, parts = self._samples_of(rank), []
        for part in self.folder.finished(samples):
            if self._options.resume and not (part.failed and self._options.on_error == "raise"):
                parts.append(part)
            else:
                part.path.unlink(missing_ok=True)
        # Only now: the process that finishes the cache may remove its parts.
        if not self._is_apart and self._is_done():
            return
        if not (is_first or missing_in(samples, parts)):
            return
        expected = self.source.estimate(self.path.parent)
        if is_first:
            # Ranks that wait for each other write into one folder: all need room in it.
            whole = range(self.source.length) if self._options.wait else samples
            written = sum(part.index.file_bytes for part in self.folder.finished(whole))
            expected.refuse_small_disk(len(whole), written, self.path.parent)
            (self._options.announce or _silent)(expected)
        tasks = self._tasks(samples, parts)
        pace = Pace(samples, expected.bytes, parts)
        self._report(pace.now)

        def finished(part: Part) -> None:
            part = self.folder.finish(part)
            first = next((each for each in parts if each.index.rows), part)
            one, other = first.index.structure, part.index.structure
            if part.index.rows and one != other:
                who = f"samples {first.samples.start} and {part.samples.start}"
                raise other_structure(who, one, other)
            parts.append(part)
            self._report(pace.computing(part))

        if tasks:
            workers = min(expected.num_workers, len(tasks))
            make_parts(self.folder, tasks, finished, self.source, workers)

    def _tasks(self, samples: range, parts: Sequence[Part]) -> list[range]:
        """Return the samples of each part that is missing beside these."""
        rows = self.source.rows_of_part
        if not self.source.length and not parts:
            return [range(0)]
        return [
            range(first, min(first + rows, each.stop))
            for each in missing_in(samples, parts)
            for first in range(each.start, each.stop, rows)
        ]

    def _samples_of(self, rank: int) -> range:
        return samples_of(rank, self._of, self.source.length)

    def _begin(self) -> bool:
        """Begin the build, or go on: with an unfinished one, or a cache that lacks parts.

        Return whether there is something to build: other ranks may have finished it meanwhile.

        Raises:
            CacheError: that is of something else; says what differs.
        """
        options, source, folder = self._options, self.source, self.folder
        refuse_no_h5py()  # before the first sample is read
        if source.compress is not None:
            refuse_missing(source.compress.codec)
        if not is_shard_name(f"{folder.path.name}/x"):
            raise CacheError(
                f"the parts of {str(self.path)!r} would be in a folder {folder.path.name!r}, which "
                "has unprintable characters or a backslash; give another path"
            )
        if folder.path.is_symlink() or folder.path.is_file():
            raise CacheError(
                f"{folder.path} would hold the parts, and is a link or a file: who reads the cache "
                "would not follow the link; delete it, or give a path on another disk"
            )
        if not options.allow_random:
            source.study.refuse_random()
        with nullcontext() if self._is_alone else self._locked():
            if not (self._is_alone or self._is_apart) and self._is_done():
                return False
            begun, what = folder.begun(), f"{folder.path} holds an unfinished build"
            if options.overwrite and begun and folder.has_made(begun.get("build")):
                begun = None  # it was killed when it had ended, or was to mend what is there
            elif begun is None and self.path.exists() and not options.overwrite:
                what = f"{self.path} lacks parts, and is"
                begun = Index.parse(str(self.path)).fingerprint
            changed = [] if begun is None else source.changed(begun, "when it was begun")
            if changed and not options.overwrite:
                raise CacheError(
                    f"{what} of something else; {'; '.join(changed)}. Pass "
                    f"{option('overwrite', True)} to begin anew, or give what it was begun with to "
                    "go on"
                )
            if begun is not None and not changed:
                warn_of_versions(begun, folder.path)
            else:
                begun = source.new_fingerprint()
            expect, says = options.expect or {}, begun.get
            if other := {name: says(name) for name in expect if says(name) != expect[name]}:
                raise CacheError(
                    f"{option('expect', expect)}: a cache that is built now would have {other}; "
                    "install what is expected, or leave it out"
                )
            folder.begin(begun)
        return True

    def _finish(self, parts: list[Part]) -> None:
        """Make the cache of all parts, and remove what it does not need."""
        if missing := missing_in(range(self.source.length), parts):
            raise CacheError(
                f"{self.folder.path}: the part with sample {missing[0].start} is not there, or "
                "cannot be read now; call again to go on"
            )
        failed = next((part for part in parts if part.failed), None)
        if failed is not None and not any(part.index.rows for part in parts):
            number, why = CachedDataset(failed.path).failed[0]
            raise CacheError(
                f"none of the {self.source.length} samples could be read; the first failed with "
                f"{why!r} (sample {number})"
            )
        one_file = self._options.single_file
        if one_file is None:
            one_file = sum(part.index.file_bytes for part in parts) <= ONE_FILE_BYTES
        if len(parts) == 1:
            rename(parts[0].path, self.path)
            one_file = True
        else:
            pace = Pace(range(self.source.length))

            def report(done: int, whole: int) -> None:
                self._report(pace.assembling(done, whole))

            combined(self.path, parts, one_file=one_file, progress=report)
        self.folder.keep_only([] if one_file else [part.path for part in parts])

    def _own_cache(self) -> Path:
        """Return a cache of the parts that begin with a sample of this rank, beside them.

        If none does, because fewer ranks began the build, it is of the part that has its samples.
        """
        own = self._samples_of(self._rank)
        built = self.folder.finished(own)
        parts = [part for part in built if part.samples.start >= own.start] or built
        if not parts:
            raise CacheError(
                f"there are no samples for rank {self._rank} of {self._of}: the dataset has "
                f"{self.source.length}; use fewer ranks"
            )
        if len(parts) == 1:
            return parts[0].path
        path = self.folder.path / f"{self._rank:05d}-of-{self._of:05d}.h5"
        combined(path, parts)
        return path

    def _report_waiting(self, seconds: float) -> None:
        """Report, now and then, how far all ranks are while another one is waited for."""
        if 0 <= seconds - self._reported < _REPORT_S:
            return
        self._reported = seconds
        # `self.folder` would go on with the build that it knows, which may be of something else.
        folder = self.folder if self.folder.fingerprint else self._watched
        folder.fingerprint = folder.fingerprint or folder.begun() or {}
        samples = range(folder.length)
        parts = folder.finished() if samples else []
        self._report(replace(Pace(samples, 0, parts).now, waiting=True, seconds=seconds))

    def _say_how_to_go_on(self, error: BaseException) -> None:
        """Add to ``error`` what is kept; remove the folder if nothing is."""
        if not self.folder.fingerprint:
            return
        samples = self._samples_of(self._rank)
        missing = sum(map(len, missing_in(samples, self.folder.finished(samples))))
        text = (
            f"{len(samples) - missing} of {len(samples)} samples are kept in {self.folder.path}; "
            "start it again with the same arguments to go on"
        )
        if missing == len(samples):
            if self._is_alone:
                with suppress(CacheError):
                    self.folder.keep_only(parts_joined(self.path))
        elif isinstance(error, KeyboardInterrupt) and not error.args:
            error.args = (f"interrupted: {text}",)  # a note would not be shown before Python 3.11
        else:
            add_note(error, f"dataloaders: {text}")


def _silent(_: object) -> None:
    pass


def _identity(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns
