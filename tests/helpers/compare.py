"""Equality of batches to the bit, and a record of everything that an epoch yields and draws."""

from __future__ import annotations

import dataclasses
import random
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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
        list(np.random.get_state()[1:3]),
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


def assert_same_epochs(
    ours: Epochs, theirs: Epochs, *, states: bool = True, storage: bool = False
) -> None:
    assert ours.length == theirs.length
    assert [len(epoch) for epoch in ours.batches] == [len(epoch) for epoch in theirs.batches]
    assert_same(ours.batches, theirs.batches, storage=storage)
    if states:
        assert_same(ours.states, theirs.states)


def assert_same(
    ours: Any,
    theirs: Any,
    where: str = "value",
    *,
    strides: bool = True,
    storage: bool = False,
    device: bool = True,
) -> None:
    """Assert that two values are the same to the bit, all the way down.

    Same types, keys, shapes, dtypes and bits: 0.0 is not -0.0, and one NaN is like another.

    Args:
        ours: the value under test.
        theirs: what it has to be.
        where: what the message calls the value.
        strides: whether tensors have the same strides.
        storage: whether their memory is alike too: shared or not, how large, and where they begin.
        device: whether they are on the same device.
    """
    difference = _difference(ours, theirs, where, _Looks(strides, storage, device))
    assert difference is None, difference


def same(one: Any, other: Any, *, strides: bool = True) -> bool:
    """Return whether two values are the same, as `assert_same` has it."""
    return _difference(one, other, "value", _Looks(strides)) is None


def bits(value: Any) -> Any:
    """Return the type's name and the bits of ``value``, comparable and picklable."""
    kind = type(value).__name__
    if isinstance(value, torch.Tensor):
        return kind, str(value.dtype), tuple(value.shape), _raw(value).numpy().tobytes()
    if isinstance(value, (np.ndarray, np.generic)):
        return kind, value.dtype.str, value.shape, value.tobytes()
    if _is_image(value):
        return "Image", *_image_bits(value)
    if isinstance(value, (float, complex)):
        return kind, repr(value)
    if isinstance(value, dict):
        return kind, [(type(key), key, bits(inner)) for key, inner in value.items()]
    if isinstance(value, (list, tuple)):
        return kind, getattr(value, "_fields", ()), [bits(inner) for inner in value]
    return kind, value


class _Looks(NamedTuple):
    strides: bool = True
    storage: bool = False
    device: bool = True


def _difference(ours: Any, theirs: Any, where: str, looks: _Looks) -> str | None:
    """Return where and how two values differ; None if they are the same."""
    if _is_image(ours) and _is_image(theirs):  # a file's image has a class of its own
        alike = _image_bits(ours) == _image_bits(theirs)
    elif type(ours) is not type(theirs):
        return f"{where}: a {type(ours).__name__} is no {type(theirs).__name__}: {ours}, {theirs}"
    elif isinstance(ours, torch.Tensor):
        return _difference_of_tensors(ours, theirs, where, looks)
    elif isinstance(ours, (np.ndarray, np.generic)):
        alike = (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        if alike and (ours.tobytes() != theirs.tobytes() or ours.dtype.kind == "O"):
            alike = np.array_equal(ours, theirs, equal_nan=ours.dtype.kind in "fc")
    elif (parts := _parts(ours)) is not None:
        others = _parts(theirs) or {}
        if list(parts) != list(others):
            return f"{where}: {list(parts)} are not {list(others)}"
        found = (_difference(parts[at], others[at], where + at, looks) for at in parts)
        return next((each for each in found if each is not None), None)
    else:
        alike = repr(ours) == repr(theirs) if isinstance(ours, (float, complex)) else ours == theirs
    return None if alike else f"{where}: {ours!r} is not {theirs!r}"


def _parts(value: Any) -> dict[str, Any] | None:
    """Return what a container holds, by how code would get at it; None if it is none."""
    if isinstance(value, Mapping):
        return {f"[{key!r}]": inner for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return {f"[{number}]": inner for number, inner in enumerate(value)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f".{each.name}": getattr(value, each.name) for each in dataclasses.fields(value)}
    if hasattr(value, "__dict__") and not callable(value):
        return {f".{name}": inner for name, inner in vars(value).items()}
    return None


def _difference_of_tensors(
    ours: torch.Tensor, theirs: torch.Tensor, where: str, looks: _Looks
) -> str | None:
    for name in ("shape", "dtype", "layout", "requires_grad", *("device",) * looks.device):
        one, other = getattr(ours, name), getattr(theirs, name)
        if one != other:
            return f"{where}: {name} {one} is not {other}"
    if ours.is_meta:
        return None
    if ours.layout is not torch.strided:
        return _difference(ours.to_dense(), theirs.to_dense(), where, looks)
    if looks.strides and ours.stride() != theirs.stride():
        return f"{where}: strides {ours.stride()} are not {theirs.stride()}"
    if looks.storage:
        memory = [
            (each.is_shared(), each.storage_offset(), each.untyped_storage().nbytes())
            for each in (ours, theirs)
        ]
        if memory[0] != memory[1]:
            return f"{where}: memory (shared, offset, bytes) {memory[0]} is not {memory[1]}"
    one, other = _raw(ours), _raw(theirs)
    if torch.equal(one, other):
        return None
    values, wanted = (plain.view(ours.dtype) for plain in (one, other))
    off = (one != other).view(-1, ours.element_size()).any(1)
    if ours.is_floating_point() or ours.is_complex():
        one, other = (each if each.is_complex() else each.double() for each in (values, wanted))
        off &= ~(one.isnan() & other.isnan())
    if not off.any():
        return None
    first = int(off.nonzero()[0])
    told = f"{values[first].item()} is not {wanted[first].item()}"
    return f"{where}: {told} at {first} of {ours.numel()}, {int(off.sum())} differ"


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of ``tensor``, in the order of its elements."""
    plain = tensor.detach().as_subclass(torch.Tensor).cpu().resolve_conj().resolve_neg()
    # Not contiguous(): that leaves one value as it is, whatever its stride.
    flat = plain.clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)


def _is_image(value: Any) -> bool:
    pillow = sys.modules.get("PIL.Image")  # not imported for those who have no images
    return pillow is not None and isinstance(value, pillow.Image)


def _image_bits(image: Any) -> tuple[Any, ...]:
    palette: tuple[Any, ...] = ()
    if image.mode == "P":
        mode = image.palette.mode if image.palette else "RGB"  # a PNG file may lack it
        palette = (mode, image.getpalette(mode), image.info.get("transparency"))
    return (image.mode, image.size, image.tobytes(), *palette)


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
