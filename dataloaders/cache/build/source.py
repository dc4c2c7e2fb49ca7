"""The dataset of a cache: what a few samples tell of it, and the finished cache opened for it.

dataset ──study.py, elsewhere or here, once──> Known: cut, fingerprint, workers ──> estimate
train.h5 ──compared with what the dataset says, or with what is known──> CachedDataset
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataloaders.cache.build.advice import advice_for
from dataloaders.cache.build.estimation import Estimate, estimate_of, rows_of_part, workers_for
from dataloaders.cache.build.findings import Findings
from dataloaders.cache.build.fingerprint import fingerprint_of, length_of
from dataloaders.cache.build.observed import Observed
from dataloaders.cache.build.opening import calls_text, open_unread
from dataloaders.cache.build.options import Options
from dataloaders.cache.build.parts import range_of
from dataloaders.cache.build.study import Study
from dataloaders.cache.read.reader import CachedDataset
from dataloaders.cache.sample.cut import Cut, Finish
from dataloaders.cache.sample.images import Images
from dataloaders.machine.resources import available_memory, machine_cores, ranks_here, usable_cores

__all__ = ["Known", "Source"]


@dataclass(frozen=True)
class Known:
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
        dataset: the user's.
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
        self._shard = shard
        self._encode = True
        self._observed = options.observed
        self._studied: Known | None = None

    @property
    def known(self) -> Known:
        """What the dataset is; it is studied once, in a process of its own or in this one."""
        if self._studied is None:
            options = self._options
            study = Study(
                self.dataset,
                self.length,
                skip=options.skip,
                images=self.images,
                encode=self._encode,
            )
            if options.num_workers == 0 and self._observed is None:
                found = study()
            else:
                if self._observed is None:
                    self._observed = Observed.of(
                        self.dataset, options.context, options.worker_init_fn
                    )
                found = self._observed.findings(study, encode=self._encode)
            self._studied = self._learned(study, found)
        return self._studied

    @property
    def cores(self) -> int:
        """All of the machine's, where no shard is built: then the other ranks wait for this one."""
        return machine_cores() if self._shard is None else usable_cores()

    def _learned(self, study: Study, found: Findings) -> Known:
        options = self._options
        study.refuse_no_images(found)
        if options.num_workers == "auto":
            memory = available_memory() * (ranks_here() if self._shard is None else 1)
            most = workers_for(found, len(self.samples), cores=self.cores, memory=memory)
            workers = max(1, most)  # "auto" never opens the dataset's files in this process
        else:
            workers = options.num_workers
        fingerprint = fingerprint_of(study, found, self.dataset, self.length)
        fingerprint["compress"] = None if options.compress is None else str(options.compress)
        if found.at_leaves and (calls := calls_text(found.calls or ())) is not None:
            fingerprint["calls"] = calls
        return Known(study, found, workers, fingerprint)

    def estimate(self, folder: Path, rows: int) -> Estimate:
        """Return what building in ``folder`` will take, with parts of so many rows; 0: as usual."""
        options, found = self._options, self.known.found
        return estimate_of(
            found,
            folder,
            samples=len(self.samples),
            num_workers=self.known.workers,
            cores=self.cores,
            rows=rows or options.rows or rows_of_part(found, len(self.samples)),
            one_file=options.one_file,
            advice=advice_for(self.dataset, found, self.images),
        )

    def open(self, path: Path) -> CachedDataset:
        """The finished cache, or that of one rank, compared with the dataset now."""
        options = self._options
        if options.check is None and self._studied is None:
            wanted = dict(options.expect or {})
            if options.compress is not None:
                wanted["compress"] = str(options.compress)
            unread = open_unread(self.dataset, path, images=options.images, expect=wanted)
            if unread is not None:
                return unread
        self._read_as_file(path)
        known = self.known
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
        asked = None if self._options.images is None else {"images": str(self.images)}
        kept = CachedDataset(path, expect=asked).index.fingerprint.get("images")
        like = Images.like(kept)
        if self._studied is None or like.rows != self.images.rows:
            # Nothing is encoded where a file is only opened.
            self.images, self._encode, self._studied = like, False, None
