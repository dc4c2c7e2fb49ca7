"""Every sample is in one chunk, and the last chunks are small."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dataloaders.cache.chunking import Chunking
from dataloaders.cache.estimation import chunking_for
from dataloaders.cache.findings import Findings

SIZES = st.integers(1, 300)


@given(samples=st.integers(0, 3000), rows=SIZES, last_rows=SIZES)
def test_chunks_hold_each_sample_once_and_in_order(samples: int, rows: int, last_rows: int) -> None:
    chunking = Chunking(samples, rows, last_rows)
    parts = [chunking.part(chunk) for chunk in range(len(chunking))]
    assert [index for part in parts for index in part] == list(range(samples))
    assert all(0 < len(part) <= max(rows, last_rows) for part in parts)


@given(samples=st.integers(0, 3000), rows=SIZES, last_rows=SIZES, beyond=st.integers(0, 2**48))
def test_there_is_nothing_in_chunks_that_there_are_not(
    samples: int, rows: int, last_rows: int, beyond: int
) -> None:
    chunking = Chunking(samples, rows, last_rows)
    assert len(chunking.part(len(chunking) + beyond)) == 0


def test_the_last_chunks_are_small() -> None:
    chunking = Chunking(1000, 100, 25)
    sizes = [len(chunking.part(chunk)) for chunk in range(len(chunking))]
    assert sizes == [100] * 8 + [25] * 8
    assert [len(Chunking(10, 4, 4).part(chunk)) for chunk in range(3)] == [4, 4, 2]


def test_of_many_samples_only_the_last_few_chunks_are_small() -> None:
    chunking = Chunking(10**9, 160, 40)
    first_small = next(n for n in range(len(chunking))[-1000:] if len(chunking.part(n)) < 160)
    assert len(chunking) - first_small == 4 * 64


def test_small_chunks_are_for_several_workers_and_samples_that_take_time() -> None:
    slow = Findings(bytes=[200_000], cells=2, seconds=[0.006, 0.006])
    assert chunking_for(slow, 3000, 2) == Chunking(3000, 94, 24)
    assert chunking_for(slow, 3000, 1) == Chunking(3000, 167, 167)
    quick = Findings(bytes=[1000], cells=2, seconds=[1e-5, 1e-5])
    assert chunking_for(quick, 3000, 2) == Chunking(3000, 94, 94)
