"""Walking any nesting of tensors: nothing is lost, nothing is changed in place."""

from __future__ import annotations

import collections
import copy
import dataclasses
import types
from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import default_collate

from dataloaders.batches import tree
from helpers.compare import assert_same, tensors_in
from helpers.datasets import Point, Record

META = torch.device("meta")
zeroed = torch.zeros_like


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: Any
    derived: int = dataclasses.field(init=False, default=7)


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    value: Any


class TaggedList(list):
    tag = "none"


plain = st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.binary(max_size=3)
tensors = st.builds(
    lambda size, dtype: torch.arange(size).to(dtype),
    st.integers(0, 4),
    st.sampled_from([torch.float32, torch.int64, torch.uint8, torch.bool]),
)


def containers(inner):
    some = st.lists(inner, max_size=3)
    named = st.dictionaries(st.text(max_size=2), inner, max_size=3)
    return (
        some
        | some.map(tuple)
        | some.map(collections.deque)
        | some.map(TaggedList)
        | st.dictionaries(st.text(max_size=2) | st.integers(), inner, max_size=3)
        | named.map(collections.OrderedDict)
        | named.map(collections.UserDict)
        | st.builds(Point, inner, inner)
        | st.builds(Record, inner, inner)
        | st.builds(Frozen, inner)
        | st.builds(Slotted, inner)
    )


nestings = st.recursive(tensors | plain, containers, max_leaves=12)


@pytest.mark.parametrize(
    "collate",
    [
        default_collate,
        list,
        lambda samples: tuple(zip(*samples, strict=True)),
        lambda samples: {"images": [image for image, _ in samples], "names": None},
    ],
)
def test_samples_are_counted_in_tensors_and_in_lists_of_a_short_batch_too(collate):
    samples = [(torch.ones(3, 5 + (collate is not default_collate) * i), i) for i in range(8)]
    count = tree.counter_of_samples(collate(samples), 8)
    assert [count(collate(samples[:some])) for some in (8, 5, 3, 1)] == [8, 5, 3, 1]
    assert tree.counter_of_samples(torch.ones(4, 2), 8)(torch.ones(3, 2)) == 3
    assert tree.counter_of_samples([torch.ones(4, 2)], None)([torch.ones(3, 2)]) == 3
    assert count([]) is None


@given(nestings)
def test_any_nesting_is_walked_mapped_moved_and_described(batch):
    before = copy.deepcopy(batch)
    found, expected = list(tree.leaves(batch)), tensors_in(batch)
    assert list(map(id, found)) == list(map(id, expected))
    assert tree.nbytes(batch) == sum(leaf.numel() * leaf.itemsize for leaf in expected)
    assert tree.samples_in(batch) == (len(found[0]) if found else None)
    assert isinstance(tree.describe(batch), str)
    mapped, clones = tree.map_tensors(batch, lambda tensor: tensor), tree.copied(batch)
    assert_same(mapped, batch)
    assert_same(clones, batch)
    assert not {*map(id, tree.leaves(clones))} & {*map(id, found)}
    assert list(map(id, tree.leaves(mapped))) == list(map(id, found))
    if isinstance(batch, (list, dict, collections.UserDict, collections.deque, Record)):
        assert mapped is not batch
    moved = tree.to_device(batch, META)
    assert all(leaf.device == META for leaf in tree.leaves(moved))
    zeros = tree.map_tensors(moved, lambda leaf: torch.zeros(leaf.shape, dtype=leaf.dtype))
    assert_same(zeros, tree.map_tensors(batch, zeroed))
    tree.map_tensors(batch, lambda tensor: None)
    assert_same(batch, before)  # the original is as it was


# Containers that cannot be made as others are


class Encoding(collections.UserDict):
    """Moves itself in place and carries more than its items, as Hugging Face's does."""

    def to(self, device, *, non_blocking=False):
        self.data = {
            key: value.to(device, non_blocking=non_blocking) for key, value in self.items()
        }
        return self


class NoUpdate(collections.OrderedDict):
    def update(self, *args, **kwargs):
        raise RuntimeError("use item assignment")


class Items(Mapping):
    """A mapping that can neither be changed nor be made from its items."""

    __getitem__ = {"a": torch.ones(2)}.__getitem__

    def __iter__(self):
        return iter("a")

    def __len__(self):
        return 1


class OwnStore(MutableMapping):
    """copy.copy() of this one shares the dict inside."""

    def __init__(self, **items):
        self.inside = items

    def __getitem__(self, key):
        return self.inside[key]

    def __setitem__(self, key, value):
        self.inside[key] = value

    def __delitem__(self, key):
        del self.inside[key]

    def __iter__(self):
        return iter(self.inside)

    def __len__(self):
        return len(self.inside)


class Window(tuple):
    """A sequence that can't be made from its items."""

    def __new__(cls, items, start, end):
        return super().__new__(cls, items[start:end])


def test_mappings_that_cannot_be_made_from_their_items():
    for batch, kind in (
        (NoUpdate(a=torch.ones(2)), NoUpdate),
        (OwnStore(a=torch.ones(2)), OwnStore),
        (types.MappingProxyType({"a": torch.ones(2)}), types.MappingProxyType),
        (Items(), dict),
        (Encoding(a=torch.ones(2)), Encoding),
    ):
        mapped = tree.map_tensors(batch, zeroed)
        assert type(mapped) is kind
        assert mapped["a"].tolist() == [0, 0]
        assert tree.to_device(batch, META)["a"].device == META
        assert batch["a"].tolist() == [1, 1]


def test_containers_keep_their_other_attributes():
    tagged, counts = TaggedList([torch.ones(1)]), collections.defaultdict(list, a=torch.ones(2))
    tagged.tag = "kept"
    assert tree.map_tensors(tagged, zeroed).tag == "kept"
    mapped = tree.map_tensors(counts, zeroed)
    assert type(mapped) is collections.defaultdict
    assert (mapped["missing"], "missing" in counts) == ([], False)
    encoding = Encoding(a=torch.ones(2))
    encoding.encodings = ["kept"]
    assert tree.to_device(encoding, META).encodings == ["kept"]
    window = Window([torch.ones(1), torch.ones(2), torch.ones(3)], 1, 3)
    for found in (tree.leaves(window), tree.to_device(window, META)):  # a list, as in pin_memory
        assert [len(leaf) for leaf in found] == [2, 3]
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    assert_same(tree.map_tensors(packed, torch.clone), packed)
    moved = tree.to_device(packed, META)
    assert (moved.data.device, moved.batch_sizes.device.type) == (META, "cpu")


class Sealed:
    """A type with ``.to()`` and no attributes."""

    __slots__ = ()

    def to(self, device):
        return self


def test_objects_without_tensors_are_returned_unchanged():
    closed = types.SimpleNamespace(tensor=torch.ones(1), shape=(1,))  # does not say how it moves
    texts = ("text", b"bytes", bytearray(b"x"), memoryview(b"x"))
    for value in (range(3), *texts, None, object(), closed, Sealed()):
        assert tree.map_tensors(value, zeroed) is value
        assert tree.to_device(value, META) is value
        assert list(tree.leaves(value)) == []
        assert tree.describe(value) == type(value).__name__


# Types that move themselves


class Movable:
    """A custom batch, as in torch's documentation; keeps the options of its last copy."""

    def __init__(self, tensor, note, how=None):
        self.tensor, self.note, self.how = tensor, note, how

    def to(self, device, **how):
        return Movable(self.tensor.to(device), self.note, how)


class Simple(Movable):
    def to(self, device):
        return Simple(self.tensor.to(device), self.note)


def test_a_custom_type_moves_by_its_own_method():
    batch = Movable(torch.ones(3), "kept")
    moved = tree.to_device([batch], META)[0]
    assert (type(moved), moved.tensor.device, moved.note) == (Movable, META, "kept")
    assert moved.how == {"non_blocking": True}
    assert tree.to_device(Simple(torch.ones(3), "kept"), META).tensor.device == META
    waited = tree.to_device({"deep": [batch]}, torch.device("cpu"))["deep"][0]
    assert waited.how == {"non_blocking": False}
    assert [leaf.shape[0] for leaf in tree.leaves(batch)] == [3]
    assert tree.map_tensors(batch, zeroed).tensor.sum() == 0
    assert batch.tensor.sum() == 3


def test_describe():
    batch = {"image": torch.zeros(2, 3), "label": [torch.tensor(1), "name"]}
    for value, words in (
        (batch, "{image: float32 2x3, label: [int64 scalar, str]}"),
        (torch.zeros(2, device="meta"), "float32 2 meta"),
        (["a"] * 9, "list of 9 str"),
        ((1,) * 8, "[" + ", ".join(["int"] * 8) + "]"),
        ([torch.zeros(1)] * 9, "[" + ", ".join(["float32 1"] * 9) + "]"),
        (np.zeros((2, 3), np.uint8), "ndarray uint8 2x3"),
    ):
        assert tree.describe(value) == words


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_arrays_and_nested_tensors_have_a_size(layout):
    """The check corrects steps for the sizes of their batches, which NumPy users vary as well."""
    nested = torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(1, 3)], layout=layout)
    batch = {"x": [np.zeros((2, 3), np.uint8), torch.zeros(5)], "name": "a", "nested": nested}
    assert tree.nbytes(batch) == 6 + 20 + 9 * 4
    assert tree.describe(nested) == "float32 nested of 2"


def test_long_lists_of_strings_are_not_walked():
    """A batch of tokens would cost more to walk than to make."""
    for words in (["a", None, 3, b"c"], ("a", 2.5)):
        walked = []
        assert tree.map_children(words, walked.append) == words
        assert walked == []
