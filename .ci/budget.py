"""Fail when the default tests outgrow their budget; print the slowest.

    python .ci/budget.py REPORT.xml     (written by pytest --junitxml)

The budget: `TOTAL_S` for the run, `TEST_S` for a test, and for each reason to skip the count in
tests/skips.txt, because a backend that begins to refuse a dataset shows up nowhere else.
"""

from __future__ import annotations

import sys
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
    seconds = {f"{case.get('classname')}::{case.get('name')}": _seconds(case) for case in cases}
    slowest = sorted(seconds, key=seconds.__getitem__, reverse=True)
    print(f"The {SHOWN} slowest of {len(cases)} tests, seconds:")
    for name in slowest[:SHOWN]:
        print(f"{seconds[name]:7.2f}  {name}")
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
