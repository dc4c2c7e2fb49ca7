"""Rows are read some at a time, which nobody can tell by what is kept of them."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset

from dataloaders.cache import precompute, reading
from dataloaders.cache.cut import whole
from dataloaders.cache.images import Images
from dataloaders.cache.reading import Reader
from dataloaders.cache.sample import join, leaf_of
from dataloaders.cache.seeds import seed_for
from dataloaders.cache.study import Study
from dataloaders.errors import CacheError
from dataloaders.random_states import random_states_kept

SIZE = 400


class Numbers(Dataset[Any]):
    """Each sample is its number, twice, and those that were read are noted."""

    def __init__(self, size: int = SIZE) -> None:
        self.size = size
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return self.sample(index)

    def sample(self, index: int) -> Any:
        return index, torch.full((4,), index)


DRAWS = {
    "torch": lambda: float(torch.rand(())),
    "NumPy": np.random.random_sample,
    "random": random.random,
    "torch, seeded": lambda: float(torch.manual_seed(5).initial_seed()),
    "NumPy, seeded": lambda: np.random.seed(5),
}


class Draws(Numbers):
    """Some samples draw random numbers; what they draw is not in them unless it is told."""

    def __init__(self, draw: str, at: tuple[int, ...], *, told: bool = False) -> None:
        super().__init__()
        self.draw = draw
        self.at = at
        self.told = told

    def sample(self, index: int) -> Any:
        drawn = DRAWS[self.draw]() if index in self.at else None
        return index, torch.full((4,), index), drawn if self.told else None


def read(reader: Reader, numbers: range) -> Iterator[tuple[int, Any]]:
    """Rows as they are kept."""
    for group in reader.groups(numbers, lambda: None):
        for index, row in group:
            structure, cells = reader.cells(index, row)
            yield index, join(structure, [leaf_of(cell.kind, cell.values) for cell in cells])


def reader_of(dataset: Dataset[Any], *, drawn: bool = False, fleeting: bool = False) -> Reader:
    return Reader(whole(dataset), None, drawn=drawn, fleeting=fleeting)


@pytest.mark.parametrize("fleeting", [False, True])
@pytest.mark.parametrize("drawn", [False, True])
def test_each_row_is_read_once_and_in_order(drawn: bool, fleeting: bool) -> None:
    dataset = Numbers()
    rows = list(read(reader_of(dataset, drawn=drawn, fleeting=fleeting), range(3, 90)))
    assert [index for index, _ in rows] == dataset.read == list(range(3, 90))
    assert all(row[0] == index and row[1].tolist() == [index] * 4 for index, row in rows)


@pytest.mark.parametrize(("fleeting", "most"), [(False, 16), (True, 1)])
def test_how_many_are_read_at_a_time(fleeting: bool, most: int) -> None:
    reader = reader_of(Numbers(), fleeting=fleeting)
    for _ in range(2):  # the first time, it is not known how large rows are
        groups = []
        for group in reader.groups(range(40), lambda: None):
            groups.append(len(group))
            for index, row in group:
                reader.cells(index, row)
    assert groups == [most] * (40 // most) + [40 % most] * (40 % most > 0)


def test_large_rows_are_read_one_by_one() -> None:
    class Large(Numbers):
        def sample(self, index: int) -> Any:
            return torch.zeros(reading.MOST_BYTES // 2 + 1, dtype=torch.uint8)

    reader, most = reader_of(Large()), 0
    for group in reader.groups(range(8), lambda: None):
        most = max(most, len(group))
        for index, row in group:
            reader.cells(index, row)
    assert most == 1


def test_slow_rows_do_not_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(1000))
    monkeypatch.setattr(reading.time, "monotonic", lambda: 0.06 * next(now))
    reader = reader_of(Numbers())
    list(read(reader, range(4)))
    assert {len(group) for group in reader.groups(range(20), lambda: None)} == {2}


@pytest.mark.parametrize("draw", DRAWS)
def test_rows_before_one_that_draws_are_read_again(draw: str) -> None:
    """From then on each is seeded, and what is drawn is a function of its number alone."""
    dataset, at = Draws(draw, (40, 41, 77), told=True), range(100)
    found = dict(read(reader_of(dataset), at))
    again = sorted(index for index in set(dataset.read) if dataset.read.count(index) == 2)
    assert again == list(range(again[0], again[-1] + 1))
    assert 40 in again
    assert len(again) <= 16
    assert len(dataset.read) == len(at) + len(again)
    with random_states_kept(cuda=False):
        for index in dataset.at:
            seed_for(index)
            assert found[index][2] == DRAWS[draw]()


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("rows", [1, 7, 100, None])
def test_draws_that_the_study_did_not_meet(
    rows: int | None, num_workers: int, tmp_path: Path
) -> None:
    """They are those of the sample's number, whatever was read before it, and by whom."""
    dataset = Draws("torch", (150, 151, 377), told=True)
    cached = precompute(dataset, tmp_path / "a.h5", num_workers=num_workers, rows=rows)
    with random_states_kept(cuda=False):
        for index in dataset.at:
            seed_for(index)
            assert cached[index][2] == float(torch.rand(()))
    assert cached[149][2] is None


def test_a_row_that_cannot_be_read_ends_what_is_read_at_a_time() -> None:
    class Fails(Numbers):
        def sample(self, index: int) -> Any:
            if index in (21, 22):
                raise ValueError(f"no {index}")
            return index

    reader, found = reader_of(Fails()), list[Any]()
    list(read(reader, range(16)))  # how large they are is known now
    for group in reader.groups(range(16, 32), lambda: None):
        for index, row in group:
            try:
                reader.cells(index, row)
                found.append(index)
            except ValueError as error:
                found.append(str(error))
    assert found == [*range(16, 21), "no 21", "no 22", *range(23, 32)]


class Kinds(Numbers):
    """One sample cannot be kept, and a later one cannot be read."""

    def sample(self, index: int) -> Any:
        if index == 203:
            raise ValueError("unreadable")
        return object() if index == 201 else index


def test_the_first_sample_that_is_wrong_is_the_one_that_is_told(tmp_path: Path) -> None:
    with pytest.raises(CacheError, match="sample 201 cannot be kept"):
        precompute(Kinds(), tmp_path / "a.h5", num_workers=0)
    cached = precompute(Kinds(), tmp_path / "a.h5", num_workers=0, on_error="skip")
    assert [index for index, _ in cached.failed] == [201, 203]
    assert [cached[row] for row in range(200, 203)] == [200, 202, 204]


# Rows that do not stay what they are


def picture(index: int) -> Image.Image:
    return Image.new("RGB", (12, 10), (index % 256, index // 256, 7))


class OneCanvas(Numbers):
    """One and the same image, drawn anew for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.canvas = Image.new("RGB", (12, 10))

    def sample(self, index: int) -> Any:
        self.canvas.paste(picture(index))
        return {"image": self.canvas, "label": index}


class OneFile(Numbers):
    """Images that are not decoded yet, of a file in memory that is written anew for each."""

    def __init__(self) -> None:
        super().__init__()
        self.file = io.BytesIO()

    def sample(self, index: int) -> Any:
        self.file.seek(0)
        self.file.truncate()
        picture(index).save(self.file, "PNG")
        self.file.seek(0)
        return {"image": Image.open(self.file), "label": index}


class OneList(Numbers):
    """One and the same list."""

    def __init__(self) -> None:
        super().__init__()
        self.words = ["", 0]

    def sample(self, index: int) -> Any:
        self.words[:] = [f"sample {index}", index]
        return {"words": self.words, "label": index}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", [OneCanvas, OneFile, OneList])
def test_what_is_used_again_for_the_next_sample(
    kind: type[Numbers], num_workers: int, tmp_path: Path
) -> None:
    cached = precompute(kind(), tmp_path / "a.h5", num_workers=num_workers)
    for index in range(SIZE):
        sample = cached[index]
        assert sample["label"] == index
        if "image" in sample:
            assert sample["image"].tobytes() == picture(index).tobytes()
        else:
            assert sample["words"] == [f"sample {index}", index]


class Fresh(OneCanvas):
    def sample(self, index: int) -> Any:
        return {"image": picture(index), "label": index}


@pytest.mark.parametrize(
    ("kind", "fleeting"),
    [(Fresh, False), (Numbers, False), (OneCanvas, True), (OneFile, True), (OneList, True)],
)
def test_the_study_tells_which_rows_stay_what_they_are(kind: type[Numbers], fleeting: bool) -> None:
    found = Study(kind(), SIZE, skip=False, images=Images())()
    assert found.failure is None
    assert found.fleeting == fleeting


def test_the_study_tells_whether_rows_draw() -> None:
    for dataset, drawn in ((Numbers(), False), (Draws("random", (0, 399)), True)):
        found = Study(dataset, SIZE, skip=False, images=Images())()
        assert found.failure is None
        assert found.drawn == drawn


def test_rows_are_not_read_again_where_the_study_met_draws(tmp_path: Path) -> None:
    dataset = Draws("NumPy", (133,))  # one of those that are always read
    precompute(dataset, tmp_path / "a.h5", num_workers=0)
    counts = [dataset.read.count(index) for index in range(SIZE)]
    assert counts.count(1) >= SIZE - 20  # all but those of the study
