"""Loaders and steps of known cost: waits that end at a deadline, and cost no processor time."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch.utils.data import Dataset


def wait(seconds: float) -> None:
    """Sleep until ``seconds`` from now."""
    deadline = time.perf_counter() + seconds
    while (left := deadline - time.perf_counter()) > 0:
        time.sleep(left)


class Waiting(Dataset[torch.Tensor]):
    """``length`` samples, each the tensor of its index, each after ``seconds`` (of ``wait``)."""

    def __init__(self, length: int, seconds: float, wait: Callable[[float], None] = wait) -> None:
        self.length = length
        self.seconds = seconds
        self.wait = wait

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if not 0 <= index < self.length:
            raise IndexError(index)
        self.wait(self.seconds)
        return torch.full((4,), float(index))


def becomes_true(condition: Callable[[], object], seconds: float = 20) -> bool:
    """Return whether ``condition`` becomes true within ``seconds``."""
    deadline = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.002)
    return bool(found)
