"""Check a step, or a loop as it stands, in one's own code.

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

from dataloaders.batches.tree import Batch
from dataloaders.bottleneck.check import Check
from dataloaders.bottleneck.report import Report
from dataloaders.loader import DataLoader
from dataloaders.measuring.progress import ProgressLine
from dataloaders.seeding.states import random_states_kept
from dataloaders.specification import generators_of


@contextmanager
def bottleneck_check(loader: Any, **options: Any) -> Iterator[Check]:
    """Give a `Check` of ``loader``; a loop that iterates it is measured and ends by itself.

    The body of the loop is the step. It trains the model, on some batches many times. After the
    block, ``check.report()`` returns the result, also after an interrupt. The random states of
    torch, NumPy, ``random`` and the loader's generators are restored.

    Args:
        loader: a DataLoader, torch's or ours, or anything that can be iterated again and again.
        options: of `Check`: ``budget_s``, ``device``, ``progress`` (without it a line in a notebook
            or on a terminal), ``clock``, ``predict``, ``try_candidates``.

    Raises:
        OptionError: ``budget_s`` is not positive.
        CheckError: while iterating, if the loader yields no batch.
    """
    line = ProgressLine(sys.stdout)
    shown = line if line.rewrites else None
    check = Check(loader, **{**options, "progress": options.get("progress") or shown})
    # Our loader counts its epochs for seed=; those of the check must not count.
    counted = loader._iterations if isinstance(loader, DataLoader) else None
    with random_states_kept(*generators_of(loader)):
        try:
            yield check
        except Exception as error:
            if not check.failed(error):
                raise
        finally:
            check.close()
            line.close()
            if counted is not None:
                loader._iterations = counted


def check_bottleneck(loader: Any, step: Callable[[Batch], object], **options: Any) -> Report:
    """Report whether the input pipeline holds ``step`` back, by how much, and where time goes.

    Runs ``step(batch)`` on real and on resident batches in short interleaved blocks.

    Args:
        loader, options: as in `bottleneck_check`.
        step: a function of one batch, as the loader delivers it, which copies the batch to its
            device unless the loader does.

    Raises:
        OptionError: ``budget_s`` is not positive.
        CheckError: the loader yields no batch.
        Exception: whatever the loader or the step raises. After KeyboardInterrupt the report so
            far is the exception's attribute ``report``.
    """
    with bottleneck_check(loader, **options) as check:
        try:
            for batch in check:
                try:
                    step(batch)
                except Exception as error:
                    if not check.failed(error):
                        raise
        except KeyboardInterrupt as interrupt:
            interrupt.report = check.report()  # type: ignore[attr-defined]
            raise
    return check.report()
