"""What a seed means: a run that is gone on with after an update has the same order and samples.

The numbers are Philox's words for (seed, epoch, key, occurrence, draw), as 25b4400 had them.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, RandomSampler, default_collate

from dataloaders import DataLoader
from dataloaders.seeding.seeded import Seeding, seed_generators

ORDER = 0xF6068896_BA7DAB88  # of seed 7, epoch 2
WORKERS = 0x7FFBD145_3A7590C0
SAMPLE_5 = (0x12DDBCF2, 0xF21766C4, 0xFBDAB024, 0x90B2A29B)
SAMPLE_5_AGAIN = (0x883DE9FB, 0xCEE4DA39, 0x0B8D1B9A, 0x0900B5DF)
ITER, ROW_0 = (  # of an iterable dataset's first worker: before its first sample, and at it
    (0x899CA19F, 0x734EB38D, 0x2A2FAB62, 0xACEB5B69),
    (0xBFEB9A40, 0xA20F2CC7, 0x04F3EC46, 0x0B356518),
)
ROW_0_OF_LARGE = (0x5B6C12C8, 0x3FD12450, 0x19E976CF, 0x6AC2FB0D)  # of seed 2**64 - 7
COLLATION_5 = (0x8F6B1195, 0xC7F92E20, 0x8BEEF01C, 0x293D3712)


def drawn():
    """A number of each of the three generators."""
    numbers = torch.rand(()).item(), np.random.rand(), random.random()
    return torch.tensor(numbers, dtype=torch.float64)


def drawn_after(words):
    torch.manual_seed(words[0])
    np.random.seed(words[1])
    random.seed(words[2] | words[3] << 32)
    return drawn()


class Draws(Dataset[torch.Tensor]):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        return drawn()


class Stream(IterableDataset[torch.Tensor]):
    """What is drawn by iter() and by the first sample."""

    def __iter__(self):
        return map(torch.stack, zip([drawn()], self.rows(), strict=False))

    def rows(self):
        while True:
            yield drawn()


def collated(samples):
    return default_collate(samples), drawn()


def test_the_generators_have_the_words_that_belong_to_them():
    seed_generators(SAMPLE_5)
    assert torch.equal(drawn(), drawn_after(SAMPLE_5))


def test_a_sample_its_repeat_and_its_collation():
    loader = DataLoader(Draws(), 2, sampler=[5, 5], collate_fn=collated, seed=7)
    loader.set_epoch(2)
    ((samples, of_batch),) = loader
    assert torch.equal(samples[0], drawn_after(SAMPLE_5))
    assert torch.equal(samples[1], drawn_after(SAMPLE_5_AGAIN))
    assert torch.equal(of_batch, drawn_after(COLLATION_5))


@pytest.mark.parametrize("workers", [0, 1])
def test_an_iterable_datasets_start_and_first_sample(workers):
    for seed, start, row in ((7, ITER, ROW_0), (2**64 - 7, None, ROW_0_OF_LARGE)):
        loader = DataLoader(Stream(), None, num_workers=workers, seed=seed)
        loader.set_epoch(2)
        ((begun, first),) = loader
        assert start is None or torch.equal(begun, drawn_after(start))
        assert torch.equal(first, drawn_after(row))
        assert repr(Seeding().view(loader).dataset) == repr(loader.dataset)


def test_the_order_and_the_workers_base_seed():
    loader = DataLoader(Draws(), 20, shuffle=True, seed=7)
    loader.set_epoch(2)
    view = Seeding().view(loader)
    (batch,) = Seeding().view(loader, samples=False).batch_sampler
    theirs = RandomSampler(range(20), generator=torch.Generator().manual_seed(ORDER))
    assert batch == list(theirs)
    assert view.generator.initial_seed() == WORKERS
    assert len(view) == 1
    assert repr(view.dataset) == repr(loader.dataset)


def test_a_dataset_of_one_sample_that_is_gone_through_twice():
    sampler = RandomSampler([0], num_samples=2)
    one, other = DataLoader(Draws(), None, sampler=sampler, seed=7)
    assert not torch.equal(one, other)
