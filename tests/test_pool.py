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
from itertools import islice

import numpy as np
import pytest
import torch
import torch.utils.data
from hypothesis import given, settings
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


def program(loader, steps):
    """Iterate, keep and drop as ``steps`` say: what is kept never changes."""
    iterators, kept = [], []
    for action, way, number in steps:
        if action == "begin":
            iterators = [*iterators[-2:], iter(loader)]
        elif action == "break off":
            iterators.clear()
        elif action == "drop":
            del kept[number : number + 4]
        elif iterators:
            for images, labels in islice(iterators[number % len(iterators)], 1 + number % 5):
                assert torch.equal(images, labels.float()[:, None, None].expand_as(images))
                thing = WAYS[way](images)
                kept.append((thing, content(thing)))
            images = thing = None
        assert all(content(thing) == was for thing, was in kept)


ACTIONS = st.sampled_from(["begin", "take", "take", "take", "drop", "break off"])
STEPS = st.lists(
    st.tuples(ACTIONS, st.sampled_from(sorted(WAYS)), st.integers(0, 9)), min_size=10, max_size=25
).map(lambda steps: [("begin", "", 0), *steps])


@pytest.mark.thinned(2)
@pytest.mark.parametrize("effort", [3, pytest.param(60, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", ["gathered ahead", "cached", "cached ahead"])
def test_a_batch_that_is_held_never_changes(name, effort, loaders):
    make = loaders[name]
    next(iter(make()))  # what begins with the first batch for good, has

    @settings(max_examples=effort)
    @given(STEPS)
    def check(steps):
        before = Held.now()
        program(make(), steps)
        assert before.left_behind() == []
        after = Held.now()
        assert (after.shared, after.files <= before.files) == (before.shared, True)

    check()


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
