"""``dataloaders check``: measure a script's own loop on real and on synthetic input, in turns."""

from __future__ import annotations

import functools
import importlib
import os
import shutil
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from dataloaders.bottleneck import Check, Report
from dataloaders.cli.remembering import BestWay, without_auto
from dataloaders.cli.running import (
    begin_measuring,
    no_loader,
    run_shown,
    streams_kept,
    untouched_files,
)
from dataloaders.measuring.progress import ProgressLine
from dataloaders.scripts.children import children_run_by
from dataloaders.scripts.ranks import Ranks, announce, straggler
from dataloaders.scripts.scratch import Scratch
from dataloaders.scripts.stopping import SIGNAL, stop
from dataloaders.scripts.takeover import Takeover
from dataloaders.scripts.target import Outcome, Target, executed

_FORMS = ("json", "html", "markdown", "trace")
_PREFIX = "dataloaders-status-"
_DAY_S = 86400


def carry_out(target: Target, args: list[str], options: Namespace) -> int:
    """Run ``target`` with one of its loaders taken over by the check; print the report.

    Returns 0 whatever the verdict is, 1 if ``--fail-if`` names it, 3 if nothing could be measured,
    130 after Ctrl-C; the script's own status if it failed before the check prolonged its epoch.
    """
    if options.against is not None:
        options.against = Report.from_json(options.against)  # or refused now
    if options.html is not None:
        importlib.import_module("dataloaders.bottleneck.outputs.page")  # or refused now
    if os.environ.get("RANK", "0") != "0":
        options.quiet = True
    if options.quiet and not (options.try_candidates or _written(options)):
        options.predict = False  # nobody would read it
    paths = *_written(options).values(), options.cache
    begin_measuring(target, options.command, *paths, quiet=options.quiet)
    _remove_left_over()
    with tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as at:
        measuring = _Measuring(options, Path(at, "status"))
        in_child = functools.partial(_check_in_child, options, measuring.result, os.getpid())
        with children_run_by(in_child) as children, measuring.watched():
            outcome = run_shown(target, args, measuring.line, measuring.shows)
        status = None if measuring.checks else measuring.status_of_child()
        for child in children:
            if child.is_alive():
                child.terminate()
    if measuring.checks:
        return measuring.conclude(outcome)
    if status is not None:
        return status
    return no_loader(measuring.takeover, outcome, len(children))


def _remove_left_over() -> None:
    """Remove the folders of checks that were killed, more than a day ago."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another user's, or removed by another check
            if time.time() - folder.stat().st_mtime > _DAY_S:
                shutil.rmtree(folder)


def _check_in_child(
    options: Namespace,
    result: Path,
    parent: int,
    target: Callable[..., object],
    args: tuple[Any, ...],
    keywords: dict[str, Any],
) -> None:
    """Run one process of the script with a loader of it taken over; notify the parent."""
    measuring = _Measuring(options, result)
    with measuring.watched(), streams_kept():
        outcome = executed(lambda: target(*args, **keywords))
    measuring.line.close()
    if measuring.checks:
        status = measuring.conclude(outcome)
        if measuring.reports:
            sys.stdout.flush()
            result.write_text(f"{status}\n")
            os.kill(parent, SIGNAL)  # it may wait for this process for ever
        if measuring.checks[0].finished or measuring.ranks is not None:
            return
    if outcome.error is not None:
        raise outcome.error


class _Measuring:
    """Does the part of one process in a check: the takeover and the report."""

    def __init__(self, options: Namespace, result: Path) -> None:
        self.checks: list[Check] = []  # one, once a loader is taken
        self.ranks: Ranks | None = None  # the others, if the process is one of several
        self.line = ProgressLine(quiet=options.quiet)
        self.result = result  # a file made only by the process whose loader is measured
        self._options = options
        self._scratch: Scratch | None = None
        self._best_way: BestWay | None = None  # of the loader, for ``tune --backends``
        self.takeover = Takeover(
            self._measure,
            options.loader,
            may_take=self._may_take,
            waited=lambda name, seconds: self.checks[0].waited_elsewhere(name, seconds),
            passed_over=lambda text: self.line(f"check  {text}"),
            stuck=self._end_at_once,
            patience_s=2 * options.budget,
        )

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the loops of this process and protect its old files, in the block."""
        let_write = self._options.let_write
        with untouched_files(self.takeover, let_write=let_write) as self._scratch, self.takeover:
            optimizers = self.takeover.optimizers
            announcing = register_optimizer_step_post_hook(
                lambda *_: announce() if optimizers.steps == 1 else None
            )
            try:
                yield
            finally:
                announcing.remove()

    @property
    def reports(self) -> bool:
        """Whether this process prints the report: it is alone, or rank 0."""
        return self.ranks is None or self.ranks.rank == 0

    def shows(self, error: BaseException | None) -> bool:
        """Return whether a failure is the script's own, not due to the check or to rank 0's end."""
        if error is not None and self.checks and self.checks[0].failed(error):
            return False
        return self.ranks is None or self.reports or not self.ranks.rank_0_ended

    def conclude(self, outcome: Outcome) -> int:
        """Print the report, with what other ranks found; return the exit status."""
        takeover, options, check = self.takeover, self._options, self.checks[0]
        if outcome.error is not None and check.failed(outcome.error):
            outcome = replace(outcome, ending="stopped", status=0, error=None)
        report = check.report()
        check.close()
        notes = [*_how_it_ended(takeover, outcome, check.finished)]
        if self.ranks is not None:
            all_ranks = self.ranks.gather({"rank": self.ranks.rank, "wait_s": check.wait_s})
            notes += straggler(all_ranks, self.ranks.size)
        if not self.reports:
            return 0
        notes += [] if self._scratch is None else self._scratch.notes()
        _show(report, notes, options)
        if self._best_way is not None and check.finished:
            print(self._best_way.remember(report))
        if outcome.ending == "interrupted":
            return outcome.status
        if outcome.status != 0 and not check.finished and not takeover.beyond:
            return outcome.status
        return int(report.verdict in options.fail_if)

    def status_of_child(self) -> int | None:
        """Return the exit status that a process of the script found; None if none measured."""
        try:
            return int(self.result.read_text())
        except (OSError, ValueError):  # not there, or without a result
            return None

    def _may_take(self) -> bool:
        """Return whether this process measures: every rank does, else the first process to ask."""
        self.ranks = Ranks.here(patience_s=max(60.0, 2 * self._options.budget))
        if self.ranks is not None:
            if self.ranks.rank:
                self.line = ProgressLine(quiet=True)
            if not self.ranks.all_watched():
                size = self.ranks.size
                self.takeover.left_for = (
                    f"is one of {size} ranks, and no check watches the others: start all of them "
                    f"by torchrun --nproc-per-node {size} -m dataloaders check train.py"
                )
                stop()
            return True
        try:
            self.result.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _end_at_once(self) -> None:
        """Print the report and end this process, whose script catches what should end it."""
        if self._scratch is not None:
            self._scratch.__exit__()
        with redirect_stdout(sys.__stdout__), redirect_stderr(sys.__stderr__):
            status = self.conclude(Outcome("stopped", 0))
            sys.stdout.flush()
        os._exit(status)

    def _measure(self, loader: Any, iterate: Any) -> Check:
        options, budget_s, cache = self._options, self._options.budget, self._options.cache
        trying = options.try_candidates
        if options.remember:
            loader, iterate = without_auto(loader, iterate)
            self._best_way = BestWay(loader, cache)
            trying = self._best_way.left_open
            budget_s /= 2  # the trials take about as long as the check
        check = Check(
            loader,
            budget_s=budget_s,
            iterate=iterate,
            progress=self.line,
            predict=options.predict,
            try_candidates=trying,
            cache=cache,
            only_epoch=True,
            before=lambda: self.takeover.before,
            agree=None if self.ranks is None else self.ranks.agree,
        )
        self.checks.append(check)
        return check


def _written(options: Namespace) -> dict[str, str]:
    """Return the files to write, by the form of the report."""
    return {form: path for form in _FORMS if (path := getattr(options, form)) is not None}


def _show(report: Report, notes: list[str], options: Namespace) -> None:
    """Print the report with ``notes``, and write its other forms."""
    import rich  # if it were missing, the check would have said so

    whole = replace(report, notes=(*report.notes, *notes))
    before, written = options.against, _written(options)
    if written.get("markdown") == "-":
        del written["markdown"]
        print(whole.to_markdown(against=before), end="")
    elif options.quiet:
        bound = report.speedup_bound
        print(report.verdict if bound is None else f"{report.verdict} {bound:.2f}")
    else:
        if before is not None:
            print(whole.against(before), end="\n\n")
        if sys.stdout.isatty():
            rich.get_console().print(whole, crop=False)
        else:
            print(whole)
    for form, path in written.items():
        beside = {"against": before} if form in ("html", "markdown") else {}
        getattr(whole, f"to_{form}")(path, **beside)


def _how_it_ended(takeover: Takeover, outcome: Outcome, enough: bool) -> list[str]:
    loader, failed = takeover.taken, outcome.ending == "raised"
    assert loader is not None
    after = f"after {takeover.steps} steps"
    so_far = f"{after}; this is what was known by then"
    if enough:
        how = f"the script was ended {after} of its loop"
    elif failed or outcome.ending == "interrupted":
        how = f"{'the script failed' if failed else 'interrupted'} {so_far}"
    elif takeover.left_for is not None:
        how = f"the script left this loop {so_far}; it then {takeover.left_for}"
    else:
        how = f"the script ended by itself {after}, before enough was measured; "
        how += "give it more epochs, or a smaller --budget"
    sentences = [f"measured in loader {loader.number}: {loader.description}", how]
    if takeover.cycled:
        sentences.append(
            "itertools.cycle keeps the batches of the first epoch and issues them again: only that "
            "epoch, which was measured, loads, shuffles and augments; in place of cycle(loader), "
            "write a generator: while True: yield from loader"
        )
    if takeover.beyond and failed:
        sentences.append(
            f"the check prolonged its epoch by {takeover.beyond} batches, which the script may not "
            "expect (a schedule of fixed length, a list filled by batch number): "
            "its failure may come from that; a smaller --budget prolongs less"
        )
    return sentences
