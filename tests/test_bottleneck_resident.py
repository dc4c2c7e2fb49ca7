"""Batches that are kept, handed out again, written into, and placed where the step wants them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dataloaders.batches.tree import leaves, map_tensors
from dataloaders.bottleneck.resident import Placement, Pool
from dataloaders.errors import CheckError


def filled(*batches: Any) -> Pool:
    pool = Pool()
    for batch in batches:
        pool.keep(batch)
    pool.place([None for _ in leaves(batches[0])])
    return pool


def batch_of(value: float) -> dict[str, Any]:
    return {"x": torch.full((2, 3), value), "y": torch.tensor([1, 2]), "name": "a"}


def test_a_pool_keeps_copies_and_issues_all_of_them_in_turn() -> None:
    first = batch_of(0.0)
    pool = filled(first, batch_of(1.0), batch_of(2.0))
    first["x"].fill_(99)
    values = [issued["x"][0, 0].item() for issued in pool.issue("synthetic", 5)]
    assert values == [0.0, 1.0, 2.0, 0.0, 1.0]
    values = [issued["x"][0, 0].item() for issued in pool.issue("synthetic", 2)]
    assert values == [2.0, 0.0]


def test_a_step_may_pop_keys_and_ask_for_gradients() -> None:
    pool = filled(batch_of(0.0))
    one, again = pool.issue("synthetic", 2)
    one.pop("name")
    one["x"].requires_grad_()
    assert again["name"] == "a"
    assert not again["x"].requires_grad
    assert not pool.written()


def test_a_step_that_writes_is_noticed_and_the_batch_restored() -> None:
    pool = filled(batch_of(1.0), batch_of(2.0))
    assert not pool.written()
    pool.issue("synthetic", 1)[0]["x"].div_(255)
    assert pool.written()
    pool.restore()
    assert not pool.written()
    assert sorted(b["x"][0, 0].item() for b in pool.issue("synthetic", 2)) == [1.0, 2.0]


@pytest.mark.parametrize(("megabytes", "kept"), [(1, 8), (4, 3), (100, 2)])
def test_batches_are_kept_as_far_as_memory_goes_and_two_at_least(megabytes: int, kept: int) -> None:
    pool = Pool(most_bytes=36 << 20)
    while pool.wants_more:
        pool.keep(torch.zeros(megabytes << 20, dtype=torch.uint8))
    assert len(pool) == kept


def test_batches_that_vary_are_replaced_by_later_ones() -> None:
    pool = filled(torch.zeros(1), torch.zeros(2))
    for length in range(3, 100):
        pool.record(torch.zeros(length))
    assert len(pool) == pool.room == 64
    lengths = [len(batch) for batch in pool.issue("synthetic", 64)]
    assert sorted(lengths) == list(range(36, 100))


class TestCrowded:
    """A device whose memory is full: ours is an error of ours, and the step's is left alone."""

    @pytest.fixture
    def memory(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        room = [3]

        def moved(pool: Pool, batch: Any) -> Any:
            if room[0] == 0:
                raise torch.OutOfMemoryError("the device is full")
            room[0] -= 1
            return map_tensors(batch, lambda leaf: leaf.to("meta"))

        monkeypatch.setattr(Pool, "_moved", moved)
        return room

    def pool(self, count: int) -> Pool:
        pool = Pool()
        for value in range(count):
            pool.keep(torch.full((4,), float(value)))
        pool.place([torch.device("meta")])
        return pool

    def test_as_many_are_resident_as_fit(self, memory: list[int]) -> None:
        pool = self.pool(8)
        pool.build()
        assert (len(pool), pool.crowded) == (3, True)
        assert len(pool.issue("synthetic", 5)) == 5

    def test_without_room_for_two_the_check_says_so(self, memory: list[int]) -> None:
        memory[0] = 1
        with pytest.raises(CheckError, match="memory of meta does not hold 2 batches"):
            self.pool(8).build()


def test_placement_sees_which_leaves_the_step_copies_away() -> None:
    batch = {"x": torch.zeros(2, 3), "lengths": torch.tensor([1, 2]), "y": torch.zeros(2)}
    static = torch.empty(2, device="meta")
    with Placement(batch) as placement:
        batch["x"].to("meta", non_blocking=True)
        static.copy_(batch["y"])
        batch["x"].double()  # a copy, but not to another device
    assert placement.devices == [torch.device("meta"), None, torch.device("meta")]


@pytest.mark.parametrize(
    "derive",
    [
        lambda x: x.double(),
        lambda x: (x / 255).sub_(0.5),
        lambda x: torch.stack([x, x]),
        lambda x: torch.cat([torch.zeros(1, 3), x]).view(-1),
    ],
)
def test_placement_sees_that_something_computed_from_the_batch_is_copied(derive: Any) -> None:
    batch = {"x": torch.ones(2, 3)}
    with Placement(batch) as placement:
        torch.zeros(7).to("meta")  # of the step's own
        assert not placement.derived
        derive(batch["x"]).to("meta")
    assert placement.derived
    assert placement.devices == [None]


def test_a_compiled_step_compiles_while_it_is_watched() -> None:
    compiled = 0

    def backend(graph: Any, inputs: Any) -> Any:
        nonlocal compiled
        compiled += 1
        return graph.forward

    step = torch.compile(lambda x: x * 2 + 1, backend=backend, fullgraph=True)
    batch = torch.ones(3)
    with Placement(batch):
        assert step(batch).tolist() == [3, 3, 3]
    assert step(batch).tolist() == [3, 3, 3]
    assert compiled == 1


@pytest.mark.gpu
def test_pinned_batches_stay_pinned_in_the_host_pool() -> None:
    pool = Pool()
    pool.keep(torch.zeros(4).pin_memory())
    pool.place([torch.device("cuda", 0)])
    assert pool.issue("host", 1)[0].is_pinned()
    assert pool.issue("synthetic", 1)[0].is_cuda


@pytest.mark.gpu
def test_placement_finds_the_cuda_device_of_a_real_step() -> None:
    batch = [torch.zeros(4, 4), torch.zeros(4, dtype=torch.int64)]
    with Placement(batch) as placement:
        x, y = (leaf.to("cuda", non_blocking=True) for leaf in batch)
        (x.sum() + y.sum()).item()
    assert [str(device) for device in placement.devices] == ["cuda:0", "cuda:0"]
