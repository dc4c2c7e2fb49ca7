"""Walk a batch, which is any nesting of tensors.

    {"image": Tensor, "meta": (Tensor, "name")}      leaves()      Tensor, Tensor
    mappings, sequences, namedtuples, dataclasses    map_tensors() the same nesting, other tensors
    and any object with a .to() of its own           to_device()   the same nesting, on a device

Everything that is not a tensor is left as it is.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from array import array
from collections.abc import (
    Callable,
    Iterator,
    Mapping,
    MutableMapping,
    MutableSequence,
    Sequence,
)
from typing import Any, TypeAlias

import numpy as np
import torch

from dataloaders.machine.facts import accelerator_in_use

Batch: TypeAlias = Any
"""What the loader yields at each step: any nesting of tensors, or a custom type."""


def leaves(batch: Batch) -> Iterator[torch.Tensor]:
    """Yield every tensor in ``batch``, depth first, in the order of its containers.

    Looks into mappings, sequences and dataclasses, and into the ``__dict__`` (one level) of a
    custom type with a ``.to()``, because such a type holds its tensors there.
    """
    return _leaves(batch, torch.Tensor)


def _leaves(batch: Batch, kinds: Any) -> Iterator[Any]:
    if isinstance(batch, kinds):
        yield batch
    elif isinstance(batch, _FLAT):
        return
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _leaves(value, kinds)
    elif isinstance(batch, Sequence):
        if type(batch) in (list, tuple) and _ATOMS.issuperset(map(type, batch)):
            return
        for value in batch:
            yield from _leaves(value, kinds)
    elif _is_dataclass_instance(batch):
        for field in dataclasses.fields(batch):
            yield from _leaves(getattr(batch, field.name, None), kinds)
    elif hasattr(batch, "to") and hasattr(batch, "__dict__"):
        for value in vars(batch).values():
            if isinstance(value, _HELD):
                yield from _leaves(value, kinds)


def map_tensors(batch: Batch, function: Callable[[torch.Tensor], Any]) -> Batch:
    """Return the nesting of ``batch`` in new containers, with ``function`` applied to each tensor.

    The containers are always new (a step that pops a key from its batch changes only its own copy);
    leaves that are not tensors are the same objects. Containers keep their type and any attributes
    beside their items. A mapping or sequence that can neither be changed nor be made from its items
    becomes a dict or a list, as in torch's ``pin_memory``. A custom type with a ``.to()`` is copied
    shallowly and its attributes are mapped.
    """
    if isinstance(batch, torch.Tensor):
        return function(batch)
    return map_children(batch, lambda child: map_tensors(child, function))


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Return ``batch`` on ``device``; tensors are copied unless they are there already.

    A type's own ``.to(device)`` comes first, because only the type knows which of its tensors must
    stay (the lengths in a PackedSequence). Copies from pinned memory are queued on the current
    stream and not waited for; copies to the CPU are, since code there could read them too early.
    """
    queued = device.type != "cpu"
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=queued)
    if callable(getattr(batch, "to", None)):
        if isinstance(batch, MutableMapping):
            batch = _shallow(batch)  # Hugging Face's BatchEncoding.to() changes it in place
        if _takes_non_blocking(batch.to):
            return batch.to(device, non_blocking=queued)
        return batch.to(device)
    return map_children(batch, lambda child: to_device(child, device))


def copied(batch: Batch) -> Batch:
    """Return a copy of ``batch``; pinned tensors are copied to pinned memory.

    A device copies from pinned memory asynchronously and faster. A device that nothing has
    initialised is left so, since workers that are forked later could not use it.
    """
    used = accelerator_in_use() is not None

    def clone(leaf: torch.Tensor) -> torch.Tensor:
        pinned = used and leaf.is_cpu and leaf.is_pinned()
        made = leaf.detach().clone()
        return made.pin_memory() if pinned else made

    return map_tensors(batch, clone)


def nbytes(batch: Batch) -> int:
    """Return the bytes of the tensors and arrays in ``batch`` (views counted at their own size)."""
    tensors, arrays = leaves(batch), _leaves(batch, np.ndarray)
    # Not by shape, which nested tensors do not have.
    size = sum(leaf.numel() * leaf.element_size() for leaf in tensors)
    return size + sum(int(array.nbytes) for array in arrays)


def samples_in(batch: Batch) -> int | None:
    """Return the number of samples, the length of the first tensor; None without a tensor."""
    for leaf in leaves(batch):
        return leaf.size(0) if leaf.ndim else None  # nested tensors have no shape
    return None


def counter_of_samples(full: Batch, size: int | None) -> Callable[[Batch], int | None]:
    """Return what counts the samples of batches that are made as ``full`` is, of ``size`` samples.

    These are `samples_in`, unless that differs from ``size`` and a list has this length: a batch
    may be a list of its samples, or hold lists of their parts.
    """
    sizes = _sizes(full)
    place = sizes.index(size) if size in sizes else 0

    def count(batch: Batch) -> int | None:
        found = _sizes(batch)
        return found[place if place < len(found) else 0]

    return count


def _sizes(batch: Batch) -> list[int | None]:
    """Return what may be the number of samples: of the first tensor, and of lists down to it."""
    sizes = [samples_in(batch)]
    while isinstance(batch, (Mapping, list, tuple)) and batch:
        if isinstance(batch, Mapping):
            batch = next(iter(batch.values()))
        else:
            sizes.append(len(batch))
            batch = batch[0]
    return sizes


def describe(batch: Batch) -> str:
    """Describe ``batch`` in one line: ``[float32 64x3x224x224, int64 64]``."""
    if isinstance(batch, torch.Tensor):
        if batch.is_nested:  # the shape, if it has one, does not say how many rows each tensor has
            shape = f"nested of {batch.size(0)}"
        else:
            shape = "x".join(str(size) for size in batch.shape) or "scalar"
        place = "" if batch.device.type == "cpu" else f" {batch.device}"
        return f"{str(batch.dtype).removeprefix('torch.')} {shape}{place}"
    if isinstance(batch, Mapping):
        return "{" + ", ".join(f"{key}: {describe(value)}" for key, value in batch.items()) + "}"
    if isinstance(batch, (list, tuple)):
        if len(batch) > 8 and not any(True for _ in leaves(batch)):
            return f"{type(batch).__name__} of {len(batch)} {type(batch[0]).__name__}"
        return "[" + ", ".join(describe(value) for value in batch) + "]"
    if hasattr(batch, "dtype") and hasattr(batch, "shape"):  # NumPy's arrays and similar types
        return f"{type(batch).__name__} {batch.dtype} {'x'.join(str(n) for n in batch.shape)}"
    return type(batch).__name__


_FLAT = (str, bytes, bytearray, memoryview, range, array)
"""Types that count as sequences and hold no tensors."""

_HELD = (torch.Tensor, Mapping, list, tuple)
"""Attribute types of a custom type that may hold tensors."""


_ATOMS = frozenset((str, bytes, int, float, bool, complex, type(None)))
"""Types that hold no tensors; batches may have tens of thousands of them in a list."""


def map_children(batch: Batch, function: Callable[[Any], Any]) -> Batch:
    """Return ``batch`` in a new container, with ``function`` applied to each direct child.

    A list or tuple of nothing but strings and numbers is copied without calling ``function``. A
    tensor has no children.
    """
    if isinstance(batch, (torch.Tensor, *_FLAT)):
        return batch
    if isinstance(batch, Mapping):
        return _map_mapping(batch, function)
    if isinstance(batch, Sequence):
        return _map_sequence(batch, function)
    if _is_dataclass_instance(batch):
        clone = copy.copy(batch)
        for field in dataclasses.fields(batch):
            if hasattr(batch, field.name):  # object.__setattr__ also works on frozen dataclasses
                object.__setattr__(clone, field.name, function(getattr(batch, field.name)))
        return clone
    if hasattr(batch, "to") and hasattr(batch, "__dict__"):
        clone = copy.copy(batch)
        for name, value in vars(batch).items():
            if isinstance(value, _HELD):
                object.__setattr__(clone, name, function(value))
        return clone
    return batch


def _map_mapping(batch: Mapping[Any, Any], function: Callable[[Any], Any]) -> Mapping[Any, Any]:
    items = {key: function(value) for key, value in batch.items()}
    if type(batch) is dict:
        return items
    try:
        if not isinstance(batch, MutableMapping):
            return type(batch)(items)  # type: ignore[call-arg]
        clone: MutableMapping[Any, Any] = _shallow(batch)
        for key, value in items.items():  # not update(): Hugging Face's ModelOutput forbids it
            clone[key] = value
    except TypeError:
        return items
    return clone


def _map_sequence(batch: Sequence[Any], function: Callable[[Any], Any]) -> Sequence[Any]:
    if type(batch) in (list, tuple) and _ATOMS.issuperset(map(type, batch)):
        return batch[:]
    values = [function(value) for value in batch]
    if type(batch) is list:
        return values
    if isinstance(batch, tuple) and hasattr(batch, "_make"):
        return batch._make(values)  # type: ignore[no-any-return]
    try:
        if not isinstance(batch, MutableSequence):
            return type(batch)(values)  # type: ignore[call-arg]
        clone: MutableSequence[Any] = _shallow(batch)
        for position, value in enumerate(values):
            clone[position] = value
    except TypeError:
        return values
    return clone


def _shallow(container: Any) -> Any:
    """Return a copy whose items can be replaced without changing those of ``container``."""
    clone = copy.copy(container)
    if not isinstance(container, (dict, list)) and not hasattr(type(container), "__copy__"):
        # copy.copy() shares the dict or list that holds the items.
        for name, value in vars(clone).items():
            if isinstance(value, (MutableMapping, MutableSequence)):
                object.__setattr__(clone, name, copy.copy(value))
    return clone


def _takes_non_blocking(to: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(to).parameters.values()
    except (TypeError, ValueError):  # a method written in C
        return True
    return any(p.name == "non_blocking" or p.kind is p.VAR_KEYWORD for p in parameters)


def _is_dataclass_instance(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
