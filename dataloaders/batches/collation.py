"""Whether torch's default collation is unmodified."""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils import collate as torch_collate

_TORCHS: dict[Any, Any] = {
    torch.Tensor: torch_collate.collate_tensor_fn,
    np.ndarray: torch_collate.collate_numpy_array_fn,
    (np.bool_, np.number, np.object_): torch_collate.collate_numpy_scalar_fn,
    float: torch_collate.collate_float_fn,
    int: torch_collate.collate_int_fn,
    str: torch_collate.collate_str_fn,
    bytes: torch_collate.collate_str_fn,
}
_COLLATED = (torch.Tensor, np.ndarray, np.generic, float, int, str, bytes, Mapping, Sequence)


def collates_as_torch() -> bool:
    """Whether ``default_collate`` still treats everything that torch collates as torch does.

    Its table of functions is public and may be changed. An entry for an unrelated class does not
    count: DALI's plugin for torch adds one for a class of its own when it is imported.
    """
    table = torch_collate.default_collate_fn_map
    if table == _TORCHS:
        return True
    if any(table.get(kind) is not call for kind, call in _TORCHS.items()):
        return False
    return all(_is_another_kind(kind) for kind in table if kind not in _TORCHS)


def _is_another_kind(kind: Any) -> bool:
    """Whether nothing that torch collates is an instance of this key of the table."""
    if isinstance(kind, tuple):
        return all(_is_another_kind(each) for each in kind)
    # An ABC decides itself what its instances are.
    if not isinstance(kind, type) or isinstance(kind, ABCMeta):
        return False
    if any(issubclass(known, kind) for known in _COLLATED):
        return False
    kinds = [kind]
    while kinds:
        kind = kinds.pop()
        if issubclass(kind, _COLLATED):
            return False
        kinds.extend(type.__subclasses__(kind))
    return True
