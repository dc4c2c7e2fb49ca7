"""Read the deterministic part of each sample from a cache: one HDF5 file, mapped into memory.

dataset ──precompute──> train.h5 ──map──> rows ──┬──> crops, flips: whole batches    batches
                                                 │    from the map into the batch,   geometry
                                                 │    by a few threads               mirroring, team
                                                 ├──> encoded images, torchvision's  pictures
                                                 │    other transforms: each image
                                                 │    in a thread, into the batch
                                                 └──> user code: sample by sample, as stock

Order, workers and everything around a batch are torch's: stock iterates the loader, with the cache
in place of the dataset.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch.utils.data import default_collate, get_worker_info

from dataloaders import registry
from dataloaders.backend import Ahead, Backend, Session, Specification
from dataloaders.batches.memory import HostPool
from dataloaders.batches.tree import Batch
from dataloaders.batches.whole import RowNumbers, SeededRows, WholeBatches
from dataloaders.cache import CachedDataset, Estimate, precompute
from dataloaders.cache.build.advice import full_size
from dataloaders.cache.build.builder import opened
from dataloaders.cache.build.observed import Observed
from dataloaders.cache.build.progress import BuildProgress
from dataloaders.cache.format.index import Index
from dataloaders.cache.sample.cut import cuts_of, whole
from dataloaders.cache.sample.images import Choice, Images
from dataloaders.cache.sample.packed import packed
from dataloaders.cache.sample.sample import Classes, classes_in, namedtuples_in
from dataloaders.datasets.files import source_of
from dataloaders.errors import BackendUnavailable, CacheError, OptionError
from dataloaders.machine.resources import usable_cores
from dataloaders.observing import Unobserved, observe
from dataloaders.plan import Plan
from dataloaders.seeding.states import random_states_kept
from dataloaders.specification import iterates_itself, state_of, view_of
from dataloaders.transforms import NoTail, Tail, device_tail
from dataloaders.transforms.draws import Draws, FreeDraws
from dataloaders.transforms.read import read
from dataloaders.transforms.trailing import trailing
from dataloaders.tuning.learned import cache_folder

from .batches import Batches, Late, NotThisBatch, batches_of, is_proved
from .pictures import MAKE_TENSORS, steps_of
from .snapshot import Snapshot
from .team import Team

__all__ = ["H5"]


@dataclass(frozen=True)
class H5(Backend):
    """Samples from a cache, which is built at the first ``iter()`` if it does not exist.

    The samples and their order equal torch's. What the dataset's transforms do before the first
    random one comes from the file; the rest runs live. If the rest consists of torchvision's
    transforms, it is done a batch at a time, once this is proved on samples of this very cache to
    give torchvision's own result: crops and flips by moving bytes, everything else (and what has to
    be decoded first) image by image in threads. The random numbers then come from a separate
    generator, seeded by torch's base seed of the epoch; with ``seed=`` they are those that stock
    gives each sample.

    Attributes:
        path: the path of the file; None: in the user's cache folder, named after its contents.
        build: "if_missing", or "never" for programs that must not spend the time and the disk.
        images: how PIL images are stored, as in `precompute`: "raw", "jpeg", "png", "webp", an
            `Encoded`, or "packed" for the dataset's own files. None: raw; an existing cache is used
            as it is.
        check: "contents" compares a few samples with an existing cache, read in a separate process;
            None compares class, length, transforms and classes, and reads no sample.
        expect: entries of its fingerprint that an existing cache must have, as in `precompute`:
            ``{"torchvision": "0.29.2"}``.

    Raises:
        OptionError: an option has a value that it cannot take.
    """

    path: str | os.PathLike[str] | None = None
    build: Literal["if_missing", "never"] = "if_missing"
    images: Choice = None
    check: Literal["contents"] | None = None
    expect: Mapping[str, Any] | None = None

    name: ClassVar[str] = "h5"

    def __post_init__(self) -> None:
        if self.build not in ("if_missing", "never"):
            raise OptionError(f"H5(build={self.build!r}): must be 'if_missing' or 'never'")
        if self.build == "never" and self.path is None:
            raise OptionError("H5(build='never') needs a path: path='train.h5'")
        if self.check not in (None, "contents"):
            raise OptionError(f"H5(check={self.check!r}): must be None or 'contents'")
        Images.of(self.images)

    def explain(self, loader: Specification) -> Plan:
        """Return whether there is a file, and what is done with its rows. Builds nothing."""
        try:
            obstacle = self._obstacle(loader)
            if obstacle is not None:
                return Plan(self.name, obstacle=obstacle)
            # Stock iterates the cache, which is not a dataset in memory even if the loader's is.
            plan = registry.load("stock")(gather=False).explain(loader)  # type: ignore[call-arg]
            kept = self._kept_images()
            how = {"fetch": self._describe_rows()}
            if kept != "packed":  # then all transforms run each time
                how["augment"] = _describe_live(loader.dataset)
            stages = tuple(
                replace(stage, how=how.get(stage.name, stage.how))
                for stage in plan.stages
                if stage.name != "decode" or kept != str(Images())
            )
            notes = [note for note in plan.notes if not note.startswith("fetched")]
            why = self._by_sample(loader)
            if why is None:
                notes.append("batches are made at once if a few rows prove the result equal")
                if kept != str(Images()) and loader.num_workers == 0:
                    threads = min(torch.get_num_threads(), usable_cores())
                    notes.append(
                        f"images stored as {kept} are decoded in this process, by up to {threads} "
                        f"threads: torch may use {torch.get_num_threads()}, and this process can "
                        f"use {usable_cores()} cores"
                    )
            else:
                notes.append(f"samples are made one by one: {why}")
            large = full_size(loader.dataset) if kept == str(Images()) else ""
            return Plan(self.name, stages, plan.delivers, notes=(*notes, *filter(None, [large])))
        except Exception as error:  # a loader may hold anything; explaining it must not fail
            return Plan(self.name, obstacle=f"this loader could not be read: {error!r}")

    def takes_ahead(self, loader: Specification) -> bool:
        """Whether no user code makes batches in this process: workers do, or this package."""
        try:
            if loader.num_workers > 0:
                return _stock().takes_ahead(loader)
            return self._obstacle(loader) is None and self._by_sample(loader) is None
        except Exception:  # a loader may hold anything
            return False

    def open(self, loader: Specification) -> Session:
        """Open a session; its first epoch opens the file, or builds it."""
        obstacle = self._obstacle(loader)
        if obstacle is not None:
            raise BackendUnavailable(str(Plan(self.name, obstacle=obstacle)))
        return _H5Session(self, loader)

    def cached(self, loader: Specification) -> CachedDataset:
        """Open the cache of the loader's dataset, or build it if it is missing and may be built.

        Raises:
            CacheError: the file belongs to another dataset, or cannot be built.
            BackendUnavailable: there is none, and ``build="never"``.
        """
        observed = Observed(loader)
        path = self._path(observed)
        exists = self._is_there(path)
        if self.build == "never" and not exists:
            raise BackendUnavailable(
                f"H5(build='never'): there is no cache at {path}; build it with: "
                "dataloaders cache build"
            )
        if exists:
            return opened(
                path, images=self.images, observed=observed, check=self.check, expect=self.expect
            )
        print(f"backend 'h5' builds {path}", file=sys.stderr)
        from dataloaders.cli.progress import ProgressLine

        line = ProgressLine()

        def told(progress: BuildProgress) -> None:
            what = "waits for another process: " if progress.waiting else ""
            line(f"h5  {what}{progress.samples_done:,} of {progress.samples:,} samples")

        def announced(estimate: Estimate) -> None:
            if estimate.advice:
                print(f"h5  {estimate.advice}", file=sys.stderr)

        try:
            return precompute(
                loader.dataset,
                path,
                images=self.images,
                progress=told,
                announce=announced,
                multiprocessing_context=loader.multiprocessing_context,
                worker_init_fn=loader.worker_init_fn if loader.num_workers else None,
            )
        finally:
            line.close()

    def _is_there(self, path: Path) -> bool:
        """Whether there is a file. Makes its folder if a file may be built.

        Raises:
            CacheError: the folder cannot be made, or its files cannot be seen.
        """
        try:
            exists = path.exists()
            if not exists and self.build != "never":
                path.parent.mkdir(parents=True, exist_ok=True)
            return exists
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

    def _obstacle(self, loader: Specification) -> str | None:
        if iterates_itself(type(loader)) and not hasattr(loader, "backend"):
            return f"{type(loader).__name__} iterates in its own way; use backend='stock'"
        if loader._dataset_kind != torch.utils.data._DatasetKind.Map:
            return "an iterable dataset has no samples by index; give it __getitem__ and __len__"
        if not hasattr(type(loader.dataset), "__len__"):
            return f"{type(loader.dataset).__name__} has no __len__, so its length is not known"
        if self.build == "never" and self.path is not None and not os.path.exists(self.path):
            return (
                f"there is no cache at {os.fspath(self.path)!r} and build='never'; build it with: "
                "dataloaders cache build"
            )
        if Images.of(self.images).packed:
            source = source_of(loader.dataset)
            if isinstance(source, str):
                return f"images='packed' keeps the encoded files of a dataset, and {source}"
        return None

    def _by_sample(self, loader: Specification) -> str | None:
        """Say why batches of ``loader`` are not made at once, if the transforms show it."""
        if loader.batch_sampler is None:
            return "batch_size=None: there are no batches"
        if loader.collate_fn is not default_collate:
            return "collate_fn is not torch's default_collate"
        kept = Images.like(self._kept_images())
        if kept.packed:
            try:
                tails = packed(loader.dataset).tails
            except CacheError as error:
                return str(error)
        else:
            best = next(iter(cuts_of(loader.dataset, images=kept.rows == "images")[0]), None)
            tails = () if best is None else best.tails
        steps = (steps_of(tail) for tail in tails if not _makes_floats_of_bytes(tail))
        return next((why for why in steps if isinstance(why, str)), None)

    def _path(self, observed: Observed) -> Path:
        if self.path is not None:
            return Path(self.path)
        from dataloaders.cache.build.fingerprint import fingerprint

        kept = fingerprint(observed.loader.dataset, self.images, observed=observed)
        text = json.dumps(kept, sort_keys=True)
        return cache_folder() / "h5" / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.h5"

    def _describe_rows(self) -> str:
        if self.path is None:
            return (
                f"rows of a cache in {cache_folder() / 'h5'}{self._describe_images()}, "
                "built at the first iter() if missing"
            )
        exists = Path(self.path).exists()
        return f"rows of {os.fspath(self.path)}{self._describe_images()}" + (
            "" if exists else ", built at the first iter()"
        )

    def _describe_images(self) -> str:
        kept = self._kept_images()
        return "" if kept == str(Images()) else f" with images as {kept}"

    def _kept_images(self) -> str:
        """Return how images are stored, or will be, as a text from `Images`."""
        kept: Any = str(Images.of(self.images))
        if self.images is None and self.path is not None:
            with suppress(CacheError):  # there may be no cache yet
                kept = Index.parse(self.path).fingerprint.get("images")
        return kept[:100] if type(kept) is str else str(Images())


def _makes_floats_of_bytes(tail: Any) -> bool:
    """Whether rows are tensors of bytes, and all that ``tail`` does is to make floats of them."""
    members = read(tail)
    makers = [member for member in members if member.torchvision in MAKE_TENSORS]
    return not makers and trailing(members) == members


def _describe_live(dataset: Any) -> str:
    """Say which transforms run each time and which the cache saves, as a build would decide it."""
    cuts, _ = cuts_of(dataset)
    cut = cuts[0] if cuts else whole(dataset)
    live, kept = (
        ", ".join(text.partition("(")[0] for text in texts) for texts in (cut.tail, cut.head)
    )
    return (live or "none") + (f"; in the cache: {kept}" if kept else "")


class _H5Session(Session):
    def __init__(self, backend: H5, loader: Specification) -> None:
        self._backend = backend
        self._loader = weakref.ref(loader)
        self._pool = HostPool()
        self._dataset: Any = None
        self._snapshot: Snapshot | None = None
        self._view: Specification | None = None
        self._changed: dict[str, Any] = {}
        self._collated: _Collated | None = None
        self._inner: Session | None = None

    def epoch(self) -> Iterator[Batch]:
        batches = self._opened().epoch()
        if self._collated is not None:
            # Torch draws this at iter(), from the same generator: nothing more is drawn.
            self._collated.begin(int(batches._base_seed))  # type: ignore[attr-defined]
        return batches

    def epoch_ahead(self) -> Ahead | None:
        if self._loader() is None:
            return None
        ahead = self._opened().epoch_ahead()
        seed = getattr(ahead, "base_seed", None)
        if seed is not None and self._collated is not None:
            self._collated.begin(seed)
        return ahead

    def close(self) -> None:
        if self._inner is not None:
            self._inner.close()
        if self._collated is not None:
            self._collated.close()
        self._inner = self._view = self._collated = self._dataset = self._snapshot = None

    def _opened(self) -> Session:
        loader = self._loader()
        if loader is None:
            raise RuntimeError("the loader of this session is gone: keep it while iterating")
        snapshot = Snapshot(loader.dataset)
        if self._inner is None or self._is_changed(loader, snapshot):
            self.close()
            cached = self._backend.cached(loader)
            if len(cached) != len(loader.dataset):  # type: ignore[arg-type]
                raise CacheError(
                    f"{cached.path} left out {len(cached.failed)} samples, so its rows have other "
                    "numbers than the dataset's; use CachedDataset as the dataset"
                )
            cached.namedtuples = _namedtuples(cached, loader)
            self._dataset, self._changed = loader.dataset, self._changes(loader, cached)
            self._snapshot = snapshot
            self._view = view_of(loader, **self._changed)
            self._inner = _stock().open(self._view)
        elif self._view is not None:  # the epoch, and what the user has changed since
            now = {**state_of(loader), **self._changed, "_iterator": self._view._iterator}
            self._view.__dict__.update(now)
        return self._inner

    def _is_changed(self, loader: Specification, snapshot: Snapshot) -> bool:
        """Whether the samples should be others than those that this session was opened for."""
        if self._dataset is not loader.dataset or self._snapshot is None:
            return True
        # As in torch, workers that persist keep the dataset as it was when they started.
        stay = loader.persistent_workers and loader.num_workers > 0
        return not stay and not self._snapshot.same_as(snapshot)

    def _changes(self, loader: Specification, cached: CachedDataset) -> dict[str, Any]:
        plain = {"dataset": cached}
        if loader.collate_fn is not default_collate or loader.batch_sampler is None:
            return plain
        view = view_of(loader, **plain)
        tail = device_tail(view, observe=_look)
        dataset: Any = cached
        if isinstance(tail, Tail):
            dataset = (tail.changes(view) or plain)["dataset"]
        batches = batches_of(
            dataset, lambda cache: _is_observed_equal(view_of(loader, dataset=cache))
        )
        if isinstance(batches, str):
            return plain
        applied = None if isinstance(tail, NoTail) else tail
        self._collated = _Collated(batches, applied, self._pool)
        changes = {"dataset": RowNumbers(dataset), "collate_fn": self._collated}
        if loader.worker_init_fn is not None:
            changes["worker_init_fn"] = _ShowCache(loader.worker_init_fn)
        return changes


def _look(loader: Any, look: Callable[[Any], Any]) -> Any:
    """Call ``look`` with the loader's cache: here if it runs no code of the user's, else elsewhere.

    Raises:
        Unobserved: as `observe`.
    """
    cached = loader.dataset
    if isinstance(cached, CachedDataset) and cached.runs_only_torchvision:
        with random_states_kept(cuda=False):
            return look(cached)
    return observe(loader, look)


def _is_observed_equal(loader: Specification) -> bool:
    """Whether batches of the loader's cache equal torch's."""
    try:
        return bool(_look(loader, is_proved))
    except Unobserved:
        return False


def _namedtuples(cached: CachedDataset, loader: Specification) -> Classes:
    """Return the dataset's own namedtuple classes: the file has only their names and fields."""
    wanted = namedtuples_in(cached.index.structure)
    loaded = {key: _classes_loaded(*key) for key in wanted}
    module = type(loader.dataset).__module__
    for key, classes in loaded.items():  # several that are alike: the dataset's own module's
        loaded[key] = [kind for kind in classes if kind.__module__ == module] or classes
    if all(len(classes) == 1 for classes in loaded.values()):
        return {key: classes[0] for key, classes in loaded.items()}
    try:
        names = observe(loader, _names_of_namedtuples)
    except Unobserved as error:
        raise CacheError(
            f"{cached.path} holds namedtuples, and the dataset, which has their classes, cannot be "
            f"read: {error}"
        ) from error
    return {name[:2]: kind for name in names if (kind := _class_called(*name)) is not None}


def _names_of_namedtuples(dataset: Any) -> list[tuple[str, tuple[str, ...], str, str]]:
    classes = classes_in(dataset[0])
    return [(*key, kind.__module__, kind.__qualname__) for key, kind in classes.items()]


def _class_called(name: str, fields: tuple[str, ...], module: str, qualname: str) -> Any:
    """Find the class of that name in its module, also one within a function."""
    with suppress(ImportError):
        importlib.import_module(module)
    classes = _classes_loaded(name, fields)
    named = [kind for kind in classes if (kind.__module__, kind.__qualname__) == (module, qualname)]
    return named[-1] if named else None


def _classes_loaded(name: str, fields: tuple[str, ...]) -> list[Any]:
    """Return the namedtuple classes of that name, found among all: those in functions too."""
    kinds: list[Any] = [tuple]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return [
        kind
        for kind in kinds
        if kind.__name__ == name
        and getattr(kind, "_fields", None) == fields
        # Not classes that were made for want of the dataset's own.
        and kind.__module__ != "dataloaders.cache.sample.sample"
    ]


class _Collated(WholeBatches):
    """Collate row numbers to a batch, in the main process or in a worker."""

    def __init__(self, batches: Batches, tail: Tail | None, pool: HostPool) -> None:
        self._batches = batches
        self._tail = tail
        self._pool: HostPool | None = pool
        self._team = Team()
        self._seed = 0
        self._count = 0

    def begin(self, seed: int) -> None:
        """Begin an epoch with this seed."""
        self._seed, self._count = seed, 0

    def close(self) -> None:
        """End the threads."""
        self._team.close()

    def __call__(self, rows: Any) -> Batch:
        """Return the batch of these rows, as in `WholeBatches`."""
        worker = get_worker_info()
        pool = self._pool if worker is None else None
        late = None if self._tail is None else Late(pool, self._team)
        if isinstance(rows, SeededRows):
            keys, draws = rows.keys, Draws(rows.words)
        else:
            keys, draws = rows, FreeDraws(len(rows), self._random(worker))
        batch = self._batches.of(keys, draws, pool, late, self._team)
        if batch is not None:
            with suppress(NotThisBatch):
                return self._finished(batch, late)
        if isinstance(rows, SeededRows):
            samples = rows.samples()
        else:
            samples = [self._batches.cached[row] for row in rows]
        late = None if self._tail is None else Late(pool, self._team)
        return self._finished(default_collate(samples), late)

    def _finished(self, batch: Batch, late: Late | None) -> Batch:
        return batch if self._tail is None or late is None else late.apply(self._tail, batch)

    def _random(self, worker: Any) -> np.random.Generator:
        # A worker's seed contains torch's base seed of the epoch and the worker's number.
        seed = self._seed if worker is None else int(worker.seed)
        self._count += 1
        key = np.array([seed & (2**64 - 1), self._count], np.uint64)
        return np.random.Generator(np.random.Philox(key=key))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pool": None}


class _ShowCache:
    """A worker_init_fn: call the user's, which sees the cache as the worker's dataset."""

    def __init__(self, function: Callable[[int], None]) -> None:
        self._function = function

    def __call__(self, worker_id: int) -> None:
        info: Any = get_worker_info()
        if isinstance(info.dataset, RowNumbers):
            object.__setattr__(info, "dataset", info.dataset.dataset)  # info forbids assignment
        self._function(worker_id)


def _stock() -> Backend:
    return registry.load("stock")()
