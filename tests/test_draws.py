"""`Draws`, held against torch's own generator after the same seeding."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dataloaders.seeding.philox import words
from dataloaders.seeding.seeded import seed_generators
from dataloaders.transforms.draws import Draws, _to_odd, between

SAMPLES = 40


def seeds(count: int = SAMPLES, *, seed: int = 0) -> np.ndarray:
    """What seeds the generators around each of so many samples."""
    return words(seed, 0, list(range(count)), [0] * count, 0)


def told(given: np.ndarray, draw: Callable[[], Any]) -> list[Any]:
    """What ``draw`` gives after each seeding, by torch itself."""
    found = []
    for row in given:
        seed_generators(tuple(int(word) for word in row))
        found.append(draw())
    return found


def test_rand_is_torchs() -> None:
    rows = seeds(400)
    draws = Draws(rows)
    found = np.stack([draws.rand() for _ in range(5)], axis=1)
    assert found.dtype == np.float32
    expected = told(rows, lambda: torch.cat([torch.rand(1) for _ in range(5)]).numpy())
    assert np.array_equal(found, np.stack(expected))


@pytest.mark.parametrize("probability", [0.0, 0.1, 0.5, 0.7, 1.0, 1 / 3])
def test_below_is_torchs_comparison(probability: float) -> None:
    rows = seeds(400)
    expected = told(rows, lambda: bool(torch.rand(1) < probability))
    assert Draws(rows).below(probability).tolist() == expected


@pytest.mark.parametrize(
    ("low", "high"),
    [
        (0.0, 1.0), (0.08, 1.0), (-30.0, 30.0), (-0.28768, 0.28768), (7.0, 7.0), (1e-7, 1e7),
        (1000.0, 1001.3), (-1e6, -999999.0), (1e-12, 3.0), (-1e-9, 5.5), (0.0, 1e-30),
    ],
)  # fmt: skip
def test_uniform_is_torchs(low: float, high: float) -> None:
    rows = seeds(1000)
    expected = told(rows, lambda: torch.empty(1).uniform_(low, high).item())
    found = Draws(rows).uniform(low, high)
    assert found.dtype == np.float32
    assert found.tolist() == expected


@given(st.floats(-1e6, 1e6, width=32), st.floats(0, 1e6, width=32), st.integers(0, 2**32 - 1))
@settings(max_examples=300, deadline=None)
def test_uniform_is_torchs_between_any_bounds(low: float, width: float, seed: int) -> None:
    torch.manual_seed(seed)
    expected = torch.empty(200).uniform_(low, low + width).numpy()
    torch.manual_seed(seed)
    found = between(Draws([[seed, 0, 0, 0]]).ahead(200)[0], low, low + width)
    assert np.array_equal(found, expected)


def test_a_sum_is_rounded_once() -> None:
    """Where 53 bits do not hold it: halfway between two float32, but for a bit far below."""
    one, other = np.array([2.0**-60, -(2.0**-60)]), np.array([1 + 2.0**-24] * 2)
    found = _to_odd(one + other, one, other).astype(np.float32)
    assert found.tolist() == [1 + 2.0**-23, 1.0]
    assert (one + other).astype(np.float32).tolist() == [1.0, 1.0]


def test_uniform_takes_bounds_sample_by_sample() -> None:
    rows = seeds()
    high = np.linspace(0.1, 500.7, SAMPLES)
    found = Draws(rows).uniform(-high, high)
    for row, bound, value in zip(rows, high.tolist(), found.tolist(), strict=True):
        seed_generators(tuple(row.tolist()))
        assert torch.empty(1).uniform_(-bound, bound).item() == value


@pytest.mark.parametrize("size", [(1,), ()])
@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 2), (-5, 9), (3, 4), (0, 2**24)])
def test_randint_is_torchs(low: int, high: int, size: tuple[int, ...]) -> None:
    rows = seeds(200)
    expected = told(rows, lambda: int(torch.randint(low, high, size)))
    assert Draws(rows).randint(low, high).tolist() == expected


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 20])
def test_randperm_is_torchs(size: int) -> None:
    rows = seeds(200)
    expected = told(rows, lambda: torch.randperm(size).tolist())
    assert Draws(rows).randperm(size).tolist() == expected


@pytest.mark.parametrize("weights", [[1.0], [0.5, 0.5], [0.0, 0.2, 0.8], [1 / 20] * 20])
def test_choose_is_torchs_multinomial_and_takes_as_many_words(weights: list[float]) -> None:
    rows = seeds(200)
    draws = Draws(rows)
    draws.rand()
    found = [draws.choose(weights), draws.choose(weights), draws.rand()]

    def draw() -> list[float]:
        torch.rand(1)
        picked = [int(torch.multinomial(torch.tensor(weights), 1)) for _ in range(2)]
        return [*picked, torch.rand(1).item()]

    assert np.stack(found, axis=1).tolist() == told(rows, draw)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 15, 16, 17, 31, 32, 100, 6000])
def test_normal_is_torchs_own_and_the_stream_goes_on_behind_it(count: int) -> None:
    rows = seeds(10)
    draws = Draws(rows)
    first = draws.rand()
    normal = draws.normal(np.full((10, 1), count))
    after = draws.rand()

    def draw() -> tuple[float, torch.Tensor, float]:
        return torch.rand(1).item(), torch.empty(count).normal_(), torch.rand(1).item()

    for sample, (one, values, other) in enumerate(told(rows, draw)):
        assert first[sample] == one
        assert torch.equal(normal[sample].values(), values)
        assert after[sample] == other


@given(st.lists(st.sampled_from([0, 1, 2, 3, 5, 15, 16, 20, "rand", "own"]), max_size=8))
@settings(max_examples=100, deadline=None)
def test_half_a_pair_that_torch_keeps_is_the_next_normal(sizes: list[Any]) -> None:
    """Whoever drew it: `normal`, or somebody by a generator."""
    rows = seeds(3)
    draws = Draws(rows)
    found: list[Any] = []
    for size in sizes:
        if size == "rand":
            found.append(draws.rand())
        elif size == "own":
            for sample in range(3):
                with draws.generator(sample) as generator:
                    torch.empty(3).normal_(generator=generator)
            found.append(None)
        else:
            found.append(draws.normal(np.full((3, 1), size)))
    found.append(draws.rand())
    for sample, row in enumerate(rows):
        seed_generators(tuple(row.tolist()))
        for size, drawn in zip([*sizes, "rand"], found, strict=True):
            if size == "rand":
                assert torch.rand(1).item() == drawn[sample]
            elif size == "own":
                torch.empty(3).normal_()
            else:
                assert torch.equal(torch.empty(size).normal_(), drawn[sample].values())


def test_normal_has_the_shape_of_each_sample() -> None:
    shapes = np.array([[3, 2, 5], [1, 1, 1]])
    found = Draws(seeds(2)).normal(shapes)
    assert [tuple(normal.values().shape) for normal in found] == [(3, 2, 5), (1, 1, 1)]


def test_those_that_do_not_draw_stay_where_they_are() -> None:
    rows = seeds()
    draws, others = Draws(rows), Draws(rows)
    where = np.arange(SAMPLES) % 3 == 0
    draws.rand(where)
    draws.normal(np.full((SAMPLES, 1), 20), where)
    draws.choose([0.5, 0.5], where)
    draws.skip(5, where)
    assert np.array_equal(draws.rand()[~where], others.rand()[~where])
    assert not draws.below(1.0, where)[~where].any()
    assert np.array_equal(others.position, np.ones(SAMPLES))


@given(st.lists(st.tuples(st.integers(0, 90), st.integers(0, 7)), max_size=12))
@settings(max_examples=60, deadline=None)
def test_streams_go_on_however_far_apart_they_are(moves: list[tuple[int, int]]) -> None:
    """Beyond the window of words that is at hand, each by itself."""
    rows = seeds(8)
    draws = Draws(rows)
    at = np.zeros(8, int)
    for count, sample in moves:
        where = np.arange(8) == sample
        draws.skip(count, where)
        at[sample] += count
        draws.rand(where)
        at[sample] += 1
    assert np.array_equal(draws.position, at)
    found, ahead = draws.ahead(100), []
    for row in rows:
        seed_generators(tuple(row.tolist()))
        ahead.append(torch.rand(2000).numpy())
    expected = np.stack([ahead[row][at[row] : at[row] + 100] for row in range(8)])
    assert np.array_equal((found & 0xFFFFFF).astype(np.float32) / 2**24, expected)
    assert np.array_equal(draws.rand(), expected[:, 0])


def test_words_that_were_given_stay_when_the_streams_go_on() -> None:
    draws = Draws(seeds(4))
    first, ahead = draws.words(), draws.ahead(20)
    before = first.copy(), ahead.copy()
    for _ in range(200):
        draws.rand()
    assert np.array_equal(first, before[0])
    assert np.array_equal(ahead, before[1])


def test_several_threads_draw_at_once() -> None:
    rows = seeds(200)
    expected = Draws(rows).ahead(64)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: Draws(rows).ahead(64), range(40)))
    assert all(np.array_equal(words, expected) for words in found)


def test_python_is_the_module_random() -> None:
    rows = seeds(20)
    draws = Draws(rows)
    found = [[draws.python(sample).random(), draws.python(sample).random()] for sample in range(20)]
    assert found == told(rows, lambda: [random.random(), random.random()])


def test_an_empty_batch_draws_nothing() -> None:
    draws = Draws(np.empty((0, 4), np.uint32))
    assert draws.rand().shape == (0,)
    assert draws.randperm(3).shape == (0, 3)
    assert draws.choose([1.0]).shape == (0,)
    assert draws.normal(np.empty((0, 3), np.int64)).shape == (0,)
    assert draws.ahead(4).shape == (0, 4)


def test_large_words_are_taken_as_they_are() -> None:
    rows = np.array([[2**32 - 1, 0, 2**32 - 1, 2**32 - 1], [0, 0, 0, 0]], np.uint32)
    draws = Draws(rows)
    assert draws.rand().tolist() == told(rows, lambda: torch.rand(1).item())
    assert [draws.python(0).random(), draws.python(1).random()] == told(rows, random.random)
