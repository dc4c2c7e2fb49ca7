"""Yield batches that cost nothing: copies of a real one, made once on the device and reissued.

    one real batch, or like= ──copied──> a pool of batches on the device ──> the step
           the loader's sampler ──> how many, and how short the last one is

A training loop that gets these batches shows its own speed: no loader can be faster.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

import torch
import torch.utils.data

from dataloaders.backend import Backend, Session, Specification
from dataloaders.batches.collation import fetched
from dataloaders.batches.tree import Batch, leaves, map_tensors, samples_in, to_device
from dataloaders.errors import BackendUnavailable, OptionError
from dataloaders.observing import Unobserved, observe
from dataloaders.plan import Plan, Stage
from dataloaders.seeding.states import random_states_kept
from dataloaders.specification import batches_in, device_of, generators_of, own_iteration

__all__ = ["Synthetic"]


# eq=False, because comparing the tensors in ``like`` does not give one bool.
@dataclass(frozen=True, eq=False)
class Synthetic(Backend):
    """Yield copies of one batch, as many as the loader has batches.

    Tensors of the last batch are cut to its number of samples, if that is known. Each batch has new
    containers and shares its tensors with the batch that came one pool earlier. If the step wrote
    into a batch, it is copied again before it is reissued.

    Attributes:
        like: the batch to copy; None: one is read in a separate process, so that nothing is opened
            here and no generator changes. If a batch cannot be sent between processes, give it.
        pool: the number of copies. Several, because a single one would stay in the CPU's cache.
        batches: the number of batches in an epoch; None for the loader's own number.

    Raises:
        OptionError: a number is out of range.
    """

    like: Batch = field(default=None, repr=False)
    pool: int = 8
    batches: int | None = None

    name: ClassVar[str] = "synthetic"
    delivers: ClassVar[Literal["host", "device"]] = "device"

    def __post_init__(self) -> None:
        if not isinstance(self.pool, int) or self.pool < 1:
            raise OptionError(f"Synthetic(pool={self.pool!r}): must be an int of at least 1")
        if self.batches is not None and (not isinstance(self.batches, int) or self.batches < 0):
            raise OptionError(
                f"Synthetic(batches={self.batches!r}): must be an int of at least 0, or None for "
                "the loader's own number"
            )

    def explain(self, loader: Specification) -> Plan:
        """Return one stage, on the device; the obstacle is an epoch of unknown length."""
        device = str(device_of(loader))
        obstacle = None
        if self.batches is None and _is_iterable(loader) and batches_in(loader) is None:
            obstacle = (
                f"{type(loader.dataset).__name__} is iterable and has no length, so the "
                "number of batches in an epoch is not known; give it: "
                "backend=Synthetic(batches=1000), from backends.synthetic"
            )
        source = "first real batch" if self.like is None else "given batch"
        how = f"{self.pool} copies of the {source}, made once and reissued"
        notes = ("not the real samples: for measuring, not for training",)
        return Plan(self.name, (Stage("fetch", device, how),), device, obstacle, notes)

    def open(self, loader: Specification) -> Session:
        """Open a session that makes its pool at the first epoch."""
        plan = self.explain(loader)
        if plan.obstacle is not None:
            raise BackendUnavailable(str(plan))
        return _SyntheticSession(self, loader)


class _SyntheticSession(Session):
    def __init__(self, options: Synthetic, loader: Specification) -> None:
        self._options = options
        self._loader = weakref.ref(loader)
        self._real: tuple[Batch, int | None] | None = None
        if options.like is not None:
            self._real = options.like, samples_in(options.like)
        self._pool: _Pool | None = None

    def epoch(self) -> Iterator[Batch]:
        loader = self._loader()
        if loader is None:
            raise RuntimeError("the loader of this session is gone: keep it while iterating")
        if self._real is None:
            self._real = _real_batch(loader)
        if self._real is None:
            return iter(())  # the sampler yielded no batch to copy
        batch, samples = self._real
        device = device_of(loader)
        if self._pool is None or self._pool.device != device:
            self._pool = _Pool(batch, device, self._options.pool)
        sizes: Iterator[int | None]
        given = self._options.batches
        if given is not None:
            sizes = itertools.repeat(None, given)
        elif (count := batches_in(loader)) is not None:
            last = _samples_in_last(loader)
            sizes = (last if turn == count - 1 else None for turn in range(count))
        else:  # maybe endless: one batch for each batch of indices
            sizes = (None for _ in loader._index_sampler)
        sized = loader._index_sampler if given is None else range(given)
        return _Epoch(_issued(self._pool, sizes, samples), sized)

    def close(self) -> None:
        self._pool = None


class _Epoch(Iterator[Batch]):
    """Iterates one epoch; has a length where torch's iterator has one."""

    def __init__(self, batches: Iterator[Batch], sized: Any) -> None:
        self._batches, self._sized = batches, sized

    def __next__(self) -> Batch:
        return next(self._batches)

    def __len__(self) -> int:
        return len(self._sized)


def _issued(pool: _Pool, sizes: Iterator[int | None], samples: int | None) -> Iterator[Batch]:
    """Yield one epoch's batches; a size of None is a whole batch of ``samples``."""
    for turn, size in enumerate(sizes):
        batch = pool.issue(turn)
        yield batch if size is None else map_tensors(batch, partial(_first, size, samples))


class _Pool:
    """Holds copies of a batch on a device; issues them in turn, in new containers."""

    def __init__(self, real: Batch, device: torch.device, size: int) -> None:
        self.device = device
        self._real = real
        self._step_writes = False
        self._slots = [self._copy() for _ in range(size)]
        self._versions = [_versions(slot) for slot in self._slots]
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # once, so that steps on any stream may read the pool

    def issue(self, turn: int) -> Batch:
        """Return the batch of the next slot, in turn."""
        place = turn % len(self._slots)
        if _versions(self._slots[place]) != self._versions[place]:
            # A step that writes does so each time, so from now on it gets copies. This slot is made
            # again, since the old one may still be in use.
            self._slots[place] = self._copy()
            self._versions[place] = _versions(self._slots[place])
            self._step_writes = True
        with torch.inference_mode(False), torch.no_grad():
            alias = torch.clone if self._step_writes else torch.Tensor.detach
            return map_tensors(self._slots[place], alias)

    def _copy(self) -> Batch:
        # Not as inference tensors, which have no version counter to show a write.
        with torch.inference_mode(False), torch.no_grad():
            # The type's own .to() knows what must stay, such as the lengths in a PackedSequence.
            return to_device(map_tensors(self._real, torch.clone), self.device)


def _versions(batch: Batch) -> list[int]:
    return [leaf._version for leaf in leaves(batch)]


def _first(samples: int, of: int | None, leaf: torch.Tensor) -> torch.Tensor:
    """Return a view of the first ``samples`` of a tensor that has ``of`` of them."""
    cut = leaf.layout is torch.strided and not leaf.is_nested and leaf.ndim > 0
    return leaf[:samples] if cut and leaf.shape[0] == of else leaf


def _real_batch(loader: Specification) -> tuple[Batch, int | None] | None:
    """Return the loader's first batch and its number of samples (None if it is one sample).

    Its samples are read and collated in a separate process.

    Raises:
        BackendUnavailable: no batch can be made there.
    """
    own = own_iteration(loader)
    if own is not None:
        with random_states_kept(*generators_of(own), cuda=False):
            for batch in own:  # training would run this loop, too
                return batch, samples_in(batch)
        return None
    with random_states_kept(*generators_of(loader), cuda=False):
        # For an iterable dataset, torch's own sampler of None.
        first = list(itertools.islice(loader._index_sampler, 1))
    if not first:
        return None
    batched = loader._auto_collation
    indices: Any = list(first[0]) if batched else first[0]
    how = {"batched": batched, "collate_fn": loader.collate_fn, "drop_last": loader.drop_last}
    try:
        made = observe(loader, partial(fetched, loader._dataset_kind, keys=indices, **how))
    except Unobserved as error:
        raise BackendUnavailable(
            f"no real batch could be read: {error}; give one: "
            "backend=Synthetic(like=batch), from backends.synthetic"
        ) from error
    return (made[0], len(indices) if batched else None) if made else None


def _samples_in_last(loader: Specification) -> int | None:
    """Return the number of samples in a last, short batch; None if it is full or not known."""
    if loader.batch_size is None or loader.drop_last or own_iteration(loader) is not None:
        return None
    samples: Any = loader.dataset if _is_iterable(loader) else loader.sampler
    return len(samples) % loader.batch_size or None


def _is_iterable(loader: Specification) -> bool:
    return isinstance(loader.dataset, torch.utils.data.IterableDataset)
