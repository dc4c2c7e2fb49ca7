"""Large columns are written once, at their places; what was not foreseen is as ever."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, get_worker_info

from dataloaders.cache import BuildProgress, CachedDataset, estimate, placing, precompute
from dataloaders.cache.about import About
from dataloaders.cache.build import building_folder
from dataloaders.cache.file import assemble
from dataloaders.cache.journal import read_journal
from dataloaders.cache.verification import verify
from helpers.cached import chunks_of
from helpers.compare import bits

SIZE = 60


@pytest.fixture(autouse=True)
def few_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of large samples, some rows of a chunk are written while others wait."""
    monkeypatch.setattr(placing, "_AT_ONCE", 3 * 3690 + 1)


class Images(Dataset[Any]):
    """One large column and small ones; ``other`` samples are not what the first ones promise."""

    def __init__(
        self, other: dict[int, Callable[[Any], Any]] | None = None, size: int = SIZE
    ) -> None:
        self.other = other or {}
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        values = np.random.default_rng(index)
        sample = {
            "image": torch.from_numpy(values.integers(0, 256, (3, 30, 41), dtype=np.uint8)),
            "label": index,
            "half": values.random(1500).astype(">f2"),
        }
        return self.other.get(index, lambda same: same)(sample)


class Varying(Images):
    """The image is as wide as it comes; the others are of one shape, a large one among them."""

    def __getitem__(self, index: int) -> Any:
        def widened(sample: Any) -> Any:
            width = 41 + index % 7
            values = np.random.default_rng(index).integers(0, 256, (3, 30, width), dtype=np.uint8)
            return {**sample, "image": torch.from_numpy(values)}

        sample = widened(Images(size=self.size)[index])
        return self.other.get(index, lambda same: same)(sample)


class TwoVarying(Varying):
    """A large image and a small mask, both as wide as they come."""

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        if isinstance(sample["image"], torch.Tensor):
            sample["mask"] = sample["image"][0].contiguous()
        return {"mask": sample.pop("mask", None), **sample}


KINDS = [Images, Varying, TwoVarying]


class Stop(Exception):
    """What interrupts a build."""


def stop(sample: Any) -> Any:
    raise Stop


def wider(sample: Any) -> Any:
    return {**sample, "image": torch.zeros(3, 30, 42, dtype=torch.uint8)}


def of_another_kind(sample: Any) -> Any:
    return {**sample, "image": sample["image"].numpy()}


def missing(sample: Any) -> Any:
    return {**sample, "image": None}


def assembled(rows: list[Any], like: CachedDataset, path: Path, **said: Any) -> bytes:
    """The file of these samples as it is made of chunks."""
    index = like.index
    about = About(fingerprint=index.fingerprint, head=index.head, tail=index.tail, **said)
    assemble(chunks_of(rows), path, about)
    return path.read_bytes()


def placed_in(path: Path) -> list[int]:
    """Bytes that each finished chunk of an interrupted build has at their places."""
    records = read_journal(building_folder(path) / "journal").records
    return [records[number].placed for number in sorted(records)]


def interrupted(path: Path, at: int, kind: type[Images] = Images) -> None:
    with pytest.raises(Stop):
        precompute(kind({at: stop}), path, num_workers=0, rows=4)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("rows", [None, 1, 7])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.thinned(4)
def test_the_file_is_the_one_that_chunks_are_put_together_to(
    kind: type[Images], rows: int | None, num_workers: int, tmp_path: Path
) -> None:
    images = kind()
    cached = precompute(images, tmp_path / "a.h5", num_workers=num_workers, rows=rows)
    samples = [images[index] for index in range(SIZE)]
    assert (tmp_path / "a.h5").read_bytes() == assembled(
        samples, cached, tmp_path / "b.h5", samples=SIZE
    )
    assert verify(tmp_path / "a.h5") == []
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.h5", "b.h5"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [7, SIZE])
@pytest.mark.parametrize("at_once", [1, 5 * 3690, 1 << 20])
@pytest.mark.thinned(3)
def test_it_does_not_depend_on_how_many_rows_are_written_at_once(
    at_once: int, rows: int, kind: type[Images], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    precompute(kind(), tmp_path / "a.h5", num_workers=0, rows=rows)
    monkeypatch.setattr(placing, "_AT_ONCE", at_once)
    precompute(kind(), tmp_path / "b.h5", num_workers=0, rows=rows)
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "b.h5").read_bytes()
    assert verify(tmp_path / "b.h5") == []


def test_large_columns_are_written_once(tmp_path: Path) -> None:
    interrupted(tmp_path / "a.h5", at=58)
    assert placed_in(tmp_path / "a.h5") == [4 * (3 * 30 * 41 + 2 * 1500)] * 14
    folder = building_folder(tmp_path / "a.h5")
    written = sum(file.stat().st_size for file in folder.glob("chunk-*"))
    assert written < 14 * 1000
    told = estimate(Images(), tmp_path / "a.h5", num_workers=0)
    assert told.disk_needed == told.bytes


def test_so_are_rows_of_several_shapes(tmp_path: Path) -> None:
    interrupted(tmp_path / "a.h5", at=58, kind=Varying)
    sizes = [Varying()[index]["image"].numel() + 2 * 1500 for index in range(56)]
    expected = [sum(sizes[first : first + 4]) for first in range(0, 56, 4)]
    assert placed_in(tmp_path / "a.h5") == expected
    folder = building_folder(tmp_path / "a.h5")
    written = sum(file.stat().st_size for file in folder.glob("chunk-*"))
    assert written < 14 * 1000
    told = estimate(Varying(), tmp_path / "a.h5", num_workers=0)
    assert told.disk_needed == told.bytes


class InTurns(Varying):
    """Sixteen even steps through these 106 are 7 long, as are the turns that the widths take."""

    def __init__(self, other: dict[int, Callable[[Any], Any]] | None = None) -> None:
        super().__init__(other, size=106)


def test_shapes_that_come_in_turns_are_seen_beforehand(tmp_path: Path) -> None:
    interrupted(tmp_path / "a.h5", at=57, kind=InTurns)
    sizes = [InTurns()[index]["image"].numel() + 2 * 1500 for index in range(56)]
    assert placed_in(tmp_path / "a.h5") == [sum(sizes[i : i + 4]) for i in range(0, 56, 4)]


class Hesitating(Varying):
    """The first chunk takes long, so that nobody knows where the next ones begin."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def __getitem__(self, index: int) -> Any:
        for _ in range(2000):
            if (
                index != 2
                or get_worker_info() is None
                or len(list(self.folder.glob("chunk-*"))) > 2
            ):
                break
            time.sleep(0.01)
        return super().__getitem__(index)


def test_rows_whose_place_is_not_known_wait_in_their_chunks(tmp_path: Path) -> None:
    """Two chunks are finished before the first one: their images are not at their places."""
    path = tmp_path / "a.h5"
    spans: list[int] = []

    def note(progress: BuildProgress) -> None:
        if progress.phase == "compute":
            spans[:] = placed_in(path)

    images = Hesitating(building_folder(path))
    cached = precompute(images, path, num_workers=2, rows=4, progress=note)
    fixed = 4 * 2 * 1500
    assert spans.count(fixed) >= 2, spans
    assert sum(each > fixed for each in spans) >= 2, spans
    samples = [Varying()[index] for index in range(SIZE)]
    assert path.read_bytes() == assembled(samples, cached, tmp_path / "b.h5", samples=SIZE)
    assert verify(path) == []


class Slow(Varying):
    """The first chunk is finished after the fourth was begun, and before that one is.

    The worker that reads the second one reads the fourth one next.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def __getitem__(self, index: int) -> Any:
        building, begun = building_folder(self.folder / "a.h5"), self.folder / "begun"
        if not list(building.glob("sizes.*")):
            return super().__getitem__(index)  # it is only studied
        if index == 12:
            begun.touch()
        for _ in range(2000):
            if begun.exists() if index == 2 else list(building.glob("chunk-000000.????????")):
                break
            if index not in (2, 13):
                break
            time.sleep(0.01)
        return super().__getitem__(index)


def test_whoever_reads_a_chunk_whose_place_is_not_known_goes_on_with_the_next_one(
    tmp_path: Path,
) -> None:
    """The second chunk is read long before the first one, and is at its place all the same."""
    path = tmp_path / "a.h5"
    placed: dict[int, int] = {}

    def note(progress: BuildProgress) -> None:
        if progress.phase == "compute":
            records = read_journal(building_folder(path) / "journal").records
            placed.update((number, record.placed) for number, record in records.items())

    cached = precompute(Slow(tmp_path), path, num_workers=2, rows=4, progress=note)
    sizes = [Varying()[index]["image"].numel() + 2 * 1500 for index in range(SIZE)]
    assert [placed[0], placed[1]] == [sum(sizes[:4]), sum(sizes[4:8])]
    samples = [Varying()[index] for index in range(SIZE)]
    assert path.read_bytes() == assembled(samples, cached, tmp_path / "b.h5", samples=SIZE)


@pytest.mark.parametrize("at", [0, 33, SIZE - 1])
@pytest.mark.parametrize("change", [wider, of_another_kind, missing])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.thinned(6)
def test_samples_that_were_not_foreseen(
    kind: type[Images], change: Callable[[Any], Any], at: int, tmp_path: Path
) -> None:
    images = kind({at: change})
    cached = precompute(images, tmp_path / "a.h5", num_workers=0, rows=4)
    samples = [images[index] for index in range(SIZE)]
    assert list(map(bits, cached)) == list(map(bits, samples))
    assert (tmp_path / "a.h5").read_bytes() == assembled(
        samples, cached, tmp_path / "b.h5", samples=SIZE
    )
    assert not building_folder(tmp_path / "a.h5").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_samples_that_fail_and_those_behind_them(kind: type[Images], tmp_path: Path) -> None:
    images = kind({21: stop, 22: stop})
    cached = precompute(images, tmp_path / "a.h5", num_workers=2, rows=4, on_error="skip")
    left = [images[index] for index in range(SIZE) if index not in (21, 22)]
    failed = cached.failed
    assert [number for number, _ in failed] == [21, 22]
    assert (tmp_path / "a.h5").read_bytes() == assembled(
        left, cached, tmp_path / "b.h5", samples=SIZE, failed=failed
    )


class Sparse(Images):
    """80 samples of 1 MiB; a short one is where a chunk's first part is written already."""

    def __init__(self) -> None:
        super().__init__(size=80)

    def __getitem__(self, index: int) -> Any:
        return np.full(5 if index == 66 else 1 << 20, index, np.uint8)


def test_a_chunk_that_is_partly_placed_is_begun_again(tmp_path: Path) -> None:
    cached = precompute(Sparse(), tmp_path / "a.h5", num_workers=0, rows=80)
    assert [len(cached[row]) for row in (0, 65, 66, 79)] == [1 << 20, 1 << 20, 5, 1 << 20]
    assert all((cached[row] == row).all() for row in (0, 65, 66, 79))
    assert cached.columns[0].shape is None


@pytest.mark.parametrize("chunk", [0, 8], ids=["oldest", "newest"])
@pytest.mark.parametrize("kind", [Images, Varying])
def test_a_flipped_bit_at_its_place_is_found_when_it_goes_on(
    kind: type[Images], chunk: int, tmp_path: Path
) -> None:
    path = tmp_path / "a.h5"
    interrupted(path, at=37, kind=kind)
    (placed,) = building_folder(path).glob("placed.*")
    found = json.loads((building_folder(path) / "placing.json").read_bytes())
    (image,) = (each for each in found["index"]["columns"] if each["name"] == "image")
    before = sum(kind()[index]["image"].numel() for index in range(4 * chunk))
    offset = image["values"][0] + before + 100
    with open(placed, "r+b") as file:
        byte = os.pread(file.fileno(), 1, offset)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 16]), offset)
    precompute(kind(), path, num_workers=0)
    whole = precompute(kind(), tmp_path / "b.h5", num_workers=0)
    assert path.read_bytes() == whole.path.read_bytes()


@pytest.mark.parametrize(
    "how", ["settings gone", "settings torn", "settings deep", "file gone", "file cut"]
)
@pytest.mark.parametrize("kind", [Images, Varying])
@pytest.mark.thinned(3)
def test_without_the_file_its_rows_are_read_again(
    kind: type[Images], how: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.h5"
    interrupted(path, at=37, kind=kind)
    (placed,) = building_folder(path).glob("placed.*")
    told = building_folder(path) / "placing.json"
    if how == "settings gone":
        told.unlink()
    elif how == "settings torn":
        told.write_bytes(told.read_bytes()[:-20])
    elif how == "settings deep":
        told.write_bytes(b"[" * 100_000)
    elif how == "file gone":
        placed.unlink()
    else:
        os.truncate(placed, 10_000)
    seen: list[BuildProgress] = []
    precompute(kind(), path, num_workers=0, progress=seen.append)
    assert seen[0].samples_done == 0
    precompute(kind(), tmp_path / "b.h5", num_workers=0)
    assert path.read_bytes() == (tmp_path / "b.h5").read_bytes()


@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_on_where_it_was(kind: type[Images], tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    interrupted(path, at=37, kind=kind)
    seen: list[BuildProgress] = []
    precompute(kind(), path, num_workers=2, progress=seen.append)
    assert seen[0].samples_done == 36
    assert seen[0].bytes_done > 36 * (3 * 30 * 41 + 2 * 1500)
    precompute(kind(), tmp_path / "b.h5", num_workers=0)
    assert path.read_bytes() == (tmp_path / "b.h5").read_bytes()


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    rows=st.integers(1, 9),
    shape=st.lists(st.integers(1, 60), min_size=1, max_size=3).map(tuple),
    dtype=st.sampled_from(["|u1", "<f4", ">i8", "|b1", "<c16"]),
    others=st.sets(st.integers(0, 19), max_size=2),
)
def test_any_shapes_and_chunks(
    tmp_path: Path, rows: int, shape: tuple[int, ...], dtype: str, others: set[int]
) -> None:
    class Arrays(Dataset[Any]):
        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> Any:
            size = (*shape[:-1], shape[-1] + 1) if index in others else shape
            return np.random.default_rng(index).integers(0, 2, size).astype(dtype), index

    path = tmp_path / "a.h5"
    cached = precompute(Arrays(), path, num_workers=0, rows=rows, overwrite=True)
    assert list(map(bits, cached)) == [bits(Arrays()[index]) for index in range(20)]
    assert path.read_bytes() == assembled(
        [Arrays()[index] for index in range(20)], cached, tmp_path / "b.h5", samples=20
    )
