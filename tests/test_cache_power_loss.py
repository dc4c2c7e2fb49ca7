"""What is finished reaches the disk soon; what a power cut took of it is made again."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset

from dataloaders.cache import precompute, syncing
from dataloaders.cache.build import building_folder
from dataloaders.cache.journal import read_journal
from dataloaders.errors import CacheError

SIZE, ROWS = 48, 4


class Samples(Dataset[Any]):
    """A large column that is placed, of one shape or of several, and what stays in the chunks."""

    def __init__(self, varying: bool, before: Callable[[int], None] | None = None) -> None:
        self.varying = varying
        self.before = before

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        if self.before is not None:
            self.before(index)
        width = 41 + (index % 7 if self.varying else 0)
        image = np.random.default_rng(index).integers(1, 256, (3, 30, width), dtype=np.uint8)
        return {"image": torch.from_numpy(image), "name": f"sample {index}"}


class Stop(Exception):
    """What interrupts a build."""


def stop_at(index: int) -> Callable[[int], None]:
    def before(number: int) -> None:
        if number == index:
            raise Stop

    return before


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that the thread has put on the disk."""
    found: list[Path] = []
    sync = syncing.sync

    def noting(path: Path) -> None:
        sync(path)
        found.append(path)

    monkeypatch.setattr(syncing, "sync", noting)
    monkeypatch.setattr(syncing, "_EVERY_S", 0.01)
    return found


@pytest.mark.parametrize("varying", [False, True])
def test_what_is_finished_is_put_on_the_disk_while_the_build_goes_on(
    varying: bool, tmp_path: Path, synced: list[Path]
) -> None:
    folder = building_folder(tmp_path / "a.h5")

    def of_this_call(records: Any) -> set[str]:
        return {file for record in records.values() for file in (record.file,) if record.placed}

    def await_the_disk(index: int) -> None:
        if index < ROWS or not (folder / "journal").exists():
            return
        written = of_this_call(read_journal(folder / "journal").records)
        placed = {path.name for path in folder.glob("placed.*")}
        while not written | placed <= {path.name for path in synced}:
            assert threading.current_thread() is threading.main_thread()
            os.sched_yield()

    precompute(Samples(varying, await_the_disk), tmp_path / "a.h5", num_workers=0, rows=ROWS)
    assert len({path.name for path in synced if path.name.startswith("chunk-")}) >= SIZE // ROWS - 1


def test_nearly_all_is_on_the_disk_before_the_last_chunks_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the end of a build waits for what was written since the thread did so before."""
    left, enough, sync = list(range(SIZE // ROWS - 2)), threading.Event(), syncing.sync

    def counting(path: Path) -> None:
        sync(path)
        if path.name.startswith("chunk-"):
            left.pop()
        if not left:
            enough.set()

    monkeypatch.setattr(syncing, "sync", counting)
    monkeypatch.setattr(syncing, "_EVERY_S", 1000.0)
    waited: list[int] = []

    def before(index: int) -> None:
        if index == SIZE - 1 and threads():
            waited.append(index)
            assert enough.wait(60)

    precompute(Samples(False, before), tmp_path / "a.h5", num_workers=0, rows=ROWS)
    assert waited == [SIZE - 1]


def test_a_disk_that_takes_nothing_ends_the_build_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half, failed = threading.Event(), threading.Event()

    def full(path: Path) -> None:
        assert half.wait(60)
        failed.set()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(syncing, "sync", full)
    monkeypatch.setattr(syncing, "_EVERY_S", 0.01)

    def before(index: int) -> None:
        if index == SIZE // 2 and threads():
            half.set()
            assert failed.wait(60)

    with pytest.raises(CacheError, match=r"No space left on device.*make room, then call"):
        precompute(Samples(False, before), tmp_path / "a.h5", num_workers=0, rows=ROWS)
    assert not threads()
    assert len(read_journal(building_folder(tmp_path / "a.h5") / "journal").records) >= 5
    monkeypatch.undo()
    precompute(Samples(False), tmp_path / "a.h5", num_workers=0)
    precompute(Samples(False), tmp_path / "b.h5", num_workers=0)
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "b.h5").read_bytes()


def threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "dataloaders-sync"]


@pytest.mark.parametrize("end", [Stop, KeyboardInterrupt])
def test_the_thread_ends_with_the_build(end: type[BaseException], tmp_path: Path) -> None:
    alive: list[int] = []

    def before(index: int) -> None:
        alive.append(len(threads()))
        if index == SIZE - 1 and threads():  # the study reads it, too
            raise end

    with pytest.raises(end):
        precompute(Samples(False, before), tmp_path / "a.h5", num_workers=0, rows=ROWS)
    assert max(alive) == 1
    assert not threads()


@pytest.fixture(scope="module", params=[False, True], ids=["one shape", "several shapes"])
def begun(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A build that was interrupted, and the file that it is to become."""
    folder = tmp_path_factory.mktemp("begun")
    dataset = Samples(request.param, stop_at(SIZE - 3))
    with pytest.raises(Stop):
        precompute(dataset, folder / "a.h5", num_workers=0, rows=ROWS)
    whole = precompute(Samples(request.param), folder / "whole.h5", num_workers=0)
    return request.param, folder / "a.h5", whole.path.read_bytes()


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
@pytest.mark.nightly
def test_what_never_reached_the_disk_is_made_again(
    begun: Any, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Names without files, files without contents, contents that are zeros, in any combination."""
    varying, interrupted, whole = begun
    path = tmp_path_factory.mktemp("cut") / "a.h5"
    folder = building_folder(path)
    shutil.copytree(building_folder(interrupted), folder)
    records = read_journal(folder / "journal").records
    (placed,) = folder.glob("placed.*")
    lost = data.draw(st.sets(st.sampled_from(sorted(records)), max_size=len(records)))
    for number in lost:
        record = records[number]
        file = folder / record.file
        how = data.draw(st.sampled_from(["no name", "empty", "zeros", "shorter", "rows zero"]))
        if how == "no name":
            file.unlink()
        elif how == "empty":
            file.write_bytes(b"")
        elif how == "zeros":
            file.write_bytes(bytes(record.bytes))
        elif how == "shorter":
            os.truncate(file, data.draw(st.integers(1, record.bytes - 1)))
        else:
            ((begin, size),) = record.spans
            there = data.draw(st.integers(0, size - 1))  # pages before it had arrived
            with open(placed, "r+b") as opened:
                os.pwrite(opened.fileno(), bytes(size - there), begin + there)
    journal = (folder / "journal").read_bytes()
    torn = data.draw(st.integers(0, len(journal)) | st.just(len(journal)))
    (folder / "journal").write_bytes(journal[:torn])
    precompute(Samples(varying), path, num_workers=0)
    assert path.read_bytes() == whole
