"""``dataloaders tune``: a script's own loop as the step, worker settings tried on its loader."""

from __future__ import annotations

import inspect
import os
import sys
from typing import TYPE_CHECKING, Any

from dataloaders.cli.running import (
    NOTHING_MEASURED,
    no_loader,
    refuse_missing_folders,
    refuse_unfit,
    run_shown,
    say_that_it_trains,
    untouched_files,
)

if TYPE_CHECKING:
    from collections.abc import Generator

    from dataloaders.batches.tree import Batch
    from dataloaders.scripts.takeover import Takeover
    from dataloaders.scripts.target import Target
    from dataloaders.tuning import Progress, Tuning

__all__ = ["tune"]


def tune(
    target: Target,
    args: list[str],
    *,
    budget_s: float,
    number: int | None = None,
    backend: str | None = None,
    json: str | None = None,
    quiet: bool = False,
    let_write: bool = False,
) -> int:
    """Run ``target``, tune its loader with its own loop as the step, print the trials.

    A loader that names no backend is tuned for ``backend``, else for that of the environment.

    Returns 0 if a choice was made; 130 after Ctrl-C, when what was known by then is printed;
    else as `check`.
    """
    from dataloaders import registry
    from dataloaders.cli.progress import ProgressLine
    from dataloaders.loader import BACKEND_VARIABLE
    from dataloaders.scripts.takeover import Takeover
    from dataloaders.tuning.run import tuning_steps

    refuse_missing_folders(json)
    refuse_unfit(target, "tune")
    if backend is not None:
        registry.load(backend)
        os.environ[BACKEND_VARIABLE] = backend
    line = ProgressLine(quiet=quiet)
    tunings: list[Tuning] = []  # as known so far; the last one counts
    running: list[Generator[Batch, None, None]] = []
    finished = False

    def told(progress: Progress) -> None:
        tunings.append(progress.so_far)
        line(f"tune  {progress.seconds:.0f} of {progress.budget_s:.0f} s  {progress.doing}")

    def tuned(loader: Any) -> Generator[Batch, None, None]:
        nonlocal finished
        tuning = yield from tuning_steps(_as_run(loader), budget_s=budget_s, progress=told)
        tunings.append(tuning)
        finished = True

    def measure(loader: Any, iterate: Any) -> Generator[Batch, None, None]:
        running.append(tuned(loader))
        return running[0]

    say_that_it_trains(target, "tune", quiet=quiet)
    takeover = Takeover(measure, number, passed_over=lambda text: line(f"tune  {text}"))
    with untouched_files(takeover, let_write=let_write) as scratch, takeover:
        outcome = run_shown(target, args, line)
    for steps in running:
        if inspect.getgeneratorstate(steps) != inspect.GEN_RUNNING:  # in a thread of the script's
            steps.close()  # a trial under way, with its workers, if the script's loop ended first
    if takeover.taken is None:
        return no_loader(takeover, outcome)
    if not tunings:
        print(
            f"the script ended after {takeover.steps} steps, too few to tune for", file=sys.stderr
        )
        return outcome.status or NOTHING_MEASURED
    tuning = tunings[-1]
    _print_tuning(tuning, takeover, quiet=quiet)
    if not finished and not quiet:
        how = "interrupted" if outcome.ending == "interrupted" else "the script's loop ended"
        print(f"note: {how} after {takeover.steps} steps; this is what was known by then")
    if scratch is not None and not quiet:
        for sentence in scratch.notes():
            print(f"note: {sentence}")
    if json is not None:
        tuning.to_json(json)
    return outcome.status


def _as_run(loader: Any) -> Any:
    """Return ``loader`` as `run` has it: with a backend in the environment, wrapped by ours."""
    from dataloaders.loader import BACKEND_VARIABLE, DataLoader, wrap

    if isinstance(loader, DataLoader) or not os.environ.get(BACKEND_VARIABLE):
        return loader
    return wrap(loader)


def _print_tuning(tuning: Tuning, takeover: Takeover, *, quiet: bool) -> None:
    if quiet:
        print(tuning.choice)
        return
    assert takeover.taken is not None
    print(tuning)
    print(f"note: tuned loader {takeover.taken.number}: {takeover.taken.description}")
    if tuning.choice == tuning.given:
        print("\nnothing to change: this is what the loader has")
        return
    unpinned = tuning.given.pin_memory and not tuning.choice.pin_memory
    arguments = f"{tuning.choice.arguments}{', pin_memory=False' if unpinned else ''}"
    lines = [f"DataLoader(..., {arguments})"]
    if tuning.choice.step_threads is not None:
        lines.append(f"torch.set_num_threads({tuning.choice.step_threads})  # before the loop")
    print(f"\nthe line{'s' * (len(lines) > 1)} to change:")
    for one in lines:
        print(f"    {one}")
    if tuning.choice.step_threads is not None:
        return  # what "auto" has is another choice: a note says so
    if tuning.remembered is not None and tuning.choice.backend is not None:
        print("or, as it is remembered, with the backend's options left to it:")
        print(f"    DataLoader(..., backend={tuning.choice.backend.name!r})")
        print(f"    dataloaders run --backend {tuning.choice.backend.name} SCRIPT")
    elif tuning.remembered is not None:
        print("or, as it is remembered, with our DataLoader:")
        auto = 'num_workers="auto", prefetch_factor="auto", pin_memory="auto"'
        print(f"    DataLoader(..., {auto})")
