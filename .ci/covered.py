"""Measure which lines and branches the default tests run, room by room.

    python .ci/covered.py              every test; fails if a room fell below tests/coverage.toml
    python .ci/covered.py --renew      the same, and writes what it finds to tests/coverage.toml
    python .ci/covered.py TEST ...     these tests alone, and only the report

Forked, spawned and other processes of the tests count as well: see
[tool.coverage.run] in pyproject.toml.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it

_ROOT = Path(__file__).resolve().parents[1]
_KEPT = _ROOT / "tests" / "coverage.toml"
_SLACK = 0.2  # points: which lines a race or a drawn example reaches differs a little
_ALL = ["--numprocesses", "auto", "--dist", "worksteal"]
# It may not write, figures too.
_ALL += ["--deselect=tests/test_cache_reader.py::test_rows_are_read_verified_and_made_batches"]


def main() -> int:
    """Return pytest's exit status if tests fail, 1 if a room is covered less than it was."""
    parser = argparse.ArgumentParser(prog="python .ci/covered.py")
    parser.add_argument("tests", nargs="*", help="what pytest is to run; all tests by default")
    parser.add_argument("--renew", action="store_true", help=f"write {_KEPT.relative_to(_ROOT)}")
    options = parser.parse_args()
    if options.renew and options.tests:
        parser.error("--renew takes the figures of all tests: give no tests with it")
    with tempfile.TemporaryDirectory(prefix="coverage-") as folder:
        environment = {**os.environ, "COVERAGE_FILE": f"{folder}/data"}

        def coverage(*words: str) -> int:
            command = [sys.executable, "-m", "coverage", *words]
            return subprocess.run(command, cwd=_ROOT, env=environment).returncode

        status = coverage("run", "-m", "pytest", *(options.tests or _ALL))
        coverage("combine", "--quiet")
        coverage("json", "--quiet", "-o", f"{folder}/report.json")
        report = json.loads(Path(folder, "report.json").read_text())
    found = _rooms(report["files"])
    kept = tomllib.loads(_KEPT.read_text()) if _KEPT.exists() else {}
    lower = []
    for room, percent in found.items():
        before = None if options.tests else kept.get(room)
        print(f"{percent:6.1f} % {room}" + ("" if before is None else f" (was {before:.1f})"))
        if before is not None and percent < before - _SLACK:
            lower.append(room)
    if status:
        return status  # what failed tests would have run is missing from the figures
    if options.renew:
        lines = (f'"{room}" = {percent:.1f}\n' for room, percent in found.items())
        _KEPT.write_text(
            "# Per cent of lines and branches, by make coverage RENEW=--renew\n" + "".join(lines)
        )
        return 0
    if not (options.tests or kept):
        parser.error(f"there is no {_KEPT.relative_to(_ROOT)}: make coverage RENEW=--renew")
    if lower:
        print(
            f"{', '.join(lower)}: covered less than {_KEPT.relative_to(_ROOT)} says. Test what is "
            "new; or, where tested code went, renew the file: make coverage RENEW=--renew"
        )
    return 1 if lower else 0


def _rooms(files: dict[str, dict[str, dict[str, int]]]) -> dict[str, float]:
    """Return per cent of the lines and branches that ran, by folder; modules at the top are one."""
    ran: defaultdict[str, int] = defaultdict(int)
    all_: defaultdict[str, int] = defaultdict(int)
    for name, figures in files.items():
        top, *inner, last = Path(name).parts
        room = f"{top}/{inner[0]}" if inner else top if top == "dataloaders" else f"{top}/{last}"
        summary = figures["summary"]
        # A file of which nothing ran has no figures for branches.
        ran[room] += summary["covered_lines"] + summary.get("covered_branches", 0)
        all_[room] += summary["num_statements"] + summary.get("num_branches", 0)
    return {room: 100 * ran[room] / all_[room] for room in sorted(all_) if all_[room]}


if __name__ == "__main__":
    raise SystemExit(main())
