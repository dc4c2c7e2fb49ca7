"""Stateless random numbers: the published vectors, then what keys them and how they spread."""

import pathlib
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dataloaders.seeding import philox

INT64 = st.integers(-(2**63), 2**64 - 1)

# Random123 1.14, tests/kat_vectors, the three lines "philox4x32 10": counter, key, expected.
KNOWN_ANSWERS = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([2**32 - 1] * 4, [2**32 - 1] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def test_philox_gives_the_published_answers_one_by_one_and_at_once():
    for counter, key, expected in KNOWN_ANSWERS:
        assert list(philox._rounds(tuple(counter), tuple(key))) == expected
        arrays = tuple(np.array([word], np.uint64) for word in counter)
        assert np.stack(philox._rounds(arrays, tuple(key)), -1).tolist() == [expected]


@settings(max_examples=100)
@given(st.tuples(*[INT64] * 5), st.tuples(*[INT64] * 5))
def test_different_tuples_have_different_bits_as_ints_and_in_arrays(one, other):
    same = all((a - b) % 2**64 == 0 for a, b in zip(one, other, strict=True))
    expected = [philox.words_of(*each) for each in (one, other)]
    assert (expected[0] == expected[1]) == same
    seed, epoch, index, occurrence, draw = one
    index, occurrence, draw = (index + 2**63) % 2**64 - 2**63, occurrence % 2**32, draw % 2**32
    alone = philox.words_of(seed, epoch, index, occurrence, draw)
    together = philox.words(seed, epoch, [index, 0], [occurrence, 1], draw)
    assert tuple(together[0].tolist()) == alone
    changes = [(place, by) for place in range(5) for by in (1, -1, 2**32)]
    changed = [
        (*one[:place], (one[place] + by) % 2**63, *one[place + 1 :]) for place, by in changes
    ]
    assert len({philox.words_of(*each) for each in (one, *changed)}) == 1 + len(changes)


def test_words_of_no_index_and_of_any_type():
    assert philox.words(0, 0, []).shape == (0, 4)
    expected = philox.words(1, 2, [200], 3, 4).tolist()
    for kind in (np.uint8, np.int16, np.int64, np.uint64):
        assert philox.words(1, 2, np.array([200], kind), 3, 4).tolist() == expected


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


@settings(max_examples=100)
@given(KEYS, KEYS)
def test_keys_are_equal_exactly_if_the_objects_are(one, other):
    same = _canonical(one) == _canonical(other)
    assert (philox.stable_key(one) == philox.stable_key(other)) == same


def test_integers_are_their_own_key_and_a_tensor_counts_by_its_content():
    for value in (0, -1, 5, 2**63 - 1, -(2**63)):
        assert philox.stable_key(value) == value
    others = [philox.stable_key(key) for key in (np.int32(-4), torch.tensor(7), True)]
    assert others == [-4, 7, 1]
    assert -(2**63) <= philox.stable_key(2**63) < 2**63
    keys = [[1, 2], [1, 3], [[1], [2]]]
    assert len({philox.stable_key(torch.tensor(key)) for key in keys + keys}) == 3


def test_keys_are_the_same_in_another_process():
    """One that hashes otherwise; philox.py is loaded alone, since torch takes seconds."""
    source = f"""
import importlib.util, pathlib, numpy
spec = importlib.util.spec_from_file_location("philox", {philox.__file__!r})
philox = importlib.util.module_from_spec(spec)
spec.loader.exec_module(philox)
keys = ["photo.jpg", ("a", 1, None, 2.5, b"x"), frozenset({{"a", "b", "c"}}), {{"b": 1, "a": 2}},
        pathlib.PurePosixPath("a/b"), numpy.arange(3)]
print([philox.stable_key(key) for key in keys])
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    keys = ["photo.jpg", ["a", 1, None, 2.5, b"x"], {"c", "b", "a"}, {"a": 2, "b": 1}]
    keys += [pathlib.PurePosixPath("a/b"), np.arange(3)]
    assert done.stdout.strip() == str([philox.stable_key(key) for key in keys]), done.stderr


class Nameless:
    pass


@pytest.mark.parametrize("key", [Nameless(), (1, Nameless()), lambda: None])
def test_a_key_that_shows_only_its_address_is_refused(key):
    with pytest.raises(TypeError, match=r"shows only its address.*give its class a __repr__"):
        philox.stable_key(key)
