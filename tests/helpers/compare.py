"""Equality of batches to the bit, and a record of everything that an epoch yields and draws."""

from __future__ import annotations

import dataclasses
import random
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch


@dataclasses.dataclass
class Epochs:
    """What a few epochs over a loader gave.

    Attributes:
        batches: for each epoch, its batches.
        states: after each epoch, the states of torch's, NumPy's, ``random``'s and the loader's
            own generator.
        length: ``len(loader)``, or the error that it raised.
    """

    batches: list[list[Any]]
    states: list[list[Any]]
    length: int | str


def seed_everything(seed: int = 3) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def generator_states(loader: Any = None) -> list[Any]:
    generator = getattr(loader, "generator", None)
    return [
        torch.get_rng_state(),
        np.random.get_state()[1],
        random.getstate(),
        None if generator is None else generator.get_state(),
    ]


def run_epochs(loader: Any, epochs: int = 2) -> Epochs:
    """Seed everything, then iterate ``loader``."""
    seed_everything()
    batches, states = [], []
    for _ in range(epochs):
        batches.append(list(loader))
        states.append(generator_states(loader))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            length: int | str = len(loader)
        except TypeError as error:
            length = str(error)
    return Epochs(batches, states, length)


def assert_same_epochs(ours: Epochs, theirs: Epochs, *, states: bool = True) -> None:
    assert ours.length == theirs.length
    assert [len(epoch) for epoch in ours.batches] == [len(epoch) for epoch in theirs.batches]
    assert_same(ours.batches, theirs.batches)
    if states:
        assert_same(ours.states, theirs.states)


def assert_same(ours: Any, theirs: Any, where: str = "value") -> None:
    """Same types, keys, shapes, dtypes, devices and bits, all the way down."""
    assert type(ours) is type(theirs), where
    if isinstance(ours, torch.Tensor):
        assert ours.shape == theirs.shape, where
        assert ours.dtype == theirs.dtype, where
        assert ours.device == theirs.device, where
        assert ours.stride() == theirs.stride(), where
        assert torch.equal(ours, theirs), f"{where}: {ours} is not {theirs}"
    elif isinstance(ours, np.ndarray):
        np.testing.assert_array_equal(ours, theirs, err_msg=where, strict=True)
    elif isinstance(ours, Mapping):
        assert list(ours) == list(theirs), where
        for key in ours:
            assert_same(ours[key], theirs[key], f"{where}[{key!r}]")
    elif isinstance(ours, Sequence) and not isinstance(ours, (str, bytes)):
        assert len(ours) == len(theirs), where
        for position, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(one, other, f"{where}[{position}]")
    elif dataclasses.is_dataclass(ours) or hasattr(ours, "__dict__"):
        assert_same(vars(ours), vars(theirs), f"vars({where})")
    else:
        assert ours == theirs, where


def structure(batch: Any) -> Any:
    """Types, keys, dtypes and numbers of dimensions of ``batch``, without sizes and values."""
    if isinstance(batch, torch.Tensor):
        return (batch.dtype, batch.ndim)
    if isinstance(batch, Mapping):
        return (type(batch), {key: structure(value) for key, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return (type(batch), [structure(value) for value in batch])
    if isinstance(batch, (list, tuple)):  # of strings or samples: as long as their batch
        return (type(batch), {str(structure(value)) for value in batch})
    if dataclasses.is_dataclass(batch):
        return (type(batch), structure(vars(batch)))
    return type(batch)
