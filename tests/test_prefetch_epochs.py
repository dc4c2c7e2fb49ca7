"""Order, random states and workers' random streams are torch's, epoch after epoch."""

import itertools
import random

import numpy as np
import pytest
import torch
import torch.utils.data
from hypothesis import given, settings
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
from helpers.contract import Unloadable
from helpers.datasets import SIZE, MapDataset, integer_sample


class Noting(MapDataset):
    """Samples of the index, the worker and draws from every process-wide generator."""

    def __init__(self, failing):
        super().__init__(integer_sample, 24)
        self.failing = failing

    def __getitem__(self, index):
        info, draws = get_worker_info(), torch.rand(2).tolist()
        if index == self.failing:
            raise Unloadable(f"sample {index}")
        worker = -1 if info is None else info.id
        return torch.tensor([index, worker, *draws, np.random.rand(), random.random()]).double()


class Draws(Sampler):
    """A user's sampler, which draws each index as it yields it, and may raise."""

    def __init__(self, after=None, most=24, first=()):
        self.after, self.most, self.first = after, most, first

    def __len__(self):
        return 24

    def __iter__(self):
        yield from self.first
        for number in range(24):
            if number == self.after:
                raise Unloadable("the sampler")
            yield int(torch.randint(self.most, (1,)))


def fails_first(worker):
    raise Unloadable(f"worker {worker}")


# Programs of loops that break off, over all kinds of loaders

SAMPLERS = {
    "in order": lambda data, own: SequentialSampler(data),
    "shuffled": lambda data, own: RandomSampler(data, num_samples=20),
    "shuffled, own generator": lambda data, own: RandomSampler(data, generator=own),
    "replacement": lambda data, own: RandomSampler(data, True, 20, own),
    "subset": lambda data, own: BatchSampler(SubsetRandomSampler(range(3, 20), own), 3, True),
    "distributed": lambda data, own: DistributedSampler(data, num_replicas=2, rank=1),
    "as it goes": lambda data, own: Draws(),
    "raises": lambda data, own: Draws(7, SIZE),
    # With one worker and two tasks: at the batch that fails as well.
    "raises with a batch": lambda data, own: Draws(0, first=(1, 5, 3)),
}

PROGRAMS = st.fixed_dictionaries(
    {
        "sampler": st.sampled_from(list(SAMPLERS)),
        "workers": st.integers(0, 2),
        "batch_size": st.integers(1, 4),
        "prefetch_factor": st.integers(1, 3),
        "persistent": st.booleans(),
        "tensors": st.booleans(),
        "seed": st.sampled_from([None, None, 7]),
        "failing": st.sampled_from([None, None, 5]),
        "changes": st.booleans(),
        "epochs": st.lists(st.one_of(st.none(), st.integers(0, 9)), min_size=1, max_size=4),
    }
)


def run(program, kind, **ours):
    """Return the batches or the error of each epoch, and the generators' states after it."""
    seed_everything()
    own = torch.Generator().manual_seed(5)
    data = TensorDataset(torch.arange(24)) if program["tensors"] else Noting(program["failing"])
    options = {"num_workers": program["workers"], **ours}
    if program["workers"]:
        options["prefetch_factor"] = program["prefetch_factor"]
        options["persistent_workers"] = program["persistent"]
        options["worker_init_fn"] = program.get("worker_init_fn")
    sampler = SAMPLERS[program["sampler"]](data, own)
    if isinstance(sampler, BatchSampler):
        options["batch_sampler"] = sampler
    else:
        options |= {"sampler": sampler, "batch_size": program["batch_size"]}
    loader = kind(data, **options)
    seen = []
    for epoch, most in enumerate(program["epochs"]):
        if program["changes"]:  # what a loop may do between epochs
            loader.batch_sampler.batch_size = 2 + epoch
            torch.rand(epoch)
            own.manual_seed(epoch % 2)
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(5 - epoch)
        try:
            for batch in itertools.islice(loader, most):
                seen.append((batch[0] if program["tensors"] else batch).tolist())
        except Unloadable as error:
            seen.append(str(error))
        # Without workers tensors are gathered ahead: their sampler is ahead of torch's at a break.
        if program["tensors"] and not program["workers"]:
            seed_everything()
            own.manual_seed(5)
        else:
            seen.append([generator_states(), own.get_state().tolist()])
    return seen


def _program(sampler, workers, epochs, **changes):
    usual = {"batch_size": 2, "prefetch_factor": 2, "persistent": True, "tensors": False}
    usual |= {"seed": None, "failing": None, "changes": False}
    return {**usual, "sampler": sampler, "workers": workers, "epochs": epochs, **changes}


def _assert_torchs(program):
    # More batches ahead than torch has in flight would ask the sampler for the difference.
    ahead = max(1, min(2, program["workers"] * program["prefetch_factor"]))
    seed = program["seed"]  # of the order too: as on stock
    reference = (torch.utils.data.DataLoader, {}) if seed is None else (DataLoader, {"seed": seed})
    expected = run(program, reference[0], **reference[1])
    assert_same(run(program, DataLoader, backend=Prefetch(ahead=ahead), seed=seed), expected)


@pytest.mark.parametrize(
    "program",
    [
        _program("as it goes", 2, [1, 6, 9, None]),
        # After the sampler's end, before the last batch.
        _program("in order", 2, [9, None, 10, None]),
        _program("distributed", 2, [None, None, None], changes=True),
        _program("shuffled, own generator", 2, [None, 3, None], seed=7),
        _program("raises", 2, [None, 1, None], batch_size=1),
        # torch reports it with a worker's first task, and resumes the worker at iter().
        _program("distributed", 1, [None] * 5, worker_init_fn=fails_first),
        _program("raises with a batch", 1, [None], failing=5, batch_size=1),
        _program("raises", 0, [None, 5], tensors=True),
        _program("shuffled", 0, [None, 3, None], tensors=True, seed=7),
    ],
    ids=lambda program: program["sampler"],
)
@pytest.mark.usefixtures("workers_end_fast")
def test_a_loop_that_breaks_off_leaves_order_and_generators_as_torch_does(program):
    _assert_torchs(program)


@pytest.mark.parametrize(
    "effort", [3, pytest.param(200, marks=(pytest.mark.nightly, pytest.mark.timeout(900)))]
)
def test_loops_that_break_off_leave_order_and_generators_as_torch_does(effort):
    settings(max_examples=effort)(given(PROGRAMS)(_assert_torchs))()
