"""What is interrupted at any of its steps leaves nothing wrong, and can be done again."""

import itertools
import sys

import pytest
import torch

from dataloaders import DataLoader
from dataloaders.cache import CachedDataset, merge, precompute, verify
from dataloaders.errors import CacheError
from helpers import faults
from helpers.compare import assert_same
from helpers.datasets import Numbered
from helpers.fake_cuda import FakeCuda, PlayedPrefetch
from helpers.processes import Held

SAMPLES = 9
at_each_fault = pytest.mark.parametrize("fault", faults.FAULTS.values(), ids=faults.FAULTS)
step_by_step = pytest.mark.parametrize(
    "stride", [pytest.param(1, marks=pytest.mark.nightly), 11], ids=["every step", "some steps"]
)


def interrupt_everywhere(fault, stride, work, folder, begin, check):
    """Interrupt ``work`` at each step, or at one of ``stride``, and ``check`` what it left."""
    for step in itertools.count(1, stride):
        begin()
        ended = faults.interrupted_at(step, fault, work, folder)
        check(ended)
        if ended == "done":
            break
    assert step > 10


@at_each_fault
@step_by_step
@pytest.mark.parametrize(
    "interrupted",
    [{"single_file": True}, {"single_file": False}, {"shard": (1, 2), "wait": False}],
    ids=["one file", "parts", "a rank"],
)
def test_a_build(fault, stride, interrupted, tmp_path):
    folder, dataset = tmp_path / "caches", Numbered(SAMPLES)
    path, numbers = folder / "train.h5", itertools.count()
    options = {"num_workers": 0, "rows": 4}

    def begin():
        if folder.exists():
            folder.rename(tmp_path / str(next(numbers)))
        folder.mkdir()

    def check(ended):
        if path.exists():
            try:
                assert_same(list(CachedDataset(path)), [dataset[row] for row in range(SAMPLES)])
            except CacheError:
                assert ended != "done"
        precompute(dataset, path, **options)
        assert_same(list(CachedDataset(path)), [dataset[row] for row in range(SAMPLES)])
        assert verify(path) == []
        assert [file for file in folder.rglob("*") if file.suffix == ".tmp"] == []

    def work():
        precompute(dataset, path, **options, **interrupted)

    interrupt_everywhere(fault, stride, work, folder, begin, check)


@at_each_fault
@step_by_step
def test_a_merge(fault, stride, tmp_path):
    folder, dataset = tmp_path / "caches", Numbered(SAMPLES)
    folder.mkdir()
    path, one = folder / "train.h5", folder / "one.h5"
    cached = precompute(dataset, path, num_workers=0, rows=4, single_file=False)
    samples = list(cached)

    def check(ended):
        assert verify(path) == []
        if one.exists():
            assert_same(list(CachedDataset(one)), samples)
            one.unlink()
        merge(path, one)
        assert_same(list(CachedDataset(one)), samples)
        one.unlink()
        assert [file for file in folder.iterdir() if file.suffix == ".tmp"] == []

    interrupt_everywhere(fault, stride, lambda: merge(path, one), folder, lambda: None, check)


class Broken(Exception):
    """The device's error."""


class Breaking(FakeCuda):
    """A device whose call of this number raises."""

    def __init__(self, call):
        super().__init__(0)
        self.left = call

    def __getattribute__(self, name):
        calls = ("record", "stream_waits", "pinned_like", "empty_like", "copy", "used_on")
        if name in calls and "backends" in sys._getframe(1).f_code.co_filename:
            self.left -= 1
            if not self.left:
                raise Broken(name)
        return super().__getattribute__(name)


@pytest.mark.parametrize("workers", [0, 1])
@step_by_step
def test_a_prefetching_epoch(workers, stride):
    batches = [torch.full((2, 3), float(number)) for number in range(5)]
    for call in itertools.count(1, stride):
        before, cuda = Held.now(), Breaking(call)
        loader = DataLoader(
            batches, batch_size=None, num_workers=workers, backend=PlayedPrefetch(cuda=cuda)
        )
        seen, raised = [], False
        try:
            for batch in loader:
                cuda.drain()
                seen.append(batch.clone())
        except Broken:
            raised = True
        assert_same(seen, batches[: len(seen)])
        assert raised == (len(seen) < 5)
        seen, cuda.left = [], 0
        for batch in loader:  # the next epoch begins anew
            cuda.drain()
            seen.append(batch.clone())
        assert_same(seen, batches)
        del loader, batch
        assert before.left_behind() == []
        if not raised:
            break
    assert call > 10
