"""`Draws`, compared with torch's own generator after the same seeding."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.h5.draws import Draws
from dataloaders.seeding.philox import words
from dataloaders.seeding.seeded import seed_generators


def seeds(count):
    return words(0, 0, list(range(count)), [0] * count, 0)


def by_torch(given, draw):
    """What ``draw`` returns after each seeding."""
    found = []
    for a, b, c, d in given.tolist():
        seed_generators((a, b, c, d))
        found.append(draw())
    return found


DRAWS = {
    "rand": (lambda draws: draws.rand(), lambda: torch.rand(1).item()),
    **{
        f"below {p:.1f}": (lambda draws, p=p: draws.below(p), lambda p=p: bool(torch.rand(1) < p))
        for p in (0.0, 0.1, 0.5, 0.7, 1.0, 1 / 3)
    },
    **{
        f"randint {n}": (
            lambda draws, n=n: draws.randint(np.full(402, n), np.full(402, True)),
            lambda n=n: int(torch.randint(0, n, (1,))),
        )
        for n in (1, 2, 7, 2**24)
    },
}


@pytest.mark.parametrize("name", DRAWS)
def test_each_draw_is_torchs_and_so_are_the_next_ones(name):
    ours, torchs = DRAWS[name]
    rows = np.concatenate([seeds(400), [[2**32 - 1, 0, 2**32 - 1, 7], [0] * 4]]).astype(np.uint32)
    draws = Draws(rows)
    found = np.stack([ours(draws) for _ in range(4)], axis=1)
    assert found.tolist() == by_torch(rows, lambda: [torchs() for _ in range(4)])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 90), st.integers(0, 7)), max_size=12))
def test_streams_go_on_however_far_apart_they_are(moves):
    """Beyond the words at hand, each by itself; those not masked stay."""
    rows = seeds(8)
    draws = Draws(rows)
    at = np.zeros(8, int)
    for count, sample in moves:
        mask = np.arange(8) == sample
        for _ in range(count):
            draws.randint(np.full(8, 5), mask)
        at += count * mask
    found = np.stack([draws.rand() for _ in range(100)], axis=1)
    streams = np.stack(by_torch(rows, lambda: torch.rand(2000).numpy()))
    expected = np.stack(
        [stream[begin : begin + 100] for stream, begin in zip(streams, at, strict=True)]
    )
    assert np.array_equal(found, expected)


def test_several_threads_draw_at_once():
    rows = seeds(200)
    expected = Draws(rows).rand()
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: Draws(rows).rand(), range(40)))
    assert all(np.array_equal(words, expected) for words in found)
