"""Write a report for a terminal or a notebook, by rich; it ends with the recommended change."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from dataloaders.bottleneck.outputs import contents

if TYPE_CHECKING:
    from dataloaders.bottleneck.report import Report

_WIDTH = 112  # a line of the candidates' table
_NOTEBOOK = '<pre style="font-family: monospace; line-height: normal">{code}</pre>'


def text(report: Report) -> str:
    """Return plain text in lines of 112 characters; lines to search or copy are not wrapped."""
    console = _printed(report)
    return "\n".join(line.rstrip() for line in console.export_text().splitlines())


def html(report: Report) -> str:
    """Return the text as HTML for a notebook."""
    return _printed(report).export_html(inline_styles=True, code_format=_NOTEBOOK)


def renderable(report: Report) -> Group:
    """Return the report as rich prints it."""
    meaning = f": {contents.MEANS[report.verdict]}"
    parts: list[Any] = [Text.assemble((report.verdict.upper(), "bold"), meaning)]
    parts += [Text(line) for line in (contents.bound_of(report), contents.gap_of(report)) if line]
    parts += ["", Text(f"loader  {report.loader}"), Text(f"batch   {report.batch}"), ""]
    for name, table in contents.tables(report).items():
        if name == "slow":  # a table would wrap the path
            parts += [_unbroken(f"slow: sample {key}, {ms} ms {at}") for key, ms, at in table.rows]
        else:
            parts.append(_table(table))
        parts.append("")
    facts = ", ".join(report.machine.values())
    parts.append(Text(f"{contents.measured(report)}; {facts}", style="dim"))
    parts += [_unbroken(f"note: {line}") for line in report.notes]
    parts += [Text(f"step: {finding}") for finding in contents.shown_findings(report)]
    parts += [Text(f"-> {line}") for line in report.advice]
    code, why = contents.change_of(report)
    if code:
        parts.append(Text(f"-> the one change to make ({why}):"))
        parts += [_unbroken(f"   {line}") for line in code.splitlines()]
    return Group(*parts)


def _printed(report: Report) -> Console:
    # In a notebook, rich would display what is printed here, in place of writing it to the file.
    console = Console(file=io.StringIO(), width=_WIDTH, record=True, force_jupyter=False)
    console.print(renderable(report), crop=False)
    return console


def _table(shown: contents.Table) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    first, *middle, last = shown.headings
    table.add_column(first)
    for heading in middle:
        table.add_column(heading, justify="right")
    table.add_column(last, style="dim")
    for row in shown.rows:
        table.add_row(*map(Text, row))
    return table


def _unbroken(line: str) -> Text:
    """Return a line that rich does not wrap, so that it can be searched and copied."""
    return Text(line, no_wrap=True, overflow="ignore")
