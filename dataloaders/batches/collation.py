"""Whether torch's default collation is unmodified."""

from __future__ import annotations

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


def collates_as_torch() -> bool:
    """Whether ``default_collate`` treats everything as torch made it.

    Its table of functions is public and may be changed. The entry that DALI's plugin for torch adds
    when it is imported, for a class of its own, does not count.
    """
    table = torch_collate.default_collate_fn_map
    if any(table.get(kind) is not function for kind, function in _TORCHS.items()):
        return False
    added = [kind for kind in table if kind not in _TORCHS]
    return all(str(getattr(kind, "__module__", "")).startswith("nvidia.dali.") for kind in added)
