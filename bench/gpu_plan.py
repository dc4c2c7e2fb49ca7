"""``python -m bench --gpu``: every test and case that needs a CUDA device, in one run with an end.

steps ──a process each──> tests, some at once ──> cases, one by one ──> one JSON, as they come

A step that fails, crashes or takes too long ends alone. What a step leaves no time for is not run,
and the result says so.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Any
from xml.etree import ElementTree

from bench.harness import Case, machine_facts

__all__ = ["BUDGET_S", "NEEDS", "Step", "run_steps", "steps_of_cases", "steps_of_tests"]

ROOT = Path(__file__).resolve().parent.parent

BUDGET_S = 480.0
"""Seconds for all steps, unless asked otherwise."""

NEEDS = """\
On a machine with a CUDA device, with its own python. It needs torch and torchvision; pytest,
pytest-timeout and hypothesis for the tests; Pillow, NVIDIA DALI and h5py for what is about them
(without one of these, that part fails or is skipped, and says so). Packages that were brought
along in a folder are found by PYTHONPATH=FOLDER. The cases, in this order, and their seconds,
about:
"""

_AT_ONCE = 4
_FEWEST_S = 15.0  # less is not worth a process that has to begin with torch
_LAST = 6000  # characters of a step's output that are kept

_FIRST = (
    "test_dali_graph.py",
    "test_prefetch_cuda.py",
    "test_dali.py",
    "test_kernels.py",
    "test_dali_nodes.py",
    "test_kernels_chains.py",
    "test_kernels_warp.py",
    "test_contract_dali.py",
    "test_contract_prefetch.py",
)
"""The tests that say most, those that take long among them; the others follow by name."""

_CASES = {
    "dali_gpu": (90, 150),
    "prefetch": (90, 140),
    "dali_hw_decoder": (65, 140),
    "dali_memory": (25, 60),
    "kernels_cuda": (45, 90),
    "device_tail_gpu": (20, 60),
}
"""Of each case that needs a device, in order: seconds that it is thought to take, and at most."""


@dataclass(frozen=True)
class Step:
    """One process.

    Attributes:
        name: of the case, or of the file of tests.
        command: what is run, from the repository's root; ``{out}`` is a file for its result.
        limit_s: after so many seconds it is ended.
        expected_s: seconds that it is thought to take.
        at_once: whether others may run beside it: nothing in it is timed.
        judged: whether its bar counts; a toy size says nothing about speed.
    """

    name: str
    command: tuple[str, ...]
    limit_s: float
    expected_s: float
    at_once: bool = False
    judged: bool = True


@dataclass
class _Book:
    """What is known so far, on disk whenever something is added."""

    target: Path
    begun: float = field(default_factory=time.perf_counter)
    document: dict[str, Any] = field(default_factory=dict)
    lock: Lock = field(default_factory=Lock)

    def add(self, entry: dict[str, Any]) -> None:
        with self.lock:
            self.document["steps"].append(entry)
            self.write()
            counted = [f"{count} {kind}" for kind, count in entry.get("outcomes", {}).items()]
            told = ", ".join([entry["status"], *counted])
            print(f"{entry['seconds']:7.1f} s  {entry['name']}: {told}", flush=True)

    def write(self) -> None:
        self.document["seconds_taken"] = round(time.perf_counter() - self.begun, 1)
        self.target.parent.mkdir(parents=True, exist_ok=True)
        beside = self.target.with_name(self.target.name + ".part")
        beside.write_text(json.dumps(self.document, indent=1) + "\n")
        beside.replace(self.target)


def steps_of_tests(folder: Path = ROOT / "tests") -> list[Step]:
    """A step for each file that may hold tests marked ``gpu``, those that say most first."""
    marked = re.compile(r"mark\.gpu|helpers\.contract")
    names = [path.name for path in folder.glob("test_*.py") if marked.search(path.read_text())]
    order = [*_FIRST, *sorted(set(names) - set(_FIRST))]
    return [
        Step(
            name,
            (
                *(sys.executable, "-m", "pytest", str(folder / name), "-m", "gpu", "-v", "-rs"),
                # Another machine's packages may warn of their own old ways.
                *("-W", "default::DeprecationWarning", "-W", "default::FutureWarning"),
                *("-p", "no:cacheprovider", "--timeout=90", "--junit-xml={out}"),
            ),
            limit_s=150,
            expected_s=15,
            at_once=True,
        )
        for name in order
        if name in names
    ]


def steps_of_cases(cases: Sequence[Case], *, tiny: bool = False) -> list[Step]:
    """A step for each case, those that say most first."""
    known = {case.name for case in cases}
    order = [name for name in _CASES if name in known] + sorted(known - set(_CASES))
    options = ("--tiny",) if tiny else ()
    return [
        Step(
            name,
            (sys.executable, "-m", "bench", name, "--alone", "--json={out}", *options),
            limit_s=_CASES.get(name, (60, 120))[1],
            expected_s=_CASES.get(name, (60, 120))[0],
            judged=not tiny,
        )
        for name in order
    ]


def run_steps(steps: Sequence[Step], target: Path, budget_s: float = BUDGET_S) -> dict[str, Any]:
    """Runs the steps; what became of each, also in ``target`` after each.

    ``machine``, ``seconds_taken``, ``finished`` and ``steps``: for each its name, ``status``
    ("passed", or why not), ``seconds``, the last lines that it wrote, and ``tests`` (outcome,
    seconds and traceback of each) or ``case`` (as a bench's own JSON).
    """
    book = _Book(target)
    book.document.update(machine=machine_facts(), budget_s=budget_s, finished=False, steps=[])
    book.write()
    end = book.begun + budget_s
    beside = [step for step in steps if step.at_once]
    with tempfile.TemporaryDirectory() as folder:
        at_once = max(1, min(_AT_ONCE, (os.cpu_count() or 1) // 2))
        with ThreadPoolExecutor(at_once) as pool:
            for future in [pool.submit(_run, step, end, Path(folder), book) for step in beside]:
                future.result()
        for step in steps:
            if not step.at_once:
                _run(step, end, Path(folder), book)
    book.document["finished"] = True
    book.write()
    return book.document


def _run(step: Step, end: float, folder: Path, book: _Book) -> None:
    begun = time.perf_counter()
    left = end - begun
    if left < _FEWEST_S:
        book.add({"name": step.name, "status": "not run: no time was left", "seconds": 0.0})
        return
    step = replace(step, limit_s=min(step.limit_s, left))
    out = folder / step.name
    command = [part.replace("{out}", str(out)) for part in step.command]
    status, written = _process(command, step.limit_s)
    seconds = round(time.perf_counter() - begun, 1)
    entry: dict[str, Any] = {"name": step.name, "status": status, "seconds": seconds}
    entry["output"] = written[-_LAST:]
    try:
        entry |= _result(out)
    except (OSError, ValueError, ElementTree.ParseError, LookupError) as error:
        entry["unread"] = repr(error)  # a process that died has written none
    if step.judged and status == "passed" and entry.get("case", {}).get("met") is False:
        entry["status"] = "its bar is not met"
    outcomes = Counter(test["outcome"] for test in entry.get("tests", ()))
    entry["outcomes"] = dict(outcomes)
    if status == "passed" and outcomes and not outcomes["passed"]:
        entry["status"] = "every test was skipped"
    book.add(entry)


def _process(command: Sequence[str], limit_s: float) -> tuple[str, str]:
    """How it ended, and what it wrote; its own children end with it."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        written, _ = process.communicate(timeout=limit_s)
        status = _ended(process.returncode)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGABRT)  # Python then writes where each thread was
        try:
            written, _ = process.communicate(timeout=5)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            written, _ = process.communicate()
        status = f"ended after {limit_s:.0f} s"
    try:
        os.killpg(process.pid, signal.SIGKILL)  # workers that it left behind
    except ProcessLookupError:
        pass  # there are none
    return status, written


def _ended(code: int) -> str:
    if code < 0:
        return f"died of signal {-code} ({signal.Signals(-code).name})"
    # 5 is pytest's: no test in the file carries the mark.
    return "passed" if code in (0, 5) else f"failed, exit status {code}"


def _result(out: Path) -> dict[str, Any]:
    text = out.read_text()
    if text.startswith("{"):
        return {"case": json.loads(text)["cases"][0]}
    return {"tests": [_test(one) for one in ElementTree.fromstring(text).iter("testcase")]}


def _test(one: ElementTree.Element) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": one.get("name"), "seconds": float(one.get("time") or 0)}
    entry["outcome"] = "passed"
    for kind in ("skipped", "failure", "error"):
        found = one.find(kind)
        if found is not None:
            entry["outcome"] = {"failure": "failed"}.get(kind, kind)
            entry["told"] = (found.text or found.get("message") or "")[-_LAST:]
    return entry
