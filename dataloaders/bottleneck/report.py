"""The check's result for its users: data, and what it can be written as."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from dataloaders.bottleneck.outputs import saved
from dataloaders.bottleneck.outputs import text as shown
from dataloaders.bottleneck.outputs.against import Comparison, compare
from dataloaders.bottleneck.outputs.markdown import markdown
from dataloaders.bottleneck.result import Result

R = TypeVar("R", bound="Report")


@dataclass(frozen=True)
class Report(Result):
    """Holds what a check found; see `Result` for its attributes."""

    def __str__(self) -> str:
        return shown.text(self)

    def __rich__(self) -> Any:
        """Return the report as rich shows it in a terminal."""
        return shown.renderable(self)

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return the report as JSON text; write it to ``path`` too, if one is given."""
        return _written(saved.text(self), path)

    @classmethod
    def from_json(cls: type[R], path: str | os.PathLike[str]) -> R:
        """Return the report that `to_json` wrote to ``path``.

        Raises:
            OptionError: the file is not there, no report, or one of another format.
        """
        return saved.read(cls, path)

    def against(self, before: Report) -> Comparison:
        """Return this report compared with an earlier one, with intervals."""
        return compare(before, self)

    def to_markdown(
        self, path: str | os.PathLike[str] | None = None, *, against: Report | None = None
    ) -> str:
        """Return a summary as Markdown, compared with ``against``; write it to ``path`` too."""
        beside = None if against is None else self.against(against)
        return _written(markdown(self, beside), path)

    def to_trace(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return the timeline as Chrome's trace events (open it in ui.perfetto.dev); write it."""
        return _written(saved.trace(self), path)

    def to_html(
        self, path: str | os.PathLike[str] | None = None, *, against: Report | None = None
    ) -> str:
        """Return the report as one HTML page without any other file; write it to ``path`` too.

        ``against`` is an earlier report, with which the page compares this one.

        Raises:
            MissingDependency: jinja2 or matplotlib is not installed.
        """
        # Charts take a second to import, and few checks want them.
        from dataloaders.bottleneck.outputs.page import page

        beside = None if against is None else self.against(against)
        return _written(page(self, beside), path)

    def _repr_html_(self) -> str:
        """Return the text as a notebook shows it."""
        return shown.html(self)


def _written(text: str, path: str | os.PathLike[str] | None) -> str:
    if path is not None:
        Path(path).write_text(text if text.endswith("\n") else text + "\n", encoding="utf-8")
    return text
