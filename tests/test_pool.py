"""The pool: what keeps a tensor's memory out of it, threads, forks, the end, and its bounds."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import random
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dataloaders.batches.memory import HostMemory, HostPool, PinnedMemory
from helpers.processes import is_true_in_a_fork

PAGE = os.sysconf("SC_PAGE_SIZE")
SIZE = 4 * PAGE

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.uint16,
    torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


def pool_of(**options: Any) -> HostPool:
    """A pool that pools small tensors too, so that tests need little memory."""
    return HostPool(**{"smallest": 1, "most_free": 1 << 30, **options})


def lent(pool: HostPool) -> torch.Tensor:
    return pool.empty((SIZE,), torch.uint8)


# A tensor like any other


@settings(max_examples=100, deadline=None)
@given(
    shape=st.lists(st.integers(0, 5), max_size=5),
    dtype=st.sampled_from(DTYPES),
    inference=st.booleans(),
)
def test_a_pooled_tensor_is_as_a_fresh_one(
    shape: list[int], dtype: torch.dtype, inference: bool
) -> None:
    with torch.inference_mode(inference):
        ours = pool_of().empty(shape, dtype)
        theirs = torch.empty(shape, dtype=dtype)
        ours.fill_(1)
    for name in ("dtype", "shape", "device", "layout", "requires_grad", "is_leaf", "grad_fn"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert type(ours) is torch.Tensor
    assert ours.stride() == theirs.stride()
    assert ours.storage_offset() == 0
    assert ours.untyped_storage().nbytes() == theirs.untyped_storage().nbytes()
    assert ours.is_contiguous()
    assert ours.data_ptr() % 64 == 0
    assert ours._is_view() is theirs._is_view() is False
    assert ours._base is None
    assert ours.is_inference() is theirs.is_inference() is inference
    assert ours.is_shared() is ours.is_pinned() is False
    assert ours.view(-1).tolist() == [1] * ours.numel()


def test_what_a_fresh_tensor_can_do() -> None:
    pool = pool_of()
    tensor = pool.empty((4, PAGE), torch.float32).fill_(2)
    assert tensor.detach_() is tensor
    tensor.requires_grad_()
    (tensor * tensor).sum().backward()
    assert tensor.grad is not None
    assert float(tensor.grad[0, 0]) == 4
    plain = tensor.detach()
    plain.resize_(2, PAGE)
    with pytest.raises(RuntimeError, match="not resizable"):
        pool.empty((1, PAGE), torch.float32).resize_(8, PAGE)
    assert pickle.loads(pickle.dumps(plain)).equal(plain)
    assert copy.deepcopy(plain).equal(plain)
    file = io.BytesIO()
    torch.save(tensor.detach(), file)
    assert len(file.getvalue()) < 4 * 4 * PAGE + 4096  # not the buffer's slack
    file.seek(0)
    assert torch.load(file).equal(tensor.detach())


@pytest.mark.parametrize("shape", [(-1, 3), (-(1 << 12), -(1 << 12)), (1 << 40, 1 << 20)])
def test_an_impossible_shape_is_torchs_error(shape: tuple[int, ...]) -> None:
    with pytest.raises(RuntimeError):
        pool_of().empty(shape, torch.uint8)


def test_the_default_device_and_fake_small_tensors_change_nothing() -> None:
    with torch.device("meta"):
        for smallest in (1, 1 << 40):
            assert pool_of(smallest=smallest).empty((PAGE,), torch.int32).is_cpu


def test_small_tensors_are_torchs_own() -> None:
    pool = HostPool()
    small = pool.empty((8,), torch.uint8)
    small.resize_(100)
    assert pool.lent_bytes == 0
    assert not pool.pays_for(8)
    assert pool.pays_for(100 << 20)


# What keeps the memory out of the pool


class Squared(torch.autograd.Function):
    """Keeps its input for the way back, and no more."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(batch)
        return weight.sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (batch,) = ctx.saved_tensors
        return batch.sum() * gradient * torch.ones(1), None


class Holder:
    def __init__(self, held: Any) -> None:
        self.held = held
        self.itself = self  # a cycle: only the garbage collector ends it


KEEPERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "itself": lambda t: t,
    "slice": lambda t: t[5:7],
    "element": lambda t: t[3],
    "view": lambda t: t.view(2, -1),
    "reshape": lambda t: t.reshape(-1, 4),
    "permute": lambda t: t.view(2, -1).permute(1, 0),
    "expand": lambda t: t[:1].expand(9),
    "detach": lambda t: t.detach(),
    "data": lambda t: t.data,
    "unbind": lambda t: t.view(4, -1).unbind(),
    "split": lambda t: t.split(100)[2],
    "other dtype": lambda t: t.view(torch.int16),
    "numpy": lambda t: t.numpy(),
    "numpy slice": lambda t: np.asarray(t)[2:],
    "numpy of a slice": lambda t: t[4:].numpy()[1:][1:],
    "numpy view": lambda t: t.numpy().view(np.float32).reshape(2, -1),
    "untyped storage": lambda t: t.untyped_storage(),
    "typed storage": lambda t: t._typed_storage(),
    "set_": lambda t: torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage()),
    "memoryview": lambda t: memoryview(t.numpy()),
    "frombuffer": lambda t: torch.frombuffer(t.numpy(), dtype=torch.uint8),
    "dlpack": lambda t: torch.utils.dlpack.to_dlpack(t),
    "numpy by dlpack": lambda t: np.from_dlpack(t),
    "as_tensor of numpy": lambda t: torch.as_tensor(t.numpy()),
    "parameter": lambda t: torch.nn.Parameter(t, requires_grad=False),
    "subclass": lambda t: t.as_subclass(torch.nn.Buffer),
    "saved for backward": lambda t: Squared.apply(torch.ones(1, requires_grad=True), t),
    "closure": lambda t: lambda: t,
    "list of views": lambda t: [t[:1], {"a": t[1:]}],
    "shallow copy": copy.copy,
}


def test_whatever_refers_to_a_tensor_keeps_its_memory() -> None:
    for name, keep in KEEPERS.items():
        pool = pool_of()
        tensor = lent(pool).fill_(7)
        address = tensor.data_ptr()
        kept = keep(tensor)
        del tensor
        assert (pool.lent_bytes, pool.free_bytes) == (SIZE, 0), name
        other = lent(pool).fill_(9)
        assert other.data_ptr() != address, name
        del kept
        assert (pool.lent_bytes, pool.free_bytes) == (SIZE, SIZE), name
        assert lent(pool).data_ptr() == address, name


def test_moving_to_shared_memory_gives_the_buffer_back() -> None:
    pool = pool_of()
    tensor = lent(pool).fill_(3)
    tensor.share_memory_()
    assert pool.free_bytes == SIZE
    lent(pool).fill_(4)
    assert (tensor == 3).all()


def test_a_cycle_gives_its_memory_back_when_it_is_collected() -> None:
    pool = pool_of()
    gc.disable()
    try:
        Holder(lent(pool))
        assert pool.lent_bytes == SIZE
        gc.collect()
        assert pool.free_bytes == SIZE
    finally:
        gc.enable()


# Which buffer, and how many


def test_the_buffer_used_last_serves_next() -> None:
    pool = pool_of()
    one, two = lent(pool), lent(pool)
    address = one.data_ptr()
    del two, one
    assert lent(pool).data_ptr() == address


def test_a_short_last_batch_uses_a_full_ones_buffer() -> None:
    pool = pool_of()
    for _ in range(3):
        full = pool.empty((64, PAGE), torch.uint8)
        held = full
        full = pool.empty((64, PAGE), torch.uint8)
        addresses = {held.data_ptr(), full.data_ptr()}
        del held
        short = pool.empty((3, PAGE), torch.uint8)
        assert short.data_ptr() in addresses
        assert short.untyped_storage().nbytes() == 3 * PAGE
        del full, short
    assert pool.free_bytes == 2 * 64 * PAGE


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 3)), max_size=300))
def test_the_pool_holds_no_more_than_its_tensors_once_did(steps: list[tuple[int, int]]) -> None:
    pool = pool_of()
    held: list[torch.Tensor] = []
    most = 0
    for pages, drops in steps:
        held.append(pool.empty((pages, PAGE), torch.uint8))
        most = max(most, sum(tensor.numel() for tensor in held))
        slack = pool.lent_bytes - sum(tensor.numel() for tensor in held)
        assert slack <= most / 2
        assert pool.free_bytes == 0 or pool.free_bytes + pool.lent_bytes <= most
        del held[:drops]
        assert pool.free_bytes == 0 or pool.free_bytes + pool.lent_bytes <= most
    held.clear()
    assert pool.lent_bytes == 0
    assert pool.free_bytes <= most


def test_a_peak_is_forgotten() -> None:
    pool = pool_of()
    large = [pool.empty((50, PAGE), torch.uint8) for _ in range(10)]
    large.clear()
    assert pool.free_bytes == 500 * PAGE
    for _ in range(200):
        pool.empty((1, PAGE), torch.uint8)
    assert pool.free_bytes <= 2 * PAGE


def test_the_cap_and_trim() -> None:
    pool = pool_of(most_free=3 * SIZE)
    held = [lent(pool) for _ in range(10)]
    held.clear()
    assert pool.free_bytes == 3 * SIZE
    tensor = lent(pool)
    pool.trim()
    assert (pool.free_bytes, pool.lent_bytes) == (0, SIZE)
    del tensor
    assert pool.free_bytes == SIZE


def test_what_was_used_longest_ago_is_released_first() -> None:
    pool = pool_of(most_free=5 * PAGE)
    pool.empty((100, PAGE), torch.uint8)  # a peak, so that the cap alone binds
    buffers = [pool.empty((pages, PAGE), torch.uint8) for pages in (1, 3, 2)]
    held = []
    while buffers:
        held.append(pool.empty((8, PAGE), torch.uint8))  # too large for any of those
        del buffers[0]
    assert pool.free_bytes == (3 + 2) * PAGE


# Threads, forks, the end


def test_threads_and_the_collector_never_share_a_buffer() -> None:
    pool = pool_of()
    wrong: list[str] = []
    start = threading.Barrier(8)

    def work(number: int) -> None:
        draw = random.Random(number)
        held: list[tuple[torch.Tensor, int]] = []
        start.wait()
        for step in range(400):
            mark = (number * 31 + step) % 251
            tensor = pool.empty((draw.randint(1, 3) * PAGE,), torch.uint8).fill_(mark)
            held.append((tensor, mark))
            if draw.random() < 0.2:
                Holder(held.pop(0)[0])  # left to the collector, in whichever thread it runs
            del held[: draw.choice((0, 0, 1, 3))]
            for tensor, value in held:
                if not bool((tensor == value).all()):
                    wrong.append(f"thread {number}, step {step}")

    threshold = gc.get_threshold()
    interval = sys.getswitchinterval()
    gc.set_threshold(20)  # in the midst of everything, the pool's own code included
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        gc.set_threshold(*threshold)
        sys.setswitchinterval(interval)
    assert not wrong
    gc.collect()
    lent(pool)
    assert pool.lent_bytes == 0
    assert not pool._lent


def test_a_call_during_another_one_does_not_wait() -> None:
    pool = pool_of()
    tensor = lent(pool)
    with pool._lock:  # as if the collector ran a finalizer in the middle of empty()
        inside = lent(pool).fill_(1)
        del tensor
        pool.trim()
    assert (inside == 1).all()
    assert pool.free_bytes == 0  # nobody has looked since
    del inside
    other = lent(pool)
    assert other.numel() == SIZE
    assert (pool.free_bytes, pool.lent_bytes) == (0, SIZE)


def test_a_dropped_pool_is_no_cycle() -> None:
    pool = pool_of()
    gone = pool._itself
    tensor = lent(pool)
    gc.disable()
    try:
        del pool
        assert gone() is None
    finally:
        gc.enable()
    del tensor


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_a_pool_of_its_own() -> None:
    pool = pool_of()
    kept, free = lent(pool).fill_(1), lent(pool)
    held = [kept]
    address = kept.data_ptr()
    del free, kept

    def child() -> bool:
        fine = pool.free_bytes == 0
        fine &= bool((held[0] == 1).all())
        held.clear()
        fine &= pool.free_bytes == SIZE
        again = lent(pool).fill_(2)
        return fine and again.data_ptr() == address and bool((again == 2).all())

    assert is_true_in_a_fork(child)
    assert (held[0] == 1).all()
    assert pool.free_bytes == SIZE

    def during_a_call() -> bool:
        tensor = lent(pool).fill_(1)
        return pool.lent_bytes == 2 * SIZE and bool((tensor == 1).all())

    with pool._lock:  # another thread was in the pool while this one forked
        assert is_true_in_a_fork(during_a_call)


@pytest.mark.parametrize(
    "ending",
    [
        "gc.disable()",
        *(pytest.param(way, marks=pytest.mark.nightly) for way in ("", "sys.exit()", "del pool")),
    ],
)
def test_the_interpreter_ends_in_silence(ending: str) -> None:
    source = f"""
        import gc, sys, torch
        from dataloaders.batches.memory import HostPool
        pool = HostPool(smallest=1)
        kept = [pool.empty((100_000,), torch.uint8) for _ in range(3)]
        torch.kept_for_ever = kept[0][1:]
        class Late:
            def __init__(self, tensor): self.tensor, self.itself = tensor, self
            def __del__(self): self.tensor = self.tensor.numpy()[1:]
        late = Late(kept[1])
        {ending}
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


# Pinned memory


@pytest.mark.gpu
def test_pinned_memory_is_not_reused_before_its_copies_ran() -> None:
    memory: HostMemory = PinnedMemory()
    shape = (16 << 20,)
    assert memory.empty(shape, torch.uint8).is_pinned()
    for number in range(5):
        batch = memory.empty(shape, torch.uint8).fill_(number)
        torch.cuda._sleep(500_000_000)  # the copy waits behind this
        copied = batch.to("cuda", non_blocking=True)
        del batch
        for _ in range(3):  # batches go on being made meanwhile
            memory.empty(shape, torch.uint8).fill_(100)
        assert bool((copied == number).all())


@pytest.mark.gpu
def test_pageable_memory_may_be_dropped_right_after_its_copy() -> None:
    pool = HostPool()
    for number in range(5):
        batch = pool.empty((16 << 20,), torch.uint8).fill_(number)
        torch.cuda._sleep(500_000_000)
        copied = batch.to("cuda", non_blocking=True)
        del batch
        pool.empty((16 << 20,), torch.uint8).fill_(100)
        assert bool((copied == number).all())
