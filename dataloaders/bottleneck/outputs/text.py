"""The report in a terminal and in a notebook, by rich; its last line is the change, as code."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from dataloaders.bottleneck.outputs import contents
from dataloaders.bottleneck.outputs.contents import milliseconds
from dataloaders.bottleneck.result import Result

_WIDTH = 112  # a line of the candidates' table
_IN_A_PAGE = '<pre style="font-family: monospace; line-height: normal">{code}</pre>'


def text(report: Result) -> str:
    """Return plain text, in lines of 112 characters except those to search for or to copy."""
    output = io.StringIO()
    console = Console(file=output, width=_WIDTH, force_terminal=False)
    console.print(renderable(report), crop=False)
    return "\n".join(line.rstrip() for line in output.getvalue().splitlines())


def html(report: Result) -> str:
    """Return the text as a notebook shows it."""
    console = Console(file=io.StringIO(), width=_WIDTH, record=True)
    console.print(renderable(report), crop=False)
    return console.export_html(inline_styles=True, code_format=_IN_A_PAGE)


def renderable(report: Result) -> Group:
    """Return what rich prints of the report."""
    parts: list[Any] = [
        Text.assemble((report.verdict.upper(), "bold"), f": {contents.MEANS[report.verdict]}")
    ]
    if bound := contents.bound_of(report):
        parts.append(Text(bound))
    if report.smallest_gap is not None:
        parts.append(Text(f"A gap below {report.smallest_gap:.1%} could not have been seen."))
    parts += ["", Text(f"loader  {report.loader}"), Text(f"batch   {report.batch}"), ""]
    sections = [
        _table(contents.arms(report)), _table(contents.stalls(report)), _waits(report),
        _table(contents.preparation(report)), _table(contents.candidates(report)),
    ]  # fmt: skip
    for section in sections:
        parts += [*section, ""] if section else []
    rounds = "1 round" if report.rounds == 1 else f"{report.rounds} rounds"
    facts = ", ".join(report.machine.values())
    parts.append(Text(f"{rounds} in {report.seconds:.0f} s; {facts}", style="dim"))
    parts += [_unbroken(f"note: {line}") for line in report.notes]
    parts += [Text(f"step: {finding}") for finding in contents.findings_of(report)]
    parts += [Text(f"-> {line}") for line in report.advice]
    code, why = contents.change_of(report)
    if code:
        parts.append(Text(f"-> the one change to make ({why}):"))
        parts += [_unbroken(f"   {line}") for line in code.splitlines()]
    return Group(*parts)


def _table(shown: contents.Table) -> list[Any]:
    if not shown:
        return []
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for number, heading in enumerate(shown.headings):
        last = number == len(shown.headings) - 1
        table.add_column(heading, justify="right" if number > 0 and not last else "left",
                         style="dim" if last else None)  # fmt: skip
    for row in shown.rows:
        table.add_row(*map(Text, row))
    return [table]


def _waits(report: Result) -> list[Any]:
    waits = report.waits
    if waits is None or report.verdict == "step-bound":
        return []
    p50, p99, longest = (milliseconds(waits[name]) for name in ("p50", "p99", "longest"))
    lines = [f"waits for a batch, ms: half up to {p50}, 99 % up to {p99}, longest {longest}"]
    if batches := waits.get("batches"):
        named = (f"{milliseconds(s)} (batch {n} of epoch {epoch})" for epoch, n, s in batches)
        lines.append(f"longest waits, ms: {', '.join(named)}")
    lines += [
        f"slow: sample {index}, {milliseconds(seconds)} ms {file}".rstrip()
        for index, file, seconds in waits["slow"]
    ]
    return [Text(line) for line in lines]


def _unbroken(line: str) -> Text:
    """Return a line that is not broken: to be searched for, or copied."""
    return Text(line, no_wrap=True, overflow="ignore")
