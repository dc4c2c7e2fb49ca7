"""Workers' shared memory used again: torch's batches, safe to keep, and none of it left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data
from torch.utils.data import Dataset, default_collate

from backends.stock import Stock
from backends.stock.collate import RingCollate
from backends.stock.shared_ring import SLOTS, SharedRing
from dataloaders import DataLoader
from dataloaders.batches.memory import SMALLEST
from helpers.compare import assert_same
from helpers.processes import run_script

TorchLoader = torch.utils.data.DataLoader
BATCH = 4
SIDE = 384  # BATCH images of SIDE x SIDE floats make more than SMALLEST bytes
assert BATCH * SIDE * SIDE * 4 > SMALLEST


def image(index: int) -> torch.Tensor:
    return torch.full((SIDE, SIDE), float(index))


class Images(Dataset[Any]):
    def __init__(self, length: int = 30) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return {"image": image(index), "mask": image(-index), "label": index}


class Sizes(Images):
    """Every batch has another size; some are too small for the ring."""

    def __getitem__(self, index: int) -> Any:
        return torch.full((40 + 97 * (index // BATCH) % 1000, 700), float(index))


class Failing(Images):
    """Its collation fails for some batches, after a first leaf was made."""

    def __getitem__(self, index: int) -> Any:
        odd = index == 9
        return image(index), torch.zeros(SIDE, SIDE + odd), torch.ones(SIDE, SIDE)


RING = Stock(ring=True)


def loaders(dataset: Any, **options: Any) -> tuple[DataLoader[Any], TorchLoader[Any]]:
    options = {"batch_size": BATCH, "num_workers": 1, **options}
    ours: DataLoader[Any] = DataLoader(dataset, backend=RING, **options)
    return ours, TorchLoader(dataset, **options)


def ring_of(iterator: Any) -> SharedRing:
    collate = iterator._collate_fn
    assert isinstance(collate, RingCollate)
    return collate._ring


@pytest.mark.parametrize(
    "options",
    [{"num_workers": 2, "prefetch_factor": 1}, {"persistent_workers": True, "timeout": 60}],
    ids=str,
)
def test_the_batches_are_torchs(options: dict[str, Any]) -> None:
    ours, theirs = loaders(Images(), **options)
    expected = list(theirs)
    for _ in range(2):
        for batch, other in zip(ours, expected, strict=True):
            assert_same(batch, other)
            del batch
    assert_same(list(ours), expected)  # kept, all of them


def test_workers_that_are_no_forks_have_a_ring_too() -> None:
    ours, _ = loaders(Images(), multiprocessing_context="forkserver")
    iterator = iter(ours)
    assert_same(list(iterator), list(TorchLoader(Images(), BATCH)))
    assert ring_of(iterator)._segments


def test_a_few_segments_serve_a_whole_epoch() -> None:
    ours, _ = loaders(Images(80), prefetch_factor=2)
    iterator = iter(ours)
    ring = ring_of(iterator)
    addresses = set()
    for batch in iterator:
        addresses |= {batch["image"].data_ptr(), batch["mask"].data_ptr()}
    assert len(addresses) == len(ring._segments) <= 2 * 4


def test_sizes_that_change_with_every_batch() -> None:
    ours, theirs = loaders(Sizes(60), num_workers=2)
    for batch, other in zip(ours, theirs, strict=True):
        assert_same(batch, other)
        del batch


def test_a_sent_batch_is_a_copy() -> None:
    ours, _ = loaders(Images())
    batch = next(iter(ours))
    assert not batch["image"].is_shared()  # as sending it would share what may be written again


@pytest.mark.usefixtures("workers_end_fast")
@pytest.mark.nightly
def test_errors_are_torchs_and_cost_no_slot() -> None:
    outcomes = []
    for loader in loaders(Failing()):
        for _ in range(2):
            got: list[Any] = []
            with pytest.raises(RuntimeError, match="equal size") as caught:
                got.extend(batch[0] for batch in loader)
            outcomes.append((str(caught.value).splitlines()[-1], got))
    for outcome in outcomes:
        assert_same(outcome, outcomes[-1])


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> SharedRing:
    """A ring whose only worker is this process, which is its consumer too."""

    class Info:
        id, num_workers = 0, 1

    monkeypatch.setattr(torch.utils.data._utils.worker, "_worker_info", Info())
    return SharedRing(1, 2)


def arrived(tensor: torch.Tensor) -> torch.Tensor:
    """What the consumer gets of a tensor that a worker sends."""
    function, arguments = tensor.__reduce_ex__(4)
    received = function(*arguments)
    assert type(received) is torch.Tensor
    return received


def test_a_segment_is_sent_once_and_unmapped_when_the_worker_drops_it(ring: SharedRing) -> None:
    size = SMALLEST
    first = ring.empty((size,), torch.uint8)
    assert first.segment is not None
    address = arrived(first.fill_(1)).data_ptr()
    again = ring.empty((size // 4,), torch.float32)
    assert again.segment is None
    kept = arrived(again.fill_(2))
    assert kept.data_ptr() == address
    other = ring.empty((size,), torch.uint8)
    assert other.place != again.place
    arrived(other)
    assert len(ring._segments) == 2
    for _ in range(4):  # too large for any free one: that is dropped
        size += size // 4
        arrived(ring.empty((size,), torch.uint8))
    assert len(ring._segments) == 2
    assert (kept == 2).all()


def test_the_consumer_unmaps_what_the_worker_dropped(ring: SharedRing) -> None:
    ring._batches = 1  # no room for more than one batch's segments
    pair = [arrived(ring.empty((SMALLEST,), torch.uint8)) for _ in range(2)]
    assert len(ring._segments) == 2
    pair.clear()
    ring.begin_batch()
    arrived(ring.empty((2 * SMALLEST,), torch.uint8))
    assert len(ring._segments) == 1


def test_a_retired_slot_serves_again_with_another_segment(ring: SharedRing) -> None:
    for _ in range(SLOTS + 2):
        ring.begin_batch()
        batch = arrived(ring.empty((SMALLEST,), torch.uint8).fill_(1))
        ring._retire()  # as before a fork, whose child now refers to the same memory
        other = arrived(ring.empty((SMALLEST,), torch.uint8).fill_(2))
        assert (batch == 1).all()
        del batch, other
    assert len(ring._segments) <= 2


def test_a_failed_collation_gives_its_slots_back(ring: SharedRing) -> None:
    collate = RingCollate(ring)
    good = [Images()[index] for index in range(BATCH)]
    for _ in range(3):
        with pytest.raises(RuntimeError, match="equal size"):
            collate([Failing()[index] for index in (7, 8, 9)] * 2)
    assert not ring._bytes.any()
    batch = collate(good)
    assert int(ring._bytes.sum()) == 2  # two leaves under way
    received = {name: arrived(batch[name]) for name in ("image", "mask")}
    assert_same({**batch, **received}, default_collate(good))


@pytest.mark.nightly
def test_a_full_ring_leaves_the_rest_to_torch() -> None:
    ours, theirs = loaders(Images(200), batch_size=BATCH)
    kept = list(ours)
    shared = sum(batch["image"].is_shared() for batch in kept)
    assert len(kept) > shared >= len(kept) - 4  # those beyond the ring came as torch sends them
    assert_same(kept, list(theirs))


def test_other_loaders_have_no_ring() -> None:
    for options in ({"collate_fn": list}, {"batch_size": None}):
        iterator: Any = iter(DataLoader(Images(2), num_workers=1, backend=RING, **options))
        assert not isinstance(iterator._collate_fn, RingCollate)
        list(iterator)


def test_the_plan_says_so() -> None:
    said = "workers reuse the shared memory of tensors of"
    assert said in str(RING.explain(TorchLoader(Images(), num_workers=1)))
    assert said not in str(RING.explain(TorchLoader(Images(), num_workers=1, collate_fn=list)))
    assert said not in str(RING.explain(TorchLoader(Images())))
    assert said not in str(Stock().explain(TorchLoader(Images(), num_workers=1)))


@pytest.mark.nightly
def test_files_as_the_way_of_sharing(tmp_path: Path) -> None:
    done = run_script(
        tmp_path,
        """
        import torch
        from backends.stock import Stock
        from dataloaders import DataLoader

        class Images(torch.utils.data.Dataset):
            def __len__(self): return 40
            def __getitem__(self, index): return torch.full((400, 400), float(index))

        if __name__ == "__main__":
            torch.multiprocessing.set_sharing_strategy("file_system")
            loader = DataLoader(
                Images(), batch_size=4, num_workers=2, persistent_workers=True,
                backend=Stock(ring=True),
            )
            for _ in range(2):
                for number, batch in enumerate(loader):
                    assert batch[:, 0, 0].tolist() == [4 * number + i for i in range(4)]
            print(len(loader._iterator._collate_fn._ring._segments))
        """,
    )
    assert done.returncode == 0, done.stderr
    assert 0 < int(done.stdout) <= 2 * 4
