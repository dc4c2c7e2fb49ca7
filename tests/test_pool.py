"""The pool of host memory: when memory is used again, its bounds, threads, forks."""

import copy
import gc
import io
import os
import pickle
import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dataloaders.batches import memory
from helpers.processes import is_true_in_a_fork

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
    plain.resize_(2, PAGE)
    memory.HostPool().empty((8,), torch.uint8).resize_(100)  # a small tensor is torch's own
    with pytest.raises(RuntimeError, match="not resizable"):
        pool.empty((1, PAGE), torch.float32).resize_(8, PAGE)
    assert pickle.loads(pickle.dumps(plain)).equal(plain)
    assert copy.deepcopy(plain).equal(plain)
    file = io.BytesIO()
    torch.save(tensor.detach(), file)
    assert len(file.getvalue()) < 4 * 4 * PAGE + 4096  # not the buffer's slack
    file.seek(0)
    assert torch.load(file).equal(tensor.detach())


# Which buffer, and how many


def test_the_buffer_lent_last_is_lent_next_and_released_last():
    pool = pool_of()
    one, two = lent(pool), lent(pool)
    address = two.data_ptr()
    del two, one
    assert lent(pool).data_ptr() == address  # the one lent last
    pool = pool_of(most_free=5 * PAGE)
    one, two = lent(pool, 4), lent(pool, 5)
    del one, two
    large = lent(pool, 40)  # then there is room for one of the two free buffers
    assert bytes_of(pool) == (large.numel(), 5 * PAGE)  # the one lent last stays


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


class Holder:
    def __init__(self, held):
        self.held = held
        self.itself = self  # a cycle: only the garbage collector ends it


def test_threads_and_the_collector_never_share_a_buffer():
    pool, start = pool_of(), threading.Barrier(8)

    def work(number):
        draw, held, wrong = random.Random(number), [], []
        start.wait()
        for step in range(400):
            mark = (number * 31 + step) % 251
            held.append((lent(pool, draw.randint(1, 3)).fill_(mark), mark))
            if draw.random() < 0.2:
                Holder(held.pop(0)[0])  # left to the collector, in whichever thread it runs
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
