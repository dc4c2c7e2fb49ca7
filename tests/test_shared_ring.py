"""Shared memory for the files of recorded batches, used again."""

import pytest
import torch
import torch.utils.data
from torchvision.transforms.functional import to_tensor

from backends.stock import Stock
from dataloaders import DataLoader
from helpers.compare import assert_same
from helpers.pictures import noise, saved
from helpers.processes import is_true_in_a_fork
from helpers.recorded import Photos, recording, replayed

TorchLoader = torch.utils.data.DataLoader
SMALLEST = 2 << 20  # of a batch of files in a slot


def small(image):
    return to_tensor(image.resize((5, 5)))


def photos(length, sides=(750,)):
    """Files of random pixels: of 1.7 MB, or of many sizes."""
    squares = (noise(*[sides[n % len(sides)]] * 2, seed=n) for n in range(length))
    return Photos([saved(square, "PNG", compress_level=0) for square in squares], small)


def recorded(dataset, **options):
    stock = Stock(gather=False, view=recording)
    return DataLoader(dataset, 2, **{"num_workers": 1, **options}, backend=stock)


def test_files_go_into_the_ring_and_those_that_are_held_stay():
    loader = recorded(photos(12), persistent_workers=True)
    held = list(loader)
    assert not any(batch.files.is_shared() for batch in held[:4]), "a slot is plain memory here"
    held += list(loader)  # more than there are slots
    for batch, expected in zip(held, 2 * list(TorchLoader(photos(12), 2)), strict=True):
        assert torch.equal(replayed(batch), expected)
    del batch, held
    assert not next(iter(loader)).files.is_shared(), "their slots serve again"


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 2, "prefetch_factor": 1},
        {"persistent_workers": True, "timeout": 60},
        pytest.param({"multiprocessing_context": "forkserver"}, marks=pytest.mark.nightly),
    ],
    ids=["workers", "persistent", "no forks"],
)
def test_batches_of_many_sizes_are_torchs(options):
    dataset = photos(24, (600, 900, 20, 750))
    expected = list(TorchLoader(dataset, 2))
    loader = recorded(dataset, **options)
    for _ in range(2):
        addresses = set()
        for batch, wanted in zip(loader, expected, strict=True):
            assert_same(replayed(batch), wanted)
            if len(batch.files) >= SMALLEST:
                addresses.add(batch.files.data_ptr())
            del batch
        assert len(addresses) < 9


def test_a_forked_child_that_drops_a_batch_does_not_free_its_slot():
    batches = iter(recorded(photos(24)))
    held = [next(batches)]  # torch's threads do not survive the fork
    expected = held[0].files.clone()
    assert is_true_in_a_fork(lambda: held.clear() is None)
    for batch in batches:
        del batch
    assert torch.equal(held[0].files, expected)
