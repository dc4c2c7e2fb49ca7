"""One rank among those that build a cache: how far all are, what they write, waiting for them.

    rank 0 ──parts──> train.parts/                          <──looks── rank 1, which waits
           ──its error──> .train.h5.00000-of-00002.lock     <──looks── and raises it, too

Ranks know of each other only by these files. A rank that is killed leaves no error: it may be slow,
or be started again, so others wait for it, and warn. An error that was noted before this process
began is of an earlier start: that rank may be started again, too.
"""

from __future__ import annotations

import math
import os
import re
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from socket import gethostname

from dataloaders.cache.build.locks import Busy, lock_path, locked
from dataloaders.cache.build.parts import BuildFolder, missing_in, range_of
from dataloaders.cache.build.progress import Pace
from dataloaders.cache.build.reading import told
from dataloaders.cache.build.source import Source
from dataloaders.errors import CacheError, CacheWarning

_POLL_S = 0.1
_TELL_S = 0.5
_STALL_S = 60.0


class Ranks:
    """The ranks that build the cache at ``path``; ``name`` is of this one's lock."""

    def __init__(self, path: Path, folder: BuildFolder, source: Source) -> None:
        self._path, self._folder, shard = path, folder, source.options.shard
        rank, of = shard or (0, 1)
        self._ranges = [range_of(each, of, source.length) for each in range(of)]
        self._report = source.options.progress
        self._told = -math.inf
        self.name = "" if shard is None else self._name(rank)
        notes = {self._note_of(each) for each in range(of) if shard is not None}
        self._before = {note for note in notes if not _is_of_this_start(note)}

    def _name(self, rank: int) -> str:
        return f"{rank:05d}-of-{len(self._ranges):05d}"

    def note_error(self, error: BaseException) -> None:
        """Have the others know why this rank ends; its lock is held."""
        with suppress(OSError):  # a full disk; then they warn, and go on waiting
            at = time.clock_gettime(time.CLOCK_BOOTTIME)
            note = f"failed {at} {gethostname()} {told(error)}"
            _known.add(note)
            lock_path(self._path, self.name).write_text(note, "utf-8", "backslashreplace")

    def _note_of(self, rank: int) -> str:
        """Return what this rank noted when it ended with an error; "": none, or it runs again."""
        try:
            text = lock_path(self._path, self._name(rank)).read_text("utf-8")
        except (OSError, ValueError):
            return ""
        return text if _NOTE.match(text) else ""

    def tell(self, seconds: float, missing: Sequence[range] = ()) -> None:
        """Report, now and then, how far whoever is waited for is, for so many seconds.

        Other ranks are waited for if they have these missing samples to make.
        """
        if self._report is None or 0 <= seconds - self._told < _TELL_S:
            return
        self._told = seconds
        folder = self._folder
        parts = folder.finished() if folder.length or folder.watch() else []
        told, left = Pace(range(folder.length), 0, parts).told, len(self._lacking(missing))
        self._report(replace(told, waiting=True, seconds=seconds, shards_left=left))

    def _lacking(self, missing: Sequence[range]) -> list[int]:
        """Return the ranks that have some of these samples to make."""
        return [
            rank
            for rank, own in enumerate(self._ranges)
            if any(each.start < own.stop and own.start < each.stop for each in missing)
        ]

    def wait(self, finish: Callable[[], None]) -> None:
        """Wait until the parts of all ranks are there; one of them calls ``finish``.

        Warns:
            CacheWarning: nothing was finished for a minute; says whose samples are missing.

        Raises:
            CacheError: another rank has ended with an error since this one began, and its samples
                are missing.
        """
        started = time.monotonic()
        seen, since = -1, 0.0
        while self._folder.is_begun or not self._path.exists():
            looked = time.monotonic()
            now = looked - started
            missing = missing_in(range(self._ranges[-1].stop), self._folder.finished())
            if not missing:
                with suppress(Busy), locked(self._path, "build"):
                    if self._folder.is_begun:
                        finish()
                    return
            lacking = self._lacking(missing)
            errors = {rank: note for rank in lacking if (note := self._note_of(rank))}
            for rank, note in errors.items():
                if note not in self._before:
                    _known.add(note)
                    raise CacheError(
                        f"rank {rank} of {len(self._ranges)} ended with an error, and {self._path} "
                        f"lacks its samples: {_told(note)}. Mend that, and start all ranks again "
                        "with the same arguments: what is finished is kept"
                    )
            left = sum(map(len, missing))
            if left != seen:
                seen, since = left, now
            elif now - since >= _STALL_S:
                texts = [f"{each.start} to {each.stop - 1}" for each in missing[:8]]
                ended = " (ended before this one began: {})"
                whose = [
                    f"{rank}{ended.format(_told(errors[rank])) if rank in errors else ''}"
                    for rank in lacking[:8]
                ]
                warnings.warn(
                    f"{self._path} waits for samples {', '.join(texts)} of other ranks: "
                    f"{', '.join(whose)}. None was finished for {now - since:.0f} s. If a rank has "
                    "ended, start it again: what is finished is kept",
                    CacheWarning,
                    stacklevel=2,
                )
                since = math.inf  # until another one is finished
            self.tell(now, missing)
            # Thousands of parts on a network disk take long to look at, for each of the ranks.
            time.sleep(max(_POLL_S, 10 * (time.monotonic() - looked)))


_NOTE = re.compile(r"failed (\d+\.\d+) (\S+) ")
_known: set[str] = set()  # notes that have ended a build of this process already


def _is_of_this_start(note: str) -> bool:
    """Whether another rank noted this on this machine, and since this process began."""
    found = _NOTE.match(note)
    if found is None or found[2] != gethostname() or note in _known:
        return False
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    began = (int(fields[19]) + 1) / os.sysconf("SC_CLK_TCK")  # which is cut to whole ticks
    return float(found[1]) >= began


def _told(note: str) -> str:
    return _NOTE.sub("", note)
