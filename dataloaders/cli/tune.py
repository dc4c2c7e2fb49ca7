"""``dataloaders tune``: a script's own loop as the step, settings or backends tried on its loader.

--backends:  check ──> candidates that may gain ──> each in turns ──> the best is remembered
"""

from __future__ import annotations

import inspect
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dataloaders import registry
from dataloaders.batches.tree import Batch
from dataloaders.cli.running import (
    NOTHING_MEASURED,
    no_loader,
    refuse_missing_folders,
    refuse_unfit,
    run_shown,
    say_that_it_trains,
    untouched_files,
)
from dataloaders.errors import DataLoadersError, OptionError, last_line
from dataloaders.loader import BACKEND_VARIABLE, DataLoader, wrap
from dataloaders.measuring.progress import ProgressLine
from dataloaders.scripts.takeover import Takeover
from dataloaders.scripts.target import Target
from dataloaders.tuning import Progress, Settings, Tuning
from dataloaders.tuning.tuner import Tuner

if TYPE_CHECKING:
    from dataloaders.bottleneck import Check, Report

_LEAST_GAIN = 1.03
_CHECK_SHARE = 0.4  # of the budget, for the prediction


def carry_out(target: Target, args: list[str], options: Namespace) -> int:
    """Run ``target``, tune its loader with its own loop as the step, print the trials.

    A loader that names no backend is tuned for that of the options, else for that of the
    environment. Returns 0 if a choice was made; 130 after Ctrl-C, when what was known by then is
    printed; else as `check`.
    """
    if options.cache is not None and not options.backends:
        raise OptionError("--cache is for --backends, which tries that cache; give both")
    refuse_missing_folders(options.json, options.cache)
    refuse_unfit(target, "tune")
    if options.backend is not None:
        registry.load(options.backend)
        os.environ[BACKEND_VARIABLE] = options.backend
    line = ProgressLine(quiet=options.quiet)
    tunings: list[Tuning] = []  # as known so far; the last one counts
    running: list[Generator[Batch, None, None]] = []
    checks: list[Check] = []  # for --backends
    predicted: list[str] = []
    finished = False

    def told(progress: Progress) -> None:
        tunings.append(progress.so_far)
        line(f"tune  {progress.seconds:.0f} of {progress.budget_s:.0f} s  {progress.doing}")

    def tuned(loader: Any, iterate: Any) -> Generator[Batch, None, None]:
        nonlocal finished
        budget_s = options.budget
        ways: dict[Settings, str] = {}
        loader, iterate = _as_tuned(loader, iterate, stock=options.backends)
        if options.backends:
            from dataloaders.bottleneck import Check

            check_s = _CHECK_SHARE * budget_s
            check = Check(loader, budget_s=check_s, iterate=iterate, progress=line)
            checks.append(check)
            try:
                yield from check
            finally:
                check.close()
            cache = options.cache and os.path.abspath(options.cache)
            ways, said = _ways(loader, check.report(), cache, line)
            predicted.extend(said)
            budget_s -= check_s
        tuner = Tuner(loader, budget_s, progress=told, ways=ways)
        tunings.append((yield from tuner.run()))
        finished = True

    def waited(name: str, seconds: float) -> None:
        if checks and not checks[0].finished:
            checks[0].waited_elsewhere(name, seconds)

    def measure(loader: Any, iterate: Any) -> Generator[Batch, None, None]:
        running.append(tuned(loader, iterate))
        return running[0]

    say_that_it_trains(target, "tune", quiet=options.quiet)
    takeover = Takeover(
        measure, options.loader, waited=waited, passed_over=lambda text: line(f"tune  {text}")
    )
    with untouched_files(takeover, let_write=options.let_write) as scratch, takeover:
        outcome = run_shown(target, args, line)
    for steps in running:
        if inspect.getgeneratorstate(steps) != inspect.GEN_RUNNING:  # in a thread of the script's
            steps.close()  # a trial under way, with its workers, if the script's loop ended first
    if takeover.taken is None:
        return no_loader(takeover, outcome)
    how = "interrupted" if outcome.ending == "interrupted" else "the script's loop ended"
    if not tunings:
        if checks:
            print(checks[0].report())
        print(f"{how} after {takeover.steps} steps, before anything was tried", file=sys.stderr)
        return outcome.status or NOTHING_MEASURED
    tuning = tunings[-1]
    notes = [] if scratch is None else scratch.notes()
    if not finished:
        notes.insert(0, f"{how} after {takeover.steps} steps; this is what was known by then")
    if options.quiet:
        print(tuning.choice)
    else:
        print(*predicted, tuning, sep="\n")
        print(f"note: tuned loader {takeover.taken.number}: {takeover.taken.description}")
        _print_change(tuning, backends=options.backends)
        print(*(f"note: {sentence}\n" for sentence in notes), sep="", end="")
    if options.json is not None:
        tuning.to_json(options.json)
    return outcome.status


def _as_tuned(loader: Any, iterate: Any, *, stock: bool) -> tuple[Any, Any]:
    """Return what is tuned, and what makes its iterators; None: its own ``__iter__``.

    It is a loader as `run` has it: with a backend in the environment, wrapped by ours. Backends
    are compared with ``stock`` where the loader itself names none.
    """
    if isinstance(loader, DataLoader):
        if not stock or loader._wanted_backend() != "auto":
            return loader, iterate
        return wrap(loader, backend="stock", device=loader.device), None
    if stock:
        return wrap(loader, backend="stock"), iterate
    return (wrap(loader) if os.environ.get(BACKEND_VARIABLE) else loader), iterate


def _ways(
    loader: Any, report: Report, cache: str | None, line: Callable[[str], None]
) -> tuple[dict[Settings, str], list[str]]:
    """Return the settings worth a trial, the loader's own first, and what was predicted."""
    from dataloaders.predicting import settings_of

    ways: dict[Any, str] = {settings_of(loader, {}): "the loader as it is"}
    said = ["what each change would gain, as predicted:"]
    if not report.candidates:
        said = [f"{report.verdict}: no change of the input is predicted to gain anything"]
        said += [f"note: {note}" for note in report.notes]
    for one in sorted(report.candidates, key=lambda one: (one.build_s > 0, len(one.options))):
        gain = one.predicted
        text = one.reason or ("not known" if gain is None else f"{gain:.2f} x")
        said.append(f"  {one.name:<20} {text}")
        if gain is None or gain.high < _LEAST_GAIN or one.reason or not one.options:
            continue
        if one.name == "persistent_workers":
            said[-1] += "; not tried: a trial's epoch does not end"
            continue
        try:
            images = one.options.get("images")
            path = cache and (str(Path(cache).with_suffix(f".{images}.h5")) if images else cache)
            settings = settings_of(loader, one.options, path)
            if settings is None:
                said[-1] += "; tried with --cache FILE only"
                continue
            if one.build_s:
                line(f"tune  {path} is opened, or built if it is missing")
                store: Any = settings.backend  # h5, or prefetch with it inside
                getattr(store, "inner", store).cached(loader)
            ways.setdefault(settings, f"{one.name}, predicted {gain.estimate:.2f} x")
        except DataLoadersError as error:
            said[-1] += f"; not tried: {last_line(error)}"
    return ways, [*said, ""]


def _print_change(tuning: Tuning, *, backends: bool) -> None:
    if tuning.choice == tuning.given:
        print("\nnothing to change: this is what the loader has")
        return
    choice = tuning.choice
    unpinned = tuning.given.pin_memory and not choice.pin_memory
    print("\nthe line to change:")
    print(f"    DataLoader(..., {choice}{', pin_memory=False' if unpinned else ''})")
    if tuning.remembered is None:
        return
    auto = 'num_workers="auto", prefetch_factor="auto", pin_memory="auto"'
    if backends:
        print("or, as it is remembered for this script:")
        print(f'    DataLoader(..., {auto}, backend="auto")')
    elif choice.backend is not None:
        print("or, as it is remembered, with the backend's options left to it:")
        print(f"    DataLoader(..., backend={choice.backend.name!r})")
        print(f"    dataloaders run --backend {choice.backend.name} SCRIPT")
    else:
        print("or, as it is remembered, with our DataLoader:")
        print(f"    DataLoader(..., {auto})")
