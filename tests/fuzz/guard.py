"""What must not happen while a target runs: other errors, much memory, other files, code."""

from __future__ import annotations

import os
import re
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["Guard"]

_ROOM = 512 << 20  # by which the address space may grow: `verify` has threads, with a stack each
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


class Guard:
    """Watches calls in this process; ``folder`` is where they may open files."""

    def __init__(self, folder: Path) -> None:
        self._inside = f"{folder.resolve()}{os.sep}"
        self._armed = False
        self._seen: list[str] = []
        self._size = os.open("/proc/self/statm", os.O_RDONLY)
        sys.addaudithook(self._audit)

    def watch(self, call: Callable[[], Any]) -> Any:
        """Return what it returns; an AssertionError says that it did what it must not do."""
        self._seen = []
        before = resource.getrlimit(resource.RLIMIT_AS)
        size = int(os.pread(self._size, 100, 0).split()[0]) * _PAGE
        resource.setrlimit(resource.RLIMIT_AS, (size + _ROOM, before[1]))
        self._armed = True
        try:
            found = call()
        finally:
            self._armed = False
            resource.setrlimit(resource.RLIMIT_AS, before)
        assert not self._seen, self._seen
        return found

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._armed or event.startswith(_HARMLESS):
            return
        self._armed = False  # what follows opens files itself
        try:
            if not self._allowed(event, arguments):
                self._seen.append(f"{event} {arguments[:1]!r:.150}")
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
        return all(
            f"{os.path.realpath(path)}{os.sep}".startswith(self._inside)
            or path.startswith(_OF_CORES)
            for path in paths
        )
