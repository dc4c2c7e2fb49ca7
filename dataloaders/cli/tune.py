"""``dataloaders tune``: try worker settings on a script's loader, with its own loop as the step.

With ``--backends`` it is a check that tries what its predictions leave open and keeps the best.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Generator
from contextlib import suppress
from typing import Any

from dataloaders.batches.tree import Batch
from dataloaders.cli.running import (
    NOTHING_MEASURED,
    begin_measuring,
    no_loader,
    run_shown,
    untouched_files,
)
from dataloaders.errors import OptionError
from dataloaders.loader import BACKEND_VARIABLE, DataLoader, wrap
from dataloaders.measuring.progress import ProgressLine
from dataloaders.scripts.takeover import Takeover
from dataloaders.scripts.target import Target
from dataloaders.tuning import Progress, Tuning
from dataloaders.tuning.tuner import Tuner


def carry_out(target: Target, args: list[str], options: Namespace) -> int:
    """Run ``target``, tune its loader with its own loop as the step, and print the trials.

    A loader that names no backend is tuned for the environment's. Returns 0 if a choice was made,
    130 after Ctrl-C, with what was known by then printed; else as `check`.
    """
    if options.backends:
        from dataloaders.cli import check  # which needs psutil and rich

        return check.carry_out(target, args, options)
    if options.cache is not None:
        raise OptionError("--cache is for --backends, which tries that cache; give both")
    begin_measuring(target, "tune", options.json, quiet=options.quiet)
    line = ProgressLine(quiet=options.quiet)
    tunings: list[Tuning] = []  # before each trial; the last one counts
    running: list[Generator[Batch, None, Any]] = []
    finished = False

    def show(progress: Progress) -> None:
        tunings.append(progress.so_far)
        line(f"tune  {progress.seconds:.0f} of {progress.budget_s:.0f} s  {progress.doing}")

    def tuned(loader: Any) -> Generator[Batch, None, None]:
        nonlocal finished
        if os.environ.get(BACKEND_VARIABLE) and not isinstance(loader, DataLoader):
            loader = wrap(loader)
        tunings.append((yield from Tuner(loader, options.budget, progress=show).run()))
        finished = True

    def measure(loader: Any, iterate: Any) -> Generator[Batch, None, None]:
        running.append(tuned(loader))
        return running[0]

    takeover = Takeover(measure, options.loader, passed_over=lambda text: line(f"tune  {text}"))
    with untouched_files(takeover, let_write=options.let_write) as scratch, takeover:
        outcome = run_shown(target, args, line)
    for steps in running:
        with suppress(ValueError):  # it runs in a thread of the script
            steps.close()  # ends the workers of a trial that the script's loop left
    if takeover.taken is None:
        return no_loader(takeover, outcome)
    how = "interrupted" if outcome.ending == "interrupted" else "the script's loop ended"
    if not tunings:
        print(f"{how} after {takeover.steps} steps, before anything was tried", file=sys.stderr)
        return outcome.status or NOTHING_MEASURED
    tuning = tunings[-1]
    notes = [f"tuned loader {takeover.taken.number}: {takeover.taken.description}"]
    if not finished:
        notes.append(f"{how} after {takeover.steps} steps; this is what was known by then")
    notes += [] if scratch is None else scratch.notes()
    if options.quiet:
        print(tuning.choice)
    else:
        print(tuning)
        print(*(f"note: {sentence}\n" for sentence in notes), sep="", end="")
        _print_change(tuning)
    if options.json is not None:
        tuning.to_json(options.json)
    return outcome.status


def _print_change(tuning: Tuning) -> None:
    if tuning.choice == tuning.given:
        print("\nnothing to change: this is what the loader has")
        return
    unpinned = tuning.given.pin_memory and not tuning.choice.pin_memory
    print("\nthe line to change:")
    print(f"    DataLoader(..., {tuning.choice}{', pin_memory=False' if unpinned else ''})")
    if tuning.remembered is not None:
        auto = 'num_workers="auto", prefetch_factor="auto", pin_memory="auto"'
        print("or, as it is remembered, with our DataLoader:")
        print(f"    DataLoader(..., {auto})")
