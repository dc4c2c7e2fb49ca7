"""The ranks that build the shards of one cache, and where they meet.

    rank 0 ──its shard──┐
    rank 1 ──its shard──┤ all are there ──whoever is first joins──> train.h5 ──> each opens it
    rank 2 ──its shard──┘

They know of each other only by the files that they see: no network, no common start. A rank that
is started again finds its shard finished, or goes on with it.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dataloaders.cache.folder import BuildFolder
from dataloaders.cache.index import Index
from dataloaders.cache.joining import joined_into
from dataloaders.cache.lock import BuildLock
from dataloaders.cache.progress import BuildProgress
from dataloaders.cache.shards import (
    check_shards,
    listed,
    names_of,
    range_of,
    shard_path,
    shard_text,
)
from dataloaders.errors import CacheError, CacheWarning
from dataloaders.machine.resources import ranks_here

__all__ = ["Ranks"]

_POLL_S = 0.1
_TELL_S = 0.5
_STALL_S = 60.0
_ASLEEP = 20  # times as long as looking takes, which with thousands of shards is a while


class Ranks:
    """All ranks that build the cache at ``target``, as one of them sees them.

    Args:
        target: the joined file.
        shard: the rank, and how many there are.
    """

    def __init__(self, target: Path, shard: tuple[int, int]) -> None:
        self._target = target
        self._rank, self._of = shard
        self._names = names_of(target, self._of)
        self._looked: dict[str, tuple[Any, bool]] = {}

    @property
    def own(self) -> Path:
        """The shard of this rank."""
        return shard_path(self._target, self._rank, self._of)

    def have_built(self) -> bool:
        """Whether there is a cache already, and no shard of it is to be built again.

        Raises:
            CacheError: there is a file, and it is none.
        """
        if not self._target.exists():
            return False
        shards = [shard.name for shard in Index.parse(str(self._target)).shards]
        # Of a build by as many ranks, those whose shard is missing build it, and only it. What is
        # wrong otherwise is said when it is opened.
        return shards != self._names or not self._missing()

    def begin_anew(self) -> None:
        """Remove the shard of this rank, and the file that joins it with the others.

        Else a rank that is done early would join what the others have not yet replaced.
        """
        if self._target.exists() and self._is_joined():
            self._target.unlink(missing_ok=True)
        self.own.unlink(missing_ok=True)

    def others_to_write(self, each: float, length: int, *, wait: bool) -> tuple[int, int]:
        """Bytes that other ranks are still to write on the disk of this one; and how many do.

        Ranks that wait for each other write into one folder. Of those that do not, these are on one
        machine that torchrun says are: each machine may have a disk of its own.

        Args:
            each: bytes that a sample takes, while it is built.
            length: samples of the whole dataset.
            wait: whether the ranks wait for each other.
        """
        left = 0
        ranks = 0
        for rank in range(self._of) if wait else _on_this_machine(self._rank, self._of):
            path = self._target.with_name(self._names[rank])
            if rank == self._rank or path.exists():
                continue
            written = BuildFolder(path).progress_of_others(0.0).bytes_done
            to_come = round(each * len(range_of(rank, self._of, length))) - written
            left += max(0, to_come)
            ranks += to_come > 0
        return left, ranks

    def join(
        self, fingerprint: Mapping[str, Any], report: Callable[[BuildProgress], None], anew: bool
    ) -> None:
        """Wait for the shards of the others, and have the joined file made by one of all.

        Args:
            fingerprint: of the whole dataset.
            report: told now and then how far all of them are.
            anew: whether shards of something else are old ones, that are still to be replaced.

        Warns:
            CacheWarning: nothing has changed for a long time; names the shards that are missing.

        Raises:
            CacheError: the shards do not belong together.
        """
        samples = int(fingerprint["length"])
        watch = _Watch(self._target, self._of)
        started, next_told = time.monotonic(), float("-inf")
        while True:
            began = time.monotonic()
            missing = self._missing() or (self._old(fingerprint) if anew else [])
            if not missing and self._have_joined(anew):
                return
            now = time.monotonic()
            if now >= next_told:
                progress = self._progress(missing, samples, now - started)
                report(progress)
                watch.look(missing, progress, now)
                next_told = now + max(_TELL_S, _ASLEEP * (time.monotonic() - now))
            time.sleep(max(_POLL_S, _ASLEEP * (now - began)))

    def _missing(self) -> list[str]:
        there = set(os.listdir(self._target.parent))
        return [name for name in self._names if name not in there]

    def _old(self, fingerprint: Mapping[str, Any]) -> list[str]:
        """The shards that were built of something else."""
        return [
            name
            for rank, name in enumerate(self._names)
            if not self._is_of(name, {**fingerprint, "shard": shard_text(rank, self._of)})
        ]

    def _is_of(self, name: str, fingerprint: Mapping[str, Any]) -> bool:
        path = self._target.with_name(name)
        try:
            found = path.stat()
            seen = (found.st_dev, found.st_ino, found.st_mtime_ns)
            if self._looked.get(name, (None, False))[0] != seen:
                self._looked[name] = seen, Index.parse(str(path)).fingerprint == fingerprint
        except (OSError, CacheError):
            return False
        return self._looked[name][1]

    def _is_joined(self) -> bool:
        try:
            return bool(Index.parse(str(self._target)).shards)
        except CacheError:
            return False

    def _have_joined(self, anew: bool) -> bool:
        """Whether the joined file is there; it is made, unless another rank does so just now."""
        if self._fits(anew):
            return True
        lock = BuildLock(BuildFolder(self._target).path)
        if not lock.try_acquire():
            return False
        try:
            if not self._fits(anew):
                joined_into(self._target, [self._target.with_name(name) for name in self._names])
        finally:
            lock.release(remove=True)
        return True

    def _fits(self, anew: bool) -> bool:
        """Whether the file that is there joins the shards that are there."""
        if not self._target.exists():
            return False
        try:
            index = Index.parse(str(self._target))
            check_shards(self._target, index)
        except CacheError:
            return False
        if not index.shards:  # somebody has built it whole
            return not anew
        return [shard.name for shard in index.shards] == self._names

    def _progress(self, missing: list[str], samples: int, seconds: float) -> BuildProgress:
        """How far all ranks are."""
        whole = BuildProgress.of_records([], samples, seconds)
        done = failed = size = 0
        absent = set(missing)
        for rank, name in enumerate(self._names):
            if name not in absent:
                done += len(range_of(rank, self._of, samples))
                continue
            other = BuildFolder(self._target.with_name(name)).progress_of_others(seconds)
            done += other.samples_done
            failed += other.failed
            size += other.bytes_done
        return replace(
            whole,
            waiting=True,
            samples_done=done,
            failed=failed,
            bytes_done=size,
            shards_left=len(missing),
        )


def _on_this_machine(rank: int, of: int) -> range:
    """The ranks that torchrun has started beside this one, and this one."""
    local, here = os.environ.get("LOCAL_RANK", ""), ranks_here()
    if not local.isdecimal() or int(local) >= here:
        return range(rank, rank + 1)
    first = max(0, rank - int(local))
    return range(first, min(of, first + here))


class _Watch:
    """Warns when nothing has changed for long: nobody else may ever say so."""

    def __init__(self, target: Path, of: int) -> None:
        self._target = target
        self._of = of
        self._seen: tuple[list[str], int] | None = None
        self._since = 0.0
        self._patience = _STALL_S

    def look(self, missing: list[str], progress: BuildProgress, now: float) -> None:
        """Compare how far the ranks are with how far they were."""
        seen = (missing, progress.samples_done)
        if seen != self._seen:
            self._seen, self._since, self._patience = seen, now, _STALL_S
        elif missing and now - self._since >= self._patience:
            warnings.warn(
                f"{self._target} waits for {len(missing)} of {self._of} shards, and none of them "
                f"has grown for {now - self._since:.0f} s: {listed(missing)}. If a rank has ended, "
                "start it again: what is finished is kept",
                CacheWarning,
                stacklevel=2,
            )
            self._patience *= 2
