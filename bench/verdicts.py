"""How often the bottleneck check is right, on workloads of known truth.

    python -m bench.verdicts                          every workload: table, totals
    python -m bench.verdicts burst tiny --seeds 3     those that start so, three times
    python -m bench.verdicts device                   those on a played device
    python -m bench.verdicts loaded                   those beside a neighbour process
    python -m bench.verdicts --verify balanced        computed truths against long plain loops
    python -m bench.verdicts --json FILE              everything measured, as JSON

Each workload runs in a process of its own, on the cores that it asks for: the check first, then
the truth where it has to be measured. A verdict is *wrong* if real /
synthetic is truly at least 1.10 and it names no cause of that (step-bound above all), at most
1.03 and it is anything but step-bound, or in between and it names a cause that is not there.
"inconclusive" is counted for itself.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import torch

from bench.harness import Case, Result, Scale, machine_facts, show
from bench.played import Overhead
from bench.truth import Truth, calibrated, measured
from bench.workloads import WORKLOADS, Workload, accepted, gap_class

__all__ = ["CASES", "examine", "judge", "main", "summarise"]

_QUICK_STEP_S = 0.05
_TINY = ("serial_double", "workers_free")
_ROOT = Path(__file__).resolve().parent.parent

Mark = Literal["right", "wrong", "inconclusive"]


def judge(workload: Workload, truth: float, verdict: str) -> Mark:
    """Whether ``verdict`` is right where real / synthetic is ``truth``."""
    if verdict == "inconclusive":
        return "inconclusive"
    return "right" if verdict in accepted(workload, truth) else "wrong"


def examine(
    name: str, *, seed: int = 0, budget_s: float = 30.0, truth_s: float = 20.0, verify: bool = False
) -> dict[str, Any]:
    """One workload, in this process: what the check says, and what is true.

    With ``verify`` only the truths: computed (where it can be) and measured.
    """
    workload = WORKLOADS[name]
    torch.set_num_threads(1)  # of the step: the workloads count on which cores are free
    if workload.cores is not None:
        usable = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, usable[: workload.cores])
    found: dict[str, Any] = {"name": name, "about": workload.about, "seed": seed}
    if not verify:
        from dataloaders.bottleneck import check_bottleneck  # truths can be verified without it

        loader, step = workload.make(seed)
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
        found["check_s"] = time.perf_counter() - start
        found["report"] = json.loads(replace(report, timeline={}).to_json())
        del loader
    found["truth"] = None
    if workload.computed is not None:
        overhead = calibrated(workload, min(3.0, truth_s), seed)
        found["overhead"] = asdict(overhead)
        found["truth"] = asdict(_computed_truth(workload, seed, overhead))
    if verify or found["truth"] is None:
        found["measured"] = asdict(measured(workload, truth_s, seed))
        found["truth"] = found["truth"] or found["measured"]
    return found


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
        low, high = (truth["value"],) * 2 if "overhead" in entry else (truth["low"], truth["high"])
        inside.append(bound["low"] <= high and low <= bound["high"])
        rows.append(
            (
                entry["name"],
                _number(truth["value"]) + ("" if "overhead" in entry else " m"),
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
        "same process (its range: half to one and a half of that cost); m: measured by long "
        "plain loops where cores are contended for or only torch's cost matters",
    )
    headings = (
        "workload", "truth", "gap", "interval", "", "verdict", "judged", "s",
    )  # fmt: skip
    return Result(headings, tuple(rows), met, notes, {"entries": list(whole)})


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 if the bar is met (or nothing is judged), 1 if not, 2 for a wrong name."""
    options = _parser().parse_args(arguments)
    if options.child is not None:
        found = examine(
            options.names[0],
            seed=options.seed,
            budget_s=options.budget,
            truth_s=options.truth,
            verify=options.verify,
        )
        options.child.write_text(json.dumps(found))
        return 0
    names = _chosen(options.names)
    if not names:
        print(f"no workload starts with {' or '.join(options.names)}; there are:")
        print(", ".join(WORKLOADS))
        return 2
    seeds = range(options.seed, options.seed + options.seeds)
    entries = []
    began = time.perf_counter()
    for seed in seeds:
        for name in names:
            entry = _in_child(name, seed, options.budget, options.truth, options.verify)
            print(_line(entry), flush=True)
            entries.append(entry)
            if options.json is not None:  # after each one: a long run may be cut short
                spent = time.perf_counter() - began
                document = {"machine": machine_facts(), "seconds": spent, "entries": entries}
                options.json.write_text(json.dumps(document, indent=1) + "\n")
    if options.verify:
        return 0
    result = summarise(entries)
    show(_case_of(names), result)
    return 0 if result.met else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.verdicts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", help="workloads, or what their names start with")
    parser.add_argument("--verify", action="store_true", help="measure the truths, check nothing")
    parser.add_argument("--budget", type=float, default=30.0, help="seconds for a check")
    parser.add_argument("--truth", type=float, default=20.0, help="seconds to measure a truth")
    parser.add_argument("--seed", type=int, default=0, help="the first seed of the random times")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds, one after the other")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every raw figure here")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    return parser


def _chosen(names: Iterable[str]) -> list[str]:
    starts = tuple(names)
    return [name for name in WORKLOADS if not starts or name.startswith(starts)]


def _in_child(name: str, seed: int, budget_s: float, truth_s: float, verify: bool) -> Any:
    """`examine` in a fresh process, which leaves no worker, thread or affinity behind."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "found.json"
        # Four workers on two cores draw a warning from torch: it is meant so here.
        command = [sys.executable, "-W", "ignore", "-m", "bench.verdicts", name]
        command += ["--seed", str(seed), "--budget", str(budget_s), "--truth", str(truth_s)]
        command += ["--verify"] * verify + ["--child", str(target)]
        run = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
        if run.returncode != 0:
            return {"name": name, "seed": seed, "failed": (run.stdout + run.stderr)[-4000:]}
        return json.loads(target.read_text())


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


def _computed_truth(workload: Workload, seed: int, overhead: Overhead) -> Truth:
    """The computed ratio, ranged over half to one and a half of what torch itself was seen to cost.

    That cost depends on what the caches hold when a batch is taken, which a short calibration
    cannot reproduce.
    """
    if workload.computed is None:
        raise ValueError(f"{workload.name} has no computed truth; measure it")
    low, value, high = (
        workload.computed(seed, Overhead(overhead.take * factor, overhead.make * factor))
        for factor in (0.5, 1.0, 1.5)
    )
    return Truth(low, value, high)


def _line(entry: dict[str, Any]) -> str:
    """One workload's outcome, as it comes."""
    name = f"{entry['name']:24s}"
    if "failed" in entry:
        return f"{name}FAILED\n{entry['failed']}"
    truth = _range(entry["truth"])
    if "report" not in entry:
        return f"{name}measured {_range(entry['measured'])}, truth {truth}"
    report = entry["report"]
    mark = judge(WORKLOADS[entry["name"]], entry["truth"]["value"], report["verdict"])
    bound = report["speedup_bound"]
    said = "" if bound is None else f"{bound['low']:.3f} to {bound['high']:.3f}"
    seconds = entry["check_s"]
    return f"{name}truth {truth}  interval {said}  {report['verdict']}  {mark}  {seconds:.1f} s"


def _range(truth: dict[str, Any]) -> str:
    return f"{truth['value']:.3f} ({truth['low']:.3f} to {truth['high']:.3f})"


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
            return summarise([_in_child(name, 0, 1.5, 0.5, False) for name in tiny])
        names = [name for name in WORKLOADS if _half_of(name) == starts]
        return summarise([_in_child(name, 0, 30.0, 20.0, False) for name in names])

    return run


def _case_of(names: Iterable[str]) -> Case:
    """The case that workloads of these names belong to."""
    halves = {_half_of(name) for name in names}
    half = halves.pop() if len(halves) == 1 else ""
    return next(case for case in CASES if case.name == ("verdicts_" + half).rstrip("_"))


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
    sys.exit(main())
