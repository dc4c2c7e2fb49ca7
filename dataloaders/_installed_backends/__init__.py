"""Import ``backends`` under a second name, for scripts whose folder has a ``backends`` package.

This is an ordinary package whose search path is the installed folder, so pickles of its classes
load in spawned workers like any others. It is used only where the plain name is taken.
"""

from pathlib import Path

__path__ = [str(Path(__file__).resolve().parents[2] / "backends")]
