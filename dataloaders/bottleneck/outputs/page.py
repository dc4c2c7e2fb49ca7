"""Write a report as one self-contained HTML page, from the template page.html."""

from __future__ import annotations

import linecache
import re
from pathlib import Path
from typing import TYPE_CHECKING

from dataloaders.bottleneck.outputs import contents
from dataloaders.bottleneck.outputs.against import Comparison
from dataloaders.errors import MissingDependency

try:
    import jinja2
    from markupsafe import Markup, escape

    from dataloaders.bottleneck.outputs.charts import charts
except ImportError as error:
    raise MissingDependency(
        f"the page needs jinja2 and matplotlib, and {error.name} cannot be imported ({error}); "
        "install them with: pip install 'gpu-dataloaders[check]'"
    ) from error

if TYPE_CHECKING:
    from dataloaders.bottleneck.report import Report

_WHERE = re.compile(r"(.+\.py):(\d+)")
_ADDRESS = re.compile(r"(?:([^,]*), )?(https?://[^\s&]+)")  # with its title


def page(report: Report, comparison: Comparison | None = None) -> str:
    """Return the page's HTML; with ``comparison``, the page compares two reports."""
    change, why = contents.change_of(report)
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters.update(code=_code, linked=_linked)
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    return environment.from_string(template).render(
        report=report,
        means=contents.MEANS[report.verdict],
        bound=contents.bound_of(report),
        gap=contents.gap_of(report),
        measured=contents.measured(report),
        change=change,
        why=why,
        tables=contents.tables(report),
        charts={name: Markup(svg) for name, svg in charts(report).items()},
        findings=[(one, _line_at(one.where or "")) for one in contents.shown_findings(report)],
        ms=contents.milliseconds,
        range_of=contents.range_of,
        comparison=comparison,
    )


def _code(text: str) -> Markup:
    """Return text as HTML, with ``<code>`` for backquotes."""
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def _linked(text: str) -> Markup:
    """Return text as HTML, with links; "Title, https://..." becomes a link named "Title"."""
    link = _ADDRESS.sub(lambda m: f'<a href="{m[2]}">{m[1] or m[2]}</a>', str(escape(text)))
    return Markup(link)


def _line_at(where: str) -> str:
    """Return the line of code at "file.py:12"; "" if it cannot be read."""
    found = _WHERE.match(where)
    return linecache.getline(found[1], int(found[2])).strip() if found else ""
