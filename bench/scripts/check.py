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
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness import Cell, Result, Scale, case
from bench.scripts.loop_shapes import SHAPES

BAR = "no wrong verdict, no failure, at most one in ten inconclusive, no finding in ours"
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


def examined(script: Script, budget_s: float) -> tuple[tuple[Cell, ...], Counter[str]]:
    """Check ``script``, then find its truth; return its row, and 1 for each mark that it gets.

    A verdict is wrong if all pairs of runs contradict it. Where the truth lies between the check's
    margins it is close: both verdicts are right, and none is asked for.
    """
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "report.json")
        words = ("-m", "dataloaders", "check", "--quiet", "--no-predict", "--budget",
                 f"{budget_s:g}", "--json", str(result), *script.command)  # fmt: skip
        done = script.run(words, 120 + 10 * budget_s)
        report = json.loads(result.read_text()) if result.is_file() else {}
    took = time.perf_counter() - began
    if not report:
        print(f"{script.name}: {done.stderr[-400:]}", file=sys.stderr)
    verdict, bound = report.get("verdict", "none"), report.get("speedup_bound")
    findings = [one["name"] for one in report.get("findings", ())]
    truths = script.truths()
    low, middle, high = min(truths), statistics.median(truths), max(truths)
    known = not math.isnan(sum(truths))
    close = low < _STEP_UP_TO and high > _INPUT_FROM
    wrong = high < _INPUT_FROM if verdict in _INPUT_BOUND else low > _STEP_UP_TO
    marks = {
        "wrong": wrong and verdict in ("step-bound", *_INPUT_BOUND),
        "failed": done.returncode != 0 or (script.ours and findings),
        "inconclusive": verdict in ("inconclusive", "none") and not close,
        "close": close,
        "unknown": not known,
    }
    row = (
        script.name,
        "yes" if done.returncode == 0 else f"status {done.returncode}",
        verdict,
        "{estimate:.2f} ({low:.2f} to {high:.2f})".format(**bound) if bound else "",
        f"{middle:.2f} ({low:.2f} to {high:.2f})" if known else None,
        ", ".join(findings),
        round(took, 1),
    )
    return row, Counter(mark for mark, given in marks.items() if given)


@case(BAR)
def scripts(scale: Scale, folder: Path) -> Result:
    """Is the check right on whole training scripts?"""
    shapes = scale.named(SHAPES, ["plain"])
    loads = scale.pick(
        full=[(1.0, 20.0, 0), (20.0, 20.0, 0), (20.0, 20.0, 2)], tiny=[(5.0, 5.0, 0)]
    )
    steps = scale.pick(full=120, tiny=10)
    scripts = [of_ours(name, *load, steps) for name in shapes for load in loads]
    return compared(scripts, scale.pick(full=20.0, tiny=1.0))


def compared(scripts: list[Script], budget_s: float) -> Result:
    """Return what the check says of each script, beside its truth."""
    rows, marks = [], Counter[str]()
    for script in scripts:
        row, its = examined(script, budget_s)
        rows.append(row)
        marks += its
    return Result(
        headings=("script", "works", "verdict", "real / synthetic", "truth", "findings", "s"),
        rows=tuple(rows),
        met=not (marks["wrong"] or marks["failed"]) and marks["inconclusive"] <= len(rows) / 10,
        notes=(
            f"{len(rows)} scripts: {marks['wrong']} wrong, {marks['failed']} failed, "
            f"{marks['inconclusive']} inconclusive. "
            f"Truth: steps a second with free input / as it is, {_PAIRS} pairs in turn; of "
            f"{marks['unknown']} it is unknown; of {marks['close']} it is within the check's "
            "margins, or its runs differ by as much: there, neither verdict is wrong and none is "
            "asked for.",
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


if __name__ == "__main__":
    _brute_force(sys.argv[1:])
