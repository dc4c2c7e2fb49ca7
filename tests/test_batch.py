"""Walking any nesting of tensors: nothing is lost, nothing is changed in place."""

from __future__ import annotations

import collections
import copy
import dataclasses
import types
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence

from dataloaders.batches.tree import (
    describe,
    leaves,
    map_children,
    map_tensors,
    nbytes,
    samples_in,
    to_device,
)
from helpers.compare import assert_same

META = torch.device("meta")


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Plain:
    value: Any
    other: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: Any
    derived: int = dataclasses.field(init=False, default=7)


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    value: Any


class Movable:
    """A custom batch, as torch's documentation shows it."""

    def __init__(self, tensor: torch.Tensor, note: str) -> None:
        self.tensor = tensor
        self.note = note

    def to(self, device: torch.device) -> Movable:
        return Movable(self.tensor.to(device), self.note)


class Encoding(collections.UserDict[str, Any]):
    """Moves itself in place and carries more than its items, as Hugging Face's does."""

    encodings: list[str]

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Encoding:
        self.data = {
            key: value.to(device, non_blocking=non_blocking) for key, value in self.items()
        }
        return self


class NoUpdate(collections.OrderedDict[str, Any]):
    def update(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("use item assignment")


class OwnStore(MutableMapping[str, Any]):
    """copy.copy() of this one shares the dict inside."""

    def __init__(self, items: dict[str, Any]) -> None:
        self.items_inside = items

    def __getitem__(self, key: str) -> Any:
        return self.items_inside[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.items_inside[key] = value

    def __delitem__(self, key: str) -> None:
        del self.items_inside[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_inside)

    def __len__(self) -> int:
        return len(self.items_inside)


class Window(Sequence[Any]):
    """A sequence that can't be made from its items."""

    def __init__(self, items: list[Any], start: int, end: int) -> None:
        self.view = items[start:end]

    def __getitem__(self, index: Any) -> Any:
        return self.view[index]

    def __len__(self) -> int:
        return len(self.view)


class TaggedList(list[Any]):
    tag = "none"


tensors = st.builds(
    lambda size, dtype: torch.arange(size).to(dtype),
    st.integers(0, 4),
    st.sampled_from([torch.float32, torch.int64, torch.uint8, torch.bool]),
)
plain_leaves = (
    st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.binary(max_size=3)
)
nestings = st.recursive(
    tensors | plain_leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2) | st.integers(), inner, max_size=3)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3).map(collections.OrderedDict)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3).map(collections.UserDict)
        | st.lists(inner, max_size=3).map(collections.deque)
        | st.lists(inner, max_size=3).map(TaggedList)
        | st.builds(Pair, inner, inner)
        | st.builds(Plain, inner, inner)
        | st.builds(Frozen, inner)
        | st.builds(Slotted, inner)
    ),
    max_leaves=12,
)


def flat(value: Any) -> list[torch.Tensor]:
    """The tensors in ``value``, found in another way than the code under test finds them."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [leaf for child in value.values() for leaf in flat(child)]
    if isinstance(value, (list, tuple, collections.deque)):
        return [leaf for child in value for leaf in flat(child)]
    if isinstance(value, (Plain, Frozen, Slotted)):
        return [leaf for f in dataclasses.fields(value) for leaf in flat(getattr(value, f.name))]
    return []


@given(nestings)
def test_leaves_are_all_tensors_in_order(batch: Any) -> None:
    found, expected = list(leaves(batch)), flat(batch)
    assert len(found) == len(expected)
    assert all(one is other for one, other in zip(found, expected, strict=True))
    assert nbytes(batch) == sum(leaf.numel() * leaf.itemsize for leaf in expected)


@given(nestings)
def test_mapping_the_identity_gives_an_equal_batch_in_new_containers(batch: Any) -> None:
    before = copy.deepcopy(batch)
    mapped = map_tensors(batch, lambda tensor: tensor)
    assert_same(mapped, batch)
    assert [id(leaf) for leaf in leaves(mapped)] == [id(leaf) for leaf in leaves(batch)]
    if isinstance(batch, (list, dict, collections.UserDict, collections.deque, Plain)):
        assert mapped is not batch
    map_tensors(batch, lambda tensor: None)
    assert_same(batch, before)  # the original is as it was


@given(nestings)
def test_to_device_keeps_the_nesting(batch: Any) -> None:
    before = copy.deepcopy(batch)
    moved = to_device(batch, META)
    assert all(leaf.device == META for leaf in leaves(moved))
    zeros = map_tensors(moved, lambda leaf: torch.zeros(leaf.shape, dtype=leaf.dtype))
    assert_same(zeros, map_tensors(batch, torch.zeros_like))
    assert_same(batch, before)


@given(nestings)
def test_describe_and_samples_in_take_anything(batch: Any) -> None:
    assert isinstance(describe(batch), str)
    first = next(iter(leaves(batch)), None)
    assert samples_in(batch) == (None if first is None else len(first))


def test_a_tagged_list_and_a_defaultdict_keep_what_they_carry() -> None:
    tagged = TaggedList([torch.ones(1)])
    tagged.tag = "kept"
    assert map_tensors(tagged, torch.zeros_like).tag == "kept"
    counts = collections.defaultdict(list, {"a": torch.ones(2)})
    mapped = map_tensors(counts, torch.zeros_like)
    assert type(mapped) is collections.defaultdict
    assert mapped["missing"] == []
    assert "missing" not in counts


def test_a_mapping_that_forbids_update() -> None:
    moved = to_device(NoUpdate(a=torch.ones(2)), META)
    assert type(moved) is NoUpdate
    assert moved["a"].device == META


def test_a_mapping_whose_shallow_copy_shares_its_store_is_not_changed() -> None:
    batch = OwnStore({"a": torch.ones(2)})
    mapped = map_tensors(batch, torch.zeros_like)
    assert type(mapped) is OwnStore
    assert mapped["a"].sum() == 0
    assert batch["a"].sum() == 2


def test_read_only_containers() -> None:
    proxy = types.MappingProxyType({"a": torch.ones(1)})
    mapped = map_tensors(proxy, torch.zeros_like)
    assert type(mapped) is types.MappingProxyType
    assert mapped["a"] == 0
    window = Window([torch.ones(1), torch.ones(2), torch.ones(3)], 1, 3)
    assert [len(leaf) for leaf in leaves(window)] == [2, 3]
    as_list = to_device(window, META)  # as torch's pin_memory falls back
    assert [leaf.shape[0] for leaf in as_list] == [2, 3]


@pytest.mark.parametrize(
    "value", [range(3), "text", b"bytes", bytearray(b"x"), memoryview(b"x"), None, 3, object()]
)
def test_what_holds_no_tensors_is_the_same_object(value: Any) -> None:
    assert map_tensors(value, torch.zeros_like) is value
    assert to_device(value, META) is value
    assert list(leaves(value)) == []


def test_a_custom_type_moves_by_its_own_method() -> None:
    batch = Movable(torch.ones(3), "kept")
    moved = to_device([batch], META)[0]
    assert (type(moved), moved.tensor.device, moved.note) == (Movable, META, "kept")
    assert [leaf.shape[0] for leaf in leaves(batch)] == [3]
    mapped = map_tensors(batch, torch.zeros_like)
    assert mapped.tensor.sum() == 0
    assert batch.tensor.sum() == 3


class Asked:
    """Remembers how its tensor was to be copied, as methods with and without a name for it are."""

    def __init__(self) -> None:
        self.tensor = torch.ones(1)
        self.how: Any = None

    def to(self, device: torch.device, **options: Any) -> Asked:
        self.how = options
        return self


def test_a_copy_is_not_waited_for_unless_it_is_asked_to() -> None:
    batch = Asked()
    to_device([batch], META)
    assert batch.how == {"non_blocking": True}
    to_device({"deep": [batch]}, META, non_blocking=False)
    assert batch.how == {"non_blocking": False}


class Unchangeable(Mapping[str, Any]):
    """Neither made from its items nor changed."""

    def __getitem__(self, key: str) -> torch.Tensor:
        return {"a": torch.ones(1)}[key]

    def __iter__(self) -> Iterator[str]:
        return iter("a")

    def __len__(self) -> int:
        return 1


def test_a_mapping_that_cannot_be_made_becomes_a_dict() -> None:
    mapped = map_tensors(Unchangeable(), torch.zeros_like)
    assert type(mapped) is dict
    assert mapped == {"a": torch.zeros(1)}


class Closed:
    """Has tensors, and no method that says how they move."""

    def __init__(self) -> None:
        self.tensor = torch.ones(1)
        self.shape = (1,)


class Sealed:
    """Moves itself, and has nothing that could be looked into."""

    __slots__ = ()

    def to(self, device: torch.device) -> Sealed:
        return self


@pytest.mark.parametrize("value", [Closed(), Sealed()])
def test_a_type_that_cannot_be_looked_into_holds_no_tensors(value: Any) -> None:
    assert list(leaves(value)) == []
    assert map_tensors([value], torch.zeros_like)[0] is value
    assert describe(value) == type(value).__name__


def test_an_error_inside_a_custom_method_is_not_hidden() -> None:
    class Broken:
        def to(self, device: torch.device, non_blocking: bool = False) -> None:
            raise TypeError("broken inside")

    with pytest.raises(TypeError, match="broken inside"):
        to_device(Broken(), META)


def test_a_mapping_that_moves_in_place_leaves_the_original_where_it_was() -> None:
    batch = Encoding(a=torch.ones(2))
    batch.encodings = ["kept"]
    moved = to_device(batch, META)
    assert moved["a"].device == META
    assert moved.encodings == ["kept"]
    assert batch["a"].device.type == "cpu"


def test_a_packed_sequence_keeps_its_lengths_where_they_must_be() -> None:
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    mapped = map_tensors(packed, lambda leaf: leaf.clone())
    assert type(mapped) is type(packed)
    assert torch.equal(mapped.data, packed.data)
    moved = to_device(packed, META)
    assert moved.data.device == META
    assert moved.batch_sizes.device.type == "cpu"


def test_describe_in_words() -> None:
    batch = {"image": torch.zeros(2, 3), "label": [torch.tensor(1), "name"]}
    assert describe(batch) == "{image: float32 2x3, label: [int64 scalar, str]}"
    assert describe(torch.zeros(2, device="meta")) == "float32 2 meta"
    assert describe(["a"] * 9) == "list of 9 str"
    assert describe((1,) * 8) == "[" + ", ".join(["int"] * 8) + "]"
    assert describe([torch.zeros(1)] * 9) == "[" + ", ".join(["float32 1"] * 9) + "]"
    assert describe(np.zeros((2, 3), np.uint8)) == "ndarray uint8 2x3"


@pytest.mark.parametrize("kind", [list, tuple])
def test_ten_thousands_of_strings_are_not_walked_one_by_one(kind: type) -> None:
    """A batch of tokens would cost more to walk than to make."""
    walked: list[Any] = []
    words = kind(["a", "b", None, 3, 2.5, b"c"])
    mapped = map_children(words, walked.append)
    assert mapped == words
    assert walked == []
    assert type(mapped) is kind
    assert kind is tuple or mapped is not words
    assert list(leaves(words)) == []
    mixed = kind(["a", torch.ones(1)])
    assert map_tensors(mixed, torch.neg)[1] == -1
    assert len(list(leaves(mixed))) == 1
