"""The cache bench's peers do the whole work, and its check refuses batches that are wrong."""

import numpy as np
import pytest
import torch

from bench.peers.check import WrongBatches, check
from bench.peers.readers import MEAN, PEERS, STD, Job

pytestmark = [
    pytest.mark.nightly,
    # FFCV's functions, compiled by numba, end in an error that nobody sees.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def job_of(folder, length=20, floats=False):
    images = np.random.default_rng(3).integers(0, 256, (length, 3, 12, 12), dtype=np.uint8)
    return Job(folder, images, side=8, batch=6, floats=floats)


def batches(job, corner=None):
    """Yield an epoch, made as plainly as possible; ``corner``: of all windows, if not random."""
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
def test_each_peer_does_the_whole_work(peer, floats, tmp_path):
    job = job_of(tmp_path, floats=floats)
    try:
        way = peer.open(job)
    except ImportError as error:
        pytest.skip(f"{peer.packages[0]} is not installed: {error}")
    for _epoch in range(2):
        check(peer.name, job, way, kept=peer.kept)


@pytest.mark.parametrize("floats", [False, True])
def test_right_batches_pass(floats, tmp_path):
    job = job_of(tmp_path, 400, floats)
    check("plain", job, batches(job))


def in_order(job):
    pairs = [pair for batch in batches(job) for pair in zip(*batch, strict=True)]
    pairs.sort(key=lambda pair: int(pair[1]))
    for begin in range(0, len(pairs), job.batch):
        yield tuple(map(torch.stack, zip(*pairs[begin : begin + job.batch], strict=True)))


def each(change):
    """An epoch of batches that ``change`` made of right ones."""
    return lambda job: (change(*batch) for batch in batches(job))


@pytest.mark.parametrize(
    ("length", "floats", "epoch", "message"),
    [
        (20, False, each(lambda images, labels: (images[:, :, 1:], labels)),
         r"plain: images are torch.uint8"),
        (20, False, each(lambda images, labels: (images.float(), labels)), "are torch.float32"),
        (20, False, each(lambda images, labels: (images, labels.int())), "labels are torch.int32"),
        (20, False, each(lambda images, labels: (images ^ 1, labels)), "no window of image"),
        (20, False, each(lambda images, labels: (images.flip(2), labels)), "no window of image"),
        (20, False, each(lambda images, labels: (images, labels.flip(0))), "no window of image"),
        (20, False, each(lambda images, labels: (images[:1].expand_as(images),
                                                 labels[:1].expand_as(labels))),
         "20 images, 4 different, of 20"),
        (20, False, lambda job: list(batches(job))[:-1], "18 images, 18 different, of 20"),
        (20, True, each(lambda images, labels: (images + 1e-4, labels)), "not normalised as"),
        (400, False, lambda job: batches(job, corner=2), "top of the windows is not uniform"),
        (400, False, in_order, "not shuffled"),
    ],
)  # fmt: skip
def test_wrong_epochs_are_refused(length, floats, epoch, message, tmp_path):
    job = job_of(tmp_path, length, floats)
    with pytest.raises(WrongBatches, match=message):
        check("plain", job, epoch(job))


def test_batches_that_are_overwritten_are_refused_where_they_should_last(tmp_path):
    job = job_of(tmp_path)

    def reused():
        buffer = torch.empty((job.batch, 3, job.side, job.side), dtype=torch.uint8)
        for images, labels in batches(job):
            yield buffer[: len(images)].copy_(images), labels

    check("plain", job, reused(), kept=False)
    with pytest.raises(WrongBatches, match="no window of image"):
        check("plain", job, reused())
