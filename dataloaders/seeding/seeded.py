"""seed=: make a loader's shuffle and samples functions of (seed, epoch, index).

    loader ──Seeding.view()──> the same loader with
        samplers without a generator   one seeded from (seed, epoch)
        indices                        sent with (seed, epoch) and the occurrence of each
        dataset[index], collate_fn     run with torch's, NumPy's and random's generators seeded

User code draws from torch's default CPU generator, ``numpy.random`` and ``random``. Outside of
workers their states are restored after each fetch. CUDA generators are never touched:
``torch.manual_seed`` would reseed every device, at many times the cost.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.utils.data
from torch.utils.data import (
    BatchSampler,
    IterableDataset,
    IterDataPipe,
    MapDataPipe,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
    default_convert,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler

from dataloaders.backend import Specification
from dataloaders.batches.whole import RowNumbers, SeededRows, ShowsDataset, WholeBatches
from dataloaders.errors import OptionError
from dataloaders.seeding.states import random_states_kept
from dataloaders.seeding.words import FIRST_RESERVED_DRAW, Words, stable_key, words, words_of
from dataloaders.specification import view_of

_SAMPLE, _COLLATE, _SAMPLER, _WORKERS = (FIRST_RESERVED_DRAW + offset for offset in range(4))

_RANDOM_SAMPLERS = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class Seeding:
    """Make the seeded views of one loader, one for each epoch; the loader's session keeps this."""

    # Of the epoch that began last, or in which the living persistent workers were started.
    _samples: bool
    _stream: torch.Tensor

    def __init__(self) -> None:
        self._sampler_counts = False

    def view(self, loader: Specification, seed: int, *, samples: bool) -> Specification:
        """Return a torch DataLoader to iterate in place of ``loader`` for the next epoch.

        It shares dataset, workers and collation with ``loader``. Torch's samplers without a
        generator (themselves or under torch's BatchSampler) are replaced by copies with one seeded
        from (seed, epoch); so is the generator of the workers' base seed. Other samplers and
        generators are not changed. Nothing is drawn from torch's default generator.

        With ``samples``, the view also seeds the generators around each sample from (seed, epoch,
        key, occurrence), and around a custom collate_fn from those of the batch's first sample.
        Occurrence counts the repeats of a key in this loader's epoch, or for DistributedSampler in
        the epoch of all ranks. ``__getitems__`` is called with one index at a time. Iterable
        datasets are seeded from (seed, epoch, rank, worker, position). Of data pipes, only the
        samplers are seeded.

        The epoch is the value given to ``loader.set_epoch``, else the ``epoch`` of a sampler once
        that was set to other than 0, else the number of earlier ``iter()`` calls. Persistent
        workers that live get the view's sampler, and seed samples or not as when they were started.

        Raises:
            OptionError: while iterating, if ``__getitems__`` does not return a list of one sample.
            TypeError: while iterating, if a sampler's key has no stable content.
        """
        stream = seed, self._epoch(loader)
        workers: Any = loader._iterator
        if workers is None:
            self._samples = samples and not isinstance(loader.dataset, (IterDataPipe, MapDataPipe))
            self._stream = torch.zeros(2, dtype=torch.int64)
            if loader.num_workers > 0 and isinstance(loader.dataset, IterableDataset):
                self._stream.share_memory_()  # type: ignore[no-untyped-call]
        self._stream.copy_(torch.tensor([_signed(number) for number in stream]))
        view = view_of(loader, **_seeded_order(loader, stream))
        if self._samples:
            view.__dict__.update(_seeded_samples(view, stream, self._stream))
        if workers is not None:
            workers._index_sampler = view._index_sampler
        return view

    def _epoch(self, loader: Specification) -> int:
        given = getattr(loader, "_given_epoch", None)
        if given is not None:
            return int(given)
        inner = getattr(loader.batch_sampler, "sampler", None)
        for sampler in (loader.batch_sampler, inner, loader.sampler):
            epoch = getattr(sampler, "epoch", None)
            # A sampler's epoch starts at 0, set or not; once it has changed, the sampler counts
            # epochs.
            if isinstance(epoch, int) and (epoch != 0 or self._sampler_counts):
                self._sampler_counts = True
                return epoch
        return int(getattr(loader, "_iterations", 0))


def seed_generators(words: Words) -> None:
    """Seed torch's default CPU generator, ``numpy.random`` and ``random`` from 128 bits.

    All three are Mersenne twisters, and each takes other words: equal seeds would make torch's and
    NumPy's streams equal. Torch and NumPy keep 32 bits of a seed.
    """
    torch.default_generator.manual_seed(words[0])
    np.random.seed(words[1])
    random.seed(words[2] | words[3] << 32)


_Stream: TypeAlias = tuple[int, int]  # (seed, epoch)


def _seeded_order(loader: Specification, stream: _Stream) -> dict[str, Any]:
    """Return the attributes of ``loader`` that draw in the main process, seeded for an epoch."""
    state: dict[str, Any] = {}
    batch_sampler: Any = loader.batch_sampler
    batched = type(batch_sampler) is BatchSampler
    # A custom batch sampler handles its own samplers.
    inner: Any = batch_sampler.sampler if batched else loader.sampler
    if type(inner) in _RANDOM_SAMPLERS and getattr(inner, "generator", None) is None:
        seeded = copy.copy(inner)
        seeded.generator = _generator(stream, _SAMPLER)
        if batched:
            state["batch_sampler"] = copy.copy(batch_sampler)
            state["batch_sampler"].sampler = seeded
        if inner is loader.sampler:
            state["sampler"] = seeded
    if loader.generator is None:
        state["generator"] = _generator(stream, _WORKERS)
    return state


def _seeded_samples(loader: Specification, stream: _Stream, shared: torch.Tensor) -> dict[str, Any]:
    """Return the attributes of ``loader`` that make samples and batches, seeded.

    An iterable dataset reads (seed, epoch) from ``shared``, since persistent workers outlive an
    epoch. Other samples get it with their keys.
    """
    state: dict[str, Any] = {
        "collate_fn": _SeededCollate(loader.collate_fn),
        "worker_init_fn": ShowsDataset(loader.worker_init_fn),
    }
    if isinstance(loader.dataset, IterableDataset):
        state["dataset"] = _SeededIterable(loader.dataset, shared, _rank())
    else:
        name = "batch_sampler" if loader._auto_collation else "sampler"
        state[name] = _KeyedIndices(getattr(loader, name), stream, batched=loader._auto_collation)
        state["dataset"] = _SeededMap(loader.dataset)
    return state


def _generator(stream: _Stream, draw: int) -> torch.Generator:
    return torch.Generator().manual_seed(words_of(*stream, 0, 0, draw)[0])


class _KeyedIndices:
    """A sampler's indices with what seeds their samples: (seed, epoch), keys, occurrences."""

    def __init__(self, sampler: Iterable[Any], stream: _Stream, *, batched: bool) -> None:
        self._sampler = sampler
        self._stream = stream
        self._batched = batched

    def __iter__(self) -> Iterator[_Keyed]:
        # The sampler's iter() runs here and its next() later, when torch would call them.
        return self._keyed(iter(self._sampler))

    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]

    def _keyed(self, indices: Iterator[Any]) -> Iterator[_Keyed]:
        sampler: Any = self._sampler
        known = _occurrences(sampler.sampler if type(sampler) is BatchSampler else sampler)
        seen: Counter[int] = Counter()
        for index in indices:
            keys = list(index) if self._batched else [index]
            if known is not None:
                occurrences = list(itertools.islice(known, len(keys)))
            else:
                occurrences = []
                for key in map(stable_key, keys):
                    occurrences.append(seen[key])
                    seen[key] += 1
            yield _Keyed(self._stream, keys if self._batched else index, occurrences)


class _Keyed(NamedTuple):
    """One task: what the sampler yielded, a list of keys or one key, and the occurrence of each.

    The occurrence is how often the key came before in the epoch, of all ranks where that is known.
    """

    stream: _Stream
    keys: Any
    occurrences: list[int]


def _occurrences(sampler: Any) -> Iterator[int] | None:
    """Yield the occurrence of each key of an epoch.

    None if a key may come twice within a pass over the dataset, or if nothing is known about the
    sampler. The keys must then be counted.
    """
    kind = type(sampler)
    if kind is SequentialSampler or (kind is RandomSampler and not sampler.replacement):
        places, period = itertools.count(), len(sampler.data_source)
    elif kind is DistributedSampler:
        # Rank r takes positions r, r + ranks, ... of one order, whose padding repeats it.
        places = itertools.count(sampler.rank, sampler.num_replicas)
        period = len(sampler.dataset)
    else:
        return None
    return (place // period for place in places)


class _Fetched(NamedTuple):
    """Samples (or one, without batching) before collation, and the words that seed it."""

    samples: Any
    words: Words


def _states_kept() -> AbstractContextManager[None]:
    """Restore the generators afterwards; not in a worker, whose generators serve nothing else."""
    return random_states_kept(cuda=False) if get_worker_info() is None else nullcontext()


class _SeededMap:
    """A map dataset whose ``keyed`` tasks run the user's code with seeded generators."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, keyed: _Keyed) -> _Fetched:
        one = keyed._replace(keys=[keyed.keys])
        return _Fetched(self._samples(one, None)[0], _collation(one))

    def __getitems__(self, keyed: _Keyed) -> _Fetched:
        if isinstance(self.dataset, RowNumbers):
            return self._for_whole_batches(keyed)
        # The test by which torch decides whether a dataset fetches several samples at once.
        bulk = getattr(self.dataset, "__getitems__", None) or None
        return _Fetched(self._samples(keyed, bulk), _collation(keyed))

    def _for_whole_batches(self, keyed: _Keyed) -> _Fetched:
        """Return the keys and the words that seed their samples, from which a batch is made."""
        one_by_one = copy.copy(self)
        one_by_one.dataset = self.dataset.dataset
        stable = [stable_key(key) for key in keyed.keys]
        seeding = words(*keyed.stream, stable, keyed.occurrences, _SAMPLE)
        rows = SeededRows(keyed.keys, seeding, lambda: one_by_one.__getitems__(keyed).samples)
        return _Fetched(rows, _collation(keyed))

    def _samples(self, keyed: _Keyed, bulk: Callable[[list[Any]], Any] | None) -> list[Any]:
        seed, epoch = keyed.stream
        samples = []
        with _states_kept():
            for key, occurrence in zip(keyed.keys, keyed.occurrences, strict=True):
                seed_generators(words_of(seed, epoch, stable_key(key), occurrence, _SAMPLE))
                if bulk is None:
                    samples.append(self.dataset[key])
                    continue
                fetched = bulk([key])
                if not isinstance(fetched, (list, tuple)) or len(fetched) != 1:
                    name, kind = type(self.dataset).__name__, type(fetched).__name__
                    raise OptionError(
                        f"seed={seed}: {name}.__getitems__([{key!r}]) must return a list of one "
                        f"sample, since each sample is seeded by its own index, and returned {kind}"
                        "; let it return a list, or leave seed= out"
                    )
                samples.append(fetched[0])
        return samples


def _collation(keyed: _Keyed) -> Words:
    """Return what seeds the collation of these samples."""
    # An empty batch, which only a custom batch sampler makes, has no first sample.
    first = (stable_key(keyed.keys[0]), keyed.occurrences[0]) if keyed.keys else (0, -1)
    return words_of(*keyed.stream, *first, _COLLATE)


class _SeededIterable:
    """An iterable dataset, with generators seeded by its position at every ``next``."""

    def __init__(self, dataset: Any, stream: torch.Tensor, rank: int) -> None:
        self.dataset = dataset
        self._stream = stream
        self._rank = rank

    def __iter__(self) -> Iterator[_Fetched]:
        seed, epoch = (int(number) for number in self._stream)
        worker = get_worker_info()
        place = self._rank << 32 | (0 if worker is None else worker.id)

        def seeded(position: int, action: Callable[[], Any]) -> Any:
            with _states_kept():
                seed_generators(words_of(seed, epoch, position, place, _SAMPLE))
                return action()

        # Begun here: iter() itself may draw, as a shuffling dataset's does.
        samples = seeded(-1, lambda: iter(self.dataset))

        def fetched(position: int) -> _Fetched:
            sample = seeded(position, lambda: next(samples))
            return _Fetched(sample, words_of(seed, epoch, position, place, _COLLATE))

        return map(fetched, itertools.count())  # which goes on after an error, and ends as samples


class _SeededCollate:
    """The user's collate_fn, seeded by the first sample's own words."""

    def __init__(self, collate_fn: Callable[[Any], Any]) -> None:
        self._collate_fn = collate_fn

    def __call__(self, fetched: _Fetched | list[_Fetched]) -> Any:
        samples: Any
        if isinstance(fetched, list):  # an iterable's samples, each on its own
            samples, seeding = [item.samples for item in fetched], fetched[0].words
        else:
            samples, seeding = fetched
        draws_nothing = self._collate_fn is default_collate or self._collate_fn is default_convert
        if draws_nothing or isinstance(self._collate_fn, WholeBatches):
            return self._collate_fn(samples)
        with _states_kept():
            seed_generators(seeding)
            return self._collate_fn(samples)


def _signed(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63


def _rank() -> int:
    """Return this process's rank, read here because workers do not join the process group."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return 0
