"""`Draws`, compared with torch's own generator after the same seeding."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.h5.draws import Draws
from dataloaders.seeding.seeded import seed_generators
from dataloaders.seeding.words import words

SEEDS = np.concatenate([words(0, 0, range(200)), [[2**32 - 1, 0, 2**32 - 1, 7], [0] * 4]])
ALL = np.full(len(SEEDS), True)


def by_torch(draw, seeds=SEEDS):
    """What ``draw`` returns after each seeding."""
    found = []
    for seed in seeds.tolist():
        seed_generators(tuple(seed))
        found.append(draw())
    return found


DRAWS = {
    "rand": (Draws.rand, lambda: torch.rand(1).item()),
    **{
        f"below {p:.1f}": (lambda draws, p=p: draws.below(p), lambda p=p: bool(torch.rand(1) < p))
        for p in (0.0, 0.1, 0.5, 0.7, 1.0, 1 / 3)
    },
    **{
        f"randint {n}": (
            lambda draws, n=n: draws.randint(np.full(len(SEEDS), n), ALL),
            lambda n=n: int(torch.randint(0, n, (1,))),
        )
        for n in (1, 2, 7, 2**24)
    },
}


@pytest.mark.parametrize("name", DRAWS)
def test_each_draw_is_torchs_and_so_are_the_next_ones_in_several_threads(name):
    draw, torchs = DRAWS[name]
    wanted = by_torch(lambda: [torchs() for _ in range(4)])

    def drawn(_):
        draws = Draws(SEEDS)
        return np.stack([draw(draws) for _ in range(4)], axis=1).tolist()

    with ThreadPoolExecutor(4) as threads:
        assert all(each == wanted for each in threads.map(drawn, range(8)))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 90), st.integers(0, 7)), max_size=12))
def test_streams_go_on_however_far_apart_they_are(moves):
    """Beyond the words at hand, each by itself; those not masked stay."""
    draws, at = Draws(SEEDS[:8]), [0] * 8
    for count, sample in moves:
        for _ in range(count):
            draws.randint(np.full(8, 5), np.arange(8) == sample)
        at[sample] += count
    found = np.stack([draws.rand() for _ in range(100)], axis=1)
    streams = by_torch(lambda: torch.rand(2000).numpy(), SEEDS[:8])
    expected = [stream[begin : begin + 100] for stream, begin in zip(streams, at, strict=True)]
    assert np.array_equal(found, expected)
