"""Stateless random numbers: the published vectors, then what keys them and how they spread."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dataloaders.seeding.philox import bits, philox4x32, stable_key, uniform, words, words_of

INT64 = st.integers(-(2**63), 2**64 - 1)

# Random123 1.14, tests/kat_vectors, the three lines "philox4x32 10": counter, key, expected.
KNOWN_ANSWERS = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    (
        [0xFFFFFFFF] * 4,
        [0xFFFFFFFF] * 2,
        [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
    ),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter, key, expected):
    assert philox4x32(counter, key).tolist() == expected


def test_philox_takes_many_blocks_at_once():
    counters, keys, expected = (np.array(part) for part in zip(*KNOWN_ANSWERS, strict=True))
    assert philox4x32(counters, keys).tolist() == expected.tolist()


@given(INT64, INT64, INT64, INT64, INT64)
def test_one_tuple_of_ints_and_arrays_agree(seed, epoch, index, occurrence, draw):
    assert tuple(words(seed, epoch, index, occurrence, draw).tolist()) == words_of(
        seed, epoch, index, occurrence, draw
    )


@given(st.lists(INT64, min_size=1, max_size=5), st.lists(INT64, min_size=1, max_size=5))
def test_a_value_does_not_depend_on_its_neighbours(indices, draws):
    together = bits(1, 2, np.array(indices, dtype=object)[:, None], 0, draws)
    assert together.shape == (len(indices), len(draws))
    for row, index in enumerate(indices):
        for column, draw in enumerate(draws):
            assert int(together[row, column]) == int(bits(1, 2, index, 0, draw))


@settings(max_examples=300)
@given(st.tuples(*[INT64] * 5), st.tuples(*[INT64] * 5))
def test_different_tuples_have_different_bits(one, other):
    same = all((a - b) % 2**64 == 0 for a, b in zip(one, other, strict=True))
    assert (words_of(*one) == words_of(*other)) == same


def test_every_argument_changes_the_result():
    base = (1, 2, 3, 4, 5)
    seen = {words_of(*base)}
    for place in range(5):
        for change in (1, -1, 2**32, 2**63):
            changed = list(base)
            changed[place] += change
            seen.add(words_of(*changed))
    assert len(seen) == 1 + 5 * 4


def test_no_two_counters_meet_in_a_grid():
    found = bits(0, 0, np.arange(100)[:, None, None], np.arange(20)[:, None], np.arange(30))
    assert np.unique(found).size == 100 * 20 * 30


@pytest.mark.parametrize("place", range(5))
def test_uniform_along_each_argument(place):
    """Mean, variance, bins and neighbours of 2**16 values, each within 5 standard errors."""
    count = 2**16
    arguments = [7, 0, 0, 0, 0]
    arguments[place] = np.arange(count)
    values = uniform(*arguments)
    assert values.dtype == np.float64
    assert values.min() >= 0
    assert values.max() < 1
    assert abs(values.mean() - 0.5) < 5 * (1 / 12 / count) ** 0.5
    assert abs(values.var() - 1 / 12) < 5 * (1 / 180 / count) ** 0.5
    bins = np.histogram(values, bins=64, range=(0, 1))[0]
    chi_square = ((bins - count / 64) ** 2 / (count / 64)).sum()
    assert abs(chi_square - 63) < 5 * (2 * 63) ** 0.5
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 5 / count**0.5


def test_draws_of_a_sample_are_independent_of_each_other_and_of_the_next_epoch():
    count = 2**14
    draws = uniform(3, 0, np.arange(count)[:, None], 0, np.arange(8))
    later = uniform(3, 1, np.arange(count)[:, None], 0, np.arange(8))
    table = np.corrcoef(np.concatenate([draws, later], axis=1).T)
    assert np.abs(table - np.eye(16)).max() < 5 / count**0.5


def test_every_bit_is_fair():
    found = bits(11, 0, np.arange(2**14))
    share = [((found >> np.uint64(bit)) & np.uint64(1)).mean() for bit in range(64)]
    assert max(abs(value - 0.5) for value in share) < 5 * 0.5 / 2**7


def test_shapes_broadcast_and_empty_arrays_stay_empty():
    assert uniform(0, 0, 0).shape == ()
    assert uniform(0, 0, np.zeros((0,), dtype=int)).shape == (0,)
    assert uniform(0, 0, []).shape == (0,)
    assert uniform([1, 2], 0, np.zeros((5, 1), dtype=np.int32)).shape == (5, 2)
    assert words(0, 0, np.arange(3)).shape == (3, 4)
    assert words(0, 0, np.arange(3)).dtype == np.uint32


def test_integer_types_do_not_matter():
    expected = int(bits(1, 2, 200, 3, 4))
    for kind in (np.uint8, np.int16, np.int32, np.uint32, np.int64, np.uint64):
        assert int(bits(kind(1), kind(2), kind(200), kind(3), kind(4))) == expected
    assert int(bits(1, 2, torch.tensor(200), 3, 4)) == expected
    assert bits(1, 2, [2**63, -1]).tolist() == [int(bits(1, 2, 2**63)), int(bits(1, 2, -1))]


def test_other_keys_are_refused():
    with pytest.raises(TypeError, match=r"keyed by integers and got 0\.5.*stable_key"):
        uniform(0, 0, 0.5)
    with pytest.raises(TypeError, match="keyed by integers and got 'a'"):
        bits(0, 0, "a")
    with pytest.raises(ValueError, match="keyed by 64-bit integers and got"):
        bits(0, 0, 2**64)


def test_integers_are_their_own_key():
    for value in (0, -1, 5, 2**63 - 1, -(2**63)):
        assert stable_key(value) == value
    assert stable_key(np.int32(-4)) == -4
    assert stable_key(torch.tensor(7)) == 7
    assert stable_key(True) == 1
    assert -(2**63) <= stable_key(2**63) < 2**63


KEYS = st.recursive(
    st.none() | st.integers() | st.text(max_size=4) | st.binary(max_size=4) | st.floats(),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=6,
)


def _canonical(key):
    """Equal where two keys of ``KEYS`` are the same: types apart, NaN equal to itself."""
    if isinstance(key, tuple):
        return tuple(map(_canonical, key))
    if isinstance(key, float):
        return ("nan",) if key != key else (float, key)
    return (type(key), key)


@settings(max_examples=300)
@given(KEYS, KEYS)
def test_keys_are_equal_exactly_if_the_objects_are(one, other):
    assert (stable_key(one) == stable_key(other)) == (_canonical(one) == _canonical(other))


def test_keys_are_the_same_in_another_process():
    source = (
        "from dataloaders.seeding.philox import stable_key; import pathlib, numpy;"
        "print(stable_key('photo.jpg'), stable_key(('a', 1, None, 2.5, b'x')),"
        "stable_key(frozenset({'a', 'b', 'c'})), stable_key({'b': 1, 'a': 2}),"
        "stable_key(pathlib.PurePosixPath('a/b')), stable_key(numpy.arange(3)))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=True
    ).stdout
    assert [int(word) for word in printed.split()] == [
        stable_key("photo.jpg"),
        stable_key(["a", 1, None, 2.5, b"x"]),
        stable_key({"c", "b", "a"}),
        stable_key({"a": 2, "b": 1}),
        stable_key(pathlib.PurePosixPath("a/b")),
        stable_key(np.arange(3)),
    ]


def test_a_tensor_key_counts_by_its_content():
    assert stable_key(torch.tensor([1, 2])) == stable_key(torch.tensor([1, 2]))
    assert stable_key(torch.tensor([1, 2])) != stable_key(torch.tensor([1, 3]))
    assert stable_key(torch.tensor([1, 2])) != stable_key(torch.tensor([[1], [2]]))


class Nameless:
    pass


@pytest.mark.parametrize("key", [Nameless(), (1, Nameless()), lambda: None])
def test_a_key_that_shows_only_its_address_is_refused(key):
    with pytest.raises(TypeError, match=r"shows only its address.*give its class a __repr__"):
        stable_key(key)
