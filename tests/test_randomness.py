"""Stateless random bits: what they depend on, and which keys of samplers are the same."""

import pathlib
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dataloaders.seeding import words

INT64 = st.integers(-(2**63), 2**64 - 1)


@settings(max_examples=100)
@given(st.tuples(*[INT64] * 5))
def test_each_number_changes_the_bits_alone_and_in_arrays(numbers):
    changes = [(place, by) for place in range(5) for by in (1, -1, 2**32)]
    changed = [
        (*numbers[:place], numbers[place] + by, *numbers[place + 1 :]) for place, by in changes
    ]
    assert len({words.words_of(*each) for each in (numbers, *changed)}) == 1 + len(changes)
    assert words.words_of(*(number + 2**64 for number in numbers)) == words.words_of(*numbers)
    seed, epoch, index, occurrence, draw = numbers
    index, occurrence = (index + 2**63) % 2**64 - 2**63, occurrence % 2**32
    expected = [words.words_of(seed, epoch, *each, draw) for each in ((index, occurrence), (0, 1))]
    together = words.words(seed, epoch, [index, 0], [occurrence, 1], draw)
    assert together.tolist() == [[*each] for each in expected]


def test_words_of_no_index_and_of_any_type():
    assert words.words(0, 0, []).shape == (0, 4)
    expected = [[*words.words_of(1, 2, 200, 3, 4)]]
    for kind in (np.uint8, np.int16, np.int64, np.uint64):
        assert words.words(1, 2, np.array([200], kind), 3, 4).tolist() == expected


KEYS = st.recursive(
    st.none() | st.integers() | st.text(max_size=4) | st.binary(max_size=4) | st.floats(),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=6,
)


@settings(max_examples=100)
@given(KEYS, KEYS)
def test_keys_are_equal_exactly_if_the_objects_are(one, other):
    assert (words.stable_key(one) == words.stable_key(other)) == (repr(one) == repr(other))


def test_integers_are_their_own_key_and_a_tensor_counts_by_its_content():
    for value in (0, -1, 5, 2**63 - 1, -(2**63)):
        assert words.stable_key(value) == value
    assert [words.stable_key(key) for key in (np.int32(-4), torch.tensor(7), True)] == [-4, 7, 1]
    assert -(2**63) <= words.stable_key(2**63) < 2**63
    keys = [[1, 2], [1, 3], [[1], [2]]]
    assert len({words.stable_key(torch.tensor(key)) for key in keys + keys}) == 3


def test_keys_are_the_same_in_another_process():
    """One that hashes otherwise; words.py is loaded alone, since torch takes seconds."""
    source = f"""
import importlib.util, pathlib, numpy
spec = importlib.util.spec_from_file_location("words", {words.__file__!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
keys = ["look at 0x12.jpg", ("a", 1, None, 2.5, b"x"), frozenset({{"a", "b", "c"}}),
        {{"b": 1, "a": 2}}, pathlib.PurePosixPath("a/b"), numpy.arange(3)]
print([module.stable_key(key) for key in keys])
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    keys = ["look at 0x12.jpg", ["a", 1, None, 2.5, b"x"], {"c", "b", "a"}, {"a": 2, "b": 1}]
    keys += [pathlib.PurePosixPath("a/b"), np.arange(3)]
    assert done.stdout.strip() == str([words.stable_key(key) for key in keys]), done.stderr


class Nameless:
    pass


@pytest.mark.parametrize("key", [Nameless(), (1, Nameless()), lambda: None])
def test_a_key_that_shows_only_its_address_is_refused(key):
    with pytest.raises(TypeError, match=r"shows only its address.*give its class a __repr__"):
        words.stable_key(key)
