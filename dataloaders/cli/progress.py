"""Shows on stderr how far a measurement is.

On a terminal one line is rewritten in place; elsewhere a line is added now and then. Nothing is
written from a thread: it would run inside the blocks.
"""

from __future__ import annotations

import shutil
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataloaders.bottleneck import Progress

_PLAIN_EVERY_S = 10.0


class ProgressLine:
    """Shows each text, or `Progress` of a check, that it is called with."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._file = sys.stderr  # the present one, which the program may replace later
        # A program that was started without a stderr has none.
        self._quiet = quiet or self._file is None
        self._terminal = not self._quiet and self._file.isatty()
        self._last = float("-inf")
        self._shown = False

    def __call__(self, progress: Progress | str) -> None:
        """Show ``progress``, unless it is too early for another line."""
        if self._quiet:
            return
        now = time.monotonic()
        if now - self._last < (0.2 if self._terminal else _PLAIN_EVERY_S):
            return
        self._last = now
        text = str(progress)
        if self._terminal:
            text = text[: shutil.get_terminal_size().columns - 1]  # one row is what is cleared
            self._file.write(f"\r\x1b[2K{text}\r")
            self._shown = True
        else:
            self._file.write(text + "\n")
        self._file.flush()

    def close(self) -> None:
        """Take the line off the terminal."""
        if self._shown:
            self._file.write("\r\x1b[2K")
            self._file.flush()
            self._shown = False
