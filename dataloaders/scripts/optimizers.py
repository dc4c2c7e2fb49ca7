"""Counts the steps of a program's optimizers: the loop in which one steps is the one that trains.

    Optimizers().steps        counts every ``step()`` of every torch optimizer
               .expected()    whether the program will have one at all

A first pass over the data (for the channels' mean, for class weights) looks like a training loop
until an optimizer steps in another loop. A program that never uses a torch optimizer (its own
update rule, another library's) has no such sign: none is made before a third epoch, or its source
does not name one.
"""

from __future__ import annotations

import re
import sys
import sysconfig
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

_NAMES_ONE = re.compile(rb"(?<![a-zA-Z])optim(izers?)?(?![a-zA-Z])|Trainer\b")
_PASSES = 2  # over the data before training: for the channels' mean, then their deviation
_INSTALLED = tuple(
    str(Path(sysconfig.get_path(kind)).resolve()) for kind in ("stdlib", "purelib", "platlib")
)
_OURS = str(Path(__file__).resolve().parents[1])


class Optimizers:
    """Counts the steps of all optimizers of this process while entered."""

    def __init__(self) -> None:
        self.steps = 0
        self.thread: threading.Thread | None = None  # of the last one
        self._modules: set[str] = set()
        self._made = self._named = False
        made = torch.optim.Optimizer.__init__

        def __init__(optimizer: Any, *args: Any, **options: Any) -> None:
            self._made = True
            made(optimizer, *args, **options)

        self._noting = mock.patch.object(torch.optim.Optimizer, "__init__", __init__)

    def __enter__(self) -> Optimizers:
        self._modules = set(sys.modules)
        self._hook = register_optimizer_step_post_hook(self._after_step)
        self._noting.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._hook.remove()
        self._noting.stop()

    def expected(self, epochs: int) -> bool:
        """Return whether one is still to step, in a loop over a loader in its epoch ``epochs``."""
        if self._made or epochs > _PASSES:
            return self._made
        # Modules that come later count too, so only a find is kept.
        new = [name for name in list(sys.modules) if name not in self._modules]
        self._named = self._named or any(map(_names_optimizer, ("__main__", *new)))
        return self._named

    def _after_step(self, *_: object) -> None:
        self.steps += 1
        self.thread = threading.current_thread()


def _names_optimizer(module: str) -> bool:
    file = getattr(sys.modules.get(module), "__file__", None)
    if not isinstance(file, str) or not file.endswith(".py"):
        return False
    path = Path(file).resolve()
    if str(path).startswith((*_INSTALLED, _OURS)):
        return False
    try:
        return _NAMES_ONE.search(path.read_bytes()) is not None
    except OSError:
        return False
