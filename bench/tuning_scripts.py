"""Does ``dataloaders tune`` choose what makes a script fastest, where its step is CPU work?

    tune bench/step_on_cpu.py ──> choice ─┐
    numbers of workers and threads ───────┼─> the script itself, run in turns, a process each
    OMP_WAIT_POLICY=passive ──────────────┘

Worth its own case since a step that computes with OpenMP threads depends on the process around it:
on other threads, on free cores, on how OpenMP waits. It also tells what to advise where step and
workers contend: fewer threads, which tune() can try, or threads that sleep while they wait, which
is settled before torch is loaded.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.harness import Case, Result, Scale
from dataloaders.machine.resources import usable_cores

BAR_RATE = 0.95
BAR_TRUE = 0.15
ROOT = Path(__file__).resolve().parent.parent
SCRIPT = "bench/step_on_cpu.py"

WORKLOADS = {
    "loading is most of it": ("--load-ms", "3"),
    "loading is half of it": ("--load-ms", "1"),
    "loading is little": ("--load-ms", "0.2"),
}

# On a busy machine, threads that wait for each other make even a toy take minutes.
_TINY = {"OMP_NUM_THREADS": "1"}


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


KINDS: dict[str, Callable[[Way], bool]] = {
    "threads as they are": lambda way: way.threads is None and not way.passive,
    "fewer threads": lambda way: way.threads is not None,
    "OMP_WAIT_POLICY=passive": lambda way: way.passive,
}


def run(scale: Scale) -> Result:
    cores, threads = usable_cores(), torch.get_num_threads()
    load, began = os.getloadavg()[0], time.perf_counter()
    workloads = list(WORKLOADS.items())[: scale.pick(full=None, tiny=1)]
    ways = _ways(*scale.pick(full=(cores, threads), tiny=(1, 2)))
    rows, data, met = [], {}, True
    with _Script(scale, passive=False) as as_it_is, _Script(scale, passive=True) as passive:
        for name, work in workloads:
            words = [*work, *scale.pick(full=[], tiny=["--side", "16"])]
            found = _tuned(words, scale)
            tuned = Way(found["choice"]["num_workers"], found["choice"].get("step_threads"))
            rates: dict[Way, list[float]] = {way: [] for way in dict.fromkeys([*ways, tuned])}
            for turn in range(scale.pick(full=3, tiny=1)):
                passed = time.perf_counter() - began
                print(f"{passed:4.0f} s  {name}: tuned {tuned}; turn {turn + 1}", flush=True)
                for way in list(rates)[:: 1 if turn % 2 == 0 else -1]:
                    script = passive if way.passive else as_it_is
                    rates[way].append(script.rate(words, way))
            medians = {way: statistics.median(each) for way, each in rates.items()}
            best = [_best(medians, kind) for kind in KINDS.values()]
            share = medians[tuned] / max(medians[one] for one in best if not one.passive)
            said, sleeping = _said(found), medians[best[2]] / medians[best[1]]
            shown = [f"{medians[one]:.4g} ({one})" for one in best]
            rows.append((name, *shown, sleeping, str(tuned), said, medians[tuned], share))
            data[name] = {
                "tuning": {"reason": found["reason"], "notes": found["notes"]},
                "runs": {str(way): [round(one, 1) for one in each] for way, each in rates.items()},
            }
            met = met and share >= BAR_RATE and abs(said / medians[tuned] - 1) <= BAR_TRUE
    return Result(
        headings=(
            "workload",
            *(f"{kind}: best, samples/s" for kind in KINDS),
            "passive / fewer threads",
            "tuned",
            "tune said",
            "in truth",
            "tuned / best",
        ),
        rows=tuple(rows),
        met=met,
        notes=(
            f"Load average when it began: {load:.1f}, on {cores} cores; torch has {threads} "
            "threads. Above 0.5 the result says little.",
            "Every figure but the one that tune said is the median of three runs of the script, "
            "in turns, each a process of its own. Best of what tune() can choose: not passive.",
        ),
        data=data,
    )


def _ways(cores: int, threads: int) -> list[Way]:
    most = cores if cores >= 4 else 2 * cores
    counts = sorted({1, most // 2, most})
    fewer = sorted({1, max(1, threads // 2)})
    return [
        *(Way(count) for count in (0, *counts)),
        *(Way(count, few) for few in fewer for count in counts if count <= cores),
        *(Way(count, None, True) for count in counts),
    ]


def _best(medians: Mapping[Way, float], kind: Callable[[Way], bool]) -> Way:
    return max(filter(kind, medians), key=medians.__getitem__)


def _tuned(words: list[str], scale: Scale) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "tuning.json")
        command = [sys.executable, "-m", "dataloaders", "tune", "--quiet"]
        command += ["--budget", str(scale.pick(full=15.0, tiny=1.0)), "--json", str(result)]
        variables = {"DATALOADERS_CACHE": folder, **scale.pick(full={}, tiny=_TINY)}
        subprocess.run(
            [*command, SCRIPT, "--", *words],
            cwd=ROOT,
            env=_environment(variables),
            capture_output=True,
            check=True,
        )
        return json.loads(result.read_text())


class _Script:
    """The script, run again and again: forks of a process of its own that has imported torch."""

    def __init__(self, scale: Scale, *, passive: bool) -> None:
        self._length = scale.pick(
            full=["--warm-up", "0.4", "--seconds", "1.2"],
            tiny=["--warm-up", "0", "--seconds", "0.1"],
        )
        variables = {"OMP_WAIT_POLICY": "passive"} if passive else {}
        code = "from bench.step_on_cpu import fork_for_each_line as run; run()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env=_environment({**variables, **scale.pick(full={}, tiny=_TINY)}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def __enter__(self) -> _Script:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def rate(self, words: list[str], way: Way) -> float:
        """Samples per second."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        threads = [] if way.threads is None else ["--threads", str(way.threads)]
        line = [*words, "--workers", str(way.workers), *threads, *self._length]
        self._process.stdin.write(" ".join(line) + "\n")
        return float(self._process.stdout.readline())


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    return {**os.environ, **variables, "PYTHONWARNINGS": "ignore"}


def _said(found: Any) -> float:
    """The rate of what was chosen in its last trial."""
    mine = [trial for trial in found["trials"] if trial["settings"] == found["choice"]]
    return float(mine[-1]["samples_per_second"]["estimate"])


CASES = [
    Case(
        "tuning_scripts",
        "Does `dataloaders tune` find what makes a script fastest whose step is CPU work, and is "
        "fewer threads or OMP_WAIT_POLICY=passive the better advice?",
        f"tuned / best of the sweep >= {BAR_RATE}; what tune said within {BAR_TRUE:.0%} of the run",
        run,
    )
]
