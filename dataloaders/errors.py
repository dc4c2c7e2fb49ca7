"""Define every exception and warning of this package, in one tree.

    DataLoadersError
    ├── OptionError         an option has a value that it cannot take      (also ValueError)
    ├── UnknownBackend      no backend has that name                       (also ValueError)
    ├── MissingDependency   the backend's own package is not installed     (also ImportError)
    ├── BackendUnavailable  this backend cannot serve this loader          (also RuntimeError)
    ├── CacheError          a cache cannot be built or read                (also RuntimeError)
    └── CheckError          a measurement could not be made                (also RuntimeError)

Each message says what was given, the rule, the value, and the next step.
"""

from __future__ import annotations

from contextlib import suppress

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
    "last_line",
    "one_line",
]


class DataLoadersError(Exception):
    """Any error that this package raises itself."""


class OptionError(DataLoadersError, ValueError):
    """An option was given a value that it cannot take."""


class UnknownBackend(DataLoadersError, ValueError):
    """No backend is registered under the name that was given."""


class MissingDependency(DataLoadersError, ImportError):
    """The backend exists, but the package that it needs is not installed."""


class BackendUnavailable(DataLoadersError, RuntimeError):
    """The backend that was named in code cannot serve this loader."""


class CacheError(DataLoadersError, RuntimeError):
    """A cache cannot be built, or the file is not a usable cache of these samples."""


class CheckError(DataLoadersError, RuntimeError):
    """A bottleneck check or a tuning run could not measure what it was asked to measure."""


def add_note(error: BaseException, note: str) -> None:
    """Add ``note`` below the text of ``error`` where it is printed; keep its type and text.

    Python 3.10 stores the note but does not print it.
    """
    with suppress(AttributeError):  # an error that is a frozen dataclass takes no notes
        notes = getattr(error, "__notes__", None)
        if notes is None:
            notes = error.__notes__ = []  # type: ignore[attr-defined]
        notes.append(note)


class BackendWarning(UserWarning):
    """A backend cannot serve one loader or one batch; the text says what serves it instead."""


class CacheWarning(UserWarning):
    """A cache holds what other versions of packages have computed."""


class CapacityWarning(UserWarning):
    """The machine lacks the memory, shared memory or cores that the loader asks for."""


def one_line(error: BaseException) -> str:
    """Return an error's type and text in one line; of the text 300 characters at most."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def last_line(error: BaseException) -> str:
    """Return the last line of an error's text, 300 characters at most; without text its type."""
    return str(error).strip().rpartition("\n")[2][:300] or type(error).__name__
