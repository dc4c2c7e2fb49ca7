"""Decide what is to be made of a loader's dataset, and where, at each ``iter()``.

dataset ──source_for──> Source ─┐
its transform ──work_of──> Work ┼──> Job, or what stands in the way
options, device ────────────────┘
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import default_collate

from dataloaders.backend import Specification
from dataloaders.observing import Unobserved, observe
from dataloaders.specification import device_of, iterates_itself
from dataloaders.transforms.operators import chain_of

from .numbers import Numbers, numbers_of
from .plan import Work, work_of
from .snapshot import Snapshot
from .sources import Image, Source, read_source, source_for
from .sources.opaque import Opaque, Recordable, opaque_for, recorded_as

if TYPE_CHECKING:
    from . import Dali

__all__ = ["Job", "job_of"]

_FEWEST_READERS = 4

_KNOWN: weakref.WeakKeyDictionary[Specification, tuple[Snapshot, Source | Opaque | str]] = (
    weakref.WeakKeyDictionary()
)
"""What is known of each loader's dataset, proved on samples once, until something changes."""


@dataclass(frozen=True, eq=False)
class Job:
    """How one loader's batches are made.

    Attributes:
        source: the source of the images.
        work: what is done to them.
        device: where they are delivered.
        numbers: the numbers of threads and batches, and who chose them.
        readers: threads that read files, and decode those that need Pillow.
        batch_size: images in a batch; 1 if the loader does not say.
        fast: as in `Dali.fast`.
        num_workers: torch's workers, in which the dataset's own code runs; 0 for sources that
            threads read.
        persistent: whether those workers live on between epochs.
    """

    source: Source | Opaque
    work: Work
    device: torch.device
    numbers: Numbers
    readers: int
    batch_size: int
    fast: tuple[str, ...] = ()
    num_workers: int = 0
    persistent: bool = False

    @property
    def threads(self) -> int:
        """DALI's threads, and as many for the work after it on the CPU."""
        return self.numbers.threads

    @property
    def depth(self) -> int:
        """Batches between the sampler and the loop."""
        return self.numbers.depth

    @property
    def kind(self) -> str:
        """The input of a graph: "encoded" files, or "pixels"."""
        return self.source.kind if isinstance(self.source, Source) else "pixels"


def job_of(options: Dali, loader: Specification) -> Job | str:
    """Return the job, or what stands in the way and what to do about it."""
    if iterates_itself(type(loader)) and not hasattr(loader, "backend"):
        return f"{type(loader).__name__} iterates in its own way; use backend='stock'"
    if loader._dataset_kind != torch.utils.data._DatasetKind.Map:
        return (
            "an iterable dataset has no samples by index; give it __getitem__ and __len__, or use "
            "backend='prefetch'"
        )
    wanted = getattr(loader, "device", None)
    if wanted is not None and torch.device(wanted).type == "cuda" and not torch.cuda.is_available():
        return f"device={str(wanted)!r}: there is no CUDA device that torch can use; leave it out"
    device = device_of(wanted)
    source = _source(loader)
    if isinstance(source, str):
        return source
    work = _work(source, options, device)
    if isinstance(work, str):
        return work
    if work.wraps is None and not _hides_types(loader):
        return (
            "behind ToImage() a transform of v1 leaves some images tv_tensors.Image and makes "
            "plain tensors of others, and this loader hands them on one by one; take all of them "
            "from torchvision.transforms.v2, or put ToPureTensor() at the end"
        )
    opaque = isinstance(source, Opaque)
    numbers = numbers_of(options, loader)
    return Job(
        source,
        work,
        device,
        numbers,
        max(_FEWEST_READERS, numbers.threads),
        loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or 1,
        tuple(options.fast),
        loader.num_workers if opaque else 0,
        opaque and loader.persistent_workers,
    )


def _hides_types(loader: Specification) -> bool:
    """Whether images are stacked, which turns any class of tensor into a plain one."""
    return loader.batch_sampler is not None and loader.collate_fn is default_collate


def _work(source: Source | Opaque, options: Dali, device: torch.device) -> Work | str:
    before = len(source.head.transforms) if isinstance(source, Opaque) else 0
    return work_of(
        source.transform,
        form=source.form,
        device="cuda" if device.type == "cuda" else "cpu",
        fast=options.fast,
        wraps=source.wraps,
        where=f"transform[{before}:]" if before else "transform",
    )


def _source(loader: Specification) -> Source | Opaque | str:
    """Return what is known of the dataset, or else a record of what its own code loads."""
    now = Snapshot(loader.dataset)
    before, found = _KNOWN.get(loader, (None, ""))
    own_code = isinstance(found, Opaque)
    stays = own_code and loader.persistent_workers and loader.num_workers > 0
    if before is None or not now.same_as(before, own_code=own_code, stays=stays):
        found = _observed(loader)
    _KNOWN[loader] = now, found
    return found


def _observed(loader: Specification) -> Source | Opaque | str:
    """Return the result of `_found`, found in a separate process and rebuilt here."""
    try:
        told = observe(loader, _look)
    except Unobserved as error:
        return str(error)
    if isinstance(told, str):
        return told
    if isinstance(told, _Recorded):
        recorded = recorded_as(loader.dataset, told.recordable)
        recorded.why = told.why
        return recorded
    source = read_source(loader.dataset)
    if isinstance(source, Source):
        source.first_size = told.first_size
    return source


@dataclass(frozen=True)
class _Files:
    """Its images are read without its own code; the first one has this height and width."""

    first_size: tuple[int, int] | None


@dataclass(frozen=True)
class _Recorded:
    """Its own code loads its images, and why."""

    recordable: Recordable
    why: str


def _look(dataset: Any) -> _Files | _Recorded | str:
    found = _found(dataset)
    if isinstance(found, str):
        return found
    if isinstance(found, Opaque):
        return _Recorded(found.recordable, found.why)
    first = found.image(0) if len(found) else None
    return _Files((first.height, first.width) if isinstance(first, Image) else None)


def _found(dataset: Any) -> Source | Opaque | str:
    source = source_for(dataset)
    if isinstance(source, Source):
        chain = chain_of(source.transform)
        if chain.members or not chain.rest:
            return source
        # The first member is the user's own code: with it, the dataset's own code may run first.
        recorded = opaque_for(dataset)
        return source if isinstance(recorded, str) else recorded
    recorded = opaque_for(dataset)
    if isinstance(recorded, str):
        return f"{source}; nor can its own code be recorded: {recorded}"
    recorded.why = source
    return recorded
