"""A study by several workers finds what a study by one finds."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset

from dataloaders.cache import precompute
from dataloaders.cache.chunk import Chunk
from dataloaders.cache.failure import Failure
from dataloaders.cache.findings import Findings, merged
from dataloaders.cache.images import Images
from dataloaders.cache.layout import Layouts
from dataloaders.cache.sample import split
from dataloaders.cache.study import Study
from dataloaders.errors import CacheError


class Rows(Dataset[Any]):
    """Samples by a function of their number."""

    def __init__(self, length: int, function: Any) -> None:
        self.length = length
        self.function = function

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.function(index)


def fails_from(first: int) -> Any:
    def sample(index: int) -> Any:
        if index >= first:
            raise ValueError(f"no sample {index}")
        return index, np.zeros(3)

    return sample


ROWS = {
    "one shape": lambda n: (np.full((3, 4), n % 256, np.uint8), n),
    "several shapes": lambda n: {"a": np.zeros((1, 1 + n % 7), np.float32), "b": str(n)},
    "some None": lambda n: (None if n % 3 else np.zeros(2), n),
    "all None": lambda n: None,
    "several types": lambda n: np.zeros(2, np.int32 if n % 2 else np.int64),
    "several structures": lambda n: (n, n) if n > 50 else [n, [n, None, "x"]],
}


def found_by(study: Study, parts: int) -> Findings:
    found = merged([study(part, parts) for part in range(parts)])
    assert found is not None
    return found


def columns_of(found: Findings) -> Any:
    return None if found.layouts is None else found.layouts.done()


@pytest.mark.parametrize("parts", [2, 3, 4])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 17, 1000])
@pytest.mark.parametrize("name", ROWS)
def test_parts_find_what_one_finds(
    name: str, length: int, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dataloaders.cache.study._SECONDS", 1e9)
    study = Study(Rows(length, ROWS[name]), length, skip=False, images=Images())
    parts = min(parts, study.parts)
    alone, together = study(), found_by(study, parts)
    assert together.digests == alone.digests
    assert sorted(together.bytes) == sorted(alone.bytes)
    # The first reading of each process but one does not count.
    assert len(together.seconds) == len(alone.seconds) - (parts - 1)
    assert together.columns == alone.columns
    assert together.cells == alone.cells
    assert (together.random, together.reason) == (alone.random, alone.reason)
    assert [column_without_order(c) for c in columns_of(together) or ()] == [
        column_without_order(c) for c in columns_of(alone) or ()
    ]


def column_without_order(column: Any) -> Any:
    return {**vars(column), "variants": set(column.variants)}


def test_the_failure_that_one_reader_would_meet_first() -> None:
    parts = [
        Findings(failure=Failure.of(ValueError(f"reading {at}")), failed_at=at) for at in (5, 2, 7)
    ]
    found = merged([Findings(choice=0), *parts])
    assert found is not None
    assert found.failure is not None
    assert found.failure.text == "ValueError: reading 2"


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_failures_that_are_skipped_are_in_the_digests(parts: int) -> None:
    study = Study(Rows(1000, fails_from(600)), 1000, skip=True, images=Images())
    found = found_by(study, parts)
    assert found.failure is None
    assert {n for n, digest in found.digests.items() if digest == "failed"} == {666, 999}


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_what_is_random_is_found_in_any_part(parts: int) -> None:
    for which in (0, 333, 666, 999):
        study = Study(
            Rows(1000, lambda n, which=which: random.random() if n == which else n),
            1000,
            skip=False,
            images=Images(),
        )
        assert found_by(study, parts).random.startswith(f"sample {which} read twice differs")


def test_parts_that_do_not_agree_are_nothing() -> None:
    assert merged([Findings(choice=0), Findings(choice=1)]) is None
    assert merged([Findings(choice=0, calls=((0, ()),)), Findings(choice=0)]) is None


def test_no_more_parts_than_samples_that_must_be_read() -> None:
    for length, parts in ((0, 1), (1, 1), (2, 2), (3, 3), (4, 4), (1000, 4)):
        study = Study(Rows(length, str), length, skip=False, images=Images())
        assert study.parts == parts


@pytest.mark.parametrize("workers", [1, 2])
def test_a_build_says_the_same_whatever_its_workers(tmp_path: Any, workers: int) -> None:
    with pytest.raises(ValueError, match="no sample 66") as failed:
        precompute(Rows(100, fails_from(60)), tmp_path / "a.h5", num_workers=workers)
    assert "raised by sample 66" in failed.value.__notes__[0]


CELLS = st.one_of(
    st.none(),
    st.integers(-5, 5),
    st.sampled_from([np.zeros(n, dtype) for n in (0, 1, 3) for dtype in ("u1", "f4")]),
    st.sampled_from([np.zeros((2, 2), "u1"), np.zeros((1, 4), "u1")]),
)


@given(rows=st.lists(st.tuples(CELLS, CELLS), min_size=1, max_size=12), data=st.data())
def test_merged_layouts_are_those_of_all_chunks(rows: list[Any], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(rows)))
    alone, first, second = Layouts(), Layouts(), Layouts()
    try:
        for number, row in enumerate(rows):
            chunk = Chunk.of([(number, *split(row))])
            assert chunk is not None
            alone.add(chunk)
    except CacheError as error:
        expected: Any = str(error).partition(" in rows")[0]
    else:
        expected = alone.done()
    try:
        for number, row in enumerate(rows):
            chunk = Chunk.of([(number, *split(row))])
            assert chunk is not None
            (first if number < cut else second).add(chunk)
        first.merge(second)
    except CacheError as error:
        found: Any = str(error).partition(" in rows")[0]
    else:
        found = first.done()
        assert first.rows == len(rows)
        assert first.structure == alone.structure
    if isinstance(expected, str):
        assert isinstance(found, str)
    else:
        assert found == expected
