"""Order, random states and workers' random streams, epoch after epoch, as torch's loader."""

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
from helpers.datasets import SIZE, MapDataset, integer_sample

TorchLoader = torch.utils.data.DataLoader
WORKERS = 2
KEPT = {"num_workers": WORKERS, "persistent_workers": True}


class Noting(MapDataset):
    """Samples with draws from every process-wide generator of the worker, and who made them."""

    def __init__(self, size=24):
        super().__init__(integer_sample, size)

    def __getitem__(self, index):
        draws = (torch.rand(2).tolist(), float(np.random.rand()), random.random())
        return super().__getitem__(index), get_worker_info().id, *draws


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
    """

    options: Callable[[Any], dict[str, Any]] = lambda dataset: {"shuffle": True}
    between: Callable[[Any, int], None] = lambda loader, epoch: None


def _validate(loader, epoch):
    if epoch:
        list(TorchLoader(MapDataset(integer_sample), shuffle=True))


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
    "shuffled": Scene(),
    "own generator": Scene(_own_generator),
    "subset": Scene(_subset),
    "distributed": Scene(_distributed, _set_epoch(0, 1, 2)),
    "short": Scene(_of(batch_size=11)),
    "one sample": Scene(lambda dataset: {"sampler": SequentialSampler([0])}),
    "a validation loop": Scene(between=_validate),
    "another length": Scene(between=_shorten),
    "another seed": Scene(_own_generator, _reseed),
    "other batches": Scene(between=_other_batches),
    "another epoch": Scene(_distributed, _set_epoch(0, 5, 6)),
    "a user's sampler": Scene(lambda dataset: {"sampler": Draws()}),
    "without order": Scene(_of(in_order=False, num_workers=1)),
}


def play(kind, scene, **ours):
    """Run three epochs of ``scene``: batches, and states of generators."""
    seed_everything()
    dataset = Noting()
    options = {"batch_size": 2, **KEPT, **scene.options(dataset)}
    if "batch_sampler" in options:
        del options["batch_size"]
    loader = kind(dataset, collate_fn=batch_of, **options, **ours)
    result = []
    for epoch in range(3):
        scene.between(loader, epoch)
        result.append((list(loader), generator_states(loader)))
    return result


@pytest.mark.parametrize("name", SCENES)
@pytest.mark.thinned(6)
def test_epochs_with_persistent_workers_equal_torchs(name):
    expected = play(TorchLoader, SCENES[name])
    assert_same(play(DataLoader, SCENES[name], backend="prefetch"), expected)


def test_a_seeded_epoch_is_stocks():
    expected = play(DataLoader, Scene(), seed=7)
    assert_same(play(DataLoader, Scene(), seed=7, backend="prefetch"), expected)
    gathers = []
    for backend in ("prefetch", "stock"):
        data = TensorDataset(torch.arange(30))
        loader = DataLoader(data, 4, shuffle=True, seed=7, backend=backend)
        seed_everything()
        gathers.append([(list(loader), generator_states(loader)) for _ in range(3)])
    assert_same(*gathers)


def fails_first(worker):
    raise Unloadable(f"worker {worker}")


@pytest.mark.usefixtures("workers_end_fast")
@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        # Sample 5 fails in each epoch.
        (MapDataset(fails_at_five, 6), {"shuffle": True}),
        # torch reports a set-up that failed with a worker's first task, and resumes it at iter().
        (MapDataset(integer_sample, 2), {"worker_init_fn": fails_first, "num_workers": 1}),
    ],
    ids=["sample", "set-up"],
)
def test_what_cannot_be_loaded_fails_its_own_epoch(dataset, options):
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
