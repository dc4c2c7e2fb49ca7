"""One rank among those that build a cache: how far all are, what they write, waiting for them.

    rank 0 ──parts──> train.parts/                          <──looks── rank 1, which waits
           ──its error──> .train.h5.00000-of-00002.lock     <──looks── and raises it, too

Ranks know of each other only by these files. A rank that is killed leaves no error: it may be slow,
or be started again, so others wait for it, and warn. An error that was noted before this process
began is of an earlier start: that rank may be started again, too.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from socket import gethostname
from typing import Any

from dataloaders.cache.build.estimation import Estimate
from dataloaders.cache.build.locks import Busy, builder_of, lock_path, locked
from dataloaders.cache.build.parts import BuildFolder, missing_in, range_of
from dataloaders.cache.build.progress import BuildProgress
from dataloaders.cache.build.reading import told
from dataloaders.cache.format.disk import size_of
from dataloaders.errors import CacheError, CacheWarning
from dataloaders.machine.resources import ranks_here

__all__ = ["Ranks"]

_POLL_S = 0.1
_TELL_S = 0.5
_STALL_S = 60.0


class Ranks:
    """The ranks that build the cache at ``path``.

    Args:
        path: of the cache.
        folder: of its parts.
        length: of the dataset.
        shard: this rank, and how many there are; None: this process builds alone.
        report: called with the progress of all while this one waits.
    """

    def __init__(
        self,
        path: Path,
        folder: BuildFolder,
        length: int,
        shard: tuple[int, int] | None,
        report: Callable[[BuildProgress], None],
    ) -> None:
        self._path = path
        self._folder = folder
        self._length = length
        self._rank, self._of = shard or (0, 1)
        self._report = report
        self._told = float("-inf")
        self.name = "" if shard is None else self._name(self._rank)
        errors = {} if shard is None else {n: self._error_of(n) for n in range(self._of)}
        self._old = {n: error for n, error in errors.items() if not _is_of_this_start(error)}

    def _name(self, rank: int) -> str:
        return f"{rank:05d}-of-{self._of:05d}"

    def note_error(self, error: BaseException) -> None:
        """Have the others know why this rank ends; its lock is held."""
        note = {
            "error": told(error),
            "at": time.clock_gettime(time.CLOCK_BOOTTIME),
            "host": gethostname(),
            "id": os.urandom(8).hex(),
        }
        _known.add(str(note["id"]))
        with suppress(OSError):  # a full disk; then they warn, and go on waiting
            lock_path(self._path, self.name).write_text(json.dumps(note))

    def _error_of(self, rank: int) -> dict[str, Any] | None:
        """Return what this rank noted when it last ended; None: no error, or it runs again."""
        try:
            found = json.loads(lock_path(self._path, self._name(rank)).read_text())
        except (OSError, ValueError, RecursionError):
            return None
        is_error = type(found) is dict and type(found.get("at")) is float and "error" in found
        return found if is_error else None

    def _last_of(self, rank: int) -> str:
        """Say what is known of a rank that is waited for."""
        if (error := self._error_of(rank)) is not None:
            return f"ended before this one began: {error['error']}"
        path = lock_path(self._path, self._name(rank))
        return builder_of(path) if path.exists() else "never began"

    def tell(self, seconds: float, missing: list[range] | None = None) -> None:
        """Report, now and then, how far the process that builds is, or all ranks.

        Args:
            seconds: since this one began to wait.
            missing: samples that are to be made; None: it waits for the lock.
        """
        if not 0 <= seconds - self._told < _TELL_S:
            self._told = seconds
            self._report(self._progress(seconds, missing))

    def _progress(self, seconds: float, missing: list[range] | None) -> BuildProgress:
        folder = self._folder
        if not folder.names.length and not folder.watch():
            return BuildProgress("compute", True, 0, 0, 0, 0, 0, seconds, None, None)
        parts = folder.finished()
        return BuildProgress(
            phase="compute",
            waiting=True,
            samples=folder.names.length,
            samples_done=sum(len(part.samples) for part in parts),
            failed=sum(part.failed for part in parts),
            bytes_done=sum(part.index.file_bytes for part in parts),
            bytes_expected=0,
            seconds=seconds,
            samples_per_second=None,
            seconds_left=None,
            shards_left=len(self._lacking(missing or [])),
        )

    def _lacking(self, missing: list[range]) -> list[int]:
        """Return the ranks that have some of these samples to make."""
        ranges = [range_of(rank, self._of, self._length) for rank in range(self._of)]
        return [
            rank
            for rank, own in enumerate(ranges)
            if any(each.start < own.stop and own.start < each.stop for each in missing)
        ]

    def _left(self, ranks: range) -> list[int]:
        """Return how many samples each of these ranks has still to make."""
        parts = self._folder.finished()
        ranges = [range_of(rank, self._of, self._length) for rank in ranks]
        return [sum(map(len, missing_in(each, parts))) for each in ranges]

    def refuse_small_disk(self, told: Estimate, written: int, *, together: bool) -> None:
        """Do nothing if there is room for what this rank, and others on its disk, still write.

        Args:
            told: of this rank's build.
            written: bytes that this rank has written.
            together: whether all write into one folder. If not, those on one machine do, of which
                torchrun says which they are: each machine may have a disk of its own.

        Raises:
            CacheError: there is not.
        """
        ranks = range(self._of) if together else _on_this_machine(self._rank, self._of)
        left = self._left(ranks)
        left.pop(self._rank - ranks.start)
        others = round(told.low_needed / max(1, told.samples) * sum(left))
        needed = round(told.low_needed) - written + others
        if needed <= told.disk_free:
            return
        busy = sum(each > 0 for each in left)
        beside = f", of which {size_of(others)} for {busy} other ranks," if others else ""
        copied = ", and twice that while its parts are copied into one file"
        raise CacheError(
            f"{told.samples} samples will take about {size_of(told.bytes)}"
            f"{copied if told.is_copied else ''}: {size_of(max(needed, 0))} more are "
            f"needed{beside} and {size_of(told.disk_free)} are free in {self._path.parent}; make "
            "room, give a path on another disk, or keep smaller samples (Resize and CenterCrop in "
            "the transform, uint8)"
        )

    def wait(self, finish: Callable[[], None]) -> None:
        """Wait until the parts of all ranks are there; one of them calls ``finish``.

        Warns:
            CacheWarning: nothing has changed for a long time; says whose samples are missing.

        Raises:
            CacheError: another rank has ended with an error since this one began, and its samples
                are missing.
        """
        started = time.monotonic()
        seen, since, patience = -1, 0.0, _STALL_S
        while self._folder.is_begun or not self._path.exists():
            looked = time.monotonic()
            missing = missing_in(range(self._length), self._folder.finished())
            if not missing:
                with suppress(Busy), locked(self._path, "build"):
                    if self._folder.is_begun:
                        finish()
                    return
            now = time.monotonic() - started
            lacking = self._lacking(missing)
            for rank in lacking:
                error = self._error_of(rank)
                if error is not None and error != self._old.get(rank):
                    _known.add(str(error.get("id")))
                    raise CacheError(
                        f"rank {rank} of {self._of} ended with an error, and {self._path} lacks "
                        f"its samples: {error['error']}. Mend that, and start all ranks again with "
                        "the same arguments: what is finished is kept"
                    )
            left = sum(map(len, missing))
            if left != seen:
                seen, since, patience = left, now, _STALL_S
            elif now - since >= patience:
                patience *= 2
                texts = [f"{each.start} to {each.stop - 1}" for each in missing[:8]]
                whose = [f"{rank} ({self._last_of(rank)})" for rank in lacking[:8]]
                warnings.warn(
                    f"{self._path} waits for samples {', '.join(texts)} of other ranks: "
                    f"{', '.join(whose)}. None was finished for {now - since:.0f} s. If a rank has "
                    "ended, start it again: what is finished is kept",
                    CacheWarning,
                    stacklevel=2,
                )
            self.tell(now, missing)
            # Thousands of parts on a network disk take long to look at, for each of the ranks.
            time.sleep(max(_POLL_S, 10 * (time.monotonic() - looked)))


_known: set[str] = set()  # errors that were raised in this process already


def _is_of_this_start(error: dict[str, Any] | None) -> bool:
    """Whether another rank noted this on this machine, and since this process began."""
    if error is None or error.get("host") != gethostname() or error.get("id") in _known:
        return False
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    began = (int(fields[19]) + 1) / os.sysconf("SC_CLK_TCK")  # which is cut to whole ticks
    return bool(error["at"] >= began)


def _on_this_machine(rank: int, of: int) -> range:
    """Return the ranks that torchrun has started beside this one, and this one."""
    local, here = os.environ.get("LOCAL_RANK", ""), ranks_here()
    if not local.isdecimal() or int(local) >= here:
        return range(rank, rank + 1)
    first = max(0, rank - int(local))
    return range(first, min(of, first + here))
