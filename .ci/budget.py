"""Fail when the default tests outgrow their budget; print the slowest.

    python .ci/budget.py REPORT.xml     (written by pytest --junitxml)

The budget: `TOTAL_S` for the run, `TEST_S` for a test, and for each reason to skip the count in
tests/skips.txt, because a backend that begins to refuse a dataset shows up nowhere else.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

TOTAL_S = 300.0
TEST_S = 5.0
SHOWN = 25
SKIPS = Path(__file__).resolve().parent.parent / "tests" / "skips.txt"


def main(report: str) -> int:
    """Return 1 if any budget is exceeded, else 0."""
    (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
    cases = suite.findall("testcase")
    seconds = {_name(case): _seconds(case) for case in cases}
    slowest = sorted(seconds, key=seconds.__getitem__, reverse=True)
    print(f"The {SHOWN} slowest of {len(cases)} tests, seconds:")
    for name in slowest[:SHOWN]:
        print(f"{seconds[name]:7.2f}  {name}")
    # Again, alone: a worker of the test before that ends, or a neighbour, is not a test's own time.
    alone = _seconds_alone([name for name in slowest if seconds[name] > TEST_S])
    seconds.update({name: min(took, seconds[name]) for name, took in alone.items()})
    faults = [
        f"{name} takes {seconds[name]:.1f} s, more than {TEST_S:.0f}: shorten or mark nightly"
        for name in slowest
        if seconds[name] > TEST_S
    ]
    if _seconds(suite) > TOTAL_S:
        faults.append("shorten the slowest tests, or mark them nightly")
    faults += _skip_faults(cases)
    for fault in faults:
        print(f"budget: {fault}")
    verdict = "over budget" if faults else "within budget"
    print(f"{_seconds(suite):.0f} s of {TOTAL_S:.0f}: {verdict}")
    return int(bool(faults))


def _seconds_alone(names: list[str]) -> dict[str, float]:
    """Run these tests one after the other, in one process; return the seconds of each call."""
    if not names:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "--junitxml", str(report)]
        subprocess.run([*command, *map(_node, names)], check=False)
        return {_name(case): _seconds(case) for case in ElementTree.parse(report).iter("testcase")}


def _node(name: str) -> str:
    """Return what pytest calls the test that the report calls ``tests.test_x.TestY::test_z``."""
    place, _, test = name.partition("::")
    parts = place.split(".")
    at = next(at for at, part in enumerate(parts) if part.startswith("test_"))
    return "::".join(["/".join(parts[: at + 1]) + ".py", *parts[at + 1 :], test])


def _name(case: ElementTree.Element) -> str:
    return f"{case.get('classname')}::{case.get('name')}"


def _seconds(element: ElementTree.Element) -> float:
    return float(element.get("time", 0))


def _skip_faults(cases: list[ElementTree.Element]) -> list[str]:
    """Compare the reasons of skipped tests with those in tests/skips.txt."""
    lines = [line.split(maxsplit=1) for line in SKIPS.read_text().splitlines() if line[:1] != "#"]
    allowed = Counter({reason: int(count) for count, reason in lines})
    counted: Counter[str] = Counter()
    for case in cases:
        for skipped in case.findall("skipped"):
            reason = skipped.get("message", "")
            counted[next((known for known in allowed if reason.startswith(known)), reason)] += 1
    return [
        f"{counted[reason]} tests skip with '{reason}', tests/skips.txt allows {allowed[reason]}"
        for reason in counted - allowed
    ]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
