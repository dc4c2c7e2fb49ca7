"""How often the bottleneck check is right, on workloads of known truth.

    python -m bench verdicts                workloads on the host; also verdicts_device, _loaded
    python -m bench.check.verdicts burst tiny     those whose names begin so; nothing is kept

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any, Literal

import torch

from bench.check.truth import computed, measured
from bench.check.workloads import WORKLOADS, Workload, accepted, gap_class
from bench.harness import Case, Result, Scale, show

__all__ = ["CASES", "examine", "judge", "summarise"]

_QUICK_STEP_S = 0.05
_QUICK_BUDGET_S, _BUDGET_S = 15.0, 22.0  # rounds end at 93 % of it
_TINY = ("serial_double", "workers_free")

Mark = Literal["right", "wrong", "inconclusive"]


def judge(workload: Workload, truth: float, verdict: str) -> Mark:
    """Whether ``verdict`` is right where real / synthetic is ``truth``."""
    if verdict == "inconclusive":
        return "inconclusive"
    return "right" if verdict in accepted(workload, truth) else "wrong"


def examine(name: str, budget_s: float | None = None, truth_s: float = 20.0) -> dict[str, Any]:
    """One workload, in this process: what the check says, and what is true."""
    from dataloaders.bottleneck import check_bottleneck

    workload = WORKLOADS[name]
    if budget_s is None:
        budget_s = _QUICK_BUDGET_S if workload.step_s <= _QUICK_STEP_S else _BUDGET_S
    torch.set_num_threads(1)  # of the step: the workloads count on which cores are free
    if workload.cores is not None:
        usable = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, usable[: workload.cores])
    loader, step = workload.make(0)
    clock = getattr(step, "clock", None)
    start = time.perf_counter()
    with _neighbour(workload.neighbour):
        report = check_bottleneck(
            loader, step, budget_s=budget_s, device=workload.device, clock=clock, predict=False
        )
    check_s = time.perf_counter() - start
    del loader
    truth = (
        measured(workload, truth_s) if workload.computed is None else computed(workload, truth_s)
    )
    return {
        "name": name,
        "check_s": check_s,
        "report": json.loads(replace(report, timeline={}).to_json()),
        "truth": asdict(truth),
    }


def summarise(entries: Sequence[dict[str, Any]]) -> Result:
    """The table of all examined workloads with its totals; ``met`` by the bar of `CASES`."""
    failed = [entry["name"] for entry in entries if "failed" in entry]
    if len(failed) == len(entries):
        return Result(("workload",), (), False, (f"no workload ran: {', '.join(failed)}",))
    whole, entries = entries, [entry for entry in entries if "failed" not in entry]
    rows: list[tuple[Any, ...]] = []
    marks: list[Mark] = []
    inside: list[bool] = []
    for entry in entries:
        workload, truth, report = WORKLOADS[entry["name"]], entry["truth"], entry["report"]
        mark = judge(workload, truth["value"], report["verdict"])
        marks.append(mark)
        bound = report["speedup_bound"] or {"low": 0.0, "estimate": None, "high": float("inf")}
        # A measured truth has an interval of its own.
        inside.append(bound["low"] <= truth["high"] and truth["low"] <= bound["high"])
        rows.append(
            (
                entry["name"],
                _number(truth["value"]) + " m" * bool(truth["real"]),
                gap_class(truth["value"]),
                f"{_number(bound['low'])} to {_number(bound['high'])}",
                "in" if inside[-1] else "OUT",
                report["verdict"],
                mark if mark != "wrong" else "WRONG",
                f"{entry['check_s']:.1f}",
            )
        )
    seconds = [entry["check_s"] for entry in entries]
    quick = [e["check_s"] for e in entries if WORKLOADS[e["name"]].step_s <= _QUICK_STEP_S]
    wrong = [row[0] for row, mark in zip(rows, marks, strict=True) if mark == "wrong"]
    met = (
        not wrong
        and not failed
        and _share(marks, "inconclusive") <= 0.10
        and statistics.fmean(inside) >= 0.90
        and max(seconds) <= 30.0
        and max(quick, default=0.0) <= 15.0
    )
    notes = (
        f"check: {_totals(marks)}; wrong: {', '.join(wrong) or 'none'}; "
        f"failed to run: {', '.join(failed) or 'none'}",
        f"truth inside the 95 % interval: {statistics.fmean(inside):.0%}",
        f"seconds a check: median {statistics.median(seconds):.1f}, most {max(seconds):.1f}; of "
        f"steps up to {1e3 * _QUICK_STEP_S:.0f} ms {max(quick, default=0.0):.1f}",
        "truth: computed from the known times and torch's own cost per batch, calibrated in the "
        "same process; m: measured by long "
        "plain loops where cores are contended for or only torch's cost matters",
    )
    headings = (
        "workload", "truth", "gap", "interval", "", "verdict", "judged", "s",
    )  # fmt: skip
    return Result(headings, tuple(rows), met, notes, {"entries": list(whole)})


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


def _share(marks: Sequence[Mark], mark: Mark) -> float:
    return marks.count(mark) / len(marks)


def _totals(marks: Sequence[Mark]) -> str:
    shares = ((mark, marks.count(mark)) for mark in ("right", "wrong", "inconclusive"))
    return ", ".join(f"{mark} {count} ({count / len(marks):.0%})" for mark, count in shares)


def _half(starts: str, tiny: Sequence[str]) -> Callable[[Scale], Result]:
    def run(scale: Scale) -> Result:
        if scale.tiny:
            # The affinity and the thread count of this process are not touched by these.
            return summarise([_in_child(name, 1.5, 0.5) for name in tiny])
        return summarise([_in_child(name) for name in WORKLOADS if _half_of(name) == starts])

    return run


def _half_of(name: str) -> str:
    return name.partition("_")[0] if name.startswith(("device_", "loaded_")) else ""


_BAR = (
    "no wrong verdict, at most 10 % inconclusive, truth inside the interval in 90 %, within 30 s "
    "each, within 15 s where steps take up to 50 ms"
)

CASES = [
    Case(
        "verdicts",
        "How often is the bottleneck check right where the truth is known?",
        _BAR,
        _half("", _TINY),
    ),
    Case(
        "verdicts_device",
        "How often, where the step's device runs behind the host, played with known durations?",
        _BAR,
        _half("device", ("device_hidden_short", "device_ahead")),
    ),
    Case(
        "verdicts_loaded",
        "How often, beside a neighbour process that takes half a core, at random?",
        _BAR,
        _half("loaded", ("loaded_serial_double",)),
    ),
]

if __name__ == "__main__":
    begins = tuple(sys.argv[1:])
    show(CASES[0], summarise([_in_child(name) for name in WORKLOADS if name.startswith(begins)]))
