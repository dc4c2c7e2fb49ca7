"""A changed table of default_collate is noticed; one that only grew is still torch's."""

from __future__ import annotations

from numbers import Number
from typing import NamedTuple

import pytest
import torch
from torch.utils.data import TensorDataset
from torch.utils.data._utils import collate as torch_collate

from dataloaders import DataLoader

LOADER = DataLoader(TensorDataset(torch.ones(2)))


def collates_as_torch():
    """Whether a loader gathers its batches, instead of calling default_collate."""
    return "default_collate_fn_map" not in str(LOADER.explain())


class Own:
    pass


class Marker:
    pass


class MarkedList(Marker, list[int]):
    pass


class Pair(NamedTuple):
    left: int
    right: int


@pytest.fixture
def add(monkeypatch):
    def into_the_table(kind):
        monkeypatch.setitem(torch_collate.default_collate_fn_map, kind, lambda *_, **__: None)

    return into_the_table


def test_torchs_own_table():
    assert collates_as_torch()


@pytest.mark.parametrize("kind", [Own, (Own, torch.Generator), type])
def test_what_is_added_for_another_kind_changes_nothing(add, kind):
    add(kind)
    assert collates_as_torch()


@pytest.mark.parametrize(
    "kind",
    [torch.Tensor, float, torch.nn.Parameter, bool, dict, Pair, object, Marker, Number,
     (Own, tuple)],
)  # fmt: skip
def test_what_concerns_samples_is_noticed(add, kind):
    add(kind)
    assert not collates_as_torch()


def test_what_is_missing_is_noticed(monkeypatch):
    monkeypatch.delitem(torch_collate.default_collate_fn_map, float)
    assert not collates_as_torch()
