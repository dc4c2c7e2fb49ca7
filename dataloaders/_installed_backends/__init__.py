"""Our ``backends`` under a second name, for scripts whose own folder has a ``backends`` package.

An ordinary package whose search path is the installed folder, so that pickles made from its
classes load in spawned workers like any others. Used only where the plain name is taken.
"""

from pathlib import Path

__path__ = [str(Path(__file__).resolve().parents[2] / "backends")]
