"""The dataset of a cache: what a few samples tell of it, and the finished cache opened for it.

dataset ──study.py, elsewhere or here, once──> Known: cut, fingerprint, workers ──> estimate
train.h5 ──class, length, head, classes compared, no sample read──> CachedDataset, tails live

A file of an earlier version does not say where the heads' parts stand; then samples have to tell.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dataloaders.cache.build.advice import advice_for
from dataloaders.cache.build.estimation import Estimate, estimate_of, rows_of_part, workers_for
from dataloaders.cache.build.fingerprint import (
    PACKAGES,
    fingerprint_of,
    length_of,
    package_versions,
    static_fingerprint,
)
from dataloaders.cache.build.parts import range_of
from dataloaders.cache.build.progress import BuildProgress
from dataloaders.cache.build.study import Findings, Study, studied
from dataloaders.cache.format.attributes import attributes_held
from dataloaders.cache.format.changes import changes
from dataloaders.cache.format.compress import Compressed
from dataloaders.cache.read.reader import CachedDataset
from dataloaders.cache.sample.cut import Call, Cut, Finish, cuts_of, whole
from dataloaders.cache.sample.images import Choice, Images
from dataloaders.cache.sample.packed import packed
from dataloaders.errors import CacheWarning, OptionError
from dataloaders.machine.resources import available_memory, machine_cores, ranks_here, usable_cores
from dataloaders.observing import worker_of

__all__ = ["Options", "Source", "silent"]


def silent(told: object) -> None:
    """Report nothing."""


@dataclass(frozen=True)
class Options:
    """What `precompute` is told, checked; ``loader``: whose worker observes the dataset.

    Raises:
        OptionError: a value that it cannot take.
    """

    num_workers: int | Literal["auto"] = "auto"
    images: Choice = None
    rows: int | None = None
    allow_random: bool = False
    on_error: Literal["raise", "skip"] = "skip"
    report: Callable[[BuildProgress], None] = silent
    announce: Callable[[Estimate], None] = silent
    compress: Compressed | None = None
    context: Any = None
    worker_init_fn: Callable[[int], None] | None = None
    check: Literal["contents"] | None = None
    expect: Mapping[str, Any] | None = None
    one_file: bool | None = None
    resume: bool = True
    overwrite: bool = False
    wait: bool = True
    loader: Any = None

    def __post_init__(self) -> None:
        workers, rows = self.num_workers, self.rows
        if self.on_error not in ("raise", "skip"):
            raise OptionError(f'on_error={self.on_error!r}: it must be "raise" or "skip"')
        if workers != "auto" and (type(workers) is not int or workers < 0):
            raise OptionError(f'num_workers={workers!r}: it must be "auto" or an int from 0 on')
        if rows is not None and (type(rows) is not int or rows < 1):
            raise OptionError(
                f"rows={rows!r}: it must be None or an int from 1 on, samples in a part"
            )
        if self.check not in (None, "contents"):
            raise OptionError(f'check={self.check!r}: it must be None or "contents"')

    @property
    def skip(self) -> bool:
        """Whether samples that fail are left out."""
        return self.on_error == "skip"


@dataclass(frozen=True)
class _Known:
    """What a dataset was found to be, and what follows from it."""

    study: Study
    found: Findings
    workers: int
    fingerprint: dict[str, Any]

    @property
    def cut(self) -> Cut:
        """The one that was chosen."""
        return self.study.cuts[self.found.choice]


class Source:
    """A dataset of which a cache is built or opened.

    Args:
        dataset: the user's.
        options: of the call.
        shard: the rank that builds, and how many there are; None: it builds alone.

    Attributes:
        length: of the dataset.
        samples: those that this rank builds.
        images: how they are kept.
    """

    def __init__(
        self, dataset: Any, options: Options, shard: tuple[int, int] | None = None
    ) -> None:
        self.dataset = dataset
        self.length = length_of(dataset)
        self.samples = range_of(*(shard or (0, 1)), self.length)
        self.images = Images.of(options.images)
        self._options = options
        self._known: _Known | None = None
        # All of the machine's, where no shard is built: then the other ranks wait for this one.
        self._cores = machine_cores() if shard is None else usable_cores()
        self._memory_of = ranks_here() if shard is None else 1

    @property
    def known(self) -> _Known:
        """What the dataset is; it is studied once, in a process of its own or in this one."""
        if self._known is None:
            self._known = self._studied(encode=True)
        return self._known

    def _studied(self, *, encode: bool) -> _Known:
        options = self._options
        study = Study(
            self.dataset, self.length, skip=options.skip, images=self.images, encode=encode
        )
        if options.num_workers == 0:
            found = study()
        else:
            loader = options.loader
            if loader is None:
                loader = worker_of(self.dataset, options.context)
                loader.worker_init_fn = options.worker_init_fn
            found = studied(loader, study)
        study.refuse_no_images(found)
        if isinstance(options.num_workers, int):
            workers = options.num_workers
        else:
            memory = available_memory() * self._memory_of
            most = workers_for(found, len(self.samples), cores=self._cores, memory=memory)
            workers = max(1, most)  # "auto" never opens the dataset's files in this process
        fingerprint = fingerprint_of(study, found, self.dataset, self.length)
        fingerprint["compress"] = None if options.compress is None else str(options.compress)
        calls = found.calls or ()
        are_json = all(type(key) in (int, str) for _, path in calls for key in path)
        if found.at_leaves and are_json:
            fingerprint["calls"] = [[number, list(path)] for number, path in calls]
        return _Known(study, found, workers, fingerprint)

    def estimate(self, folder: Path, rows: int) -> Estimate:
        """Return what building in ``folder`` will take, with parts of so many rows; 0: as usual."""
        options, found = self._options, self.known.found
        return estimate_of(
            found,
            folder,
            samples=len(self.samples),
            num_workers=self.known.workers,
            cores=self._cores,
            rows=rows or options.rows or rows_of_part(found, len(self.samples)),
            one_file=options.one_file,
            advice=advice_for(self.dataset, found, self.images),
        )

    def open(self, path: Path) -> CachedDataset:
        """Return the finished cache, or that of one rank, compared with the dataset now.

        Warns:
            CacheWarning: it was built with other versions of torch, torchvision, Pillow or NumPy.

        Raises:
            CacheError: there is no cache, or it is of something else; says what differs.
        """
        options = self._options
        wanted = dict(options.expect or {})
        if options.images is not None:
            wanted["images"] = str(Images.of(options.images))
        if options.compress is not None:
            wanted["compress"] = str(options.compress)
        cached = CachedDataset(path, expect=wanted)
        if options.check is None and self._known is None and self._open_unread(cached):
            return cached
        like = Images.like(cached.index.fingerprint.get("images"))
        if self._known is None or like.rows != self.images.rows:
            self.images = like
            self._known = self._studied(encode=False)
        known = self._known
        compared = {**known.fingerprint, **wanted}
        compared.pop("calls", None)  # files of earlier versions do not have them
        for name in {"images", "compress"} - wanted.keys():  # it may be kept in any way
            compared.pop(name, None)
        cached.refuse_changed(compared)
        tails, calls = known.cut.tails, known.found.calls or ()
        if known.found.at_leaves:
            cached.with_tails([(keys, tails[number]) for number, keys in calls])
        else:  # FiveCrop gives a tuple, and what is left takes all of it
            cached.transform = Finish(tails, calls)
        cached.refuse_other_classes(known.found.attributes)
        return cached

    def _open_unread(self, cached: CachedDataset) -> bool:
        """Have the dataset's live transforms in the cache; whether no sample is needed to tell."""
        says = cached.index.fingerprint
        calls = _calls_in(says.get("calls"))
        if calls is None:
            return False
        kept = Images.like(says.get("images"))
        if kept.packed:
            cuts = [packed(self.dataset)]
        else:
            cuts = [
                *cuts_of(self.dataset, images=kept.rows == "images")[0],
                whole(self.dataset),
            ]
        cut = next((cut for cut in cuts if list(cut.head) == says.get("head")), None)
        cached.refuse_changed(static_fingerprint(self.dataset, cut or cuts[0]))
        if cut is None or {number for number, _ in calls} != set(range(len(cut.tails))):
            return False
        _warn_of_versions(cached.path, says)
        cached.refuse_other_classes(attributes_held(self.dataset))
        cached.with_tails([(keys, cut.tails[number]) for number, keys in calls])
        return True


def _warn_of_versions(path: Path, says: Mapping[str, Any]) -> None:
    built = {name: says[name] for name in PACKAGES if name in says}
    changed = changes(built, package_versions(), "when it was built")
    if changed:
        warnings.warn(
            f"the cache {path} holds what other versions computed ({'; '.join(changed)}). Its rows "
            "stay as they are; to have an error instead, give expect= the versions that you need, "
            "and to compute them again, build it with overwrite=True (--overwrite)",
            CacheWarning,
            stacklevel=2,
        )


def _calls_in(found: Any) -> Sequence[Call] | None:
    """Return what a fingerprint says of calls; None if it says nothing that makes sense."""
    try:
        calls = [(number, tuple(path)) for number, path in found]
    except (TypeError, ValueError):
        return None
    good = all(type(each) in (int, str) for n, path in calls for each in (n, *path))
    return calls if good else None
