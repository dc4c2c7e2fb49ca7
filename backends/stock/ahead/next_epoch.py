"""The next epoch's first tasks, guessed while this epoch ends.

    sampler exhausted ──first_tasks()──> copies of samplers and generators, one epoch on
    next iter()       ──agrees()───────> did the real sampler draw the same indices?

Only the copies draw, and the process-wide generators are put back. A wrong guess costs the workers
time and nothing else. After one that has no explanation, the loader's epochs are no longer guessed.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
import torch.utils.data
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    MapDataPipe,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from dataloaders.backend import Specification
from dataloaders.seeding.seeded import Seeding
from dataloaders.seeding.states import random_states_kept
from dataloaders.specification import view_of

from .messages import WorkerMessage

__all__ = ["EarlyTasks", "NextEpochGuess", "epoch_of_dataset", "no_guess"]

_RANDOM = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_KNOWN = (*_RANDOM, SequentialSampler, DistributedSampler)
_MOST_DRAWS_BETWEEN = 8
_MOST_MISSES = 3


def no_guess(loader: Specification) -> str | None:
    """Say why the next epoch of ``loader`` is not begun while this one ends; None if it is."""
    if loader.num_workers == 0:
        return "num_workers=0"
    if not loader.persistent_workers:
        return "workers start anew for each epoch: persistent_workers=True keeps them"
    if loader._dataset_kind != torch.utils.data._DatasetKind.Map:
        return "an iterable dataset begins its next epoch only when asked to"
    if isinstance(loader.dataset, MapDataPipe):
        return "the dataset is a data pipe"
    if not loader.in_order:
        return "in_order=False"
    if loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler:
        return f"{type(loader.batch_sampler).__name__}, the batch_sampler, is not one of torch's"
    sampler = _innermost(loader)
    if type(sampler) not in _KNOWN:
        return f"{type(sampler).__name__}, the sampler, is not one of torch's"
    return None


def epoch_of_dataset(loader: Specification) -> int | None:
    """Return the epoch that ``loader.set_epoch`` passed to its dataset; None if it passed none."""
    given = getattr(loader, "_given_epoch", None)
    if given is None or not callable(getattr(loader.dataset, "set_epoch", None)):
        return None
    return int(given)


class EarlyTasks:
    """Iterate over the tasks of an epoch that nobody has asked for yet.

    Attributes:
        indices: what the sampler is expected to draw first.
        dataset_epoch: the expected epoch of the dataset; see `epoch_of_dataset`.
        number: under which the workers save the states of their generators.
        sent: the number of tasks taken from this iterator.
    """

    def __init__(
        self, indices: list[Any], dataset_epoch: int | None, number: int, workers: int
    ) -> None:
        self.indices = indices
        self.dataset_epoch = dataset_epoch
        self.number = number
        self.sent = 0
        self._workers = workers

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.sent == len(self.indices):
            raise StopIteration
        task, self.sent = self.sent, self.sent + 1
        index = self.indices[task]
        if task >= self._workers:
            return index
        # Tasks go to the workers in turn: this is the first one of worker ``task``.
        return WorkerMessage(index, set_epoch=self.dataset_epoch, save=self.number)


class NextEpochGuess:
    """Guess the first tasks of a loader's next epoch.

    Args:
        loader: as it was at ``iter()``. Held weakly: it owns the workers that own this object.
        seeding: the loader's, if it has a ``seed``.
        samples: whether the seeded view seeds samples too, or only their order.
    """

    def __init__(self, loader: Specification, seeding: Seeding | None, *, samples: bool) -> None:
        self._loader = weakref.ref(loader)
        self._seeding = seeding
        self._samples = samples
        self._guesses = 0
        self._misses = 0
        self._draws_between = 0
        self._state: torch.Tensor | None = None

    def first_tasks(self) -> EarlyTasks | None:
        """Return the next epoch's first tasks, or None; on the consumer's thread."""
        loader = self._loader()
        if loader is None or self._misses == _MOST_MISSES or no_guess(loader) is not None:
            return None
        if torch.get_default_device().type != "cpu":
            return None
        self._state = torch.default_generator.get_state()
        try:
            with random_states_kept(cuda=False):
                for _ in range(self._draws_between):
                    _draw_a_seed()
                view = _one_epoch_on(loader)
                sampler: Iterable[Any] = view._index_sampler
                if self._seeding is not None:
                    sampler = self._seeding.foreseen_indices(view, samples=self._samples)
                count = loader.prefetch_factor * loader.num_workers  # type: ignore[operator]
                indices = list(islice(sampler, count))
        except Exception:
            return None  # the real sampler raises at iter()
        self._guesses += 1
        return EarlyTasks(indices, epoch_of_dataset(view), self._guesses, loader.num_workers)

    def agrees(self, early: EarlyTasks, indices: list[Any], dataset_epoch: int | None) -> bool:
        """Whether ``early`` are the tasks of the epoch that begins with ``indices``."""
        try:
            return bool(early.dataset_epoch == dataset_epoch and early.indices == indices)
        except Exception:  # keys of any type may refuse to be compared
            return False

    def missed(self, state: torch.Tensor) -> None:
        """Learn from a wrong guess, or stop guessing.

        Other loaders' ``iter()`` draw seeds from torch's default generator, a validation loop's
        above all. The number of seeds drawn between two epochs is expected to stay the same.

        Args:
            state: the default generator's, before the real sampler drew.
        """
        loader = self._loader()
        draws = None
        if loader is not None and type(_innermost(loader)) in _RANDOM:
            draws = _draws_from(self._state, state)
        explained = draws is not None and draws != self._draws_between
        self._misses = self._misses + 1 if explained else _MOST_MISSES
        self._draws_between = draws or 0


def _one_epoch_on(loader: Specification) -> Specification:
    """Return the loader as it is expected at the next ``iter()``, its samplers copied."""
    sampler = copy.copy(_innermost(loader))
    generator = getattr(sampler, "generator", None)
    if generator is not None:
        sampler.generator = generator.clone_state()
    if isinstance(sampler, DistributedSampler):
        sampler.epoch += 1
    changes: dict[str, Any] = {"sampler": sampler}
    if loader.batch_sampler is not None:
        changes["batch_sampler"] = copy.copy(loader.batch_sampler)
        changes["batch_sampler"].sampler = sampler
    given = getattr(loader, "_given_epoch", None)
    return view_of(
        loader,
        _given_epoch=None if given is None else given + 1,
        _iterations=int(getattr(loader, "_iterations", 0)) + 1,
        **changes,
    )


def _draws_from(before: torch.Tensor | None, after: torch.Tensor) -> int | None:
    """Count the seeds drawn between two states of the default generator; None if not only seeds."""
    if before is None:
        return None
    with random_states_kept(cuda=False):
        torch.default_generator.set_state(before)
        for draws in range(_MOST_DRAWS_BETWEEN + 1):
            if torch.equal(torch.default_generator.get_state(), after):
                return draws
            _draw_a_seed()
    return None


def _draw_a_seed() -> None:
    # As torch's loaders and samplers draw one.
    torch.empty((), dtype=torch.int64, device="cpu").random_()


def _innermost(loader: Specification) -> Any:
    if loader.batch_sampler is None:
        return loader.sampler
    return getattr(loader.batch_sampler, "sampler", None)
