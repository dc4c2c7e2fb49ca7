"""The cache bench's peers do the whole work, and its check refuses batches that are wrong."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from bench.peers.check import WrongBatches, check
from bench.peers.readers import PEERS, Job, over_memmap, under_torch

pytestmark = pytest.mark.nightly


def job_of(folder, length=20, floats=False):
    images = np.random.default_rng(3).integers(0, 256, (length, 3, 12, 12), dtype=np.uint8)
    images[:, :2] = np.indices((12, 12))
    return Job(folder, images, side=8, batch=6, floats=floats)


def batches(job):
    return under_torch(over_memmap, job, workers=0)


@pytest.mark.parametrize(("floats", "length"), [(False, 20), (True, 20), (True, 400)])
@pytest.mark.parametrize("name", PEERS)
def test_each_peer_does_the_whole_work(name, floats, length, tmp_path):
    job = job_of(tmp_path, length, floats)
    try:
        epochs = PEERS[name](job)
    except ImportError as error:
        pytest.skip(f"a package is not installed: {error}")
    for _ in range(2):
        check(job, epochs)


def without_windows(job):
    """Yield an epoch of one window of each image."""
    (folder := job.folder / "cropped").mkdir()
    return batches(replace(job, folder=folder, images=job.images[:, :, 2:10, 2:10]))


def not_shuffled(job):
    return DataLoader(over_memmap(job), job.batch)


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
        (400, False, without_windows, "top of the windows is not uniform"),
        (400, False, not_shuffled, "not shuffled"),
    ],
)  # fmt: skip
def test_wrong_epochs_are_refused(length, floats, epoch, message, tmp_path):
    job = job_of(tmp_path, length, floats)
    with pytest.raises(WrongBatches, match=message):
        check(job, epoch(job))
