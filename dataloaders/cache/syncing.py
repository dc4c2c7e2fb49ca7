"""What a build has finished is put on the disk while it goes on, now and then and not each time.

    a chunk is finished ──> a line of the journal, at once       kill -9 loses nothing of it
                        ──a thread, now and then───> the disk    a power cut loses 3 s of it

Each time, everything that waits for the disk, the workers' writes among it, waits for all of it: of
many small chunks that is a good part of a build. In which order things arrive does not matter: what
a line of the journal says of an earlier call is believed only after comparing checksums.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from pathlib import Path

from dataloaders.cache.disk import sync, writing

__all__ = ["Syncing"]

_EVERY_S = 3.0


class Syncing:
    """While entered, a thread that has files on the disk soon after they were named.

    Args:
        folder: of the files.
        finish: called last, each time; it puts what names the files on the disk.

    Raises:
        CacheError: with the next files, or when it is left: the disk did not take something.
    """

    def __init__(self, folder: Path, finish: Callable[[], None]) -> None:
        self._folder = folder
        self._finish = finish
        self._named: set[Path] = set()
        self._changed = threading.Condition()
        self._ended = False
        self._soon = False
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._run, name="dataloaders-sync", daemon=True)

    def __enter__(self) -> Syncing:
        self._thread.start()
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._thread.join()
        if kind is None:
            self._raise()

    def add(self, files: Collection[Path]) -> None:
        """Have these files on the disk within a few seconds."""
        self._raise()
        with self._changed:
            self._named.update(files)

    def soon(self) -> None:
        """Begin at once: the end of a build then waits for little."""
        with self._changed:
            self._soon = True
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ended or self._soon, timeout=_EVERY_S)
                if self._ended:
                    return  # what comes next puts the whole file on the disk
                self._soon = False
                named, self._named = self._named, set()
            if not named:
                continue
            try:
                for path in sorted(named):
                    sync(path)
                self._finish()
            except OSError as error:
                self._error = error

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            with writing(self._folder):
                raise error
