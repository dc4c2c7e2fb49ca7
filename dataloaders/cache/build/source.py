"""Describe the dataset of a cache from a few samples, and open its finished cache.

dataset ──study.py, elsewhere or here, once──> cut, fingerprint ──> workers, estimate
train.h5 ──class, length, head, classes compared, no sample read──> CachedDataset, tails live

A file of an earlier version does not say where the heads' parts stand: then samples are read.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from torch.utils.data import IterableDataset, MapDataPipe

from dataloaders.cache.build.estimation import Estimate
from dataloaders.cache.build.parts import BuildFolder, samples_of
from dataloaders.cache.build.progress import BuildProgress
from dataloaders.cache.build.reading import IN_THIS_PROCESS, Failure
from dataloaders.cache.build.rows import PART_BYTES, PART_SECONDS, Maker
from dataloaders.cache.build.study import Study, described, ways_to_cut
from dataloaders.cache.build.values import digests_of_values
from dataloaders.cache.format.attributes import attributes_of
from dataloaders.cache.format.changes import changes
from dataloaders.cache.format.compress import Compressed
from dataloaders.cache.format.disk import free_bytes
from dataloaders.cache.format.entries import MOST_SHARDS
from dataloaders.cache.format.writing import About
from dataloaders.cache.read.reader import ACCEPTABLE, CachedDataset
from dataloaders.cache.sample.cut import Call, Cut
from dataloaders.cache.sample.images import Choice, Images
from dataloaders.errors import CacheError, CacheWarning, OptionError
from dataloaders.machine.resources import available_memory, machine_cores, ranks_here, usable_cores
from dataloaders.observing import Unobserved, held, observe, worker_of
from dataloaders.options import option

_MOST_SMALL_PARTS, _SMALL_PART_SECONDS = 64, 1.0
_BYTES_PER_WORKER = 2 * PART_BYTES + (300 << 20)
_FEW_SECONDS = 2.0

ONE_FILE_BYTES = 128 << 20
"""Parts that take no more than this together become one file."""

_PACKAGES = {"torch": "torch", "torchvision": "torchvision", "PIL": "pillow", "numpy": "numpy"}
"""By the name of a fingerprint's entry, the package whose version it is."""


@dataclass(frozen=True)
class Options:
    """The options of `precompute`, by its names; ``loader``: whose worker observes the dataset.

    Raises:
        OptionError: a value that one cannot take.
    """

    images: Choice = None
    num_workers: int | Literal["auto"] = "auto"
    rows: int | None = None
    allow_random: bool = False
    on_error: Literal["raise", "skip"] = "skip"
    resume: bool = True
    overwrite: bool = False
    compress: str | Compressed | None = None
    progress: Callable[[BuildProgress], None] | None = None
    announce: Callable[[Estimate], None] | None = None
    wait: bool = True
    multiprocessing_context: Any = None
    worker_init_fn: Callable[[int], None] | None = None
    shard: tuple[int, int] | None = None
    check: Literal["contents"] | None = None
    expect: Mapping[str, Any] | None = None
    single_file: bool | None = None
    build_id: str | None = None
    loader: Any = None

    def __post_init__(self) -> None:
        for name, holds, rule in (
            ("on_error", self.on_error in ("raise", "skip"), "'raise' or 'skip'"),
            ("num_workers", _is_count(self.num_workers, 0, "auto"), "'auto' or an int from 0 on"),
            ("rows", _is_count(self.rows, 1, None), "None or an int from 1 on, samples in a part"),
            ("check", self.check in (None, "contents"), "None or 'contents'"),
            (
                "shard",
                self.shard is None or _is_shard(self.shard),
                "None or (rank, of), such as (3, 8): the shard of this process, counted from 0, "
                f"and how many there are, up to {MOST_SHARDS}",
            ),
        ):
            if not holds:
                raise OptionError(f"{option(name, getattr(self, name))}: it must be {rule}")
        if self.shard is None:
            return
        if not self.resume:
            raise OptionError(
                f"resume=False with {option('shard')}: another rank may have made its parts "
                "already; delete the folder of the parts before the ranks are started"
            )
        if self.overwrite and not self.build_id:
            raise OptionError(
                f"{option('overwrite', True)} with {option('shard', self.shard)} needs "
                f"{option('build_id')}, a text that all ranks share and that is another one for "
                "each build, such as a job's number: a rank that comes late would take the new "
                "cache for an old one"
            )


def _is_count(value: Any, least: int, other: str | None) -> bool:
    return value == other or (type(value) is int and value >= least)


def _is_shard(value: Any) -> bool:
    is_pair = isinstance(value, tuple) and [type(each) for each in value] == [int, int]
    return is_pair and 0 <= value[0] < value[1] <= MOST_SHARDS


class Source:
    """A dataset of which a cache is built or opened."""

    def __init__(self, dataset: Any, options: Options) -> None:
        self.dataset = dataset
        self.options = options
        self.length = _length_of(dataset)
        self.images = Images.of(options.images)
        how = options.compress
        self.compress = how if how is None or isinstance(how, Compressed) else Compressed(how)
        # All of the machine's, where no shard is built: then the other ranks wait for this one.
        self._cores = machine_cores() if options.shard is None else usable_cores()
        self._memory_of = ranks_here() if options.shard is None else 1

    @cached_property
    def study(self) -> Study:
        """What a few samples show; they are read once, in a process of its own or in this one.

        CacheError: the process that reads them cannot.
        """
        options = self.options
        study = Study(
            self.dataset,
            self.length,
            skip=options.on_error == "skip",
            images=self.images,
            compress=self.compress,
        )
        if options.num_workers == 0:
            with IN_THIS_PROCESS:
                study()
        else:
            loader = options.loader
            if loader is None:
                loader = worker_of(self.dataset, options.multiprocessing_context)
                loader.worker_init_fn = options.worker_init_fn
            try:
                answer = observe(loader, study.report)
            except Unobserved as error:
                name = type(self.dataset).__name__
                raise CacheError(f"{name} could not be studied: {error}") from error
            study.found = answer.reraise() if isinstance(answer, Failure) else answer
        study.refuse_no_images()
        return study

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What a cache of the dataset depends on, and where its rows go through the transforms."""
        says = {**self.study.contents, **_versions()}
        says["compress"] = None if self.compress is None else str(self.compress)
        says["calls"] = [[number, list(path)] for number, path in self.study.found.calls]
        if self.options.overwrite and self.options.build_id:
            says["build"] = self.options.build_id
        return says

    def new_fingerprint(self) -> dict[str, Any]:
        """Return the fingerprint of a new build; one that overwrites has an id of its own."""
        own = {"build": os.urandom(8).hex()} if self.options.overwrite else {}
        return {**own, **self.fingerprint}

    def changed(self, before: Mapping[str, Any], when: str) -> list[str]:
        """Return what differs from the fingerprint of a build, but for the versions of packages."""
        now = {name: e for name, e in self.fingerprint.items() if name not in _PACKAGES}
        return changes(before, now, when)

    @property
    def samples(self) -> range:
        """The samples of this rank."""
        return samples_of(*(self.options.shard or (0, 1)), self.length)

    @property
    def rows_of_part(self) -> int:
        """The samples of a part: as many as fit into a worker's memory, and half a minute.

        There are as many parts for each worker, and up to 64 small ones, so that no worker is left
        waiting for the last one.
        """
        _, of = self.options.shard or (0, 1)
        samples = max(1, -(-self.length // of))
        least = -(-self.length // MOST_SHARDS)
        if self.options.rows:
            return min(max(self.options.rows, least), samples)
        found, workers = self.study.found, max(1, self.workers)
        seconds = found.row_seconds or 1e-9
        rows = max(1, int(min(PART_BYTES / found.row_memory, PART_SECONDS / seconds)))
        wanted = round(seconds * samples / _SMALL_PART_SECONDS)
        parts = max(math.ceil(samples / rows), min(_MOST_SMALL_PARTS, wanted))
        if parts > 1:
            parts = math.ceil(parts / workers) * workers
        return max(math.ceil(samples / parts), least)

    @property
    def is_small(self) -> bool:
        """Whether all samples will take so little that their parts become one file."""
        return self.study.found.row_bytes * self.length <= ONE_FILE_BYTES

    @property
    def workers(self) -> int:
        """How many processes read samples. "auto": one a core, if there is work and memory for it.

        At least one: "auto" never opens the dataset's files in this process.
        """
        if isinstance(self.options.num_workers, int):
            return self.options.num_workers
        samples = len(self.samples)
        if samples * self.study.found.row_seconds < _FEW_SECONDS:
            return 1
        memory = available_memory() * self._memory_of
        return max(1, min(self._cores, memory // _BYTES_PER_WORKER, samples))

    def maker(self, folder: BuildFolder) -> Maker:
        """Return what makes the parts of the build in this folder."""
        study, options = self.study, self.options
        about = About(
            samples=0,
            fingerprint=folder.fingerprint,
            head=study.cut.head,
            tail=study.cut.tail,
            compress=self.compress,
            attributes=study.found.attributes,
        )
        return Maker(
            study.cut,
            study.found.calls,
            options.allow_random,
            options.on_error == "skip",
            self.images,
            folder,
            about,
        )

    def estimate(self, folder: Path) -> Estimate:
        """Return what building this rank's samples in ``folder`` will take."""
        found, samples = self.study.found, len(self.samples)
        waits, one_file = self.options.shard is None or self.options.wait, self.options.single_file
        if one_file is None:
            one_file = self.is_small
        size = round(found.row_bytes * samples)
        is_copied = one_file and waits and self.rows_of_part < self.length
        return Estimate(
            samples=samples,
            bytes=size,
            seconds=found.row_seconds * samples / max(1, min(self.workers, self._cores)),
            disk_needed=2 * size if is_copied else size,
            disk_free=free_bytes(folder),
            num_workers=self.workers,
            rows=self.rows_of_part,
        )

    def open(self, path: Path, *, is_whole: bool = True) -> CachedDataset:
        """Return the finished cache, or unless it ``is_whole`` a rank's, compared with the dataset.

        Raises:
            CacheError: there is no cache, or it is of something else; says what differs.
        """
        options = self.options
        wanted = dict(options.expect or {})
        if options.images is not None:
            wanted["images"] = str(self.images)
        if self.compress is not None:
            wanted["compress"] = str(self.compress)
        cached = CachedDataset(path, expect=wanted)
        if is_whole:
            cached.refuse_part()
        says, is_built = cached.index.fingerprint, "study" in vars(self)
        unread = None if is_built or options.check is not None else self._unread(cached)
        if unread is not None:
            cut, calls = unread
            classes = attributes_of(self.dataset, held)
            self._warn_of_values(cached)
        else:
            like = Images.like(says.get("images"))
            if not is_built or like.rows != self.images.rows:
                self.images = like
                vars(self).pop("study", None)
            found = self.study.found
            cut, calls, classes = self.study.cut, found.calls, found.attributes
            own = {name: e for name, e in self.study.contents.items() if name != "images"}
            cached.refuse_changed({**own, **wanted})
        cached.refuse_other_classes(classes)
        if not is_built:  # else the build has warned
            warn_of_versions(says, path)
        cached.with_tails(cut.tails_of(calls))
        return cached

    def _warn_of_values(self, cached: CachedDataset) -> None:
        """Warn if the dataset's labels or the like are others than when the cache was built."""
        now = digests_of_values(self.dataset)
        names = [name for name in now if cached.index.fingerprint.get(name, now[name]) != now[name]]
        if names:
            warnings.warn(
                f"{cached.path}: the {', '.join(names)} in {type(self.dataset).__name__} changed "
                "since it was built, and its rows are those of then. If samples depend on this, "
                f"build it again with {option('overwrite', True)}; to have an error instead, give "
                f"{option('check', 'contents')}",
                CacheWarning,
                stacklevel=2,
            )

    def _unread(self, cached: CachedDataset) -> tuple[Cut, Sequence[Call]] | None:
        """Compare the dataset with the cache; return its cut and calls, if no sample is needed."""
        says = cached.index.fingerprint
        calls = _calls_in(says.get("calls"))
        if calls is None:  # it is of an earlier version
            return None
        cuts, _ = ways_to_cut(self.dataset, Images.like(says.get("images")))
        accepted = {n: e for n, e in (self.options.expect or {}).items() if n in ACCEPTABLE}
        head = cached.index.head  # the fingerprint's may be anything
        cut = next((cut for cut in cuts if cut.head == head), None)
        if cut is None and "head" in accepted:  # the texts alone may differ
            cut = next((cut for cut in cuts if len(cut.head) == len(head)), None)
        cached.refuse_changed({**described(self.dataset, self.length, cut or cuts[0]), **accepted})
        if cut is None or {number for number, _ in calls} != set(range(len(cut.tails))):
            return None
        return cut, calls


def _calls_in(found: Any) -> Sequence[Call] | None:
    """Return what a fingerprint says of calls; None if it says nothing that makes sense."""
    try:
        calls = [(number, tuple(path)) for number, path in found]
    except (TypeError, ValueError):
        return None
    good = all(type(each) in (int, str) for n, path in calls for each in (n, *path))
    return calls if good else None


def _length_of(dataset: Any) -> int:
    if isinstance(dataset, (IterableDataset, MapDataPipe)):
        why = "has no samples by index"
    elif not hasattr(type(dataset), "__getitem__"):
        why = "has no __getitem__"
    else:
        try:
            return len(dataset)
        except (TypeError, NotImplementedError, ValueError, OverflowError) as error:
            why = f"has no len() ({error})"
    raise OptionError(
        f"{type(dataset).__name__} {why}, and a cache is built of samples by index; give a "
        "map-style dataset, with __len__ and __getitem__"
    )


def warn_of_versions(says: Mapping[str, Any], path: Path) -> None:
    """Warn if other versions of packages than now computed what says this of itself."""
    built = {name: says[name] for name in _PACKAGES if name in says}
    if changed := changes(built, _versions(), "when it was built"):
        warnings.warn(
            f"{path} holds what other versions computed ({'; '.join(changed)}). Its rows stay as "
            "they are; to have an error instead, give expect= the versions that you need, and to "
            f"compute them again, build it with {option('overwrite', True)}",
            CacheWarning,
            stacklevel=2,
        )


def _versions() -> dict[str, str | None]:
    """Return the version of each of `_PACKAGES`; None: not installed."""
    found: dict[str, str | None] = {}
    for name, package in _PACKAGES.items():
        try:
            found[name] = version(package)
        except PackageNotFoundError:
            found[name] = None
    return found
