"""Every exception and warning of this package, in one tree.

    DataLoadersError
    ├── OptionError         an option has a value that cannot be used      (also ValueError)
    ├── UnknownBackend      no backend of that name                        (also ValueError)
    ├── MissingDependency   the backend's own package is not installed     (also ImportError)
    ├── BackendUnavailable  this backend cannot serve this loader          (also RuntimeError)
    └── CheckError          a measurement could not be made                (also RuntimeError)

Each message says what was given, the rule, the value, and the next step.
"""

from __future__ import annotations

__all__ = [
    "BackendUnavailable",
    "BackendWarning",
    "CacheError",
    "CacheWarning",
    "CapacityWarning",
    "CheckError",
    "DataLoadersError",
    "MissingDependency",
    "OptionError",
    "UnknownBackend",
    "add_note",
]


class DataLoadersError(Exception):
    """Any error that this package raises itself."""


class OptionError(DataLoadersError, ValueError):
    """An option was given a value that it cannot take."""


class UnknownBackend(DataLoadersError, ValueError):
    """No backend is registered under the name that was given."""


class MissingDependency(DataLoadersError, ImportError):
    """The backend exists, but the package it stands on is not installed."""


class BackendUnavailable(DataLoadersError, RuntimeError):
    """The backend that was named in code cannot serve this loader."""


class CacheError(DataLoadersError, RuntimeError):
    """A cache cannot be built, or the file is none, is damaged, unfinished or of other samples."""


class CheckError(DataLoadersError, RuntimeError):
    """A bottleneck check or a tuning run could not measure what it was asked to measure."""


def add_note(error: BaseException, note: str) -> None:
    """Have ``note`` shown under ``error`` where it is printed; its type and text stay its own.

    Python 3.10 keeps the note and does not print it.
    """
    notes = getattr(error, "__notes__", None)
    if notes is None:
        notes = error.__notes__ = []  # type: ignore[attr-defined]
    notes.append(note)


class BackendWarning(UserWarning):
    """A backend cannot serve one loader or one batch, and what serves it in its place."""


class CacheWarning(UserWarning):
    """A build waits for other ranks, and none of them seems to go on."""


class CapacityWarning(UserWarning):
    """The machine lacks the memory, shared memory or cores that the loader asks for."""
