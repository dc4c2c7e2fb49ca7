"""The report as text for a terminal; the last line is the one change to make, as code."""

from __future__ import annotations

import textwrap

from dataloaders.bottleneck.outputs import contents
from dataloaders.bottleneck.outputs.contents import milliseconds
from dataloaders.bottleneck.result import Result
from dataloaders.measuring.table import table

WIDTH = 112
"""Characters of a line, for the candidates' table."""


def text(report: Result, width: int = WIDTH) -> str:
    """Return the text, in lines of ``width`` characters except those to search for or to copy."""
    lines = [f"{report.verdict.upper()}: {contents.MEANS[report.verdict]}"]
    lines += textwrap.wrap(contents.bound_of(report), width)
    if report.smallest_gap is not None:
        lines.append(f"A gap below {report.smallest_gap:.1%} could not have been seen.")
    lines += ["", *_wrapped(f"loader  {report.loader}", width)]
    lines += [*_wrapped(f"batch   {report.batch}", width), ""]
    first, rest = (contents.arms, contents.stalls), (contents.preparation, contents.candidates)
    for shown in (*(_table(each(report), width) for each in first), _waits(report, width),
                  *(_table(each(report), width) for each in rest)):  # fmt: skip
        lines += [*shown, ""] if shown else []
    rounds = "1 round" if report.rounds == 1 else f"{report.rounds} rounds"
    facts = ", ".join(report.machine.values())
    lines += _wrapped(f"{rounds} in {report.seconds:.0f} s; {facts}", width)
    lines += [f"note: {line}" for line in report.notes]
    for finding in contents.findings_of(report):
        lines += _wrapped(f"step: {finding}", width)
    for line in report.advice:
        lines += _wrapped(f"-> {line}", width)
    code, why = contents.change_of(report)
    if code:
        lines += _wrapped(f"-> the one change to make ({why}):", width)
        lines += [f"   {line}" for line in code.splitlines()]
    return "\n".join(lines)


def _table(shown: contents.Table, width: int) -> list[str]:
    if not shown:
        return []
    flush_right = shown.headings[1:-1]
    return table(shown.headings, shown.rows, right=flush_right, width=width).splitlines()


def _waits(report: Result, width: int) -> list[str]:
    waits = report.waits
    if waits is None or report.verdict == "step-bound":
        return []
    p50, p99, longest = (milliseconds(waits[name]) for name in ("p50", "p99", "longest"))
    lines = [f"waits for a batch, ms: half up to {p50}, 99 % up to {p99}, longest {longest}"]
    if batches := waits.get("batches"):
        named = (f"{milliseconds(s)} (batch {n} of epoch {epoch})" for epoch, n, s in batches)
        lines += _wrapped(f"longest waits, ms: {', '.join(named)}", width)
    lines += [
        f"slow: sample {index}, {milliseconds(seconds)} ms {file}".rstrip()
        for index, file, seconds in waits["slow"]
    ]
    return lines


def _wrapped(line: str, width: int) -> list[str]:
    """Return ``line``, which may itself have several lines, in lines of ``width`` characters."""
    return [
        part
        for each in line.splitlines()
        for part in textwrap.wrap(each, width, break_on_hyphens=False, break_long_words=False)
    ]
