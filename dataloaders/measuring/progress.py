"""Show how far a measurement or a build is.

On a terminal and in a notebook one line is rewritten; elsewhere a line is added now and then.
Nothing is written from a thread, which would run within the measured blocks.
"""

from __future__ import annotations

import shutil
import sys
import time
from typing import TextIO

_PLAIN_EVERY_S = 10.0


class ProgressLine:
    """Shows what it is called with, as text, on stderr or in ``file``."""

    def __init__(self, file: TextIO | None = None, *, quiet: bool = False) -> None:
        self._file = file or sys.stderr  # as it is now: the program may replace it
        ipython = sys.modules.get("IPython")
        notebook = ipython is not None and hasattr(ipython.get_ipython(), "kernel")
        # A program that was started without a stderr has none.
        self._quiet = quiet or self._file is None
        # What a script puts in place of stdout may have no isatty().
        terminal = getattr(self._file, "isatty", lambda: False)
        self.rewrites = not self._quiet and (notebook or terminal())
        self._last = float("-inf")
        self._width = 0

    def __call__(self, progress: object) -> None:
        """Show ``progress``, unless a line was shown just before."""
        now = time.monotonic()
        if self._quiet or now - self._last < (0.2 if self.rewrites else _PLAIN_EVERY_S):
            return
        self._last = now
        text = str(progress)
        if self.rewrites:
            text = text[: shutil.get_terminal_size().columns - 1]  # only one row is rewritten
            self._file.write(f"\r{text:<{self._width}}\r")  # further output begins the line
            self._width = len(text)
        else:
            self._file.write(text + "\n")
        self._file.flush()

    def close(self) -> None:
        """Erase the line."""
        if self._width:
            self._file.write(f"\r{'':<{self._width}}\r")
            self._file.flush()
            self._width = 0
