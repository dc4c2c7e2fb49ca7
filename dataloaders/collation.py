"""torch's default collation: whether it still is what torch made it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.data._utils import collate as torch_collate

__all__ = ["collates_as_torch"]

_TORCHS: dict[Any, Any] = {
    torch.Tensor: torch_collate.collate_tensor_fn,
    np.ndarray: torch_collate.collate_numpy_array_fn,
    (np.bool_, np.number, np.object_): torch_collate.collate_numpy_scalar_fn,
    float: torch_collate.collate_float_fn,
    int: torch_collate.collate_int_fn,
    str: torch_collate.collate_str_fn,
    bytes: torch_collate.collate_str_fn,
}


def collates_as_torch() -> bool:
    """Whether ``default_collate`` does what torch made it do (its table can be changed)."""
    return torch_collate.default_collate_fn_map == _TORCHS
