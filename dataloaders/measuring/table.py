"""Format tables as plain text."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Container, Sequence
from itertools import zip_longest

_GAP = "  "


def table(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Container[str] = (),
    width: int | None = None,
) -> str:
    """Return aligned columns, their cells wrapped so that lines fit.

    Args:
        headings: of the columns.
        rows: the cells, one a heading.
        right: the headings of columns that are aligned to the right.
        width: of a line; None: the terminal's.
    """
    lines = [headings, *rows]
    widths = [max(1, *map(len, column)) for column in zip(*lines, strict=True)]
    room = (width or shutil.get_terminal_size().columns) - len(_GAP) * (len(widths) - 1)
    while sum(widths) > max(room, len(widths)):
        widths[widths.index(max(widths))] -= 1
    shown = []
    for line in lines:
        wrapped = [
            textwrap.wrap(cell, width, break_on_hyphens=False)  # names of packages stay whole
            for cell, width in zip(line, widths, strict=True)
        ]
        for cells in zip_longest(*wrapped, fillvalue="") if any(wrapped) else [line]:
            padded = [
                cell.rjust(width) if heading in right else cell.ljust(width)
                for heading, cell, width in zip(headings, cells, widths, strict=True)
            ]
            shown.append(_GAP.join(padded).rstrip())
    return "\n".join(shown)
