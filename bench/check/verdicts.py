"""How often the bottleneck check is right, on workloads of known truth.

    python -m bench verdicts                workloads on the host; also verdicts_device, _loaded
    python -m bench verdicts --only burst   those whose names begin so; nothing is kept

Each workload runs in a process of its own, on the cores that it asks for: the check first, then
the truth where it has to be measured. A verdict is *wrong* if real /
synthetic is truly at least 1.10 and it names no cause of that (step-bound above all), at most
1.03 and it is anything but step-bound, or in between and it names a cause that is not there.
"inconclusive" is counted for itself.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import torch

from bench.check.truth import computed, measured
from bench.check.workloads import WORKLOADS, Workload, accepted, gap_class
from bench.harness import Result, Scale, case
from dataloaders.bottleneck import Report, check_bottleneck
from dataloaders.measuring.intervals import Interval

_QUICK_STEP_S = 0.05
_QUICK_BUDGET_S, _BUDGET_S = 15.0, 22.0  # rounds end at 93 % of it

Mark = Literal["right", "wrong", "inconclusive"]


def judge(workload: Workload, truth: float, verdict: str) -> Mark:
    """Whether ``verdict`` is right where real / synthetic is ``truth``."""
    if verdict == "inconclusive":
        return "inconclusive"
    return "right" if verdict in accepted(workload, truth) else "wrong"


def examine(name: str, budget_s: float | None = None, truth_s: float = 20.0) -> dict[str, Any]:
    """One workload, in this process: what the check says, and what is true."""
    workload = WORKLOADS[name]
    if budget_s is None:
        budget_s = _QUICK_BUDGET_S if workload.step_s <= _QUICK_STEP_S else _BUDGET_S
    torch.set_num_threads(1)  # of the step: the workloads count on which cores are free
    if workload.cores is not None:
        usable = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, usable[: workload.cores])
    loader, step = workload.make()
    start = time.perf_counter()
    with _neighbour(workload.neighbour):
        report = check_bottleneck(
            loader,
            step,
            budget_s=budget_s,
            device=workload.device,
            clock=getattr(step, "clock", None),
            predict=False,
        )
    check_s = time.perf_counter() - start
    del loader
    truth = (measured if workload.computed is None else computed)(workload, truth_s)
    return entry_of(workload, report, check_s, truth)


def entry_of(workload: Workload, report: Report, check_s: float, truth: Interval) -> dict[str, Any]:
    """Return what `summarise` wants to know of a workload, as JSON values."""
    return {
        "name": workload.name,
        "check_s": check_s,
        "report": json.loads(replace(report, timeline={}).to_json()),
        "truth": asdict(truth),
    }


def summarise(entries: Sequence[dict[str, Any]]) -> Result:
    """The table of all examined workloads with its totals; ``met`` by `_BAR`."""
    failed = [entry["name"] for entry in entries if "failed" in entry]
    examined = [entry for entry in entries if "failed" not in entry]
    if not examined:
        return Result(("workload",), (), False, (f"no workload ran: {', '.join(failed)}",))
    rows: list[tuple[Any, ...]] = []
    marks = Counter[Mark]()
    inside: list[bool] = []
    for entry in examined:
        workload, truth, report = WORKLOADS[entry["name"]], entry["truth"], entry["report"]
        mark = judge(workload, truth["estimate"], report["verdict"])
        marks[mark] += 1
        bound = report["speedup_bound"] or {"low": 0.0, "estimate": None, "high": float("inf")}
        # A measured truth has an interval of its own.
        inside.append(bound["low"] <= truth["high"] and truth["low"] <= bound["high"])
        rows.append(
            (
                entry["name"],
                _number(truth["estimate"]) + " m" * (workload.computed is None),
                gap_class(truth["estimate"]),
                f"{_number(bound['low'])} to {_number(bound['high'])}",
                "in" if inside[-1] else "OUT",
                report["verdict"],
                mark if mark != "wrong" else "WRONG",
                f"{entry['check_s']:.1f}",
            )
        )
    seconds = [entry["check_s"] for entry in examined]
    quick = [e["check_s"] for e in examined if WORKLOADS[e["name"]].step_s <= _QUICK_STEP_S]
    wrong = [row[0] for row in rows if row[6] == "WRONG"]
    met = (
        not wrong
        and not failed
        and marks["inconclusive"] <= 0.10 * len(rows)
        and statistics.fmean(inside) >= 0.90
        and max(seconds) <= 30.0
        and max(quick, default=0.0) <= 15.0
    )
    totals = (
        f"{mark} {marks[mark]} ({marks[mark] / len(rows):.0%})"
        for mark in ("right", "wrong", "inconclusive")
    )
    notes = (
        f"check: {', '.join(totals)}; wrong: {', '.join(wrong) or 'none'}; "
        f"failed to run: {', '.join(failed) or 'none'}",
        f"truth inside the 95 % interval: {statistics.fmean(inside):.0%}",
        f"seconds a check: median {statistics.median(seconds):.1f}, most {max(seconds):.1f}; of "
        f"steps up to {1e3 * _QUICK_STEP_S:.0f} ms {max(quick, default=0.0):.1f}",
        "truth: computed from the known times and torch's own cost per batch, calibrated in the "
        "same process; m: measured by long "
        "plain loops where cores are contended for or only torch's cost matters",
    )
    headings = ("workload", "truth", "gap", "interval", "", "verdict", "judged", "s")
    return Result(headings, tuple(rows), met, notes, {"entries": list(entries)})


def _in_child(name: str, *seconds: float) -> dict[str, Any]:
    """`examine` in a fresh process, which leaves no worker, thread or affinity behind."""
    code = "import json, bench.check.verdicts as it; print(json.dumps(it.examine({!r}, *{!r})))"
    # Four workers on two cores draw a warning from torch: it is meant so here.
    command = [sys.executable, "-W", "ignore", "-c", code.format(name, seconds)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        return {"name": name, "failed": (run.stdout + run.stderr)[-4000:]}
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


@contextmanager
def _neighbour(wanted: bool) -> Iterator[None]:
    """Beside another process that takes half a core: at work or asleep, 10 to 300 ms at a time."""
    if not wanted:
        yield
        return
    process = subprocess.Popen([sys.executable, "-c", _NEIGHBOUR])
    try:
        yield
    finally:
        process.kill()
        process.wait()


_NEIGHBOUR = """
import random, time
draw = random.Random(0).uniform
while True:
    until = time.monotonic() + draw(0.01, 0.3)
    while time.monotonic() < until:
        pass
    time.sleep(draw(0.01, 0.3))
"""


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:.3f}" if value < 3 else f"{value:.4g}"


def _of(scale: Scale, wanted: Callable[[Workload], object], *tiny: str) -> Result:
    seconds: tuple[float, ...] = scale.pick(full=(), tiny=(1.5, 0.5))
    names = [name for name, workload in WORKLOADS.items() if wanted(workload)]
    return summarise([_in_child(name, *seconds) for name in scale.named(names, tiny)])


_BAR = (
    "no wrong verdict, at most 10 % inconclusive, truth inside the interval in 90 %, within 30 s "
    "each, within 15 s where steps take up to 50 ms"
)


@case(_BAR)
def verdicts(scale: Scale, folder: Path) -> Result:
    """How often is the bottleneck check right where the truth is known?"""
    return _of(scale, lambda it: not (it.loop or it.neighbour), "serial_double", "workers_free")


@case(_BAR)
def verdicts_device(scale: Scale, folder: Path) -> Result:
    """How often, where the step's device runs behind the host, played with known durations?"""
    return _of(scale, lambda it: it.loop, "device_hidden_short", "device_ahead")


@case(_BAR)
def verdicts_loaded(scale: Scale, folder: Path) -> Result:
    """How often, beside a neighbour process that takes half a core, at random?"""
    return _of(scale, lambda it: it.neighbour, "loaded_serial_double")
