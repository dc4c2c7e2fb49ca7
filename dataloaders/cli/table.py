"""Tables of the command line as plain text: without rich, which is not always installed."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from itertools import zip_longest

__all__ = ["table"]

_GAP = "  "


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, right: str = "") -> str:
    """Return aligned columns, their cells wrapped so that lines fit into the terminal.

    Args:
        headings: of the columns.
        rows: the cells, one a heading.
        right: the heading of the column that is flush right.
    """
    lines = [headings, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    room = shutil.get_terminal_size().columns - len(_GAP) * (len(widths) - 1)
    while sum(widths) > max(room, len(widths)):
        widths[widths.index(max(widths))] -= 1
    told = []
    for line in lines:
        wrapped = [
            textwrap.wrap(cell, width, break_on_hyphens=False)  # names of packages stay whole
            for cell, width in zip(line, widths, strict=True)
        ]
        for cells in zip_longest(*wrapped, fillvalue="") if any(wrapped) else [line]:
            padded = [
                cell.rjust(width) if heading == right else cell.ljust(width)
                for heading, cell, width in zip(headings, cells, widths, strict=True)
            ]
            told.append(_GAP.join(padded).rstrip())
    return "\n".join(told)
