"""The cache bench's peers do the whole work, and its check refuses batches that are wrong."""

import numpy as np
import pytest
import torch

from bench.peers.check import WrongBatches, check
from bench.peers.readers import MEAN, PEERS, STD, Job

pytestmark = pytest.mark.nightly


def job_of(folder, length=20, floats=False):
    images = np.random.default_rng(3).integers(0, 256, (length, 3, 12, 12), dtype=np.uint8)
    images[:, :2] = np.indices((12, 12))
    return Job(folder, images, side=8, batch=6, floats=floats)


def batches(job, corner=None, order=None):
    """Yield an epoch, made as plainly as possible; ``corner``: of all windows, if not random."""
    mean, std = (np.array(values, np.float32)[:, None, None] for values in (MEAN, STD))
    random = np.random.default_rng(5)
    order = random.permutation(len(job)) if order is None else order
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
@pytest.mark.parametrize("name", PEERS)
def test_each_peer_does_the_whole_work(name, floats, tmp_path):
    job = job_of(tmp_path, floats=floats)
    try:
        epochs = PEERS[name](job)
    except ImportError as error:
        pytest.skip(f"a package is not installed: {error}")
    for _ in range(2):
        check(job, epochs)


@pytest.mark.parametrize("floats", [False, True])
def test_right_batches_pass(floats, tmp_path):
    job = job_of(tmp_path, 400, floats)
    check(job, batches(job))


def each(change):
    """Return a function that makes an epoch of batches that ``change`` made of right ones."""
    return lambda job: (change(*batch) for batch in batches(job))


def overwritten(job):
    buffer = torch.empty((job.batch, 3, job.side, job.side), dtype=torch.uint8)
    for images, labels in batches(job):
        yield buffer[: len(images)].copy_(images), labels


@pytest.mark.parametrize(
    ("length", "floats", "epoch", "message"),
    [
        (20, False, each(lambda images, labels: (images[:, :, 1:], labels)), "are torch.uint8"),
        (20, False, each(lambda images, labels: (images.float(), labels)), "are torch.float32"),
        (20, False, each(lambda images, labels: (images, labels.int())), "labels are torch.int32"),
        (20, False, each(lambda images, labels: (images ^ 1, labels)), "no window of image"),
        (20, False, each(lambda images, labels: (images.flip(2), labels)), "no window of image"),
        (20, False, each(lambda images, labels: (images, labels.flip(0))), "no window of image"),
        (20, False, overwritten, "no window of image"),
        (20, False, each(lambda images, labels: (images[:1].expand_as(images),
                                                 labels[:1].expand_as(labels))),
         "20 images, 4 different, of 20"),
        (20, False, lambda job: list(batches(job))[:-1], "18 images, 18 different, of 20"),
        (20, True, each(lambda images, labels: (images + 1e-4, labels)), "not normalised as"),
        (400, False, lambda job: batches(job, corner=2), "top of the windows is not uniform"),
        (400, False, lambda job: batches(job, order=np.arange(len(job))), "not shuffled"),
    ],
)  # fmt: skip
def test_wrong_epochs_are_refused(length, floats, epoch, message, tmp_path):
    job = job_of(tmp_path, length, floats)
    with pytest.raises(WrongBatches, match=message):
        check(job, epoch(job))
