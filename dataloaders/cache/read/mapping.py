"""Map a file of a cache, and notice when it is cut short while it is mapped."""

from __future__ import annotations

import os
from pathlib import Path

from dataloaders.errors import CacheError
from dataloaders.machine.page_cache import map_file

__all__ = ["MappedFile"]


class MappedFile:
    """An open file, mapped; the descriptor is not kept.

    Args:
        path: of the file.
        descriptor: of the file.
        size: that the file has.

    Attributes:
        data: all of its bytes, read-only.

    Raises:
        CacheError: it cannot be mapped.
    """

    def __init__(self, path: Path, descriptor: int, size: int) -> None:
        self._path = path
        self._status = os.fstat(descriptor)
        try:
            self.data = map_file(descriptor, size)
        except OSError as error:
            raise CacheError(f"the cache {path} cannot be mapped: {error.strerror}") from error

    def refuse_cut_short(self) -> None:
        """Look whether the file still has all bytes: reading those that it lacks ends the process.

        Raises:
            CacheError: it was cut short.
        """
        try:
            found = os.stat(self._path)
        except OSError:  # removed, or not to be seen: what is open stays
            return
        if os.path.samestat(found, self._status) and found.st_size < len(self.data):
            raise CacheError(
                f"{self._path} was cut short while it was open: it has {found.st_size} bytes, and "
                f"had {len(self.data)}. Whoever writes to it should write a new file next to it "
                "and rename that, as precompute() does; then open it again"
            )
