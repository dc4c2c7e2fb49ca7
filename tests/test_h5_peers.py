"""The cache bench's peers give what was asked for, and its check refuses what was not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.h5 import measure
from bench.h5_check import WrongBatches, check
from bench.h5_peers import MEAN, PEERS, STD, Job, Peer
from bench.harness import Scale

# FFCV's functions, compiled by numba, end in an error that nobody sees.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

Change = Callable[[torch.Tensor, torch.Tensor], Any]


def job_of(folder: Path, length: int = 20, floats: bool = False) -> Job:
    images = np.random.default_rng(3).integers(0, 256, (length, 3, 12, 12), dtype=np.uint8)
    return Job(folder, images, side=8, batch=6, floats=floats)


def batches(job: Job, corner: int | None = None) -> Iterator[Any]:
    """An epoch by the plainest code there is; ``corner``: of every window, if it is not random."""
    mean, std = (np.array(values, np.float32)[:, None, None] for values in (MEAN, STD))
    random = np.random.default_rng(5)
    order = random.permutation(len(job))
    for begin in range(0, len(job), job.batch):
        rows = order[begin : begin + job.batch]
        windows = []
        for row in rows:
            top, left = random.integers(0, 5, 2) if corner is None else (corner, corner)
            window = job.images[row, :, top : top + 8, left : left + 8]
            window = window[:, :, ::-1] if random.random() < 0.5 else window
            windows.append((window / np.float32(255) - mean) / std if job.floats else window)
        yield torch.from_numpy(np.stack(windows)), torch.from_numpy(rows)


@pytest.mark.parametrize("floats", [False, True])
@pytest.mark.parametrize("peer", PEERS, ids=[peer.name for peer in PEERS])
def test_each_peer_does_the_whole_work(peer: Peer, floats: bool, tmp_path: Path) -> None:
    job = job_of(tmp_path, floats=floats)
    try:
        way = peer.open(job)
    except ImportError as error:
        pytest.skip(f"{peer.packages[0]} is not installed: {error}")
    for _epoch in range(2):
        check(peer.name, job, way, kept=peer.kept)


@pytest.mark.parametrize("floats", [False, True])
@pytest.mark.parametrize("length", [20, 400])
def test_right_batches_pass(length: int, floats: bool, tmp_path: Path) -> None:
    job = job_of(tmp_path, length, floats)
    check("plain", job, batches(job))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda images, labels: (images[:, :, 1:], labels), r"plain: images are torch.uint8"),
        (lambda images, labels: (images.float(), labels), "images are torch.float32"),
        (lambda images, labels: (images, labels.int()), "labels are torch.int32"),
        (lambda images, labels: (images ^ 1, labels), "no window of image"),
        (lambda images, labels: (images.flip(2), labels), "no window of image"),
        (lambda images, labels: (images, labels.flip(0)), "no window of image"),
        (lambda images, labels: (images[:1].expand_as(images), labels[:1].expand_as(labels)),
         "20 images, 4 different, of 20"),
    ],
)  # fmt: skip
def test_wrong_batches_are_refused(change: Change, message: str, tmp_path: Path) -> None:
    job = job_of(tmp_path)
    with pytest.raises(WrongBatches, match=message):
        check("plain", job, (change(*batch) for batch in batches(job)))


def test_a_missing_batch_is_noticed(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    with pytest.raises(WrongBatches, match="18 images, 18 different, of 20"):
        check("plain", job, list(batches(job))[:-1])


def test_values_that_are_not_normalised_right_are_refused(tmp_path: Path) -> None:
    job = job_of(tmp_path, floats=True)
    with pytest.raises(WrongBatches, match="is not normalised as it should be"):
        check("plain", job, ((images + 1e-4, labels) for images, labels in batches(job)))


def test_windows_that_are_not_random_are_refused(tmp_path: Path) -> None:
    job = job_of(tmp_path, 400)
    with pytest.raises(WrongBatches, match="top of the windows is not uniform from 0 to 4"):
        check("plain", job, batches(job, corner=2))


def test_an_order_that_is_not_shuffled_is_refused(tmp_path: Path) -> None:
    job = job_of(tmp_path, 400)
    pairs = [pair for batch in batches(job) for pair in zip(*batch, strict=True)]
    pairs.sort(key=lambda pair: int(pair[1]))
    parts = [pairs[begin : begin + job.batch] for begin in range(0, len(pairs), job.batch)]
    ordered = [tuple(map(torch.stack, zip(*part, strict=True))) for part in parts]
    with pytest.raises(WrongBatches, match="not shuffled"):
        check("plain", job, ordered)


def test_batches_that_are_said_to_last_have_to(tmp_path: Path) -> None:
    job = job_of(tmp_path)

    def reused() -> Iterator[Any]:
        buffer = torch.empty((job.batch, 3, job.side, job.side), dtype=torch.uint8)
        for images, labels in batches(job):
            yield buffer[: len(images)].copy_(images), labels

    check("plain", job, reused(), kept=False)
    with pytest.raises(WrongBatches, match="no window of image"):
        check("plain", job, reused())


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(job: Job) -> Any:
        raise ImportError("No module named 'fast'")

    monkeypatch.setattr("bench.h5.PEERS", (Peer("fast", ("fast-loader",), missing),))
    result = measure(Scale(tiny=True), tmp_path)
    assert [row[0] for row in result.rows] == ["uint8, h5 (ours)", "float32, h5 (ours)"]
    wanted = "Not installed, so not measured: fast-loader (No module named 'fast')."
    assert wanted in result.notes
