"""Order, random states and the workers' own random streams, epoch after epoch, as torch's loader.

With persistent workers the next epoch's first tasks are guessed and begun while an epoch ends; each
sample notes by a clock that the loop sets whether that happened.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.utils.data
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    get_worker_info,
)

from backends.prefetch import Prefetch
from dataloaders import DataLoader
from helpers.compare import assert_same, generator_states, seed_everything
from helpers.contract import Unloadable, fails_at_five
from helpers.datasets import SIZE, CountingStream, MapDataset, integer_sample
from helpers.waits import becomes_true

TorchLoader = torch.utils.data.DataLoader
WORKERS = 2
IN_FLIGHT = 2 * WORKERS
KEPT = {"num_workers": WORKERS, "persistent_workers": True}


class Noting(MapDataset):
    """Samples with draws from every process-wide generator of the worker, and who made them when.

    Attributes:
        clock: set by the loop to the number of the epoch that it is about to begin.
        made: how many samples each worker has made.
    """

    epoch = -1

    def __init__(self, size=24):
        super().__init__(integer_sample, size)
        self.clock = torch.zeros(1, dtype=torch.int64).share_memory_()
        self.made = torch.zeros(WORKERS, dtype=torch.int64).share_memory_()

    def __getitem__(self, index):
        worker = get_worker_info().id
        draws = (torch.rand(2).tolist(), float(np.random.rand()), random.random())
        sample = (super().__getitem__(index), worker, *draws, self.epoch, int(self.clock))
        self.made[worker] += 1
        return sample


class NotingEpochs(Noting):
    def set_epoch(self, epoch):
        self.epoch = epoch


class Draws(Sampler):
    """A user's sampler, which draws each index when it is asked for it, and may raise."""

    def __init__(self, after=None, most=24):
        self.after, self.most = after, most

    def __len__(self):
        return 24

    def __iter__(self):
        for number in range(24):
            if number == self.after:
                raise Unloadable("the sampler")
            yield int(torch.randint(self.most, (1,)))


def batch_of(samples):
    return samples  # as they are: without tensors in shared memory


class Scene(NamedTuple):
    """One loop.

    Attributes:
        options: of a loader for the dataset that is given.
        between: what happens before each epoch.
        early: "+" for each epoch that begins early.
        wasted: guesses that turn out wrong, where none is made after the last epoch.
    """

    options: Callable[[Any], dict[str, Any]] = lambda dataset: {"shuffle": True}
    between: Callable[[Any, int], None] = lambda loader, epoch: None
    early: str = "-++"
    wasted: int | None = None


def _validate(loader, epoch):
    if epoch:
        list(TorchLoader(MapDataset(integer_sample), shuffle=True))


def _draw_ever_more(loader, epoch):
    for _ in range(epoch * (epoch + 1) // 2):  # as many seeds as no number of them between epochs
        torch.empty((), dtype=torch.int64).random_()


def _shorten(loader, epoch):
    loader.dataset.size = 24 - 2 * epoch


def _reseed(loader, epoch):
    if epoch == 2:
        loader.generator.manual_seed(9)


def _other_batches(loader, epoch):
    loader.batch_sampler.batch_size = 2 + epoch


def _set_epoch(*epochs):
    def told(loader, epoch):
        sampler = loader.sampler
        (sampler if isinstance(sampler, DistributedSampler) else loader).set_epoch(epochs[epoch])

    return told


def _of(**options):
    return lambda dataset: {"shuffle": True, **options}


def _distributed(dataset):
    return {"sampler": DistributedSampler(dataset, num_replicas=2, rank=1)}


def _own_generator(dataset):
    return {"shuffle": True, "generator": torch.Generator()}


def _subset(dataset):
    return {"batch_sampler": BatchSampler(SubsetRandomSampler(range(3, 20)), 3, drop_last=True)}


SCENES = {
    "shuffled": Scene(early="-+++"),
    "own generator": Scene(_own_generator, early="-+++"),
    "subset": Scene(_subset),
    "distributed": Scene(_distributed, _set_epoch(0, 1, 2)),
    "short": Scene(_of(batch_size=11)),
    "one sample": Scene(lambda dataset: {"sampler": SequentialSampler([0])}),
    "a validation loop": Scene(between=_validate, early="--++"),
    "ever more validation loops": Scene(between=_draw_ever_more, early="-------", wasted=3),
    "another length": Scene(between=_shorten, early="---"),
    "another seed": Scene(_own_generator, _reseed, early="-+--", wasted=1),
    "other batches": Scene(between=_other_batches, early="---"),
    "another epoch": Scene(_distributed, _set_epoch(0, 5, 6, 7), early="----", wasted=1),
    "a user's sampler": Scene(lambda dataset: {"sampler": Draws()}, early="---", wasted=0),
    "without order": Scene(_of(in_order=False, num_workers=1), early="---", wasted=0),
}


def play(kind, scene, dataset=None, **ours):
    """Run the epochs of ``scene``: batches, states of generators, and whether each began early.

    It did if the clock of its first sample is of the epoch before.
    """
    seed_everything()
    dataset = dataset or Noting()
    options = {"batch_size": 2, **KEPT, **scene.options(dataset)}
    if "batch_sampler" in options:
        del options["batch_size"]
    loader = kind(dataset, collate_fn=batch_of, **options, **ours)
    result, early = [], ""
    for epoch, guessed in enumerate(scene.early):
        if "backend" in ours and guessed == "+":
            wait_for_early_tasks(dataset, result[0][0], epoch, early.count("+"))
        scene.between(loader, epoch)
        dataset.clock.fill_(epoch)
        batches = list(loader)
        early += "+" if batches[0][0][-1] < epoch else "-"
        notes = [[sample[:-1] for sample in batch] for batch in batches]
        result.append((notes, generator_states(loader)))
    return result, early


def wait_for_early_tasks(dataset, batches, epochs, used):
    """Return when the workers have made the next epoch's first batches, after ``epochs`` epochs.

    Each of these ended with a guess, of which ``used`` turned out right.
    """
    sizes = [len(batch) for batch in batches]
    wanted = epochs * sum(sizes) + (epochs - used) * sum(sizes[:IN_FLIGHT])
    assert becomes_true(lambda: int(dataset.made.sum()) >= wanted), "no epoch begins early"


@pytest.mark.parametrize("name", SCENES)
@pytest.mark.thinned(6)
def test_epochs_with_persistent_workers_equal_torchs(name):
    scene, dataset = SCENES[name], Noting()
    expected, _ = play(TorchLoader, scene)
    got, early = play(DataLoader, scene, dataset, backend="prefetch")
    assert_same(got, expected)
    assert early == scene.early
    if scene.wasted is not None:
        sizes = [[len(batch) for batch in batches] for batches, _ in got]
        wasted = scene.wasted * sum(sizes[0][:IN_FLIGHT])
        assert int(dataset.made.sum()) == sum(map(sum, sizes)) + wasted


def test_a_seeded_epoch_begins_early_and_is_stocks():
    scene = Scene(early="-+++")
    expected, _ = play(DataLoader, scene, seed=7)
    got, early = play(DataLoader, scene, seed=7, backend="prefetch")
    assert_same(got, expected)
    assert early == "-+++"
    gathers = []
    for backend in ("prefetch", "stock"):
        data = TensorDataset(torch.arange(30))
        loader = DataLoader(data, 4, shuffle=True, seed=7, backend=backend)
        seed_everything()
        gathers.append([(list(loader), generator_states(loader)) for _ in range(3)])
    assert_same(*gathers)


class EpochStream(IterableDataset):
    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter([[self.epoch]] * 4)


@pytest.mark.parametrize("context", [None, pytest.param("forkserver", marks=pytest.mark.nightly)])
def test_set_epoch_reaches_the_datasets_of_persistent_workers(context):
    options = {**KEPT, "collate_fn": batch_of, "multiprocessing_context": context}
    options["num_workers"] = WORKERS if context is None else 1
    for dataset in (NotingEpochs(), EpochStream()):
        loader = DataLoader(dataset, 2, backend="prefetch", **options)
        for epoch in (0, 1, 2, 7, 7, 8):
            loader.set_epoch(epoch)
            samples = [sample for batch in loader for sample in batch]
            assert {sample[-2] if len(sample) > 1 else sample[0] for sample in samples} == {epoch}


def test_a_datasets_next_epoch_begins_early_and_one_that_is_told_none_keeps_its_own():
    scene = Scene(between=_set_epoch(3, 4, 5, 9, 10), early="-++--")
    assert play(DataLoader, scene, NotingEpochs(), backend="prefetch")[1] == "-++--"
    result, early = play(DataLoader, Scene(), NotingEpochs(), backend="prefetch")
    assert {sample[-1] for batches, _ in result for batch in batches for sample in batch} == {-1}
    assert early == "-++"


def test_a_loop_that_stops_at_the_last_batch_has_ended_its_epoch():
    for size in (8, 24):
        dataset, batches = Noting(size), []
        loader = DataLoader(dataset, 2, collate_fn=batch_of, backend="prefetch", **KEPT)
        for epoch in range(3):
            if epoch:
                wait_for_early_tasks(dataset, batches, epoch, epoch - 1)
            dataset.clock.fill_(epoch)
            batches = list(itertools.islice(iter(loader), size // 2))  # and not the end
            samples = [sample for batch in batches for sample in batch]
            assert [sample[0] for sample in samples] == list(range(0, 3 * size, 3))
            assert (samples[0][-1] < epoch) == (epoch > 0)


def test_why_the_next_epoch_does_not_begin_early():
    base = {"dataset": MapDataset(integer_sample), "num_workers": 1, "backend": "prefetch"}
    kept = {**base, "persistent_workers": True}
    not_early = "do not begin the next epoch before it is requested: "
    for options, words in (
        (kept, "the workers begin the next epoch while this one ends"),
        (base, not_early + "workers start anew for each epoch: persistent_workers=True keeps them"),
        ({**kept, "dataset": CountingStream()}, not_early + "an iterable dataset"),
        ({**kept, "in_order": False}, not_early + "in_order=False"),
        ({**kept, "sampler": Draws()}, not_early + "Draws, the sampler, is not"),
        ({**kept, "batch_sampler": [[1]]}, not_early + "list, the batch_sampler, is not"),
    ):
        assert words in str(DataLoader(**options).explain())


def fails_first(worker):
    raise Unloadable(f"worker {worker}")


@pytest.mark.usefixtures("workers_end_fast")
@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        # Sample 5 fails in each epoch; the first tasks of a shuffled one may hold it.
        (MapDataset(fails_at_five, 6), {"shuffle": True}),
        # torch reports a set-up that failed with a worker's first task, and resumes it at iter().
        (MapDataset(integer_sample, 2), {"worker_init_fn": fails_first, "num_workers": 1}),
    ],
    ids=["sample", "set-up"],
)
def test_what_cannot_be_loaded_early_fails_its_own_epoch(dataset, options):
    results = []
    for kind, ours in ((DataLoader, {"backend": "prefetch"}), (TorchLoader, {})):
        seed_everything()
        loader, found = kind(dataset, **{**KEPT, **options}, **ours), []
        for _ in range(5):
            try:
                found.extend(batch.tolist() for batch in loader)
            except Unloadable as error:
                found.append(str(error))
        results.append(found)
    assert results[0] == results[1]
    assert any(isinstance(each, str) for each in results[0])


# Programs of loops that break off, over all kinds of loaders

SAMPLERS = {
    "in order": lambda dataset, own: SequentialSampler(dataset),
    "shuffled": lambda dataset, own: RandomSampler(dataset, num_samples=20),
    "shuffled, own generator": lambda dataset, own: RandomSampler(dataset, generator=own),
    "replacement": lambda dataset, own: RandomSampler(dataset, True, 20, own),
    "as it goes": lambda dataset, own: Draws(),
    "raises": lambda dataset, own: Draws(7, SIZE),
}

PROGRAMS = st.fixed_dictionaries(
    {
        "sampler": st.sampled_from(list(SAMPLERS)),
        "workers": st.integers(0, 2),
        "batch_size": st.integers(1, 4),
        "prefetch_factor": st.integers(1, 3),
        "persistent": st.booleans(),
        "tensors": st.booleans(),
        "epochs": st.lists(st.one_of(st.none(), st.integers(0, 9)), min_size=1, max_size=4),
    }
)


def run(program, kind, **ours):
    """Batches or the error of each epoch, and the generators' states after it."""
    seed_everything()
    own = torch.Generator().manual_seed(5)
    numbers = torch.arange(24) * 3
    data = TensorDataset(numbers) if program["tensors"] else MapDataset(integer_sample, 24)
    options = {"num_workers": program["workers"], "batch_size": program["batch_size"]}
    if program["workers"]:
        options["prefetch_factor"] = program["prefetch_factor"]
        options["persistent_workers"] = program["persistent"]
    loader = kind(data, sampler=SAMPLERS[program["sampler"]](data, own), **options, **ours)
    seen = []
    for most in program["epochs"]:
        try:
            for batch in itertools.islice(loader, most):
                seen.append(torch.as_tensor(batch[0] if program["tensors"] else batch).tolist())
        except Unloadable as error:
            seen.append(str(error))
        # Without workers tensors are gathered ahead: their sampler is ahead of torch's at a break.
        if program["tensors"] and not program["workers"]:
            seed_everything()
            own.manual_seed(5)
        else:
            seen.append([generator_states(), own.get_state().tolist()])
    return seen


def _example(sampler, workers, epochs, **changes):
    usual = {"batch_size": 2, "prefetch_factor": 2, "persistent": True, "tensors": False}
    program = {"sampler": sampler, "workers": workers, "epochs": epochs}
    return example({**usual, **program, **changes})


@pytest.mark.parametrize(
    "effort", [5, pytest.param(200, marks=(pytest.mark.nightly, pytest.mark.timeout(900)))]
)
def test_loops_that_break_off_leave_order_and_generators_as_torch_does(effort):
    @settings(max_examples=effort)
    @given(PROGRAMS)
    @_example("as it goes", 2, [1, 6, 9, None])
    @_example("in order", 2, [9, None, 10, None])  # after the sampler's end, before the last batch
    @_example("replacement", 1, [7, None], persistent=False)
    @_example("raises", 2, [None, 1, None], batch_size=1)
    @_example("raises", 0, [None, 5], tensors=True)
    @_example("shuffled", 0, [None, 3, None], tensors=True)
    def check(program):
        # More batches ahead than torch has in flight would ask the sampler for the difference.
        ahead = max(1, min(2, program["workers"] * program["prefetch_factor"]))
        expected = run(program, TorchLoader)
        assert_same(run(program, DataLoader, backend=Prefetch(ahead=ahead)), expected)

    check()
