"""Write a report as Markdown, for a pull request or $GITHUB_STEP_SUMMARY."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from dataloaders.bottleneck.outputs import contents
from dataloaders.bottleneck.outputs.against import Comparison

if TYPE_CHECKING:
    from dataloaders.bottleneck.report import Report

_LEFT_OUT = ("waits", "slow")  # left to the other forms: a summary says what to do


def markdown(report: Report, comparison: Comparison | None = None) -> str:
    """Return a summary: the verdict, the change to make, tables, and the notes folded away."""
    parts = [f"### {report.verdict}: {contents.MEANS[report.verdict]}", contents.bound_of(report)]
    code, why = contents.change_of(report)
    if code:
        parts += [f"**The one change to make** ({_escaped(why)}):", f"```python\n{code}\n```"]
    elif why:
        parts.append(f"**Next:** {_escaped(why)}")
    if comparison is not None:
        parts += [
            f"**Compared with before:** {_escaped(comparison.sentence)}",
            _table(comparison.table),
            _listed(comparison.differs),
        ]
    parts += [
        _table(shown) for name, shown in contents.tables(report).items() if name not in _LEFT_OUT
    ]
    facts = f"loader: {report.loader}", f"batch: {report.batch}", ", ".join(report.machine.values())
    parts += [
        _listed(map(str, contents.shown_findings(report))),
        "<details><summary>Notes and machine</summary>",
    ]
    parts += [_listed((*report.notes, *facts)), "</details>"]
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(table: contents.Table) -> str:
    if not table.rows:
        return ""
    rule = ("---:" if numeric else "---" for numeric in table.numeric)
    rows = (table.headings, rule, *([_escaped(cell) for cell in row] for row in table.rows))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _listed(lines: Iterable[str]) -> str:
    return "\n".join(f"- {_escaped(line)}" for line in lines)


def _escaped(text: str) -> str:
    """Escape what has a meaning in Markdown, its tables or HTML, except code in backquotes."""
    parts = re.split(r"(`[^`|<]+`)", " ".join(text.split()))
    parts[::2] = [re.sub(r"([\\`*_\[\]<>|#~$])", r"\\\1", part) for part in parts[::2]]
    return "".join(parts)
