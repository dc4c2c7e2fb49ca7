"""Precompute a dataset's samples into a cache, part by part, so that nothing is lost half-way.

    dataset ──a few samples, elsewhere──> Findings ──> cut, rows of a part, estimate
    samples 500 to 999 ──a worker──> train.parts/00500.h5, finished, synced, renamed
    all parts there ──joined, or copied into one file──> train.h5 ──> CachedDataset

Whatever is killed, and whenever: finished parts stay, and the next call makes the others. Ranks do
the same with a range of samples each, and know of each other only by the parts that they see.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dataloaders.cache.build.advice import advice_for
from dataloaders.cache.format.codecs import refuse_missing
from dataloaders.cache.format.compress import Compressed, compressed_of
from dataloaders.cache.sample.cut import Cut, Finish
from dataloaders.cache.format.entries import is_shard_name
from dataloaders.cache.build.estimation import (
    ONE_FILE_BYTES,
    Estimate,
    estimate_of,
    refuse_small_disk,
    rows_of_part,
    workers_for,
)
from dataloaders.cache.build.findings import Findings
from dataloaders.cache.build.fingerprint import fingerprint_of, length_of
from dataloaders.cache.format.hdf5 import refuse_no_h5py
from dataloaders.cache.sample.images import Choice, Images
from dataloaders.cache.format.index import Index
from dataloaders.cache.build.joining import combined
from dataloaders.cache.build.locks import Busy, locked
from dataloaders.cache.build.observed import Observed
from dataloaders.cache.build.opening import calls_text, open_unread
from dataloaders.cache.build.parts import BuildFolder, Part, missing_in, range_of
from dataloaders.cache.build.progress import BuildProgress, Pace
from dataloaders.cache.build.rows import Job, Made, Maker, other_structure
from dataloaders.cache.read.shards import check_shard, folder_of
from dataloaders.cache.build.study import Study
from dataloaders.cache.read.verification import verify
from dataloaders.cache.build.workers import make_parts
from dataloaders.cache.format.writing import About
from dataloaders.errors import CacheError, CacheWarning, OptionError, add_note
from dataloaders.machine.resources import available_memory, machine_cores, ranks_here, usable_cores

if TYPE_CHECKING:
    from dataloaders.cache.read.reader import CachedDataset

__all__ = ["BuildProgress", "Estimate", "estimate", "precompute"]

_POLL_S = 0.1
_TELL_S = 0.5
_STALL_S = 60.0

Report = Callable[[BuildProgress], None]


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
    progress: Report | None = None,
    announce: Callable[[Estimate], None] | None = None,
    wait: bool = True,
    multiprocessing_context: Any = None,
    worker_init_fn: Callable[[int], None] | None = None,
    shard: tuple[int, int] | None = None,
    check: Literal["contents"] | None = None,
    expect: Mapping[str, Any] | None = None,
    single_file: bool | None = None,
) -> CachedDataset:
    """Return the samples of ``dataset`` from the cache at ``path``; build it if it is missing.

    If the dataset's transforms are a torchvision Compose that a few samples prove to be separable,
    the file holds the result of its members before the first one that draws random numbers or is
    your own code, and the rest runs live when a sample is read. Trailing ToTensor,
    ConvertImageDtype, ToDtype and Normalize before that point stay live too, so that images are
    stored as uint8. For any other dataset, whole samples are stored, and they must be the same each
    time they are read.

    Workers build parts, each a finished file in the folder ``train.parts`` of ``train.h5``, which
    joins them; a cache of less than 128 MiB is one file. Finished parts are not lost: after Ctrl-C,
    a crash or a power cut the same call makes those that are missing.

    Args:
        dataset: map-style, with samples made of tensors, arrays, numbers, bool, str, bytes, PIL
            images and None, in dicts, lists and tuples.
        path: the path of the file.
        images: how PIL images are stored. "raw"; "jpeg" (lossy), "png", "webp" (both lossless) or
            an `Encoded` with a quality and a bounded size; a dict of these by column; or "packed":
            the image files that the dataset opens with Pillow, byte for byte, with all transforms
            live. None: raw; an existing file is used as it is.
        num_workers: processes that read samples; "auto": one a core. 0: this process.
        rows: samples in a part, which a worker loses when it is interrupted. None: by their size,
            some 96 MiB. A part that takes a worker longer than half a minute is closed early.
        allow_random: keep one draw of each sample, read with the generators of torch, NumPy and
            ``random`` seeded by its number. False: refuse a dataset that draws from one of them or
            seeds it while any sample's stored part is made, and one of which a few samples differ
            when they are read again. Draws from the dataset's own generators show only in the
            latter.
        on_error: "skip" leaves out samples that cannot be read or stored; the file lists them.
        resume: continue an unfinished build; False begins again.
        overwrite: build even if there is a file, or an unfinished build of something else. The
            old file stays in place until the new one is finished.
        compress: "zstd", "gzip" or a `Compressed` with its level: columns that are large enough are
            compressed by HDF5's filters, in chunks of 64 KiB or a row. None: build without
            compression; an existing file may be compressed or not.
        progress: called with a `BuildProgress` now and then, on this thread.
        announce: called with the `Estimate` before anything is computed, on this thread. None: its
            `advice`, if there is some, is a CacheWarning.
        wait: if another process or thread builds this file, wait for it; False: raise.
        multiprocessing_context: how workers start, as a DataLoader takes it.
        worker_init_fn: called in each worker with its number, as a DataLoader takes it.
        shard: (rank, of), where ``of`` processes, on one machine or many, call this with the same
            dataset and path: each builds the parts of its samples, and when all are there, one of
            them joins them at ``path``, which each returns. With ``wait=False`` a rank returns a
            cache of its own samples as soon as these are built, and nothing is joined: see `join`.
        check: "contents" reads a few samples again, in another process, and compares them with the
            file that is there. None: its class, length, transforms and classes are compared, and no
            sample is read.
        expect: entries of the fingerprint (see `fingerprint`) that a file that is there must have:
            ``{"torchvision": "0.29.2"}`` refuses one of another version.
        single_file: True: one file, however large it is; its parts are copied, so the disk has to
            hold the rows twice meanwhile. False: parts are never copied. None: they are, if all
            take less than 128 MiB.

    Warns:
        CacheWarning: images are stored as large as they are decoded, because the first transform
            is random; says how large a row is, and what to do.

    Raises:
        CacheError: the file, or an unfinished build, is of something else (names what changed);
            samples are random (also with ``on_error="skip"``), or cannot be stored; the disk is too
            small or full.
        OptionError: an option has a value that it cannot take.
        MissingDependency: h5py, or a package that compression needs, is not installed.
        Exception: the sample's own, with a note that names the sample, if ``on_error="raise"``.
    """
    options = _Options(
        images=images,
        num_workers=num_workers,
        rows=rows,
        allow_random=allow_random,
        skip=_is_skip(on_error),
        report=progress or _silent,
        announce=announce or _warn,
        compress=compressed_of(compress),
        context=multiprocessing_context,
        worker_init_fn=worker_init_fn,
        check=check,
        expect=expect,
        one_file=single_file,
        resume=resume,
        overwrite=overwrite,
        wait=wait,
    )
    target = Path(os.path.realpath(path))
    _refuse_no_folder(target)
    if shard is not None:
        check_shard(shard)
    builder = _Builder(dataset, target, options, shard)
    builder.have_built()
    return builder.open(builder.own if shard is not None and not wait else target)


def _refuse_no_folder(target: Path) -> None:
    try:
        there = target.parent.is_dir()
        with suppress(FileNotFoundError, NotADirectoryError):
            target.stat()
    except OSError as error:  # not ours to see, a link to itself, a name that is too long
        raise CacheError(
            f"{target.parent} cannot be read ({error.strerror}); give a path in a folder "
            "that you may read and write"
        ) from error
    if not there:
        raise CacheError(
            f"{target.parent} is not a folder, so no cache can be built in it; create it"
        )


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
    options = _Options(
        images=images,
        num_workers=num_workers,
        allow_random=True,
        skip=True,
        context=multiprocessing_context,
        one_file=single_file,
    )
    target = Path(os.path.realpath(path))
    _refuse_no_folder(target)
    return _Builder(dataset, target, options).estimate()


def opened(
    path: Path,
    *,
    images: Choice,
    observed: Observed,
    check: Literal["contents"] | None = None,
    expect: Mapping[str, Any] | None = None,
) -> CachedDataset:
    """Return the finished cache at ``path``, compared with the dataset.

    The dataset is observed only where ``check`` asks for it, or where the file does not say how
    samples go through the transforms.

    Raises:
        CacheError: the file is of something else (names what changed), or the dataset cannot be
            observed.
    """
    options = _Options(
        num_workers="auto", images=images, skip=True, observed=observed, check=check, expect=expect
    )
    return _Builder(observed.loader.dataset, Path(os.path.realpath(path)), options).open(path)


def _silent(told: Any) -> None:
    pass


def _warn(told: Estimate) -> None:
    if told.advice:
        warnings.warn(told.advice, CacheWarning, stacklevel=2)


@dataclass(frozen=True)
class _Options:
    """What `precompute` is told, checked.

    Raises:
        OptionError: a value that it cannot take.
    """

    num_workers: int | Literal["auto"]
    images: Choice = None
    rows: int | None = None
    allow_random: bool = False
    skip: bool = False
    report: Report = field(default=_silent)
    announce: Callable[[Estimate], None] = field(default=_silent)
    compress: Compressed | None = None
    context: Any = None
    worker_init_fn: Callable[[int], None] | None = None
    observed: Observed | None = None
    check: Literal["contents"] | None = None
    expect: Mapping[str, Any] | None = None
    one_file: bool | None = None
    resume: bool = True
    overwrite: bool = False
    wait: bool = True

    def __post_init__(self) -> None:
        workers, rows = self.num_workers, self.rows
        if workers != "auto" and (type(workers) is not int or workers < 0):
            raise OptionError(f'num_workers={workers!r}: it must be "auto" or an int from 0 on')
        if rows is not None and (type(rows) is not int or rows < 1):
            raise OptionError(
                f"rows={rows!r}: it must be None or an int from 1 on, samples in a part"
            )
        if self.check not in (None, "contents"):
            raise OptionError(f'check={self.check!r}: it must be None or "contents"')


class _Builder:
    """One call of `precompute`.

    Attributes:
        folder: the parts so far.
        path: of the cache.
        own: with a shard, the cache of this rank's samples, once these are built.
    """

    def __init__(
        self,
        dataset: Any,
        path: Path,
        options: _Options,
        shard: tuple[int, int] | None = None,
    ) -> None:
        self.folder = BuildFolder(path)
        self.path = path
        self.own = path
        self._dataset = dataset
        self._options = options
        self._shard = shard
        self._length = length_of(dataset)
        self._range = range_of(*(shard or (0, 1)), self._length)
        self._images = Images.of(options.images)
        self._encode = True
        self._observed = options.observed
        self._studied: _Studied | None = None
        self._before = _identity(path)  # another builder may rename its file into place meanwhile

    # What the dataset is

    @property
    def _known(self) -> _Studied:
        """What the dataset is; it is studied once, in a process of its own or in this one."""
        if self._studied is None:
            options = self._options
            study = Study(
                self._dataset,
                self._length,
                skip=options.skip,
                images=self._images,
                encode=self._encode,
            )
            if options.num_workers == 0 and self._observed is None:
                found = study()
            else:
                if self._observed is None:
                    self._observed = Observed.of(
                        self._dataset, options.context, options.worker_init_fn
                    )
                found = self._observed.findings(study, encode=self._encode)
            self._studied = self._learned(study, found)
        return self._studied

    @property
    def _cores(self) -> int:
        """All of the machine's, where no shard is built: then the other ranks wait for this one."""
        return machine_cores() if self._shard is None else usable_cores()

    def _learned(self, study: Study, found: Findings) -> _Studied:
        options = self._options
        study.refuse_no_images(found)
        if options.num_workers == "auto":
            memory = available_memory() * (ranks_here() if self._shard is None else 1)
            most = workers_for(found, len(self._range), cores=self._cores, memory=memory)
            workers = max(1, most)  # "auto" never opens the dataset's files in this process
        else:
            workers = options.num_workers
        fingerprint = fingerprint_of(study, found, self._dataset, self._length)
        fingerprint["compress"] = None if options.compress is None else str(options.compress)
        if found.at_leaves and (calls := calls_text(found.calls or ())) is not None:
            fingerprint["calls"] = calls
        return _Studied(study, found, workers, fingerprint)

    def estimate(self) -> Estimate:
        """What it will take."""
        options, found = self._options, self._known.found
        return estimate_of(
            found,
            self.path.parent,
            samples=len(self._range),
            num_workers=self._known.workers,
            cores=self._cores,
            rows=self.folder.rows or options.rows or rows_of_part(found, len(self._range)),
            one_file=options.one_file,
            advice=advice_for(self._dataset, found, self._images),
        )

    # Opening

    def open(self, path: Path) -> CachedDataset:
        """The finished cache, or that of one rank, compared with the dataset now."""
        from dataloaders.cache.read.reader import CachedDataset

        options = self._options
        if options.check is None and self._studied is None:
            wanted = dict(options.expect or {})
            if options.compress is not None:
                wanted["compress"] = str(options.compress)
            unread = open_unread(self._dataset, path, images=options.images, expect=wanted)
            if unread is not None:
                return unread
        self._read_as_file(path)
        known = self._known
        tails, calls = known.cut.tails, known.found.calls or ()
        expect = dict(known.fingerprint)
        del expect["images"]  # compared already
        expect.pop("calls", None)  # files of earlier versions do not have them
        expect.update(options.expect or {})
        if self._options.compress is None:  # then it may be compressed or not
            del expect["compress"]
        if not known.found.at_leaves:  # FiveCrop gives a tuple, and what is left takes all of it
            finish = Finish(tails, calls)
            cached = CachedDataset(path, transform=finish, expect=expect)
        else:
            of_leaves = [(keys, tails[number]) for number, keys in calls]
            cached = CachedDataset(path, tails=of_leaves, expect=expect)
        cached.refuse_other_classes(known.found.attributes)
        return cached

    def _read_as_file(self, path: Path) -> None:
        """Have the dataset studied as the file's images are: its files, PIL images or any rows.

        Raises:
            CacheError: they are kept in another way than was asked for.
        """
        from dataloaders.cache.read.reader import CachedDataset

        asked = None if self._options.images is None else {"images": str(self._images)}
        kept = CachedDataset(path, expect=asked).index.fingerprint.get("images")
        like = Images.like(kept)
        if self._studied is None or like.rows != self._images.rows:
            # Nothing is encoded where a file is only opened.
            self._images, self._encode, self._studied = like, False, None

    # Building

    def have_built(self) -> None:
        """Have the cache in place, or this rank's parts of it."""
        options, rank = self._options, self._rank
        if self._before is not None and not options.overwrite and not self._lacks_parts():
            self._remove_leftover()
            if self._shard is None or options.wait:
                return
        told = float("-inf")

        def waiting(seconds: float) -> None:
            nonlocal told
            if seconds - told >= _TELL_S:
                told = seconds
                options.report(self._progress_of_others(seconds))

        is_waiting = waiting if options.wait or self._shard is not None else None
        with locked(self.path, rank, waiting=is_waiting):
            # Whoever was waited for has built it: also where each was told to overwrite.
            if self._shard is None and _identity(self.path) != self._before:
                self._remove_leftover(is_locked=True)
                return
            try:
                self._build()
            except BaseException as error:
                self._tell_how_to_go_on(error)
                raise
        if self._shard is not None and options.wait:
            self._meet_others()

    @property
    def _rank(self) -> str:
        return "" if self._shard is None else f"{self._shard[0]:05d}-of-{self._shard[1]:05d}"

    def _lacks_parts(self) -> bool:
        """Whether a part of the joined cache that is there is not."""
        folder = folder_of(self.path)
        shards = Index.parse(str(self.path)).shards
        return any(not os.path.lexists(folder / shard.name) for shard in shards)

    def _remove_leftover(self, *, is_locked: bool = False) -> None:
        """Remove what a builder that was killed at the very end has left behind.

        An interrupted build that is to replace the cache stays, to go on.
        """
        if not self.folder.is_begun:
            self.folder.remove_if_empty()
            return
        with suppress(OSError, CacheError):  # it may well be a disk that can only be read
            names = [Path(shard.name).name for shard in Index.parse(str(self.path)).shards]
            if not self.folder.watch() or self.folder.names.token != self._token_there():
                return
            if is_locked:
                self.folder.keep_only(names)
            else:
                with locked(self.path):
                    self.folder.keep_only(names)

    def _build(self) -> None:
        """Make the parts that are missing, and unless there are other ranks the cache."""
        options, folder, shard = self._options, self.folder, self._shard
        refuse_no_h5py()  # before the first sample is read
        if options.compress is not None:
            refuse_missing(options.compress.codec)
        if not is_shard_name(f"{folder.path.name}/x"):
            raise CacheError(
                f"the parts of {str(self.path)!r} would be in a folder {folder.path.name!r}, which "
                "has unprintable characters or a backslash; give another path"
            )
        if not options.allow_random:
            self._known.study.refuse_random(self._known.found)
        if shard is None:
            self._settle()
        else:
            with locked(self.path, "build", waiting=_silent):
                self._settle()
        if not options.resume:
            folder.drop(folder.finished(self._range))
        folder.sweep(self._range)
        parts = folder.finished(self._range)
        if not options.skip:
            folder.drop(part for part in parts if part.index.failed is not None)
            parts = folder.finished(self._range)
        told = self.estimate()
        if told.is_copied:  # with checksums of its own: what flipped since would not be seen later
            folder.drop(part for part in parts if verify(part.path))
            parts = folder.finished(self._range)
        self._refuse_small_disk(told, sum(part.index.file_bytes for part in parts))
        options.announce(told)
        self._make(missing_in(self._range, parts), parts, told)
        parts = folder.finished(self._range)
        if missing := missing_in(self._range, parts):  # a cache without them would be short
            raise CacheError(
                f"samples {missing[0].start} to {missing[0].stop - 1} were not made, and no worker "
                "said why; start it again with the same arguments to go on"
            )
        if shard is None:
            self._finish(parts)
        elif not options.wait:
            self._make_own(parts)

    def _settle(self) -> None:
        options, known = self._options, self._known
        token = ""
        if self._before is not None:
            # What is there is read until the new cache is finished, and what lacks a part keeps the
            # names of the others.
            token = f"-{os.urandom(4).hex()}" if options.overwrite else self._token_there()
        self.folder.settle(
            known.fingerprint,
            self._length,
            rows=options.rows,
            default=rows_of_part(known.found, self._length),
            token=token,
            overwrite=options.overwrite,
        )

    def _token_there(self) -> str:
        names = [Path(shard.name).stem for shard in Index.parse(str(self.path)).shards]
        _, dash, token = names[0].partition("-") if names else ("", "", "")
        return dash + token

    def _refuse_small_disk(self, told: Estimate, written: int) -> None:
        if self._shard is None:
            refuse_small_disk(told, self.path.parent, written)
            return
        rank, of = self._shard
        # Ranks that wait for each other write into one folder. Of those that do not, these are on
        # one machine that torchrun says are: each machine may have a disk of its own.
        ranks = range(of) if self._options.wait else _on_this_machine(rank, of)
        parts = self.folder.finished()
        left = [
            sum(map(len, missing_in(range_of(other, of, self._length), parts)))
            for other in ranks
            if other != rank
        ]
        others = round(told.low_needed / max(1, told.samples) * sum(left))
        busy = sum(each > 0 for each in left)
        refuse_small_disk(told, self.path.parent, written, others=others, ranks=busy)

    def _make(self, missing: list[range], parts: list[Part], told: Estimate) -> None:
        options, known, rows = self._options, self._known, self.folder.rows
        about = About(
            samples=0,
            fingerprint=known.fingerprint,
            head=known.cut.head,
            tail=known.cut.tail,
            compress=options.compress,
            attributes=known.found.attributes,
        )
        job = Job(
            known.found.calls,
            options.allow_random,
            options.skip,
            self._images,
            self.folder.names,
            about,
        )
        tasks = [
            range(max(first, each.start), min(first + rows, each.stop))
            for each in missing
            for first in range(each.start // rows * rows, each.stop, rows)
        ]
        if not self._length and not parts:
            tasks = [range(0)]
        pace = Pace(len(self._range), told.bytes)
        failed = sum(
            0 if part.index.failed is None else part.index.failed[0].size for part in parts
        )
        done = sum(len(part.samples) for part in parts)
        options.report(pace.computing(done, failed, sum(p.index.file_bytes for p in parts)))
        like = [
            (part.samples.start, part.index.structure)
            for part in parts
            if part.index.structure is not None
        ]

        def finished(made: Made) -> None:
            if made.structure is not None:
                like.append((made.samples.start, made.structure))
                if like[0][1] != made.structure:
                    raise other_structure(*like[0], *like[-1])
            options.report(pace.computing(len(made.samples), made.failed, made.bytes))

        if tasks:
            make_parts(
                Maker(known.cut, job),
                tasks,
                finished,
                dataset=self._dataset,
                workers=min(known.workers, len(tasks)),
                context=options.context,
                worker_init_fn=options.worker_init_fn,
            )

    def _finish(self, parts: list[Part]) -> None:
        """Make the cache of all parts, and remove what it does not need."""
        options = self._options
        failed = [part for part in parts if part.index.failed is not None]
        if failed and not any(part.index.rows for part in parts):
            raise self._nothing_left(failed[0])
        size = sum(part.index.file_bytes for part in parts)
        one_file = size <= ONE_FILE_BYTES if options.one_file is None else options.one_file
        if len(parts) == 1:
            parts[0].path.rename(self.path)
        else:
            pace = Pace(self._length, 0)

            def report(done: int, whole: int) -> None:
                options.report(pace.assembling(done, whole))

            combined(self.path, parts, one_file=one_file, progress=report)
        is_joined = len(parts) > 1 and not one_file
        self.folder.keep_only([part.path.name for part in parts] if is_joined else [])

    def _nothing_left(self, part: Part) -> CacheError:
        from dataloaders.cache.read.reader import CachedDataset

        number, why = CachedDataset(part.path).failed[0]
        return CacheError(
            f"none of the {self._length} samples could be read; the first failed with "
            f"{why!r} (sample {number})"
        )

    def _make_own(self, parts: list[Part]) -> None:
        """Have a cache of this rank's samples, beside its parts."""
        if len(parts) == 1:
            self.own = parts[0].path
            return
        self.own = self.folder.path / f"{self._rank}.h5"
        if parts:
            combined(self.own, parts)
        else:  # fewer samples than ranks
            raise CacheError(
                f"there are no samples for rank {self._rank}: the dataset has {self._length}; use "
                "fewer ranks"
            )

    # Other builders

    def _meet_others(self) -> None:
        """Wait for the parts of the other ranks; one of them makes the cache.

        Warns:
            CacheWarning: nothing has changed for a long time; says which samples are missing.
        """
        started, told = time.monotonic(), float("-inf")
        seen, since, patience = -1, 0.0, _STALL_S
        while True:
            if not self.folder.is_begun and self.path.exists():
                return
            parts = self.folder.finished()
            missing = missing_in(range(self._length), parts)
            if not missing:
                with suppress(Busy), locked(self.path, "build"):
                    if self.folder.is_begun:
                        self._finish(self.folder.finished())
                    return
            now = time.monotonic() - started
            done = self._length - sum(map(len, missing))
            if done != seen:
                seen, since, patience = done, now, _STALL_S
            elif missing and now - since >= patience:
                patience *= 2
                texts = [f"{each.start} to {each.stop - 1}" for each in missing[:8]]
                warnings.warn(
                    f"{self.path} waits for samples {', '.join(texts)} of other ranks, and none "
                    f"was finished for {now - since:.0f} s. If a rank has ended, start it again: "
                    "what is finished is kept",
                    CacheWarning,
                    stacklevel=2,
                )
            if now - told >= _TELL_S:
                told = now
                self._options.report(self._progress_of_others(now, missing))
            time.sleep(_POLL_S)

    def _progress_of_others(
        self, seconds: float, missing: list[range] | None = None
    ) -> BuildProgress:
        """How far the process that builds is, or all ranks."""
        if not self.folder.names.length and not self.folder.watch():
            return BuildProgress("compute", True, 0, 0, 0, 0, 0, seconds, None, None)
        parts = self.folder.finished()
        ranks = 0
        if missing is not None and self._shard is not None:
            of = self._shard[1]
            ranges = [range_of(rank, of, self._length) for rank in range(of)]
            ranks = sum(bool(missing_in(each, parts)) for each in ranges)
        return BuildProgress(
            phase="compute",
            waiting=True,
            samples=self.folder.names.length,
            samples_done=sum(len(part.samples) for part in parts),
            failed=sum(part.index.failed[0].size for part in parts if part.index.failed),
            bytes_done=sum(part.index.file_bytes for part in parts),
            bytes_expected=0,
            seconds=seconds,
            samples_per_second=None,
            seconds_left=None,
            shards_left=ranks,
        )

    def _tell_how_to_go_on(self, error: BaseException) -> None:
        """Add to ``error`` what is kept; remove the folder if nothing is."""
        parts = self.folder.finished(self._range) if self.folder.names.length else []
        done = sum(len(part.samples) for part in parts)
        if not done:
            if self.folder.names.length and self._shard is None and not self._is_joined():
                self.folder.keep_only([])
            return
        text = (
            f"{done} of {len(self._range)} samples are kept in {self.folder.path}; start it "
            "again with the same arguments to go on"
        )
        if isinstance(error, KeyboardInterrupt) and not error.args:
            error.args = (f"interrupted: {text}",)  # a note would not be shown before Python 3.11
        else:
            add_note(error, f"dataloaders: {text}")

    def _is_joined(self) -> bool:
        try:
            return bool(Index.parse(str(self.path)).shards)
        except CacheError:
            return False


@dataclass(frozen=True)
class _Studied:
    """What a dataset was found to be, and what follows from it."""

    study: Study
    found: Findings
    workers: int
    fingerprint: dict[str, Any]

    @property
    def cut(self) -> Cut:
        """The one that was chosen."""
        return self.study.cuts[self.found.choice]


def _is_skip(on_error: object) -> bool:
    if on_error not in ("raise", "skip"):
        raise OptionError(f'on_error={on_error!r}: it must be "raise" or "skip"')
    return on_error == "skip"


def _on_this_machine(rank: int, of: int) -> range:
    """The ranks that torchrun has started beside this one, and this one."""
    local, here = os.environ.get("LOCAL_RANK", ""), ranks_here()
    if not local.isdecimal() or int(local) >= here:
        return range(rank, rank + 1)
    first = max(0, rank - int(local))
    return range(first, min(of, first + here))


def _identity(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns
