"""What a running worker is told, on the back of a task: set_epoch, keep or put back its generators.

    consumer: Tell(index, epoch=3, keep=7) ──pickled──> index queue ──unpickled──> worker:
        keeps the states of its generators, calls dataset.set_epoch(3), is left with the index

torch's worker knows tasks, the order to begin an epoch, and the end. Whatever else it is told
happens while one of these is unpickled, in the worker, after every task before it.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

__all__ = ["Tell"]


class Tell:
    """Unpickles in a worker as ``value``, and on the way does what it was given.

    Args:
        value: what the worker is to find in its place.
        epoch: for ``set_epoch`` of the worker's copy of the dataset, if it has one.
        keep: a number under which to remember the states of torch's, NumPy's and ``random``'s
            generators in the worker as they are now.
        put_back: the number under which states were remembered; others are left alone.
    """

    __slots__ = ("epoch", "keep", "put_back", "value")

    def __init__(
        self,
        value: Any,
        *,
        epoch: int | None = None,
        keep: int | None = None,
        put_back: int | None = None,
    ) -> None:
        self.value = value
        self.epoch = epoch
        self.keep = keep
        self.put_back = put_back

    def __reduce__(self) -> tuple[Any, ...]:
        return _hear, (self.value, self.epoch, self.keep, self.put_back)


_kept: tuple[int, Any, Any, Any] | None = None


def _hear(value: Any, epoch: int | None, keep: int | None, put_back: int | None) -> Any:
    global _kept
    info = get_worker_info()
    if info is None:
        return value
    if put_back is not None and _kept is not None and _kept[0] == put_back:
        torch.default_generator.set_state(_kept[1])
        np.random.set_state(_kept[2])
        random.setstate(_kept[3])
    if keep is not None:
        states = (torch.default_generator.get_state(), np.random.get_state(), random.getstate())
        _kept = (keep, *states)
    # The states are kept before, and put back before: set_epoch may draw.
    if epoch is not None:
        set_epoch = getattr(info.dataset, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
    return value
