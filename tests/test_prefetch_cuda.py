"""Prefetching on a real device: order of streams, memory, graphs, endings."""

import gc
import itertools
import sys

import pytest
import torch
import torch.utils.data
from torch.utils.data import TensorDataset

from backends.prefetch import Prefetch
from dataloaders import DataLoader
from helpers.compare import assert_same
from helpers.datasets import MapDataset
from helpers.processes import run_script

pytestmark = pytest.mark.gpu

ROWS, BATCH = 4096, 512
LONG = 20_000_000  # cycles of a kernel that keeps a stream busy for about 10 ms


def data():
    values = torch.arange(ROWS, dtype=torch.float32)
    return TensorDataset(values[:, None].repeat(1, 1000), torch.arange(ROWS))


def loader_of(backend, **options):
    return DataLoader(data(), batch_size=BATCH, backend=backend, **options)


def poison(like, stream):
    """Take freed memory as soon as the allocator gives it out, and overwrite it."""
    with torch.cuda.stream(stream):
        for _ in range(4):
            torch.full_like(like, float("nan"))


@pytest.mark.parametrize("pins", [True, False])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_step_that_lags_behind_reads_its_own_batch(pins, num_workers):
    loader = loader_of(Prefetch(ahead=2, pin_memory=pins), num_workers=num_workers)
    sums, other = [], torch.cuda.Stream()
    for rows, _ in loader:
        torch.cuda._sleep(LONG)
        sums.append(rows.sum(dtype=torch.float64))
        poison(rows, other)
    theirs = torch.utils.data.DataLoader(data(), BATCH)
    expected = [float(rows.sum(dtype=torch.float64)) for rows, _ in theirs]
    assert [float(total) for total in sums] == expected


def test_the_hand_over_does_not_wait_for_the_device():
    iterator = iter(loader_of(Prefetch(ahead=2), num_workers=1))
    next(iterator)
    torch.cuda.synchronize()
    torch.cuda._sleep(50 * LONG)
    behind = torch.cuda.Event()
    behind.record()
    next(iterator)
    assert not behind.query()
    torch.cuda.synchronize()


def test_a_graph_is_captured_while_the_thread_copies():
    """In CUDA's strictest mode, torch's own, in which calls of other threads spoil a graph."""
    loader = loader_of(Prefetch(ahead=3), num_workers=2)
    for _ in range(3):
        for number, (rows, _) in enumerate(loader):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                total = rows[:, 0].sum(dtype=torch.float64)
            graph.replay()
            assert float(total) == sum(range(number * BATCH, (number + 1) * BATCH))


def test_many_epochs_leave_device_and_pinned_memory_flat():
    loader = loader_of(Prefetch(), num_workers=1, persistent_workers=True)
    for _ in range(10):
        list(loader)
    torch.cuda.synchronize()
    reserved = torch.cuda.memory_reserved()
    pinned = torch.cuda.host_memory_stats()["num_host_alloc"]
    for epoch in range(50):
        for _ in itertools.islice(loader, 2 if epoch % 3 else None):
            pass
    torch.cuda.synchronize()
    gc.collect()
    assert torch.cuda.memory_reserved() <= reserved
    # As many as can be in flight at the worst moment, and not one for each batch.
    assert torch.cuda.host_memory_stats()["num_host_alloc"] <= pinned + 8


def test_an_interpreter_exits_cleanly_while_copies_are_under_way(tmp_path):
    done = run_script(
        tmp_path,
        """
        import torch
        from torch.utils.data import TensorDataset
        from dataloaders import DataLoader

        if __name__ == "__main__":
            loader = DataLoader(TensorDataset(torch.zeros(4096, 4096)), 64, backend="prefetch")
            iterator = iter(loader)
            for _ in range(3):
                next(iterator)
            torch.cuda._sleep(100_000_000)
        """,
        python=sys.executable,
    )
    assert done.stderr == ""


def test_tensors_that_the_dataset_put_on_the_device_stay_there():
    dataset = MapDataset(lambda index: torch.full((3,), float(index), device="cuda"))
    loader = DataLoader(dataset, batch_size=4, backend="prefetch")
    assert_same(next(batch.cpu()[:, 0].tolist() for batch in loader), [0.0, 1.0, 2.0, 3.0])


@pytest.mark.parametrize("ahead", [1, 4])
def test_device_memory_is_at_most_ahead_and_one_more_batches_than_a_plain_loop(ahead):
    batch_bytes = BATCH * 1000 * 4 + BATCH * 8

    def peak(batches):
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for rows, _ in batches:
            rows = rows.to("cuda", non_blocking=True)
            torch.cuda._sleep(LONG)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    plain = peak(torch.utils.data.DataLoader(data(), BATCH, pin_memory=True))
    ours = peak(loader_of(Prefetch(ahead=ahead)))
    assert ours <= plain + (ahead + 1) * batch_bytes + 4096


def test_the_stream_may_change_from_batch_to_batch():
    streams = [torch.cuda.Stream() for _ in range(3)]
    iterator, sums = iter(loader_of(Prefetch(ahead=1))), []
    for stream in itertools.islice(itertools.cycle(streams), ROWS // BATCH):
        with torch.cuda.stream(stream):
            rows, _ = next(iterator)
            torch.cuda._sleep(LONG)
            sums.append(rows[:, 0].sum(dtype=torch.float64))
            del rows
    torch.cuda.synchronize()
    assert [float(total) for total in sums] == [
        sum(range(first, first + BATCH)) for first in range(0, ROWS, BATCH)
    ]
