"""What the subcommands that run a script do, from their options to their exit status."""

from __future__ import annotations

import inspect
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dataloaders.errors import DataLoadersError, OptionError

if TYPE_CHECKING:
    from collections.abc import Generator

    from dataloaders.batches.tree import Batch
    from dataloaders.bottleneck import Report
    from dataloaders.cli.progress import ProgressLine
    from dataloaders.scripts.takeover import Measure, Takeover
    from dataloaders.scripts.target import Outcome, Target
    from dataloaders.tuning import Progress, Tuning

__all__ = ["NO_LOADER", "check", "run", "tune"]

NO_LOADER = 21
"""Exit status when the script ended without a loader that could be taken over."""


def check(
    target: Target,
    args: list[str],
    *,
    budget_s: float,
    number: int | None = None,
    json: str | None = None,
    html: str | None = None,
    quiet: bool = False,
) -> int:
    """Run ``target`` with one of its loaders taken over by the check; print the report.

    Returns the verdict's exit status; the script's own if it failed before its epoch was
    prolonged; `NO_LOADER` if no loader could be taken over; 130 after Ctrl-C.
    """
    from dataloaders.bottleneck import Check
    from dataloaders.cli.progress import ProgressLine

    _refuse_hidden(target)
    _refuse_missing_folders(json, html)
    line = ProgressLine(quiet=quiet)
    checks: list[Check] = []

    def measure(loader: Any, iterate: Any) -> Check:
        checks.append(Check(loader, budget_s=budget_s, iterate=iterate, progress=line))
        return checks[0]

    takeover, outcome = _run_taken_over(target, args, measure, number, line)
    if not checks:
        return _no_loader(takeover, outcome)
    report = checks[0].report()
    checks[0].close()
    _print_report(report, quiet=quiet)
    if not quiet:
        for sentence in _how_it_ended(takeover, outcome, checks[0].finished):
            print(f"note: {sentence}")
    if json is not None:
        report.to_json(json)
    if html is not None:
        report.to_html(html)
    if outcome.ending == "interrupted":
        return outcome.status
    if outcome.status != 0 and not checks[0].finished and not takeover.beyond:
        return outcome.status
    return report.exit_status


def run(target: Target, args: list[str], *, backend: str, explain: bool = False) -> int:
    """Run ``target`` with its loaders on ``backend``; returns the script's own exit status."""
    from dataloaders import registry
    from dataloaders.loader import BACKEND_VARIABLE
    from dataloaders.scripts.switch import BackendSwitch
    from dataloaders.scripts.takeover import replaced_iter

    _refuse_hidden(target)
    registry.load(backend)  # a wrong name or a missing package is told before the script starts
    os.environ[BACKEND_VARIABLE] = backend
    with replaced_iter(BackendSwitch(explain=explain)):
        outcome = target.run(args)
    outcome.show_error()
    return outcome.status


def tune(
    target: Target,
    args: list[str],
    *,
    budget_s: float,
    number: int | None = None,
    backend: str | None = None,
    json: str | None = None,
    quiet: bool = False,
) -> int:
    """Run ``target``, tune its loader with its own loop as the step, print the trials.

    A loader that names no backend is tuned for ``backend``, else for that of the environment.

    Returns 0 if a choice was made; after Ctrl-C 130, and what was known by then is printed;
    else as `check`.
    """
    from dataloaders import registry
    from dataloaders.cli.progress import ProgressLine
    from dataloaders.loader import BACKEND_VARIABLE
    from dataloaders.tuning.run import tuning_steps

    _refuse_hidden(target)
    _refuse_missing_folders(json)
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

    takeover, outcome = _run_taken_over(target, args, measure, number, line)
    for steps in running:
        if inspect.getgeneratorstate(steps) != inspect.GEN_RUNNING:  # in a thread of the script's
            steps.close()  # a trial under way, with its workers, if the script's loop ended first
    if takeover.taken is None:
        return _no_loader(takeover, outcome)
    if not tunings:
        print(
            f"the script ended after {takeover.steps} steps, too few to tune for", file=sys.stderr
        )
        return outcome.status or NO_LOADER
    tuning = tunings[-1]
    _print_tuning(tuning, takeover, quiet=quiet)
    if not finished and not quiet:
        how = "interrupted" if outcome.ending == "interrupted" else "the script's loop ended"
        print(f"note: {how} after {takeover.steps} steps; this is what was known by then")
    if json is not None:
        tuning.to_json(json)
    return outcome.status


def _as_run(loader: Any) -> Any:
    """``loader`` as `run` has it: with a backend in the environment, ours around torch's."""
    from dataloaders.loader import BACKEND_VARIABLE, DataLoader, wrap

    if isinstance(loader, DataLoader) or not os.environ.get(BACKEND_VARIABLE):
        return loader
    return wrap(loader)


def _run_taken_over(
    target: Target, args: list[str], measure: Measure, number: int | None, line: ProgressLine
) -> tuple[Takeover, Outcome]:
    from dataloaders.scripts.takeover import Takeover

    with Takeover(measure, number) as takeover:
        try:
            outcome = target.run(args)
        finally:
            line.close()
    sys.stdout.flush()
    outcome.show_error()
    return takeover, outcome


def _refuse_hidden(target: Target) -> None:
    from dataloaders.scripts.target import hidden_by

    hidden = hidden_by(target.folder, "dataloaders")
    if hidden is not None:
        raise DataLoadersError(
            f"{hidden} has the same name as this package, {Path(__file__).resolve().parents[1]}: "
            f"{target.name} can import only one of them as 'dataloaders'; rename yours"
        )


def _refuse_missing_folders(*paths: str | None) -> None:
    for path in paths:
        if path is not None and not Path(path).resolve().parent.is_dir():
            raise OptionError(
                f"{path!r}: the folder {str(Path(path).resolve().parent)!r} does not exist; "
                "make it first, or write elsewhere"
            )


def _no_loader(takeover: Takeover, outcome: Outcome) -> int:
    if outcome.ending == "interrupted":
        return outcome.status
    lines = [f"no loader was taken over; the script iterated {len(takeover.seen)} of them"]
    lines += [f"  {seen.number}. {seen.description}: {seen.why_not}" for seen in takeover.seen]
    if takeover.seen:
        lines.append("choose one with --loader N, its number in this list")
    else:
        lines.append(
            "only loops over torch.utils.data.DataLoader and its subclasses can be taken over; "
            "for any other, call dataloaders.check_bottleneck(loader, step) in the script"
        )
    print("\n".join(lines), file=sys.stderr)
    return outcome.status or NO_LOADER


def _print_report(report: Report, *, quiet: bool) -> None:
    if quiet:
        bound = report.speedup_bound
        print(report.verdict if bound is None else f"{report.verdict} {bound:.2f}")
    elif sys.stdout.isatty():
        from rich.console import Console

        Console().print(report)
    else:
        print(report)


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


def _how_it_ended(takeover: Takeover, outcome: Outcome, enough: bool) -> list[str]:
    assert takeover.taken is not None
    steps = takeover.steps
    sentences = [f"measured in loader {takeover.taken.number}: {takeover.taken.description}"]
    if enough:
        sentences.append(f"the script was ended after {steps} steps of its loop")
    elif outcome.ending == "interrupted":
        sentences.append(f"interrupted after {steps} steps; this is what was known by then")
    elif outcome.ending == "raised":
        sentences.append(f"the script failed after {steps} steps; this is what was known by then")
    else:
        sentences.append(
            f"the script ended by itself after {steps} steps, before enough was measured; "
            "give it more epochs, or a smaller --budget"
        )
    if takeover.beyond and outcome.ending == "raised":
        sentences.append(
            f"its epoch had been prolonged by {takeover.beyond} batches, which the script may not "
            "expect (a schedule of fixed length, a list filled by batch number): "
            "its failure may come from that; a smaller --budget prolongs less"
        )
    return sentences
