"""Does ``dataloaders tune`` choose what makes a script fastest, where its step is CPU work?

    tune bench/step_on_cpu.py ──> choice ─┐
    every number of workers and threads ──┴─> the script itself, run in turns, a process each

Worth its own case since a step that computes with OpenMP threads depends on the process around it:
on other threads, on free cores, on how OpenMP waits.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.harness import Case, Result, Scale
from dataloaders.workers import usable_cores

BAR_RATE = 0.95
BAR_TRUE = 0.15
ROOT = Path(__file__).resolve().parent.parent
SCRIPT = "bench/step_on_cpu.py"

WORKLOADS = {
    "loading is most of it": ("--load-ms", "3"),
    "loading is half of it": ("--load-ms", "1"),
    "loading is little": ("--load-ms", "0.2"),
}


@dataclass(frozen=True)
class Way:
    """How the script is run; ``passive`` is OMP_WAIT_POLICY."""

    workers: int
    threads: int | None = None
    passive: bool = False

    def __str__(self) -> str:
        text = f"{self.workers} workers"
        text += "" if self.threads is None else f", {self.threads} threads"
        return f"{text}, passive" if self.passive else text


def run(scale: Scale) -> Result:
    cores, threads = usable_cores(), torch.get_num_threads()
    load = os.getloadavg()[0]
    most = scale.pick(full=max(4, cores), tiny=1)
    counts = sorted({0, 1, most // 2, (3 * most) // 4, most})
    fewer = sorted({1, max(1, threads // 2), max(1, 3 * threads // 4)} - {threads})
    ways = [Way(count) for count in counts]
    if not scale.tiny:
        ways += [Way(count, few) for count in counts for few in fewer]
        ways += [Way(count, None, True) for count in counts]
    rows, data, met = [], {}, True
    for name, work in list(WORKLOADS.items())[: scale.pick(full=None, tiny=1)]:
        words = [*work, *scale.pick(full=[], tiny=["--side", "16"])]
        found = _tuned(words, scale)
        choice = found["choice"]
        tuned = Way(choice["num_workers"], choice.get("step_threads"))
        rates: dict[Way, list[float]] = {way: [] for way in dict.fromkeys([*ways, tuned])}
        for turn in range(scale.pick(full=3, tiny=1)):
            for way in list(rates)[:: 1 if turn % 2 == 0 else -1]:
                rates[way].append(_rate(words, way, scale))
        medians = {way: statistics.median(each) for way, each in rates.items()}
        own = {way: rate for way, rate in medians.items() if not way.passive}
        best = max(own, key=lambda way: own[way])
        share = medians[tuned] / medians[best]
        said = _said(found)
        passive = max((rate for way, rate in medians.items() if way.passive), default=None)
        rows.append(
            (name, medians[Way(0)], str(tuned), said, medians[tuned], str(best), medians[best],
             share, passive)
        )  # fmt: skip
        data[name] = {
            "tuning": {"reason": found["reason"], "notes": found["notes"]},
            "runs": {str(way): [round(rate, 1) for rate in each] for way, each in rates.items()},
        }
        met = met and share >= BAR_RATE and abs(said / medians[tuned] - 1) <= BAR_TRUE
    return Result(
        headings=(
            "workload",
            "0 workers, samples/s",
            "tuned",
            "tune said",
            "in truth",
            "best of the sweep",
            "its samples/s",
            "tuned / best",
            "best with OMP_WAIT_POLICY=passive",
        ),
        rows=tuple(rows),
        met=met,
        notes=(
            f"Load average when it began: {load:.1f}, on {cores} cores; torch has {threads} "
            "threads. Above 0.5 the result says little.",
            "Every figure but the one that tune said is the median of three runs of the script, "
            "in turns, each a process of its own.",
        ),
        data=data,
    )


# On a busy machine, threads that wait for each other make even a toy take minutes.
_TINY = {"OMP_NUM_THREADS": "1"}


def _tuned(words: list[str], scale: Scale) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "tuning.json")
        command = [sys.executable, "-m", "dataloaders", "tune", "--quiet"]
        command += ["--budget", str(scale.pick(full=30.0, tiny=1.0)), "--json", str(result)]
        variables = {"DATALOADERS_CACHE": folder, **scale.pick(full={}, tiny=_TINY)}
        _run([*command, SCRIPT, "--", *words], variables)
        return json.loads(result.read_text())


def _rate(words: list[str], way: Way, scale: Scale) -> float:
    command = [sys.executable, SCRIPT, *words, "--workers", str(way.workers)]
    command += ["--threads", str(way.threads)] if way.threads is not None else []
    command += scale.pick(full=["--seconds", "4"], tiny=["--seconds", "0.1", "--warm-up", "0"])
    variables = {"OMP_WAIT_POLICY": "passive"} if way.passive else {}
    out = _run(command, {**variables, **scale.pick(full={}, tiny=_TINY)})
    return float(out.splitlines()[-1])


def _run(command: list[str], variables: dict[str, str]) -> str:
    environment = {**os.environ, **variables, "PYTHONWARNINGS": "ignore"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    ).stdout


def _said(found: Any) -> float:
    """The rate of what was chosen in its last trial."""
    mine = [trial for trial in found["trials"] if trial["settings"] == found["choice"]]
    return float(mine[-1]["samples_per_second"]["estimate"])


CASES = [
    Case(
        "tuning_scripts",
        "Does `dataloaders tune` find what makes a script fastest whose step is CPU work?",
        f"tuned / best of the sweep >= {BAR_RATE}; what tune said within {BAR_TRUE:.0%} of the run",
        run,
    )
]
