"""Count optimizer steps: the loop in which an optimizer steps is the training loop.

    Optimizers().steps        how often torch's optimizers have stepped
               .expected()    whether one is still expected to step

A first pass over the data (for the channels' mean, or class weights) looks like a training loop
until an optimizer steps in another loop. No step is expected of a program without torch optimizers,
such as one with an update rule of its own: it has made none by the third epoch over a loader, or
its own modules do not name one.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

_NAMES_ONE = re.compile(rb"(?<![a-zA-Z])optim(izers?)?(?![a-zA-Z])|Trainer\b")
_PASSES = 2  # over the data before training, for the mean and the deviation of the channels


class Optimizers:
    """Counts the steps of all optimizers of this process, while entered, and calls ``stepped``."""

    def __init__(self, stepped: Callable[[], object] = lambda: None) -> None:
        self.steps = 0
        self.thread: threading.Thread | None = None  # of the last one
        self._made = self._named = False
        self._stepped = stepped
        self._modules = 0  # how many were imported when the program's files were searched
        made = torch.optim.Optimizer.__init__

        def __init__(optimizer: Any, *args: Any, **options: Any) -> None:
            self._made = True
            made(optimizer, *args, **options)

        self._noting = mock.patch.object(torch.optim.Optimizer, "__init__", __init__)

    def __enter__(self) -> Optimizers:
        self._hook = register_optimizer_step_post_hook(self._after_step)
        self._noting.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._hook.remove()
        self._noting.stop()

    def expected(self, epochs: int) -> bool:
        """Return whether an optimizer may still step, in epoch ``epochs`` of a loader."""
        if self._made or epochs > _PASSES:
            return self._made
        if self._modules != len(sys.modules):
            self._modules, self._named = len(sys.modules), any(map(_names_one, _own_files()))
        return self._named

    def _after_step(self, *_: object) -> None:
        self.steps += 1
        self.thread = threading.current_thread()
        self._stepped()


def _own_files() -> list[str]:
    """Return the files of __main__ and of modules from its folder or ``sys.path[0]``."""
    main = str(getattr(sys.modules["__main__"], "__file__", ""))
    own = os.path.dirname(main), sys.path[0]
    folders = tuple(os.path.join(os.path.abspath(folder), "") for folder in own)
    found = [main]
    for name, module in list(sys.modules.items()):
        path = module.__dict__.get("__file__") if isinstance(module, ModuleType) else None
        of_others = name.startswith(("backends.", "dataloaders.")) or "-packages" in str(path)
        if not of_others and str(path).startswith(folders):
            found.append(str(path))
    return found


def _names_one(path: str) -> bool:
    try:
        return _NAMES_ONE.search(Path(path).read_bytes()) is not None
    except OSError:  # such as of code in a notebook
        return False
