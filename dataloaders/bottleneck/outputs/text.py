"""Write a report as plain text; it ends with the recommended change."""

from __future__ import annotations

import shutil
import textwrap
from typing import TYPE_CHECKING

from dataloaders.bottleneck.outputs import contents
from dataloaders.measuring.table import table

if TYPE_CHECKING:
    from dataloaders.bottleneck.report import Report

_WIDTH = 112  # a line of the candidates' table


def text(report: Report) -> str:
    """Return lines of the terminal's width, else of 112 characters.

    Lines to search or copy are not wrapped.
    """
    width = shutil.get_terminal_size((_WIDTH, 1)).columns

    def wrapped(line: str) -> str:
        return textwrap.fill(line, width, break_on_hyphens=False)

    verdict = f"{report.verdict.upper()}: {contents.MEANS[report.verdict]}"
    sentences = (verdict, contents.bound_of(report), contents.gap_of(report))
    parts = [wrapped(line) for line in sentences if line]
    parts += ["", wrapped(f"loader  {report.loader}"), wrapped(f"batch   {report.batch}"), ""]
    for name, (headings, rows) in contents.tables(report).items():
        if name == "slow":  # a table would wrap the path
            parts += [f"slow: sample {key}, {ms} ms {at}" for key, ms, at in rows]
        else:
            parts.append(table(headings, rows, right=headings[1:-1], width=width))
        parts.append("")
    parts.append(wrapped(f"{contents.measured(report)}; {', '.join(report.machine.values())}"))
    parts += [f"note: {line}" for line in report.notes]
    parts += [wrapped(f"step: {finding}") for finding in contents.shown_findings(report)]
    parts += [wrapped(f"-> {line}") for line in report.advice]
    code, why = contents.change_of(report)
    if code:
        parts.append(wrapped(f"-> the one change to make ({why}):"))
        parts += [f"   {line}" for line in code.splitlines()]
    return "\n".join(parts)
