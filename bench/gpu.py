"""``python -m bench --gpu``: the tests and cases that need a CUDA device, in one run with an end.

    pytest -m gpu --junitxml, a process a file, some at once ─┐
    bench cases with gpu=True, a process each, one by one  ───┴─> one JSON, written after each

A job that fails, crashes or hangs ends alone. With pytest-xdist installed, so does a test: xdist
reports the test at which a worker died and goes on with the next one. A job for which no time is
left is not run, and the file says so.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from bench.harness import Case, machine_facts

ROOT = Path(__file__).resolve().parent.parent
BUDGET_S = 480.0

_FEWEST_S = 15.0  # a process needs this to import torch and start CUDA
_LAST = 6000  # characters of output to keep
_FIRST = ("test_prefetch_cuda", "test_dali", "test_contract", "test_stock")
_CASES_FIRST = ("dali_gpu", "prefetch")


@dataclass(frozen=True)
class Job:
    """One process.

    Attributes:
        name: the test file or the case.
        command: run in the repository's root; ``{out}`` is the path of its result, ``{seconds}``
            what it should take at most.
        limit_s: the seconds after which it is stopped.
        alone: whether nothing runs beside it, because it measures time.
    """

    name: str
    command: tuple[str, ...]
    limit_s: float
    alone: bool = False


def jobs_of_tests(folder: Path = ROOT / "tests") -> list[Job]:
    """Return a job for each file that may hold tests marked ``gpu``, the most telling first."""
    files = [
        file
        for file in folder.rglob("test_*.py")
        if re.search(r"mark\.gpu|contract", file.read_text(encoding="utf-8"))
    ]
    files.sort(key=lambda file: (not file.name.startswith(_FIRST), file.name))
    options = [
        "-m",
        "gpu",
        "-v",
        "-rs",
        "-p",
        "no:cacheprovider",
        "--timeout=90",
        "--session-timeout={seconds}",
    ]
    options += ("-n", "1") if find_spec("xdist") else ()
    # Versions of packages that the project was not tested with may warn of deprecations.
    options += ("-W", "default::DeprecationWarning", "-W", "default::FutureWarning")
    pytest = (sys.executable, "-m", "pytest", *options, "--junitxml={out}")
    return [Job(file.name, (*pytest, str(file)), limit_s=150) for file in files]


def jobs_of_cases(cases: Sequence[Case], *, tiny: bool = False) -> list[Job]:
    """Return a job for each case, the most telling first."""
    bench = (sys.executable, "-m", "bench", "--alone", "--json={out}", *["--tiny"] * tiny)
    ordered = sorted(cases, key=lambda case: (case.name not in _CASES_FIRST, case.name))
    return [Job(case.name, (*bench, case.name), case.limit_s, alone=True) for case in ordered]


def run_jobs(
    jobs: Sequence[Job], target: Path, budget_s: float = BUDGET_S, *, at_once: int = 4
) -> dict[str, Any]:
    """Run the jobs and return what is in ``target``, which is written after each of them.

    Those that need not be alone come first, ``at_once`` at a time, and leave half of the budget
    to the others. Of each job the document has its name, ``status`` ("passed", or why not),
    ``seconds``, the end of its output, and ``tests`` or ``case``.
    """
    begun = time.monotonic()
    document = {"machine": machine_facts(), "budget_s": budget_s, "finished": False, "jobs": []}

    def add(entry: dict[str, Any]) -> None:
        document["jobs"].append(entry)
        write()
        print(f"{entry['seconds']:6.1f} s  {entry['name']}: {entry['status']}", flush=True)

    def write() -> None:
        document["seconds_taken"] = round(time.monotonic() - begun, 1)
        part = target.with_name(f"{target.name}.part")
        part.write_text(json.dumps(document, indent=1) + "\n")
        part.replace(target)

    target.parent.mkdir(parents=True, exist_ok=True)
    write()
    alone = [job for job in jobs if job.alone]
    beside = [job for job in jobs if not job.alone]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(at_once) as pool:
        end = begun + (budget_s / 2 if alone else budget_s)
        for done in as_completed([pool.submit(_run, job, end, Path(folder)) for job in beside]):
            add(done.result())
        for job in alone:
            add(_run(job, begun + budget_s, Path(folder)))
    document["finished"] = True
    write()
    return document


def _run(job: Job, end: float, folder: Path) -> dict[str, Any]:
    begun = time.monotonic()
    limit = min(job.limit_s, end - begun)
    if limit < min(_FEWEST_S, job.limit_s):
        return {"name": job.name, "status": "not run: no time was left", "seconds": 0.0}
    out, log = folder / job.name, folder / f"{job.name}.log"
    # SIGABRT makes Python's faulthandler print all stacks; `timeout` signals the whole group.
    command = ["timeout", "--signal=ABRT", "--kill-after=5", f"{limit:.1f}", *job.command]
    fields = {"{out}": str(out), "{seconds}": f"{0.9 * limit:.0f}"}
    for field, value in fields.items():
        command = [word.replace(field, value) for word in command]
    with log.open("w") as file:
        code = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"},
            stdout=file,
            stderr=subprocess.STDOUT,
            check=False,
        ).returncode
    seconds = time.monotonic() - begun
    status = f"stopped after {limit:.0f} s" if seconds >= limit else _status(code)
    entry: dict[str, Any] = {"name": job.name, "status": status, "seconds": round(seconds, 1)}
    entry["output"] = log.read_text(errors="replace")[-_LAST:]
    if not out.exists():  # the process died, or pytest found no marked test
        return entry
    text = out.read_text()
    if text.startswith("{"):
        entry["case"] = json.loads(text)["cases"][0]
        if entry["status"] == "passed" and entry["case"]["met"] is False:
            entry["status"] = "bar not met"
        return entry
    entry["tests"] = [_test(test) for test in ElementTree.fromstring(text).iter("testcase")]
    counts = Counter(test["outcome"] for test in entry["tests"])
    entry["status"] += "".join(f", {number} {outcome}" for outcome, number in counts.items())
    return entry


def _status(code: int) -> str:
    signal = code - 128 if code > 128 else -code
    if signal > 0:
        return f"died of signal {signal}"
    return "passed" if code in (0, 5) else f"failed, exit status {code}"  # 5: no test was marked


def _test(test: ElementTree.Element) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": test.get("name"), "seconds": float(test.get("time") or 0)}
    for outcome in ("skipped", "failure", "error"):
        found = test.find(outcome)
        if found is not None:
            return {**entry, "outcome": outcome, "why": (found.text or "")[-_LAST:]}
    return {**entry, "outcome": "passed"}
