"""Tensors that claim to be on a CUDA device and are computed on the CPU: `Played(tensor)`."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

with FakeTensorMode():  # from then on torch asks no driver whether there is such a device
    pass


class Played(torch.Tensor):
    """A tensor whose ``device`` is ``cuda:0``; ``kept`` is what it is computed with.

    It goes to the CPU, and is copied into. Autograd, which would want a thread of the device's, and
    ``.to("cuda")``, which would want its driver, are left out.
    """

    kept: torch.Tensor

    @staticmethod
    def __new__(cls, kept: torch.Tensor) -> Played:
        return torch.Tensor._make_wrapper_subclass(
            cls, kept.shape, kept.stride(), dtype=kept.dtype, device="cuda:0"
        )

    def __init__(self, kept: torch.Tensor) -> None:
        self.kept = kept

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        to_host = options.pop("device", torch.device("cuda")).type == "cpu"
        given, options = tree_map_only(Played, lambda leaf: leaf.kept, (args, options))
        out = func(*given, **options)
        if out is given[0]:
            return args[0]
        return out if to_host else tree_map_only(torch.Tensor, Played, out)
