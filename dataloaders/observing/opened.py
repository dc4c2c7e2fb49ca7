"""Note the files that a process opens for reading, and whether they changed afterwards."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TypeAlias

Files: TypeAlias = dict[str, tuple[int, int]]
"""Size in bytes and time of the last change in nanoseconds, by absolute path."""


def files_opened() -> Files:
    """Return a dict to which each file that this process opens for reading is added, from now on.

    For processes that end soon: it cannot be stopped. Libraries that open files in C or C++ are not
    seen, except torchvision's.
    """
    opened: Files = {}

    def note(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and args[2] & os.O_ACCMODE == os.O_RDONLY:
            add(opened, args[0])

    sys.addaudithook(note)
    module: Any = sys.modules.get("torchvision.io.image")
    if module is not None:
        inner = module.read_file

        def read_file(path: Any) -> Any:
            add(opened, path)
            return inner(path)

        module.read_file = read_file
    return opened


def add(files: Files, path: Any) -> None:
    """Add ``path`` as it is now, if it is that of a file with contents or of a folder."""
    with suppress(OSError, ValueError):
        if isinstance(path, (str, bytes, os.PathLike)):
            found = os.stat(path)
            # A file of /proc is empty, and another one each time.
            if stat.S_ISDIR(found.st_mode) or (stat.S_ISREG(found.st_mode) and found.st_size):
                files[os.path.abspath(os.fsdecode(path))] = found.st_size, found.st_mtime_ns


def unchanged(files: Mapping[str, Any]) -> bool:
    """Whether each of these files has its size and time still."""
    now: Files = {}
    for path in files:
        add(now, path)
    return now == {path: tuple(was) for path, was in files.items()}
