"""``dataloaders check`` on whole scripts: does it work, what does it say, what is true?

    check   python -m dataloaders check [--budget S] SCRIPT
    truth   the script's own steps a second with free input / as it is: median of pairs

These are the shapes of loop_shapes.py, whose load can be set to nothing; third_party.py has scripts
of others. ``python -m bench.scripts.check SCRIPT`` prints the truth of any script, found in turns
within its own loop.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness import Case, Cell, Result, Scale
from bench.scripts.loop_shapes import SHAPES

_INPUT_FROM, _STEP_UP_TO = 1.05, 1.08  # the check's margins
_PAIRS = 3
_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
_TO_END_S = 30
_VALIDATES_FROM = 20  # times a mean step; the check leaves out such steps, too
_INPUT_BOUND = ("input-bound", "transfer-bound", "contention-bound")


@dataclass(frozen=True)
class Script:
    """A script and how its truth is found.

    Attributes:
        name: in the table.
        command: what follows ``dataloaders check``.
        truth: what follows ``python`` to print its steps a second, with input as it is and free; or
            one command, to print their ratios; or none, where child processes train.
        folder: where it runs.
        path: folders that it imports from.
        launcher: what follows ``python`` before all of that.
        ours: whether it is known to be free of what `findings` finds.
    """

    name: str
    command: tuple[str, ...]
    truth: tuple[tuple[str, ...], ...]
    folder: Path = Path()
    path: tuple[str, ...] = ()
    launcher: tuple[str, ...] = ()
    ours: bool = False

    def run(self, words: tuple[str, ...], most_s: float) -> subprocess.CompletedProcess[str]:
        """Return what ``python *words`` gives; its status is 124 if it does not end in time."""
        here = str(Path(__file__).resolve().parents[2])
        path = [*self.path, here, *filter(None, [os.environ.get("PYTHONPATH")])]
        command = [sys.executable, *self.launcher, *words]
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(
                command, cwd=self.folder, stdout=output, stderr=errors, start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
            )  # fmt: skip
            try:
                status = process.wait(most_s)
            except subprocess.TimeoutExpired:
                status = 124
                os.killpg(process.pid, signal.SIGTERM)  # a launcher then ends its ranks
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_TO_END_S)
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            output.seek(0)
            errors.seek(0)
            return subprocess.CompletedProcess(command, status, output.read(), errors.read())

    def truths(self) -> tuple[float, ...]:
        """Return steps a second with free input / as it is, by pair; NaN if not counted."""
        if len(self.truth) < 2:
            shown = "".join(self.run(words, 600).stdout for words in self.truth)
            found = re.search("truth: ([0-9. ]+)", shown)
            return tuple(map(float, found[1].split())) if found else (math.nan,)
        return tuple(self._rate(free) / self._rate(real) for real, free in _PAIRS * [self.truth])

    def _rate(self, words: tuple[str, ...]) -> float:
        found = re.search("steps a second: ([0-9.]+)", self.run(words, 300).stdout)
        return float(found[1]) if found else math.nan


@dataclass(frozen=True)
class Examined:
    """What the check said of a script, and the truth."""

    script: Script
    report: dict[str, Any] | None  # None: nothing was measured
    status: int  # of the check
    seconds: float  # that it took
    truths: tuple[float, ...]  # steps a second with free input / as it is, by pair; NaN: not known

    @property
    def verdict(self) -> str:
        return "none" if self.report is None else str(self.report["verdict"])

    @property
    def findings(self) -> list[str]:
        return [] if self.report is None else [one["name"] for one in self.report["findings"]]

    @property
    def wrong(self) -> bool:
        """Whether all pairs of runs contradict the verdict; an unknown truth says nothing."""
        if self.verdict in _INPUT_BOUND:
            return max(self.truths) < _INPUT_FROM
        return self.verdict == "step-bound" and min(self.truths) > _STEP_UP_TO

    @property
    def close(self) -> bool:
        """Whether the truth lies between the check's margins, so that both verdicts are right."""
        return min(self.truths) < _STEP_UP_TO and max(self.truths) > _INPUT_FROM

    @property
    def known(self) -> bool:
        """Whether the script's own loop could be timed."""
        return not math.isnan(sum(self.truths))

    @property
    def answered(self) -> bool:
        """Whether there is a verdict where there can be one."""
        return self.verdict not in ("inconclusive", "none") or self.close

    @property
    def failed(self) -> bool:
        """Whether the check failed, or saw in a script of ours what is not there."""
        return self.status != 0 or (self.script.ours and bool(self.findings))

    def row(self) -> tuple[Cell, ...]:
        bound = None if self.report is None else self.report["speedup_bound"]
        said = "" if bound is None else "{estimate:.2f} ({low:.2f} to {high:.2f})".format(**bound)
        low, middle, high = min(self.truths), statistics.median(self.truths), max(self.truths)
        truth = None if not self.known else f"{middle:.2f} ({low:.2f} to {high:.2f})"
        works = "yes" if self.status == 0 else f"status {self.status}"
        found = ", ".join(self.findings)
        return (self.script.name, works, self.verdict, said, truth, found, round(self.seconds, 1))


def examined(script: Script, budget_s: float) -> Examined:
    """Check ``script``, then find its truth."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "report.json")
        words = ("-m", "dataloaders", "check", "--quiet", "--no-predict", "--budget",
                 f"{budget_s:g}", "--json", str(result), *script.command)  # fmt: skip
        done = script.run(words, 120 + 10 * budget_s)
        report = json.loads(result.read_text()) if result.is_file() else None
    took = time.perf_counter() - began
    if report is None:
        print(f"{script.name}: {done.stderr[-400:]}", file=sys.stderr)
    return Examined(script, report, done.returncode, took, script.truths())


def run(scale: Scale) -> Result:
    shapes = scale.pick(full=list(SHAPES), tiny=["plain"])
    loads = scale.pick(
        full=[(1.0, 20.0, 0), (20.0, 20.0, 0), (20.0, 20.0, 2)], tiny=[(5.0, 5.0, 0)]
    )
    steps = scale.pick(full=120, tiny=10)
    scripts = [of_ours(name, *load, steps) for name in shapes for load in loads]
    return compared(scripts, scale.pick(full=20.0, tiny=1.0))


def compared(scripts: list[Script], budget_s: float) -> Result:
    """Return what the check says of each script, beside its truth."""
    return result_of([examined(script, budget_s) for script in scripts])


def result_of(found: list[Examined]) -> Result:
    wrong, failed = sum(one.wrong for one in found), sum(one.failed for one in found)
    open_ = sum(not one.answered for one in found)
    close, unknown = sum(one.close for one in found), sum(not one.known for one in found)
    return Result(
        headings=("script", "works", "verdict", "real / synthetic", "truth", "findings", "s"),
        rows=tuple(one.row() for one in found),
        met=wrong == failed == 0 and open_ <= len(found) / 10,
        notes=(
            f"{len(found)} scripts: {wrong} wrong, {failed} failed, {open_} inconclusive. "
            f"Truth: steps a second with free input / as it is, {_PAIRS} pairs in turn; of "
            f"{unknown} it is unknown; of {close} it is within the check's margins, or its runs "
            "differ by as much: there, neither verdict is wrong and none is asked for.",
        ),
    )


def of_ours(name: str, load: float, step: float, workers: int, steps: int) -> Script:
    """Return a shape of `bench.scripts.loop_shapes`; its truth is the rate of ``steps`` steps."""
    steps = min(steps, 40) if name == "one_epoch" else steps

    def words(load: float) -> tuple[str, ...]:
        given = f"--load {load} --step {step} --workers {workers}"
        return ("-m", "bench.scripts.loop_shapes", name, *given.split())

    counted = ("--steps", str(steps))
    return Script(
        f"{name}, load {load:g} ms, step {step:g} ms, {workers} workers",
        words(load),
        ((*words(load), *counted), (*words(0), *counted)),
        launcher=_TORCHRUN if name == "ranks" else (),
        ours=True,
    )


def _brute_force(words: list[str]) -> None:
    """Run a script of others', its loop on real batches and on eight held ones, in turns.

    Prints how many times as fast it is on the held ones. In one process: of two processes on an
    idle machine, one may be a quarter slower than the other in all that it does.
    """
    from dataloaders.scripts.scratch import Scratch
    from dataloaders.scripts.takeover import Takeover
    from dataloaders.scripts.target import Target

    words = [word for word in words if word != "--"]
    ratios: list[float] = []

    def batches(iterate: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        while True:
            yield from iterate()

    def measure(loader: Any, iterate: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        real = batches(iterate)
        held = itertools.cycle([next(real) for _ in range(8)])
        ready = loader.num_workers * (loader.prefetch_factor or 0)
        for _ in range(_PAIRS):
            took = []
            for source in (real, held):
                yield from _steps(source, 4 + ready, 1.0)
                took.append((yield from _steps(source, 16, 3.0)))
            ratios.append(took[0] / took[1])

    takeover = Takeover(measure)
    target = Target(words[1], "module") if words[0] == "-m" else Target(words[0], "file")
    with Scratch(lambda: takeover.optimizers.steps > 0), takeover:
        target.run(words[2:] if words[0] == "-m" else words[1:])
    print("\ntruth:", *ratios or ["no loop over a loader was counted"])


def _steps(source: Iterator[Any], fewest: int, seconds: float) -> Generator[Any, None, float]:
    """Yield batches for so many steps and seconds, or more; return the seconds of a step."""
    began, steps = time.perf_counter(), list[float]()
    while len(steps) < fewest or time.perf_counter() - began < seconds:
        batch = next(source)
        given = time.perf_counter()
        yield batch
        steps.append(time.perf_counter() - given)
    most = _VALIDATES_FROM * statistics.fmean(steps)
    others = [step for step in steps if step > most]
    return (time.perf_counter() - began - sum(others)) / (len(steps) - len(others))


BAR = "no wrong verdict, no failure, at most one in ten inconclusive, no finding in ours"
CASES = [
    Case("scripts", "Is the check right on whole training scripts?", BAR, run),
]

if __name__ == "__main__":
    _brute_force(sys.argv[1:])
