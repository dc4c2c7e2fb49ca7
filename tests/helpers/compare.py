"""Equality of batches to the bit, and a record of everything that an epoch yields and draws."""

from __future__ import annotations

import dataclasses
import random
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch


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


def run_epochs(loader: Any) -> SimpleNamespace:
    """Seed everything, iterate ``loader`` twice, and return all that this gave.

    The batches of each epoch, all generators' states after each, and the length or its error.
    """
    seed_everything()
    batches, states = [], []
    for _ in range(2):
        batches.append(list(loader))
        states.append(generator_states(loader))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            length: int | str = len(loader)
        except TypeError as error:
            length = str(error)
    return SimpleNamespace(batches=batches, states=states, length=length)


def assert_same(ours: Any, theirs: Any, *, strides: bool = True, storage: bool = False) -> None:
    """Assert that two values are the same to the bit, all the way down.

    Same types, keys, shapes, dtypes and bits: 0.0 is not -0.0, and one NaN is like another.

    Args:
        ours: the value under test.
        theirs: what it has to be.
        strides: whether tensors have the same strides.
        storage: whether their memory is alike too: shared or not, how large, and where it begins.
    """
    difference = _difference(ours, theirs, _Compared(strides, storage))
    assert difference is None, difference


def same(one: Any, other: Any, *, strides: bool = True, info: bool = False) -> bool:
    """Return whether two values are the same, as `assert_same` has it; with images' ``info``."""
    return _difference(one, other, _Compared(strides, info=info)) is None


def bits(value: Any) -> tuple[Any, ...]:
    """Return types, keys, shapes, dtypes and bits of ``value``, comparable and picklable."""
    compared = _Compared(strides=False, device=False)
    return tuple((where, form) for where, _, form in _parts(value, "", compared))


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in ``value``, in the order of its containers."""
    parts = _parts(value, "", _Compared())
    return [part for _, part, _ in parts if isinstance(part, torch.Tensor)]


class _Compared(NamedTuple):
    strides: bool = True
    storage: bool = False
    device: bool = True
    info: bool = False  # of images, and their classes: a file's image has its own


def _difference(ours: Any, theirs: Any, compared: _Compared) -> str | None:
    """Return where and how two values differ; None if they are the same."""
    pairs = zip_longest(_parts(ours, "value", compared), _parts(theirs, "value", compared))
    for (place, value, form), (_, wanted, wanted_form) in pairs:  # equal keys, equally many parts
        if form != wanted_form:
            return f"{place}: {form[:-1]} {value!r} is not {wanted_form[:-1]} {wanted!r}"
    return None


def _parts(value: Any, where: str, compared: _Compared) -> Iterator[tuple[str, Any, Any]]:
    """Yield each part of ``value``: how code gets at it, the part, and a form to compare.

    The form of a container has its keys, that of a leaf ends with its bits.
    """
    kind = type(value).__name__
    if isinstance(value, torch.Tensor):
        yield where, value, (kind, *_form_of_tensor(value, compared))
    elif isinstance(value, (np.ndarray, np.generic)):
        plain = value.tolist() if value.dtype.kind == "O" else _bits_of_array(np.asarray(value))
        yield where, value, (kind, value.dtype.str, value.shape, plain)
    elif (pillow := sys.modules.get("PIL.Image")) and isinstance(value, pillow.Image):
        info = (type(value), value.info) if compared.info else ()
        yield where, value, ("Image", *info, *_form_of_image(value))
    elif (inner := _inner(value)) is not None:
        yield where, value, (kind, tuple(inner))
        for key, part in inner.items():
            yield from _parts(part, where + key, compared)
    else:
        yield where, value, (kind, repr(value) if isinstance(value, (float, complex)) else value)


def _inner(value: Any) -> dict[str, Any] | None:
    """Return what a container holds, by how code gets at it; None if it is none."""
    if isinstance(value, Mapping):
        return {f"[{key!r}]": inner for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return {f"[{number}]": inner for number, inner in enumerate(value)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f".{each.name}": getattr(value, each.name) for each in dataclasses.fields(value)}
    if hasattr(value, "__dict__") and not callable(value):
        return {f".{name}": inner for name, inner in vars(value).items()}
    return None


def _form_of_tensor(tensor: torch.Tensor, compared: _Compared) -> Iterator[Any]:
    yield from (tuple(tensor.shape), str(tensor.dtype), str(tensor.layout), tensor.requires_grad)
    if compared.device:
        yield str(tensor.device)
    if tensor.is_meta:
        return
    if tensor.layout is torch.strided:
        yield tensor.stride() if compared.strides else ()
    else:
        tensor = tensor.to_dense()
    if compared.storage:
        yield tensor.is_shared(), tensor.storage_offset(), tensor.untyped_storage().nbytes()
    plain = tensor.detach().as_subclass(torch.Tensor).cpu().resolve_conj().resolve_neg()
    # Not contiguous(): that leaves one value as it is, whatever its stride.
    flat = plain.clone(memory_format=torch.contiguous_format).reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    if not flat.numel():
        yield b""
        return
    rows = flat.view(torch.uint8).reshape(flat.numel(), -1)
    if flat.is_floating_point():
        rows[flat.double().isnan()] = 255
    yield rows.numpy().tobytes()


def _bits_of_array(array: np.ndarray[Any, Any]) -> bytes:
    if array.dtype.kind in "fc":
        array = np.where(np.isnan(array), np.array(np.nan, array.dtype), array)
    return array.tobytes()


def _form_of_image(image: Any) -> tuple[Any, ...]:
    palette: tuple[Any, ...] = ()
    if image.mode == "P":
        mode = image.palette.mode if image.palette else "RGB"  # a PNG file may lack it
        palette = (mode, tuple(image.getpalette(mode) or ()), image.info.get("transparency"))
    return (image.mode, image.size, *palette, image.tobytes())


def structure(batch: Any) -> frozenset[Any]:
    """Return types, keys, dtypes and dimensions in ``batch``, without lengths, sizes and values."""
    return frozenset(
        (
            re.sub(r"\[\d+\]", "[]", where),
            type(part),
            getattr(part, "dtype", None),
            getattr(part, "ndim", None),
        )
        for where, part, _ in _parts(batch, "", _Compared())
    )
