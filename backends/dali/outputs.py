"""Turn DALI's results into torch tensors that share their memory.

    TensorList [n] of [H, W, C] ──in one piece──> Tensor [n, C, H, W]
                                └─else──────────> n x Tensor [C, H, W]

Each tensor keeps its memory alive, and DALI does not write into it again (with its default
executor, ``exec_dynamic``): batches may be kept for ever, also after the pipeline's end.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils.dlpack import from_dlpack

__all__ = ["handed_over"]


def handed_over(made: Any) -> Tensor | list[Tensor]:
    """Return the images of one run, channels first; their memory is in the order [H, W, C].

    Args:
        made: DALI's ``TensorList`` of images [H, W, C], on the CPU or a CUDA device.
    """
    if made.is_dense_tensor():
        return _tensor(made.as_tensor()).permute(0, 3, 1, 2)
    return [_tensor(made[place]).permute(2, 0, 1) for place in range(len(made))]


def _tensor(made: Any) -> Tensor:
    tensor: Tensor = from_dlpack(made)
    return tensor
