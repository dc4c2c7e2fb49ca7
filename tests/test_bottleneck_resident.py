"""Resident batches: how many are kept, and where the step wants them."""

import itertools
import re
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bench.check.played import HostOn, VirtualTime
from dataloaders.bottleneck import check_bottleneck, placement, resident
from dataloaders.errors import CheckError


def filled(*batches):
    pool = resident.Pool()
    for batch in batches:
        pool.keep(batch)
    pool.place([None])  # of one tensor each
    return pool


def watching(batch):
    watched = placement.Placement()
    watched.watch(batch)
    return watched


@pytest.mark.parametrize(("kilobytes", "kept"), [(1, 8), (4, 3), (100, 2)])
def test_as_many_batches_are_kept_as_fit_into_memory_and_at_least_two(kilobytes, kept):
    pool = resident.Pool(most_bytes=36 << 10)
    while pool.wants_more:
        pool.keep(torch.zeros(kilobytes << 10, dtype=torch.uint8))
    assert len(pool) == kept


def test_batches_that_vary_are_replaced_by_later_ones():
    pool = filled(torch.zeros(1), torch.zeros(2))
    for length in range(3, 100):
        pool.record(torch.zeros(length))
    assert len(pool) == pool.room == 64
    lengths = [len(batch) for batch in pool.issue("synthetic", 64)]
    assert sorted(lengths) == list(range(36, 100))


def test_real_blocks_of_varied_shapes_hold_no_batch_and_copy_none_inside_the_clock(monkeypatch):
    """Held pinned ones make the loader pin new memory for each; a copy is no step's time."""
    time, record = VirtualTime(), resident.Pool.record
    done, delivered, held = [], [], []

    class Clock(HostOn):
        def mark(self):
            done.append("mark ")
            return super().mark()

        def wait(self):
            done.append("wait ")

    class Varied:
        def __iter__(self):
            for number in itertools.count():
                batch = torch.zeros(1 + number % 7)
                delivered.append(weakref.ref(batch))
                yield batch
                del batch

    def recorded(pool, batch):
        done.append("copy ")
        record(pool, batch)

    def step(batch):
        del batch
        time.sleep(0.01)
        held.append(sum(one() is not None for one in delivered[-50:]))

    monkeypatch.setattr(resident.Pool, "record", recorded)
    check_bottleneck(Varied(), step, budget_s=4, clock=Clock(time))
    assert re.search("copy mark (mark )+wait", "".join(done))
    assert not re.search("mark copy", "".join(done))
    assert max(held) <= 2


@pytest.mark.parametrize("fit", [3, 1])
def test_a_full_device_gets_as_many_resident_batches_as_fit(fit, monkeypatch):
    """Two at least; the step's own error is left alone."""
    room = iter(range(fit))

    def moved(pool, batch):
        if next(room, None) is None:
            raise torch.OutOfMemoryError("the device is full")
        return batch.to("meta")

    monkeypatch.setattr(resident.Pool, "_moved", moved)
    pool = filled(*(torch.full((4,), float(value)) for value in range(8)))
    pool.place([torch.device("meta")])
    if fit < 2:
        with pytest.raises(CheckError, match="memory of meta does not hold 2 batches"):
            pool.build()
    else:
        pool.build()
        assert (len(pool), pool.crowded) == (fit, True)
        assert len(pool.issue("synthetic", 5)) == 5


def test_sparse_batches_are_resident_as_well():
    pool = filled(*(torch.eye(4).to_sparse() for _ in range(3)))
    pool.place([torch.device("meta")])
    assert [batch.layout for batch in pool.issue("synthetic", 3)] == [torch.sparse_coo] * 3


@pytest.mark.parametrize(("fit", "kept"), [(8, 8), (4, 4), (1, 2)])
def test_of_batches_on_a_device_as_many_are_kept_as_fit(fit, kept, monkeypatch):
    """Twice a batch has to be free, for the step; two are kept without asking."""
    pool = resident.Pool()
    accelerator = {
        "get_memory_info": lambda device: ((fit - len(pool)) * 1024, 2**30),
        "memory_reserved": lambda device: 0,
        "max_memory_allocated": lambda device: 0,
    }
    for name, function in accelerator.items():
        monkeypatch.setattr(torch.accelerator, name, function)
    with FakeTensorMode():
        for _ in range(8):
            if pool.wants_more:
                pool.keep(torch.zeros(512, dtype=torch.uint8, device="cuda"))
    assert (len(pool), pool.crowded) == (kept, kept < 8)


def test_placement_sees_which_leaves_the_step_copies_away():
    batch = {"x": torch.zeros(2, 3), "lengths": torch.tensor([1, 2]), "y": torch.zeros(2)}
    static = torch.empty(2, device="meta")
    watched = watching(batch)
    with watched:
        batch["x"].to("meta", non_blocking=True)
        static.copy_(batch["y"])
        batch["x"].double()  # a copy, but not to another device
    assert watched.devices == [torch.device("meta"), None, torch.device("meta")]


@pytest.mark.parametrize(
    "derive",
    [
        lambda x: x.double(),
        lambda x: (x / 255).sub_(0.5),
        lambda x: torch.stack([x, x]),
        lambda x: torch.cat([torch.zeros(1, 3), x]).view(-1),
    ],
)
def test_placement_sees_that_something_computed_from_the_batch_is_copied(derive):
    batch = {"x": torch.ones(2, 3)}
    watched = watching(batch)
    with watched:
        torch.zeros(7).to("meta")  # of the step's own
        assert not watched.derived
        derive(batch["x"]).to("meta")
    assert watched.derived
    assert watched.devices == [None]


@pytest.mark.gpu
def test_pinned_batches_stay_pinned_in_the_host_pool():
    pool = resident.Pool()
    pool.keep(torch.zeros(4).pin_memory())
    pool.place([torch.device("cuda", 0)])
    assert pool.issue("host", 1)[0].is_pinned()
    assert pool.issue("synthetic", 1)[0].is_cuda


@pytest.mark.gpu
def test_placement_finds_the_cuda_device_of_a_real_step():
    batch = [torch.zeros(4, 4), torch.zeros(4, dtype=torch.int64)]
    watched = watching(batch)
    with watched:
        x, y = (leaf.to("cuda", non_blocking=True) for leaf in batch)
        (x.sum() + y.sum()).item()
    assert [str(device) for device in watched.devices] == ["cuda:0", "cuda:0"]
