"""``python -m bench --gpu``: what needs a CUDA device, in one run with an end.

pytest -m gpu --junitxml gpu.xml       the tests, in at most half of the time
python -m bench NAME                   each case, in a process of its own: one that crashes or
                                       hangs ends alone
gpu.json                               the cases' results, written after each
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.harness import Case, machine_facts

ROOT = Path(__file__).resolve().parent.parent
BUDGET_S = 480.0
_CASES_FIRST = ("dali_gpu", "prefetch")  # those that decide most


def run(
    cases: Sequence[Case], target: Path, budget_s: float, *, tiny: bool = False, tests: bool = True
) -> int:
    """Run the tests and then the cases; return 0 if all passed and all bars were met."""
    end = time.monotonic() + budget_s
    target.parent.mkdir(parents=True, exist_ok=True)
    passed = True
    if tests:
        # A hung test that holds the GIL outlasts pytest's own limits.
        status = _status(pytest(target.with_suffix(".xml"), budget_s / 3), budget_s / 2)
        passed = status in (0, 5)  # 5: none was selected
    return int(not (run_cases(cases, target, end, tiny) and passed))


def pytest(report: Path, seconds: float) -> list[str]:
    """Return the command that runs the tests marked ``gpu`` and writes their outcomes."""
    options = ["-m", "gpu", "-v", "-rs", "-p", "no:cacheprovider", "--timeout=90"]
    options += ["--continue-on-collection-errors"]  # a package may be missing that others need
    # A worker of xdist that dies is replaced, and its test reported.
    options += ["-n", "4", "--dist", "loadfile"] if find_spec("xdist") else []
    # Versions of packages that the project was not tested with may warn of deprecations.
    options += ["-W", "default::DeprecationWarning", "-W", "default::FutureWarning"]
    limits = [f"--session-timeout={seconds:.0f}", f"--junitxml={report}"]
    return [sys.executable, "-m", "pytest", *options, *limits]


def run_cases(cases: Sequence[Case], target: Path, end: float, tiny: bool = False) -> bool:
    """Run each case until the monotonic clock says ``end``; return whether all bars were met.

    Of each case ``target`` has the result, or its name and why there is none.
    """
    ordered = sorted(cases, key=lambda case: (case.name not in _CASES_FIRST, case.name))
    document: dict[str, Any] = {"machine": machine_facts(), "cases": []}
    for case in ordered:
        entry = _result(case, min(case.limit_s, end - time.monotonic()), tiny)
        document["cases"].append(entry)
        target.write_text(json.dumps(document, indent=1) + "\n")
        print(f"{case.name}: {entry.get('failed', 'done')}", flush=True)
    return all("failed" not in entry and entry["met"] is not False for entry in document["cases"])


def _result(case: Case, limit_s: float, tiny: bool) -> dict[str, Any]:
    if limit_s <= 0:
        return {"name": case.name, "failed": "not run: no time was left"}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "result.json")
        command = [sys.executable, "-m", "bench", "--alone", case.name, f"--json={out}"]
        status = _status([*command, *["--tiny"] * tiny], limit_s)
        if status is None:
            return {"name": case.name, "failed": f"stopped after {limit_s:.0f} s"}
        if status or not out.exists():
            return {"name": case.name, "failed": f"exit status {status}"}
        result: dict[str, Any] = json.loads(out.read_text())["cases"][0]
        return result


def _status(command: Sequence[str], limit_s: float) -> int | None:
    """Return the exit status; None if the command was killed after ``limit_s`` seconds."""
    # The package need not be installed, and tests run scripts in folders of their own.
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    try:
        return subprocess.run(command, cwd=ROOT, env=environment, timeout=limit_s).returncode
    except subprocess.TimeoutExpired:
        return None
