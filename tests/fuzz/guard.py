"""What must not happen while a target runs: other errors, much memory, other files, code.

    watch(call) ──> None, or a Finding: what happened, and where in the package

A file of a few KB must not take gigabytes: the address space may grow by `ROOM` while it is read.
Each event that Python reports to audit hooks has to be one of a few, and of the work folder.
"""

from __future__ import annotations

import os
import re
import resource
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataloaders.errors import CacheError, MissingDependency, OptionError

__all__ = ["ROOM", "Finding", "Guard", "refusals_aside"]

ROOM = 512 << 20
"""Bytes by which the address space may grow; `verify` has threads, with a stack and arena each."""

_PAGE = os.sysconf("SC_PAGE_SIZE")
_HARMLESS = (
    "_thread.", "array.", "builtins.id", "code.__new__", "cpython.", "gc.", "object.", "sys.",
    "mmap.__new__", "os.putenv", "tempfile.", "time.", "fcntl.", "glob.",
)  # fmt: skip
_OF_PATHS = ("open", "os.", "shutil.", "pathlib.")
_OF_CORES = ("/proc/self/cgroup", "/proc/self/mountinfo", "/sys/fs/cgroup/")
_FORBIDDEN = ("os.exec", "os.fork", "os.posix_spawn", "os.startfile", "os.system", "os.kill")
# `namedtuple` makes code of its fields, whose names were looked at; of nothing else.
_NAMEDTUPLE = re.compile(
    r"lambda _cls, (\w+, )*(\w+,? ?)?: _tuple_new\(_cls, \((\w+, )*(\w+,? ?)?\)\)"
)


@dataclass(frozen=True)
class Finding:
    """Something that must not happen.

    Attributes:
        what: in a line; the same for inputs that do the same.
        trace: how it came to it.
    """

    what: str
    trace: str


@contextmanager
def refusals_aside() -> Iterator[None]:
    """Errors that a hostile file may raise are no finding."""
    try:
        yield
    except (CacheError, MissingDependency, OptionError) as error:
        text = str(error)
        assert len(text) < 3000, f"an error of {len(text)} characters: {text[:100]!r}"
        assert text.isprintable(), f"an error that is more than text: {text[:1000]!r}"


class Guard:
    """Watches calls in this process; ``folder`` is where they may open files."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder.resolve())
        self._armed = False
        self._seen: list[Finding] = []
        self._size = os.open("/proc/self/statm", os.O_RDONLY)
        sys.addaudithook(self._audit)

    def watch(self, call: Callable[[], None], *, audited: bool = True) -> list[Finding]:
        """What ``call`` did that it must not do; ``audited``: other files and code count too."""
        self._seen = []
        before = resource.getrlimit(resource.RLIMIT_AS)
        size = int(os.pread(self._size, 100, 0).split()[0]) * _PAGE
        resource.setrlimit(resource.RLIMIT_AS, (size + ROOM, before[1]))
        self._armed = audited
        try:
            call()
        except Exception as error:
            wrong = error
        else:
            return self._seen
        finally:
            self._armed = False
            resource.setrlimit(resource.RLIMIT_AS, before)
        text = "".join(traceback.format_exception(wrong))
        return [*self._seen, Finding(f"{type(wrong).__name__} {_where(wrong)}", text)]

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._armed or event.startswith(_HARMLESS):
            return
        self._armed = False  # what follows opens files itself
        try:
            if not self._allowed(event, arguments):
                text = f"{event} {arguments[:1]!r:.150}"
                self._seen.append(Finding(text, "".join(traceback.format_stack())))
        finally:
            self._armed = True

    def _allowed(self, event: str, arguments: tuple[Any, ...]) -> bool:
        if event == "compile":
            source = arguments[0]
            text = source.decode() if isinstance(source, bytes) else source
            return isinstance(text, str) and _NAMEDTUPLE.fullmatch(text) is not None
        if event == "exec":  # of what was compiled before
            return bool(arguments[0].co_filename.startswith("<"))
        if event.startswith(_FORBIDDEN) or not event.startswith(_OF_PATHS):
            return False
        named = arguments[:1] if event == "open" else arguments
        paths = [os.fsdecode(each) for each in named if isinstance(each, (str, bytes, Path))]
        inside = f"{self._folder}{os.sep}"
        return all(
            f"{os.path.realpath(path)}{os.sep}".startswith(inside) or path.startswith(_OF_CORES)
            for path in paths
        )


def _where(error: BaseException) -> str:
    """The innermost line of the package that it went through."""
    found = "outside the package"
    for frame in traceback.extract_tb(error.__traceback__):
        if f"{os.sep}dataloaders{os.sep}" in frame.filename or "backends" in frame.filename:
            found = f"in {Path(frame.filename).name}:{frame.lineno} ({frame.name})"
    return found
