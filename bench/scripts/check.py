"""``dataloaders check`` on whole scripts: does it work, what does it say, what is true?

check   python -m dataloaders check [--budget S] SCRIPT
truth   python -m bench.scripts.check SCRIPT: the rate of the script's own loop on held batches
        over that on its own ones, in turns
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

from bench.harness import Cell, Result

BAR = "no wrong verdict, no failure, at most one in ten inconclusive"
_INPUT_FROM, _STEP_UP_TO = 1.05, 1.08  # the check's margins
_PAIRS = 3
_TO_END_S = 30
_VALIDATES_FROM = 20  # times a mean step; the check leaves out such steps, too
_INPUT_BOUND = ("input-bound", "transfer-bound", "contention-bound")


@dataclass(frozen=True)
class Script:
    """A script and how its truth is found.

    Attributes:
        name: in the table.
        command: what follows ``dataloaders check``.
        folder: where it runs.
        path: folders that it imports from.
        spawns: whether child processes train, so that its truth cannot be found.
    """

    name: str
    command: tuple[str, ...]
    folder: Path
    path: tuple[str, ...] = ()
    spawns: bool = False

    def run(self, words: tuple[str, ...], most_s: float) -> subprocess.CompletedProcess[str]:
        """Return what ``python *words`` gives; its status is 124 if it does not end in time."""
        here = str(Path(__file__).resolve().parents[2])
        path = [*self.path, here, *filter(None, [os.environ.get("PYTHONPATH")])]
        command = [sys.executable, *words]
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(
                command, cwd=self.folder, stdout=output, stderr=errors, start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
            )  # fmt: skip
            try:
                status = process.wait(most_s)
            except subprocess.TimeoutExpired:
                status = 124
                os.killpg(process.pid, signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_TO_END_S)
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            output.seek(0)
            errors.seek(0)
            return subprocess.CompletedProcess(command, status, output.read(), errors.read())

    def truths(self) -> tuple[float, ...]:
        """Return steps a second on held batches / as it is, by pair; NaN if not counted."""
        if self.spawns:
            return (math.nan,)
        shown = self.run(("-m", "bench.scripts.check", *self.command), 600).stdout
        found = re.search("truth: ([0-9. ]+)", shown)
        return tuple(map(float, found[1].split())) if found else (math.nan,)


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
        "failed": done.returncode != 0,
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
            f"Truth: steps a second on held batches / as it is, {_PAIRS} pairs in turn; of "
            f"{marks['unknown']} it is unknown; of {marks['close']} it is within the check's "
            "margins, or its runs differ by as much: there, neither verdict is wrong and none is "
            "asked for.",
        ),
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
    with Scratch(lambda: takeover.optimizers.steps > 0), takeover:
        Target(words[0], "file").run(words[1:])
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
