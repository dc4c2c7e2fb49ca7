"""Precompute a dataset's samples into one file, in parallel, so that nothing is lost half-way.

    dataset ──study──> cut, estimate
            ──Chunks, in workers──> train.h5.building/chunk-000017.5e1f + a line of the journal
            ──assemble──> train.h5.building/assembled ──rename──> train.h5 ──> CachedDataset

Whatever is killed, and whenever: what the journal names is kept, and the next call goes on. The
finished file is the same to the bit.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from dataloaders.cache.advice import advice_for
from dataloaders.cache.chunking import Chunking
from dataloaders.cache.codecs import refuse_missing
from dataloaders.cache.compress import Compressed, compressed_of
from dataloaders.cache.crew import AHEAD, Crew
from dataloaders.cache.cut import Cut, Finish
from dataloaders.cache.disk import writing
from dataloaders.cache.estimation import (
    Estimate,
    chunking_for,
    estimate_of,
    refuse_small_disk,
    workers_for,
)
from dataloaders.cache.findings import Findings
from dataloaders.cache.fingerprint import fingerprint_of, length_of
from dataloaders.cache.folder import BuildFolder, building_folder
from dataloaders.cache.images import Choice, Images
from dataloaders.cache.journal import Record
from dataloaders.cache.layout import first_columns
from dataloaders.cache.lock import BuildLock, builder_of
from dataloaders.cache.observed import Observed
from dataloaders.cache.opening import calls_text, open_unread
from dataloaders.cache.placing import placeable
from dataloaders.cache.progress import BuildProgress, Pace
from dataloaders.cache.rows import Job
from dataloaders.cache.shards import check_shard, range_of, shard_text
from dataloaders.cache.study import Study
from dataloaders.cache.work import Piece, Work, studied_by
from dataloaders.errors import CacheError, CacheWarning, MissingDependency, OptionError, add_note
from dataloaders.machine.resources import available_memory, machine_cores, ranks_here, usable_cores

if TYPE_CHECKING:
    from dataloaders.cache.about import About
    from dataloaders.cache.index import Index
    from dataloaders.cache.reader import CachedDataset

__all__ = ["BuildProgress", "Estimate", "building_folder", "estimate", "precompute"]

_POLL_S = 0.1
_TELL_S = 0.5
_LAST_CHUNKS = 2  # of each worker, which are not on the disk when the file is put together

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
) -> CachedDataset:
    """Return the samples of ``dataset`` from the file at ``path``; build it if it is missing.

    If the dataset's transforms are a torchvision Compose that a few samples prove to be separable,
    the file holds the result of its members before the first one that draws random numbers or is
    your own code, and the rest runs live when a sample is read. Trailing ToTensor,
    ConvertImageDtype, ToDtype and Normalize before that point stay live too, so that images are
    stored as uint8. For any other dataset, whole samples are stored, and they must be the same each
    time they are read.

    Nothing is lost: after Ctrl-C, a crash or a power cut the same call continues from
    ``<path>.building``, and the finished file is the same to the bit.

    Args:
        dataset: map-style, with samples made of tensors, arrays, numbers, bool, str, bytes, PIL
            images and None, in dicts, lists and tuples.
        path: the path of the file.
        images: how PIL images are stored. "raw"; "jpeg" (lossy), "png", "webp" (both lossless) or
            an `Encoded` with a quality and a bounded size; a dict of these by column; or "packed":
            the encoded files, byte for byte, of an ImageFolder, a Subset or ConcatDataset of some,
            or a dataset with ``encoded`` and ``target`` methods, with all transforms live. None:
            raw; an existing file is used as it is.
        num_workers: processes that read samples; "auto": one a core. 0: this process.
        rows: samples in a chunk, the unit that is kept or lost when a build is interrupted; a
            worker loses the one that it reads, and sometimes the one before. None: by their size
            and cost. The file does not depend on it.
        allow_random: keep one draw of each sample, read with the generators of torch, NumPy and
            ``random`` seeded by its number. False: refuse a dataset that draws from one of them or
            seeds it while any sample's stored part is made, and one of which a few samples differ
            when they are read again. Draws from the dataset's own generators show only in the
            latter.
        on_error: "skip" leaves out samples that cannot be read or stored; the file lists them.
        resume: continue an unfinished build; False begins again.
        overwrite: build even if there is a file, or an unfinished build of something else. The
            old file stays in place until the new one is finished.
        compress: "zstd" (small), "blosc" (fast to read) or a `Compressed` with its level: columns
            that are large enough are compressed, in pieces of 64 KiB or a row. None: build without
            compression; an existing file may be compressed or not.
        progress: called with a `BuildProgress` now and then, on this thread.
        announce: called with the `Estimate` before anything is computed, on this thread. None: its
            `advice`, if there is some, is a CacheWarning.
        wait: if another process or thread builds this file, wait for it; False: raise.
        multiprocessing_context: how workers start, as a DataLoader takes it.
        worker_init_fn: called in each worker with its number, as a DataLoader takes it.
        shard: (rank, of), where ``of`` processes, on one machine or many, call this with the same
            dataset and path: each builds its part of the samples beside ``path`` (the fourth of
            eight: ``train.00003-of-00008.h5``), and when all are there, one of them joins them by a
            file at ``path``, which each returns. With ``wait=False`` a rank returns its own shard
            as soon as it is built, and nothing is joined: see `join`.
        check: "contents" reads a few samples again, in another process, and compares them with the
            file that is there. None: its class, length, transforms and classes are compared, and no
            sample is read.
        expect: entries of the fingerprint (see `fingerprint`) that a file that is there must have:
            ``{"torchvision": "0.29.2"}`` refuses one of another version.

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
    )
    target = Path(os.path.realpath(path))
    _refuse_no_folder(target)
    if shard is None:
        builder = _Builder(dataset, target, options)
        _have_built(builder, resume=resume, overwrite=overwrite, wait=wait)
        return builder.open(target)
    from dataloaders.cache.ranks import Ranks

    check_shard(shard)
    ranks = Ranks(target, shard)
    builder = _Builder(dataset, ranks.own, options, shard)
    builder.others = partial(ranks.others_to_write, length=length_of(dataset), wait=wait)
    if not overwrite and ranks.have_built():
        for each in (builder, _Builder(dataset, target, options)):
            each.remove_leftover()
        return builder.open(target)
    if overwrite:
        ranks.begin_anew()
    _have_built(builder, resume=resume, overwrite=overwrite, wait=wait)
    cached = builder.open(ranks.own)
    if not wait:
        return cached
    ranks.join(builder.of_dataset, options.report, anew=overwrite)
    return builder.open(target)


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


def _have_built(builder: _Builder, *, resume: bool, overwrite: bool, wait: bool) -> None:
    """Have the builder's file in place."""
    target = builder.path
    before = _identity(target)  # once: another builder may rename its file into place meanwhile
    if before is not None and not overwrite:
        builder.remove_leftover()
        return
    lock = BuildLock(builder.folder.path)
    builder.await_lock(lock, wait=wait)
    empty = False
    try:
        # Whoever was waited for has built it: also where each was told to overwrite.
        if _identity(target) == before:
            builder.build(resume=resume, overwrite=overwrite)
        builder.folder.wipe()
        empty = True
    except BaseException as error:
        empty = builder.tell_how_to_go_on(error)
        raise
    finally:
        lock.release(remove=empty)


def estimate(
    dataset: Any,
    path: str | os.PathLike[str],
    *,
    images: Choice = None,
    num_workers: int | Literal["auto"] = "auto",
    multiprocessing_context: Any = None,
) -> Estimate:
    """Estimate what `precompute` will take. Reads a few samples and writes nothing."""
    options = _Options(
        images=images,
        num_workers=num_workers,
        allow_random=True,
        skip=True,
        context=multiprocessing_context,
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


def _nobody(each: float) -> tuple[int, int]:
    return 0, 0


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

    def __post_init__(self) -> None:
        workers, rows = self.num_workers, self.rows
        if workers != "auto" and (type(workers) is not int or workers < 0):
            raise OptionError(f'num_workers={workers!r}: it must be "auto" or an int from 0 on')
        if rows is not None and (type(rows) is not int or rows < 1):
            raise OptionError(
                f"rows={rows!r}: it must be None or an int from 1 on, samples in a chunk"
            )
        if self.check not in (None, "contents"):
            raise OptionError(f'check={self.check!r}: it must be None or "contents"')


class _Builder:
    """One call of `precompute`.

    Attributes:
        folder: what the build has so far.
        path: of the file.
        others: bytes that other ranks are still to write on this disk, where a sample takes so
            many; and how many ranks do.
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
        self.others: Callable[[float], tuple[int, int]] = _nobody
        self._dataset = dataset
        self._options = options
        self._shard = shard
        self._length = length_of(dataset)
        self._part = range(self._length) if shard is None else range_of(*shard, self._length)
        self._images = Images.of(options.images)
        self._encode = True
        self._observed = options.observed or Observed.of(dataset, options.context)
        self._studied: _Studied | None = None

    # What the dataset is

    @property
    def _known(self) -> _Studied:
        """What the dataset is; it is studied once: by a build's workers, else by a look at it."""
        if self._studied is None:
            study = self._study()
            found = self._observed.findings(study, encode=self._encode)
            self._studied = self._learned(study, found)
        return self._studied

    def _study(self) -> Study:
        return Study(
            self._dataset,
            self._length,
            skip=self._options.skip,
            images=self._images,
            encode=self._encode,
        )

    @contextmanager
    def _crew(self) -> Iterator[Crew]:
        """Workers for the chunks, who have studied the dataset if nobody had."""
        study = self._study() if self._studied is None else self._studied.study
        most, context = self._most_workers, self._options.context
        start = self._options.worker_init_fn
        with Crew(
            Work(study), self._dataset, most=most, context=context, worker_init_fn=start
        ) as crew:
            if self._studied is None:
                # In workers: a file that a sample opens must not be shared by all later ones.
                found = studied_by(crew, study, self._most_workers if self._length else 0)
                self._studied = self._learned(study, found)
            yield crew

    @property
    def _most_workers(self) -> int:
        if self._options.num_workers == "auto":
            return self._cores
        return self._options.num_workers

    @property
    def _cores(self) -> int:
        """All of the machine's, where no shard is built: then the other ranks wait for this one."""
        return machine_cores() if self._shard is None else usable_cores()

    @property
    def _memory(self) -> int:
        return available_memory() * (ranks_here() if self._shard is None else 1)

    def _learned(self, study: Study, found: Findings) -> _Studied:
        options = self._options
        if found.failure is not None:
            found.failure.reraise()
        study.refuse_no_images(found)
        if options.num_workers == "auto":
            most = workers_for(found, len(self._part), cores=self._cores, memory=self._memory)
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
        return estimate_of(
            self._known.found,
            self.folder.path.parent,
            samples=len(self._part),
            num_workers=self._known.workers,
            cores=self._cores,
            rows=self._options.rows or self._chunking().rows,
            placed=self._placed_part(),
            advice=advice_for(self._dataset, self._known.found, self._images),
        )

    def _chunking(self) -> Chunking:
        """The chunks of a build that is not told how large they are."""
        return chunking_for(self._known.found, len(self._part), self._known.workers)

    @property
    def of_dataset(self) -> dict[str, Any]:
        """The fingerprint of the whole dataset."""
        return self._known.fingerprint

    @property
    def _of_file(self) -> dict[str, Any]:
        """The fingerprint of the file."""
        part = {} if self._shard is None else {"shard": shard_text(*self._shard)}
        return {**self.of_dataset, **part}

    def open(self, path: Path) -> CachedDataset:
        """The finished file, or the one that it is joined into, compared with the dataset now."""
        from dataloaders.cache.reader import CachedDataset

        options = self._options
        if options.check is None and self._studied is None:
            wanted = dict(options.expect or {})
            if path == self.path and self._shard is not None:
                wanted["shard"] = shard_text(*self._shard)
            if options.compress is not None:
                wanted["compress"] = str(options.compress)
            unread = open_unread(self._dataset, path, images=options.images, expect=wanted)
            if unread is not None:
                return unread
        self._read_as_file(path)
        known = self._known
        tails, calls = known.cut.tails, known.found.calls or ()
        expect = {**(self._of_file if path == self.path else self.of_dataset)}
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
        from dataloaders.cache.reader import CachedDataset

        asked = None if self._options.images is None else {"images": str(self._images)}
        kept = CachedDataset(path, expect=asked).index.fingerprint.get("images")
        like = Images.like(kept)
        if self._studied is None or like.rows != self._images.rows:
            # Nothing is encoded where a file is only opened.
            self._images, self._encode, self._studied = like, False, None

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
                    f"{self.path} is being built by {builder_of(self.folder.path)} "
                    "(wait=False, --no-wait); "
                    "wait for it, or give another path"
                )
            now = time.monotonic()
            if now - told >= _TELL_S:
                told = now
                self._options.report(self.folder.progress_of_others(now - started))
            time.sleep(_POLL_S)

    # Building

    def build(self, *, resume: bool, overwrite: bool) -> None:
        """Make the file; the lock is held."""
        if find_spec("h5py") is None:  # needed at the very end: told at the beginning
            raise MissingDependency(
                "building a cache needs h5py, which is not installed; install it with: "
                "pip install h5py"
            )
        if self._options.compress is not None:
            refuse_missing(self._options.compress.codec)
        if self.folder.is_leftover() or not resume:
            self.folder.wipe()
        with self._crew() as crew:
            self._build(crew, overwrite=overwrite)

    def _build(self, crew: Crew, *, overwrite: bool) -> None:
        folder, options = self.folder, self._options
        if not options.allow_random:
            self._known.study.refuse_random(self._known.found)
        chunking = folder.settle(
            self._of_file,
            len(self._part),
            options.rows,
            overwrite=overwrite,
            default=self._chunking,
        )
        folder.drop_bad(self._part, chunking, with_failures=not options.skip)
        folder.sweep()
        told = replace(self.estimate(), rows=chunking.rows)
        kept = sum(record.bytes + record.placed for record in folder.records)
        others, ranks = self.others(told.low_needed / max(1, told.samples))
        refuse_small_disk(told, folder.path.parent, kept, others=others, ranks=ranks)
        options.announce(told)
        if self._is_placeable:
            folder.place(self._laid_out, self._first_columns())
        token = os.urandom(4).hex()
        self._compute(crew, told, chunking, token)
        if folder.drop_damaged() or self._missing(chunking):
            self._compute(crew, told, chunking, token)
        self._refuse_missing(chunking)
        self._refuse_nothing_left()
        self._assemble()

    @property
    def _is_placeable(self) -> bool:
        # What is drawn anew each time must not be written by two: a killed builder's workers live
        # on for a moment. And where compressed rows will stand is not known before.
        found = self._known.found
        if found.random or self._options.compress is not None:
            return False
        return placeable(found.layouts, len(self._part))

    def _placed_part(self) -> float:
        """How many of the bytes are written where they stand in the file, from 0 to 1."""
        layouts, rows = self._known.found.layouts, len(self._part)
        if layouts is None or not self._is_placeable:
            return 0.0
        sizes = [each.size * np.dtype(each.dtype).itemsize for each in layouts.done(rows)]
        return sum(sizes[number] for number in self._first_columns()) / sum(sizes)

    def _first_columns(self) -> list[int]:
        layouts = self._known.found.layouts
        assert layouts is not None
        rows = len(self._part)
        return first_columns(layouts.done(rows), rows)

    def _laid_out(self, path: Path) -> Index:
        from dataloaders.cache.file import lay_out

        layouts = self._known.found.layouts
        assert layouts is not None
        return lay_out(path, layouts, self._about(), len(self._part))

    def _about(self) -> About:
        from dataloaders.cache.about import About

        failed = [
            (index - self._part.start, why)
            for record in self._in_order()
            for index, why in record.failed
        ]
        known = self._known
        return About(
            samples=len(self._part),
            failed=failed,
            fingerprint=self._of_file,
            head=known.cut.head,
            tail=known.cut.tail,
            compress=self._options.compress,
            attributes=known.found.attributes,
        )

    def _in_order(self) -> list[Record]:
        return sorted(self.folder.records, key=lambda record: record.chunk)

    def _compute(self, crew: Crew, told: Estimate, chunking: Chunking, token: str) -> None:
        folder, options, found = self.folder, self._options, self._known.found
        missing = self._missing(chunking)
        workers = min(self._known.workers, len(missing))
        placement = None
        if folder.placed is not None:
            sizes = folder.sizes(f"sizes.{token}", len(chunking))
            placement = folder.placed.placement(str(sizes))
        job = Job(
            choice=found.choice,
            calls=found.calls,
            allow_random=options.allow_random,
            folder=str(folder.path),
            token=token,
            chunking=chunking,
            first=self._part.start,
            skip=options.skip,
            images=self._images,
            placement=placement,
            put_off=_sure_of_more(missing, workers),
        )
        pace = Pace(len(self._part), told.bytes)
        options.report(pace.computing(folder.records))
        if not missing:
            return
        crew.dismiss(keep=workers)
        crew.hire(workers)
        finished = crew.answers(
            [Piece(job, number) for number in missing],
            named=lambda piece: (
                f"samples {job.numbers(piece.chunk)[0]} to {job.numbers(piece.chunk)[-1]}"
            ),
        )
        with (
            _told_to_stop(job.stop),
            folder.syncing() as syncing,
        ):  # its thread begins behind the workers' fork
            for done, made in enumerate(finished, 1):
                for record in made.records:
                    self._refuse_other_structure(record, job)
                    folder.keep(record)
                    options.report(pace.computing([record], more=True))
                if made.failure is not None:
                    made.failure.reraise()
                if len(missing) - done == _LAST_CHUNKS * max(1, workers):
                    syncing.soon()
        crew.dismiss()  # they end while the file is put together

    def _missing(self, chunking: Chunking) -> list[int]:
        """The numbers of the chunks that are not finished."""
        return [number for number in range(len(chunking)) if not self.folder.has(number)]

    def _refuse_missing(self, chunking: Chunking) -> None:
        missing = self._missing(chunking)
        if missing:  # a file without them would be finished, and short
            raise CacheError(
                f"{len(missing)} chunks were not made, and no worker said why; start it "
                "again with the same arguments to go on"
            )

    def _refuse_other_structure(self, new: Record, job: Job) -> None:
        known = (record for record in self.folder.records if record.structure)
        first = next(known, None)
        if first is not None and new.structure not in ("", first.structure):
            one, other = (job.numbers(record.chunk).start for record in (first, new))
            raise CacheError(
                f"samples from {one} on and from {other} on are built differently; a cache needs "
                "the same keys in the same order, and the same lengths, in all of them. Return "
                "what varies as one tensor, array, str or plain list"
            )

    def _refuse_nothing_left(self) -> None:
        if self._shard is not None:  # the others may have some: it is seen when they are joined
            return
        failed = [one for record in self.folder.records for one in record.failed]
        if failed and not any(record.rows for record in self.folder.records):
            index, why = min(failed)
            raise CacheError(
                f"none of the {len(self._part)} samples could be read; the first failed with "
                f"{why!r} (sample {index})"
            )

    def _assemble(self) -> None:
        from dataloaders.cache.file import become, lay_out, layouts_of
        from dataloaders.cache.filling import Known, fill

        folder, records, about = self.folder, self._in_order(), self._about()
        pace = Pace(len(self._part), 0)
        pace.computing(records)

        def report(done: int, whole: int) -> None:
            self._options.report(pace.assembling(done, whole))

        placed = folder.placed
        with writing(folder.path):
            try:
                layouts = layouts_of(folder.chunks(records))
                index = lay_out(folder.assembled, layouts, about)
                whole, there = folder.assembled, 0
                known: Known = ()
                if placed is not None and folder.in_place(index, records):
                    # It may have more in it, of a call that was killed here: that is written again.
                    become(placed.path, folder.assembled, index)
                    whole, known = placed.path, folder.known_blocks(records)
                    there = sum(record.placed for record in records)
                chunks = folder.chunks(records, complete=not there)
                fill(chunks, whole, index, about, placed=there, known=known, progress=report)
                folder.put_in_place(whole)
            except BaseException:
                folder.drop_assembled()
                raise

    # Endings

    def remove_leftover(self) -> None:
        """Remove the folder if its file is in place and nobody builds."""
        if not self.folder.path.is_dir():
            return
        with suppress(OSError, CacheError):  # it may well be a disk that can only be read
            lock = BuildLock(self.folder.path)
            if lock.try_acquire():
                leftover = self.folder.is_leftover()
                if leftover:
                    self.folder.wipe()
                lock.release(remove=leftover)

    def tell_how_to_go_on(self, error: BaseException) -> bool:
        """Add to ``error`` what is kept; whether nothing is, and the folder may be removed."""
        done = self.folder.samples_kept()
        if not done:
            if self.folder.is_open:
                self.folder.wipe()
            return self.folder.is_empty()
        self.folder.close()
        text = (
            f"{done} of {len(self._part)} samples are kept in {self.folder.path}; start it "
            "again with the same arguments to go on"
        )
        if isinstance(error, KeyboardInterrupt) and not error.args:
            error.args = (f"interrupted: {text}",)  # a note would not be shown before Python 3.11
        else:
            add_note(error, f"dataloaders: {text}")
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


@contextmanager
def _told_to_stop(stop: str) -> Iterator[None]:
    """If the block ends with an error, workers, who look for the file ``stop``, end where they are.

    Ctrl-C is one, too; whatever it is, it goes on.
    """
    try:
        yield
    except BaseException:
        with suppress(OSError):  # then they end with their chunks
            Path(stop).touch()
        raise


def _sure_of_more(missing: list[int], workers: int) -> int:
    """Return the chunk before which a worker is usually given another one after the one it has.

    Each worker has AHEAD chunks while chunks are left. It is not certain: a fast worker may take
    all that are left while a slow one makes its last. A chunk that the slow worker then puts off is
    not finished, and is made again by another `_compute`.
    """
    return missing[-(AHEAD + 1) * workers] if 0 < (AHEAD + 1) * workers <= len(missing) else 0


def _is_skip(on_error: object) -> bool:
    if on_error not in ("raise", "skip"):
        raise OptionError(f'on_error={on_error!r}: it must be "raise" or "skip"')
    return on_error == "skip"


def _identity(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns
