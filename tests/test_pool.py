"""Memory that is used again: when, how much, threads, forks; a held batch never changes."""

import copy
import gc
import io
import os
import pickle
import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch
import torch.utils.data
from hypothesis import HealthCheck, given, settings, stateful
from hypothesis import strategies as st
from torch.utils.data import TensorDataset
from torchvision.transforms import Compose, Resize, ToTensor

from backends.h5 import H5
from backends.prefetch import Prefetch
from backends.stock import Stock
from dataloaders import DataLoader
from dataloaders.batches import memory
from dataloaders.cache import precompute
from helpers.compare import assert_same
from helpers.pictures import noise, saved
from helpers.processes import Held, is_true_in_a_fork
from helpers.recorded import Photos, recording, replayed

PAGE = os.sysconf("SC_PAGE_SIZE")
SIZE = 4 * PAGE


def pool_of(**options):
    """A pool that pools small tensors too, so that tests need little memory."""
    return memory.HostPool(**{"smallest": 1, "most_free": 1 << 30, **options})


def lent(pool, pages=4):
    return pool.empty((pages * PAGE,), torch.uint8)


def bytes_of(pool):
    """Return the bytes that tensors refer to, and the bytes that only the pool refers to."""
    sizes = {True: 0, False: 0}
    for buffer in pool._buffers:
        sizes[buffer.is_free()] += buffer.nbytes
    return sizes[False], sizes[True]


# A tensor like any other


def test_a_pooled_tensor_behaves_like_a_fresh_one():
    pool = pool_of()
    with torch.device("meta"):  # which does not matter
        tensor = pool.empty((4, PAGE), torch.float32).fill_(2)
    assert (tensor.device.type, tensor.is_leaf, tensor._base) == ("cpu", True, None)
    assert tensor.data_ptr() % 64 == 0
    assert pool.empty((3, 0), torch.bfloat16).tolist() == [[]] * 3
    assert tensor.detach_() is tensor
    tensor.requires_grad_()
    (tensor * tensor).sum().backward()
    assert float(tensor.grad[0, 0]) == 4
    plain = tensor.detach()
    with pytest.raises(RuntimeError, match="not resizable"):
        pool.empty((1, PAGE), torch.float32).resize_(8, PAGE)
    assert pickle.loads(pickle.dumps(plain)).equal(plain)
    assert copy.deepcopy(plain).equal(plain)
    file = io.BytesIO()
    torch.save(tensor.detach(), file)
    assert len(file.getvalue()) < 4 * 4 * PAGE + 4096  # not the buffer's slack
    file.seek(0)
    assert torch.load(file).equal(tensor.detach())


# How many


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 3)), max_size=300))
def test_buffers_are_at_most_twice_their_tensors_and_unused_ones_are_released(steps):
    pool, held, lately = pool_of(most_free=500 * PAGE), [], []
    for pages, drops in steps:
        held.append(lent(pool, pages))
        lately = [*lately[-64:], 2 * pages * PAGE]
        needed = sum(tensor.numel() for tensor in held)
        lent_bytes, free_bytes = bytes_of(pool)
        assert needed <= lent_bytes <= 2 * needed
        assert free_bytes <= min(500 * PAGE, sum(lately))
        del held[:drops]
    held.clear()
    assert bytes_of(pool)[0] == 0


# Threads, forks, the end


def test_threads_and_the_collector_never_share_a_buffer():
    pool, start = pool_of(), threading.Barrier(8)

    def work(number):
        draw, held, wrong = random.Random(number), [], []
        start.wait()
        for step in range(400):
            mark = (number * 31 + step) % 251
            held.append((lent(pool, draw.randint(1, 3)).fill_(mark), mark))
            if draw.random() < 0.2:
                cycle = [held.pop(0)[0]]  # left to the collector, in whichever thread it runs
                cycle.append(cycle)
            del held[: draw.choice((0, 0, 1, 3))]
            wrong.extend(step for tensor, value in held if not bool((tensor == value).all()))
        return wrong

    threshold, interval = gc.get_threshold(), sys.getswitchinterval()
    gc.set_threshold(20)  # in the midst of everything, the pool's own code included
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(8) as threads:
            assert not any(threads.map(work, range(8)))
    finally:
        gc.set_threshold(*threshold)
        sys.setswitchinterval(interval)
    gc.collect()
    lent(pool)
    assert bytes_of(pool)[0] == 0


def test_a_call_during_another_one_does_not_wait():
    pool = pool_of()
    tensor = lent(pool)
    with pool._lock:  # as if the collector ran a finalizer in the middle of empty()
        inside = lent(pool).fill_(1)
        del tensor
        assert is_true_in_a_fork(lambda: lent(pool).fill_(1).sum() == SIZE)
    assert (inside == 1).all()
    other = lent(pool)
    assert (other.numel(), *bytes_of(pool)) == (SIZE, SIZE, 0)


# Shared memory for the files of recorded batches


TorchLoader = torch.utils.data.DataLoader
SMALLEST = 2 << 20  # of a batch of files in a slot


def photos(length, sides=(750,)):
    """Files of random pixels: of 1.7 MB, or of many sizes."""
    small = Compose([Resize((5, 5)), ToTensor()])
    squares = (noise(*[sides[n % len(sides)]] * 2, seed=n) for n in range(length))
    return Photos([saved(square, "PNG", compress_level=0) for square in squares], small)


def recorded(dataset, **options):
    stock = Stock(gather=False, view=recording)
    return DataLoader(dataset, 2, **{"num_workers": 1, **options}, backend=stock)


def test_files_go_into_the_ring_and_those_that_are_held_stay():
    loader = recorded(photos(12), persistent_workers=True)
    held = list(loader)
    assert not any(batch.files.is_shared() for batch in held[:4]), "a slot is plain memory here"
    held += list(loader)  # more than there are slots
    for batch, expected in zip(held, 2 * list(TorchLoader(photos(12), 2)), strict=True):
        assert torch.equal(replayed(batch), expected)
    del batch, held
    assert not next(iter(loader)).files.is_shared(), "their slots serve again"


def test_batches_of_many_sizes_are_torchs():
    dataset = photos(24, (600, 900, 20, 750))
    expected = list(TorchLoader(dataset, 2))
    loader = recorded(dataset, num_workers=2, prefetch_factor=1, persistent_workers=True)
    for _ in range(2):
        addresses = set()
        for batch, wanted in zip(loader, expected, strict=True):
            assert_same(replayed(batch), wanted)
            if len(batch.files) >= SMALLEST:
                addresses.add(batch.files.data_ptr())
            del batch
        assert len(addresses) < 9


def test_a_forked_child_that_drops_a_batch_does_not_free_its_slot():
    batches = iter(recorded(photos(24)))
    held = [next(batches)]  # torch's threads do not survive the fork
    expected = held[0].files.clone()
    assert is_true_in_a_fork(lambda: held.clear() is None)
    for batch in batches:
        del batch
    assert torch.equal(held[0].files, expected)


# Batches that a program holds, for each backend with memory of its own


NUMBERS = torch.arange(32)
# Four images of 384 x 384 floats are enough for the pool.
IMAGES = TensorDataset(NUMBERS.float()[:, None, None].expand(-1, 384, 384).contiguous(), NUMBERS)


@pytest.fixture(scope="module")
def loaders(tmp_path_factory):
    path = tmp_path_factory.mktemp("cache") / "images.h5"
    precompute(IMAGES, path, num_workers=0)
    backends = {
        "gathered ahead": Prefetch(),
        "cached": H5(path),
        "cached ahead": Prefetch(H5(path)),
    }
    return {
        name: partial(DataLoader, IMAGES, 4, backend=backend, device="cpu")
        for name, backend in backends.items()
    }


WAYS = {
    "itself": lambda tensor: tensor,
    "permuted": lambda tensor: tensor.permute(2, 0, 1).detach(),
    "numpy": lambda tensor: tensor.numpy()[0],
    "storage": lambda tensor: tensor.untyped_storage(),
    "numpy by dlpack": lambda tensor: np.from_dlpack(tensor),
    "saved for backward": lambda tensor: (torch.ones(1, requires_grad=True) * tensor).grad_fn,
}


def content(thing):
    """A few of the bytes of what was kept: all values of an image are equal."""
    if isinstance(thing, torch.UntypedStorage):
        thing = torch.empty(0).set_(thing)
    thing = getattr(thing, "_saved_other", thing)
    return np.asarray(thing).reshape(-1)[::49_991].tobytes()


class Loop(stateful.RuleBasedStateMachine):
    """A program that iterates, keeps and drops; ``make`` is its loader's."""

    def __init__(self):
        super().__init__()
        self.before = Held.now()
        self.loader = self.make()
        self.iterators = []
        self.kept = []

    @stateful.rule()
    def begin(self):
        if self.iterators and (self.loader.persistent_workers or len(self.iterators) > 2):
            self.iterators.clear()
        self.iterators.append(iter(self.loader))

    @stateful.precondition(lambda self: self.iterators)
    @stateful.rule(way=st.sampled_from(sorted(WAYS)), count=st.integers(1, 5), data=st.data())
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

    @stateful.precondition(lambda self: self.kept)
    @stateful.rule(data=st.data())
    def drop(self, data):
        first = data.draw(st.integers(0, len(self.kept) - 1))
        del self.kept[first : first + data.draw(st.integers(1, 6))]

    @stateful.rule()
    def break_off(self):
        self.iterators.clear()

    @stateful.invariant()
    def is_unchanged(self):
        for thing, was in self.kept:
            assert content(thing) == was

    def teardown(self):
        del self.loader
        self.iterators.clear()
        self.kept.clear()
        assert self.before.left_behind() == []
        after = Held.now()
        assert (after.shared, after.files <= self.before.files) == (self.before.shared, True)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("effort", [1, pytest.param(20, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", ["gathered ahead", "cached", "cached ahead"])
def test_a_batch_that_is_held_never_changes(name, effort, loaders):
    class Program(Loop):
        make = staticmethod(loaders[name])

    next(iter(Program.make()))  # what begins with the first batch for good, has
    how = {"stateful_step_count": 25, "suppress_health_check": list(HealthCheck)}
    stateful.run_state_machine_as_test(Program, settings=settings(max_examples=effort * 3, **how))


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
