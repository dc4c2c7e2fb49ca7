"""The next epoch's first tasks, foreseen while this one ends.

    sampler exhausted ──foresee()──> copies of samplers and generators, one epoch on ──> NextEpoch
    next iter()       ──agrees()───> the real sampler drew the same, for the same dataset epoch?

Nothing real moves here: the copies draw, with the process-wide generators put back afterwards. So
a wrong guess costs work of the workers and no more, and after one that nothing explains there is
no further one.
"""

from __future__ import annotations

import copy
import weakref
from collections import deque
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

from . import order
from .ahead_tell import Tell

__all__ = ["Foresight", "NextEpoch", "epoch_of_dataset", "indices_of", "no_foresight"]

_RANDOM = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_KNOWN = (*_RANDOM, SequentialSampler, DistributedSampler)
_MOST_DRAWS_BETWEEN = 8
_MOST_MISSES = 3


def no_foresight(loader: Specification) -> str | None:
    """Why the next epoch of ``loader`` is not begun while this one ends; None if it can be."""
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
    sampler = _innermost(loader)
    if loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler:
        return f"{type(loader.batch_sampler).__name__}, the batch_sampler, is not one of torch's"
    if type(sampler) not in _KNOWN:
        return f"{type(sampler).__name__}, the sampler, is not one of torch's"
    return None


def epoch_of_dataset(loader: Specification) -> int | None:
    """The epoch that ``loader.set_epoch`` gave to its dataset; None if it gave none."""
    given = getattr(loader, "_given_epoch", None)
    if given is None or not callable(getattr(loader.dataset, "set_epoch", None)):
        return None
    return int(given)


def indices_of(index_sampler: Any) -> Iterator[Any]:
    """What ``iter(index_sampler)`` yields, the same draws at the same moments.

    The first batch of a shuffled million comes in a third of the time: torch makes a list of all
    indices first. `order` promises equal numbers, and equal objects where they are plain ints.
    """
    if not order.is_known(index_sampler) or type(index_sampler.sampler) is SubsetRandomSampler:
        return iter(index_sampler)
    batches = order.index_batches(index_sampler)
    return (batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in batches)


class NextEpoch:
    """The first tasks of an epoch that nobody has asked for yet.

    Attributes:
        indices: as the sampler is expected to give them.
        epoch: for the dataset; see `epoch_of_dataset`.
        tasks: those of ``indices`` that are not sent, as they are to be sent.
        sent: how many are sent.
        number: under which the workers remember their generators, as of before the first task.
    """

    def __init__(self, indices: list[Any], epoch: int | None, number: int, workers: int) -> None:
        self.indices = indices
        self.epoch = epoch
        self.number = number
        self.sent = 0
        # Task j goes to worker j, then j modulo the workers: each one's first tells it.
        first = [Tell(index, epoch=epoch, keep=number) for index in indices[:workers]]
        self.tasks: deque[Any] = deque([*first, *indices[workers:]])


class Foresight:
    """Guesses of one loader's next epoch, and what past ones taught.

    Args:
        loader: held weakly, since it owns the workers that own this.
        seeding: the loader's, if it has a ``seed``.
        samples: whether the seeded view seeds samples too, or only their order.
    """

    def __init__(self, loader: Specification, seeding: Seeding | None, *, samples: bool) -> None:
        self._loader = weakref.ref(loader)
        self._seeding = seeding
        self._samples = samples
        self._given = _Counter()
        self._sampler = _Counter()
        self._iterations = 0
        self._made = 0
        self._misses = 0
        self._draws_between = 0
        self._state: torch.Tensor | None = None
        self._trusted = True
        self._open = False

    def begin(self) -> None:
        """An epoch begins: remember by which numbers; on the consumer's thread."""
        loader = self._loader()
        self._open = False
        if loader is None:
            return
        self._given.see(getattr(loader, "_given_epoch", None))
        self._sampler.see(getattr(_innermost(loader), "epoch", None))
        self._iterations = int(getattr(loader, "_iterations", 0))
        self._open = self._trusted and no_foresight(loader) is None

    def foresee(self) -> NextEpoch | None:
        """The next epoch's first tasks, once for each epoch; on the consumer's thread.

        None where it cannot be foreseen, or guesses have failed.
        """
        loader = self._loader()
        if loader is None or not self._open or torch.get_default_device().type != "cpu":
            return None
        self._open = False
        self._state = torch.default_generator.get_state()
        try:
            with random_states_kept(cuda=False):
                for _ in range(self._draws_between):
                    _draw_a_seed()
                view = self._view(loader)
                sampler: Iterable[Any] = view._index_sampler
                if self._seeding is not None:
                    sampler = self._seeding.foreseen_indices(view, samples=self._samples)
                count = loader.prefetch_factor * loader.num_workers  # type: ignore[operator]
                indices = list(islice(indices_of(sampler), count))
            epoch = epoch_of_dataset(view)
        except Exception:
            return None  # what the real sampler will raise, it raises at iter()
        self._made += 1
        return NextEpoch(indices, epoch, self._made, loader.num_workers)

    def agrees(self, expected: NextEpoch, indices: list[Any], epoch: int | None) -> bool:
        """Whether the epoch that begins now, with these first indices, is the ``expected`` one."""
        try:
            return bool(expected.epoch == epoch and expected.indices == indices)
        except Exception:  # keys of any type may refuse to be compared
            return False

    def missed(self, state: torch.Tensor) -> None:
        """A guess was wrong: find out why, and stop guessing if there is no telling.

        ``state`` is the default generator's as it was before the real sampler drew.
        """
        self._misses += 1
        self._trusted = self._misses < _MOST_MISSES and (
            self._learns_draws(state) or self._given.surprised or self._sampler.surprised
        )
        self._open = self._open and self._trusted

    def _view(self, loader: Specification) -> Specification:
        """The loader as it will be: samplers and their generators copied, one epoch on."""
        inner = _innermost(loader)
        ahead = copy.copy(inner)
        generator = getattr(inner, "generator", None)
        if generator is not None:
            ahead.generator = generator.clone_state()
        epoch = self._sampler.next()
        if isinstance(ahead, DistributedSampler) and epoch is not None:
            ahead.epoch = epoch
        changes: dict[str, Any] = {"sampler": ahead}
        if loader.batch_sampler is not None:
            changes["batch_sampler"] = copy.copy(loader.batch_sampler)
            changes["batch_sampler"].sampler = ahead
        return view_of(
            loader, _given_epoch=self._given.next(), _iterations=self._iterations + 1, **changes
        )

    def _learns_draws(self, state: torch.Tensor) -> bool:
        """Whether the default generator is a few drawn seeds on: then so it will be next time.

        That is what other loaders' ``iter()`` draw from it, a validation loop's above all.
        """
        loader = self._loader()
        if self._state is None or loader is None or type(_innermost(loader)) not in _RANDOM:
            return False
        with random_states_kept(cuda=False):
            torch.default_generator.set_state(self._state)
            for draws in range(_MOST_DRAWS_BETWEEN + 1):
                if torch.equal(torch.default_generator.get_state(), state):
                    learned = draws != self._draws_between
                    self._draws_between = draws
                    return learned
                _draw_a_seed()
        return False


class _Counter:
    """A number that goes on by as much as it did last time, by 1 at first."""

    def __init__(self) -> None:
        self._value: int | None = None
        self._step = 1
        self._seen = False
        self.surprised = False

    def see(self, value: Any) -> None:
        now = value if isinstance(value, int) else None
        self.surprised = self._seen and now != self.next()
        self._seen = True
        if now is not None and self._value is not None:
            self._step = now - self._value
        self._value = now

    def next(self) -> int | None:
        return None if self._value is None else self._value + self._step


def _innermost(loader: Specification) -> Any:
    if loader.batch_sampler is None:
        return loader.sampler
    return getattr(loader.batch_sampler, "sampler", None)


def _draw_a_seed() -> None:
    # As torch's loaders and samplers draw one.
    torch.empty((), dtype=torch.int64, device="cpu").random_()
