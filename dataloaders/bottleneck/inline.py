"""A check in one's own code: a function for a step, a block around a loop as it stands.

report = check_bottleneck(loader, step)

with bottleneck_check(loader) as check:
    for batch in check:                     in place of: for batch in loader
        loss = ...
check.report()
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from dataloaders.batches.tree import Batch
from dataloaders.bottleneck.check import Check, Progress
from dataloaders.bottleneck.report import Report
from dataloaders.loader import DataLoader
from dataloaders.measuring.clocks import Clock
from dataloaders.seeding.states import random_states_kept
from dataloaders.specification import generators_of

__all__ = ["bottleneck_check", "check_bottleneck"]


@contextmanager
def bottleneck_check(
    loader: Any,
    *,
    budget_s: float = 30.0,
    device: torch.device | str | None = None,
    progress: Callable[[Progress], None] | None = None,
    clock: Clock | None = None,
    predict: bool = True,
    try_candidates: bool = False,
    advise: bool = False,
) -> Iterator[Check]:
    """Give a `Check` of ``loader``; the loop that iterates it is measured and ends by itself.

    What the loop does with a batch is the step, as it stands: it trains the model, on some batches
    many times. After the block ``check.report()`` has the result, also of a loop that was
    interrupted, and the random states of torch, NumPy and ``random``, and the loader's generator,
    are as before.

    Args:
        loader: a DataLoader, torch's or ours, or anything that can be iterated again and again.
        budget_s: the most seconds to spend; fewer if the answer is clear earlier, up to twice
            as many without a verdict where steps are slow (0.25 s) or not two rounds fit.
        device: where the step wants its batches; None: where its first real batch ends up.
        progress: called with a `Progress` between blocks; None: a line in a notebook or on a
            terminal.
        clock: what blocks are timed with, for a step on a device that torch does not know; None:
            the devices that the step computes on, else the host's clock.
        predict: unless the step is the bottleneck, look for what preparation consists of, and what
            remedies would gain; some seconds more.
        try_candidates: run these remedies with the step, too, each for a tenth of the budget.
        advise: also run the step under settings that findings name (autocast, TF32, cuDNN's
            autotuner), and give these findings a measured gain.

    Raises:
        OptionError: ``budget_s`` is not positive.
        CheckError: while iterating, if the loader yields no batch.
    """
    line = _Line()
    check = Check(
        loader,
        budget_s=budget_s,
        device=device,
        progress=progress or line,
        clock=clock,
        predict=predict,
        try_candidates=try_candidates,
        advise=advise,
    )
    hook = register_optimizer_step_post_hook(lambda *_: check.optimizer_stepped())
    with random_states_kept(*generators_of(loader)), _epochs_uncounted(loader):
        try:
            yield check
        finally:
            hook.remove()
            check.close()
            line.close()


def check_bottleneck(
    loader: Any,
    step: Callable[[Batch], object],
    *,
    budget_s: float = 30.0,
    device: torch.device | str | None = None,
    progress: Callable[[Progress], None] | None = None,
    clock: Clock | None = None,
    predict: bool = True,
    try_candidates: bool = False,
    advise: bool = False,
) -> Report:
    """Return whether the input pipeline holds ``step`` back, by how much, and where the time goes.

    Runs ``step(batch)`` on real and on resident batches in short interleaved blocks, see
    `bottleneck_check`.

    Args:
        loader, budget_s, device, progress, clock: as in `bottleneck_check`.
        predict, try_candidates, advise: likewise.
        step: takes one batch as the loader delivers it; copies it to its device itself, unless
            the loader does.

    Raises:
        OptionError: ``budget_s`` is not positive.
        CheckError: the loader yields no batch.
        Exception: whatever the loader or the step raises. After KeyboardInterrupt the report so
            far is the exception's attribute ``report``.
    """
    with bottleneck_check(
        loader,
        budget_s=budget_s,
        device=device,
        progress=progress,
        clock=clock,
        predict=predict,
        try_candidates=try_candidates,
        advise=advise,
    ) as check:
        try:
            for batch in check:
                step(batch)
        except KeyboardInterrupt as interrupt:
            interrupt.report = check.report()  # type: ignore[attr-defined]
            raise
    return check.report()


class _Line:
    """Shows progress in one line that is written over, where somebody sees it."""

    def __init__(self) -> None:
        self._file = sys.stdout
        self._seen = _in_notebook() or (self._file is not None and self._file.isatty())
        self._width = 0

    def __call__(self, progress: Progress) -> None:
        self._write(str(progress))

    def close(self) -> None:
        """Take the line away."""
        if self._width:
            self._write("")
            self._write("")

    def _write(self, text: str) -> None:
        if self._seen:
            print(f"\r{text:<{self._width}}", end="", file=self._file, flush=True)
            self._width = len(text)


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


@contextmanager
def _epochs_uncounted(loader: Any) -> Iterator[None]:
    """A loader of ours counts its epochs for ``seed=``: the check's do not count."""
    counted = loader._iterations if isinstance(loader, DataLoader) else 0
    try:
        yield
    finally:
        if isinstance(loader, DataLoader):
            loader._iterations = counted
