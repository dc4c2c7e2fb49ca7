"""A batch that is held never changes and none leaks, for each backend with memory of its own."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch.utils.data import TensorDataset

from backends.h5 import H5
from backends.prefetch import Prefetch
from dataloaders import DataLoader
from dataloaders.cache import precompute
from helpers.datasets import Made
from helpers.processes import Held

BATCH, BATCHES = 4, 8
SIDE = 384  # BATCH images of SIDE x SIDE floats are enough for the pool


IMAGES = Made(lambda index: (torch.full((SIDE, SIDE), float(index)), index), BATCH * BATCHES)


def gathered(**options):
    numbers = torch.arange(BATCH * BATCHES)
    images = numbers.float()[:, None, None].expand(-1, SIDE, SIDE).contiguous()
    return DataLoader(TensorDataset(images, numbers), BATCH, **options)


@pytest.fixture(scope="module")
def loaders(tmp_path_factory):
    path = tmp_path_factory.mktemp("cache") / "images.h5"
    precompute(IMAGES, path, num_workers=0)
    cached = partial(DataLoader, IMAGES, BATCH)
    return {
        "gathered ahead": lambda: gathered(backend=Prefetch(), device="cpu"),
        "cached": lambda: cached(backend=H5(path)),
        "cached ahead": lambda: cached(backend=Prefetch(H5(path)), device="cpu"),
    }


WAYS = {
    "itself": lambda tensor: tensor,
    "slice": lambda tensor: tensor[1:2],
    "permuted": lambda tensor: tensor.permute(2, 0, 1).detach(),
    "numpy": lambda tensor: tensor.numpy()[0],
    "memoryview": lambda tensor: memoryview(tensor.numpy()),
    "storage": lambda tensor: tensor.untyped_storage(),
    "frombuffer": lambda tensor: torch.frombuffer(tensor.numpy(), dtype=torch.uint8),
    "numpy by dlpack": lambda tensor: np.from_dlpack(tensor),
    "saved for backward": lambda tensor: (torch.ones(1, requires_grad=True) * tensor).grad_fn,
    "shallow copy": copy.copy,
}


def content(thing):
    """A few of the bytes of what was kept: all values of an image are equal."""
    if isinstance(thing, torch.UntypedStorage):
        thing = torch.empty(0).set_(thing)
    thing = getattr(thing, "_saved_other", thing)
    return np.asarray(thing).reshape(-1)[::49_991].tobytes()


class Loop(RuleBasedStateMachine):
    """A program that iterates, keeps and drops; ``make`` is its loader's."""

    def __init__(self):
        super().__init__()
        self.before = Held.now()
        self.loader = self.make()
        self.iterators = []
        self.kept = []

    @rule()
    def begin(self):
        if self.iterators and (self.loader.persistent_workers or len(self.iterators) > 2):
            self.iterators.clear()
        self.iterators.append(iter(self.loader))

    @precondition(lambda self: self.iterators)
    @rule(way=st.sampled_from(sorted(WAYS)), count=st.integers(1, 5), data=st.data())
    def take(self, way, count, data):
        number = data.draw(st.integers(0, len(self.iterators) - 1))
        for _ in range(count):
            batch = next(self.iterators[number], None)
            if batch is None:
                del self.iterators[number]
                return
            images, labels = batch
            expected = labels.float()[:, None, None].expand_as(images)
            assert torch.equal(images, expected)
            thing = WAYS[way](images)
            self.kept.append((thing, content(thing)))
            del images, batch, thing

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def drop(self, data):
        first = data.draw(st.integers(0, len(self.kept) - 1))
        del self.kept[first : first + data.draw(st.integers(1, 6))]

    @rule()
    def break_off(self):
        self.iterators.clear()

    @rule()
    def drop_the_loader(self):
        self.loader = self.make()

    @invariant()
    def is_unchanged(self):
        for thing, was in self.kept:
            assert content(thing) == was

    def teardown(self):
        del self.loader
        self.iterators.clear()
        self.kept.clear()
        assert self.before.left_behind() == []
        after = Held.now()
        assert after.shared == self.before.shared
        assert after.files <= self.before.files


EFFORT = [
    pytest.param(1, id="everyday"),
    pytest.param(20, id="thorough", marks=pytest.mark.nightly),
]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("effort", EFFORT)
@pytest.mark.parametrize("name", ["gathered ahead", "cached", "cached ahead"])
def test_a_batch_that_is_held_never_changes(name, effort, loaders):
    class Program(Loop):
        make = staticmethod(loaders[name])

    next(iter(Program.make()))  # what begins with the first batch for good, has
    how = settings(
        max_examples=effort * 3,
        stateful_step_count=25,
        suppress_health_check=list(HealthCheck),
        deadline=None,
    )
    run_state_machine_as_test(Program, settings=how)


def test_memory_is_used_again_once_nothing_refers_to_it(loaders):
    loader = loaders["cached"]()

    def used():
        return {images.data_ptr() for images, _ in loader}

    for name, way in WAYS.items():
        assert len(used() | used()) <= 2, name
        thing = way(next(iter(loader))[0])
        was = content(thing)
        used()
        assert content(thing) == was, name
        del thing
