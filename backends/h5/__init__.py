"""Read the deterministic part of each sample from a cache: HDF5 files, mapped into memory.

dataset ──precompute──> train.h5 ──map──> rows ──┬──> raw images, crops and flips: whole batches
                                                 │    from the map into the batch, by a few threads
                                                 └──> anything else: sample by sample, as stock;
                                                      its floats are still made a batch at once

session.py   the cache in place of the dataset    windows.py  crops and flips as windows
batches.py   whole batches, proved to be torch's  draws.py    torch's random numbers for a batch
images.py    windows of images, copied            floats.py   floats of samples made one by one
threads.py   a batch shared among threads

Order and workers are torch's: stock iterates the loader, with the cache in place of the dataset.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import warnings
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch.utils.data import BatchSampler, default_collate

from dataloaders import registry
from dataloaders.backend import Backend, Session, Specification
from dataloaders.cache import CachedDataset, precompute
from dataloaders.cache.build.source import Options, Source
from dataloaders.cache.format.index import Index
from dataloaders.cache.read.notes import Note
from dataloaders.cache.sample.cut import cut_of, whole
from dataloaders.cache.sample.images import Choice, Images
from dataloaders.errors import BackendUnavailable, CacheError, OptionError
from dataloaders.observing import Unobserved
from dataloaders.plan import Plan
from dataloaders.specification import other_iteration
from dataloaders.tuning.learned import cache_folder

from .batches import proved
from .images import obstacle_in
from .session import H5Session

__all__ = ["H5"]


@dataclass(frozen=True)
class H5(Backend):
    """Reads samples from a cache, which is built at the first ``iter()`` if it does not exist.

    The samples and their order equal torch's. What the dataset's transforms do before the first
    random one comes from the file; the rest runs live. If images are stored raw, and the rest
    consists of torchvision's crops and flips and of what makes tensors or floats, whole batches are
    made at once, if samples of this very cache prove that the result is torchvision's own. The
    random numbers then come from a separate generator, seeded by torch's base seed of the epoch;
    with ``seed=`` they are those that stock gives each sample.

    Attributes:
        path: the path of the file; None: one in the user's cache folder. A `CachedDataset` as the
            loader's dataset is read as it is, unless an option says more.
        build: "if_missing", or "never" for programs that must not spend the time and the disk.
        images: how PIL images are stored, as in `precompute`: "raw", "jpeg", "png", "webp", an
            `Encoded`, or "packed" for the dataset's own files. None: raw; an existing cache is used
            as it is.
        check: "contents" also compares a few samples with an existing cache, read in a separate
            process; None compares class, length, transforms, classes and the indices of a Subset,
            and reads no sample.
        expect: entries of its fingerprint that the cache must have, as in `precompute`:
            ``{"torchvision": "0.29.2"}``. "dataset" and "head" count in place of the dataset's.
        threads: how many threads at most make a batch, in this process or in each worker; None: as
            many as `torch.get_num_threads` says, and no more than this rank's cores.
        puts_off: whether images that end as floats are returned as bytes, for prefetch to finish
            on the device; prefetch sets it.

    Raises:
        OptionError: an option has a value that it cannot take.
    """

    path: str | os.PathLike[str] | None = None
    build: Literal["if_missing", "never"] = "if_missing"
    images: Choice = None
    check: Literal["contents"] | None = None
    expect: Mapping[str, Any] | None = None
    threads: int | None = None
    puts_off: bool = field(default=False, repr=False)

    name: ClassVar[str] = "h5"

    def __post_init__(self) -> None:
        if self.build not in ("if_missing", "never"):
            raise OptionError(f"H5(build={self.build!r}): must be 'if_missing' or 'never'")
        if self.build == "never" and self.path is None:
            raise OptionError("H5(build='never') needs a path: path='train.h5'")
        if self.check not in (None, "contents"):
            raise OptionError(f"H5(check={self.check!r}): must be None or 'contents'")
        if self.threads is not None and (type(self.threads) is not int or self.threads < 1):
            raise OptionError(f"H5(threads={self.threads!r}): must be None or an int from 1 on")
        Images.of(self.images)

    def explain(self, loader: Specification) -> Plan:
        """Return where each stage runs, and whether the file is there; build nothing."""
        try:
            obstacle = self._obstacle(loader)
            path = self._known_path(loader)
            built = path is not None and os.path.exists(path)
            if obstacle is not None:
                return Plan(self.name, obstacle=obstacle)
            # Stock iterates the cache, which is not a dataset in memory even if the loader's is.
            plan = registry.load("stock")(gather=False).explain(loader)  # type: ignore[call-arg]
            kept = self._kept_images(path)
            images = "" if kept == str(Images()) else f" with images as {kept}"
            where = f"a cache in {cache_folder() / 'h5'}" if path is None else os.fspath(path)
            later = "" if built else ", built at the first iter() if missing"
            how = {"fetch": f"rows of {where}{images}{later}"}
            if kept != "packed":  # then all transforms run each time
                how["augment"] = _describe_live(loader.dataset)
            stages = tuple(
                replace(stage, how=how.get(stage.name, stage.how))
                for stage in plan.stages
                if stage.name != "decode" or kept != str(Images())
            )
            notes = [note for note in plan.notes if not note.startswith("fetched")]
            why = self._by_sample(loader) or (self._unproved(loader) if built else None)
            notes.append(
                "batches are made at once if a few rows prove the result equal"
                if why is None
                else f"samples are made one by one: {why}"
            )
            return Plan(self.name, stages, plan.delivers, notes=tuple(notes))
        except Exception as error:  # a loader may hold anything; explaining it must not fail
            return Plan(self.name, obstacle=f"this loader could not be read: {error!r}")

    def takes_ahead(self, loader: Specification) -> bool:
        """Return whether no user code makes batches in this process."""
        try:
            if loader.num_workers > 0:
                return registry.load("stock")().takes_ahead(loader)
            return self._obstacle(loader) is None and self._by_sample(loader) is None
        except Exception:  # a loader may hold anything
            return False

    def open(self, loader: Specification) -> Session:
        """Open a session; its first epoch opens the file, or builds it."""
        obstacle = self._obstacle(loader)
        if obstacle is not None:
            raise BackendUnavailable(str(Plan(self.name, obstacle=obstacle)))
        return H5Session(self, loader)

    def cached(self, loader: Specification) -> CachedDataset:
        """Open the cache of the loader's dataset, or build it if it is missing and may be built.

        Raises:
            CacheError: the file belongs to another dataset, cannot be built, or is missing and may
                not be.
        """
        if self._reads_as_it_is(loader):
            return loader.dataset  # type: ignore[return-value]
        path = self._path(loader)
        if os.path.exists(path) or self.build == "never":
            # Only for check=, or of an older file, a worker of the loader reads a few samples.
            options = Options(
                images=self.images, check=self.check, expect=self.expect, loader=loader
            )
            return Source(loader.dataset, options).open(Path(os.path.realpath(path)))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            advice = "give a path in a folder that can be written to"
            if self.path is None:
                advice = (
                    "set DATALOADERS_CACHE to a folder that can be written to, or give "
                    'H5("train.h5") as the backend'
                )
            raise CacheError(
                f"{path.parent} cannot be created or read ({error.strerror}); {advice}"
            ) from error
        print(f"backend 'h5' builds {path}", file=sys.stderr)
        from dataloaders.measuring.progress import ProgressLine

        with closing(ProgressLine()) as line:
            return precompute(
                loader.dataset,
                path,
                images=self.images,
                expect=self.expect,
                progress=lambda now: line(f"h5  {now}"),
                multiprocessing_context=loader.multiprocessing_context,
                worker_init_fn=loader.worker_init_fn if loader.num_workers else None,
            )

    def _obstacle(self, loader: Specification) -> str | None:
        if (other := other_iteration(loader)) is not None:
            return f"{other}; use backend='stock'"
        if loader._dataset_kind != torch.utils.data._DatasetKind.Map:
            return "an iterable dataset has no samples by index; give it __getitem__ and __len__"
        if loader.batch_sampler is None and isinstance(loader.sampler, BatchSampler):
            return "the sampler gives lists of indices; give it as batch_sampler="
        if not hasattr(type(loader.dataset), "__len__"):
            return f"{type(loader.dataset).__name__} has no __len__, so its length is not known"
        if self.build == "never" and self.path is not None and not os.path.exists(self.path):
            return (
                f"there is no cache at {os.fspath(self.path)!r} and build='never'; build it with: "
                "dataloaders cache build"
            )
        return None

    def _by_sample(self, loader: Specification) -> str | None:
        """Say why batches of ``loader`` are not made at once, if the transforms show it."""
        if loader.batch_sampler is None:
            return "batch_size=None: there are no batches"
        if loader.collate_fn is not default_collate:
            return "collate_fn is not torch's default_collate"
        text = self._kept_images(self._known_path(loader))
        kept = Images.like(text)
        if not kept.packed:
            cut, _ = cut_of(loader.dataset, images=kept.rows == "images")
            for why in map(obstacle_in, () if cut is None else cut.tails):
                if why is not None:
                    return why
        if kept.rows == "any":
            return None
        return f"images stored as {text} are decoded, and transformed by torchvision"

    def _unproved(self, loader: Specification) -> str | None:
        """Say why batches of the existing cache are not made at once; None: they are."""
        with warnings.catch_warnings(), suppress(CacheError, Unobserved):  # iter() raises these
            warnings.simplefilter("ignore")
            batches = proved(self.cached(loader))
            return batches if isinstance(batches, str) else None
        return None

    def _path(self, loader: Specification) -> Path:
        if self.path is not None:
            return Path(self.path)
        folder = cache_folder() / "h5"
        note = Note(folder, loader.dataset, str(Images.of(self.images)))
        path = None if self.check else note.recall()
        if path is None:
            source = Source(loader.dataset, Options(images=self.images, loader=loader))
            text = json.dumps(source.study.contents, sort_keys=True)
            path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.h5"
            note.write(path, source.study.found.files)
        return path

    def _reads_as_it_is(self, loader: Specification) -> bool:
        given = self.path, self.images, self.check, self.expect
        return type(loader.dataset) is CachedDataset and all(each is None for each in given)

    def _known_path(self, loader: Specification) -> str | os.PathLike[str] | None:
        """Return the path of the cache, if it is known without a look at the dataset."""
        return loader.dataset.path if self._reads_as_it_is(loader) else self.path  # type: ignore[attr-defined]

    def _kept_images(self, path: str | os.PathLike[str] | None) -> str:
        """Return how images are stored, or will be, as a text from `Images`."""
        kept: Any = str(Images.of(self.images))
        if self.images is None and path is not None:
            with suppress(CacheError):  # there may be no cache yet
                kept = Index.parse(path).fingerprint.get("images")
        return kept[:100] if type(kept) is str else str(Images())


def _describe_live(dataset: Any) -> str:
    """Say which transforms run live and which are in the cache, as a build would decide it."""
    cut = cut_of(dataset)[0] or whole(dataset)
    live, kept = (
        ", ".join(text.partition("(")[0] for text in texts) for texts in (cut.tail, cut.head)
    )
    return (live or "none") + (f"; in the cache: {kept}" if kept else "")
