"""The accelerator of this process, asked and waited for without bringing it up.

A process that has brought CUDA up cannot fork workers that use it, so nothing here may be what
does so first.
"""

from __future__ import annotations

import torch

__all__ = ["in_use", "synchronise"]


def in_use() -> bool:
    """Whether this process has initialised the accelerator that torch was built for."""
    device = torch.accelerator.current_accelerator()
    if device is None:
        return False
    initialised = getattr(torch.get_device_module(device), "is_initialized", None)
    if initialised is None:  # MPS: it needs no initialisation, and bears being asked
        return torch.accelerator.is_available()
    return bool(initialised())


def synchronise() -> None:
    """Wait for the device, where one is in use."""
    if in_use():
        torch.accelerator.synchronize()
