"""Find and name the parts of a cache: the files beside it that are built one by one.

    train.h5             the whole: joins the parts, or has all rows itself
    train.parts/
        00000.h5         samples 0 to 499, a cache by itself
        00500.h5         samples 500 to 999
        01000.h5.77.tmp  samples 1000 and more, being written by process 77
        build.json       what is built; gone when it is finished
    .train.h5.lock       who builds; stays

A part is named by its first sample. Builds that replace a finished cache have names of their own
(``00500-5e1f.h5``), shared by all ranks, so that nothing old is taken for something new.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dataloaders.cache.format.block import parts_folder
from dataloaders.cache.format.changes import changes
from dataloaders.cache.format.disk import sync, writing
from dataloaders.cache.format.index import Index
from dataloaders.cache.format.writing import About
from dataloaders.errors import CacheError

__all__ = [
    "BuildFolder",
    "Names",
    "Part",
    "complete_builds",
    "missing_in",
    "parts_folder",
    "range_of",
    "remove_unfinished",
    "unfinished",
]

_DIGITS = 5
_PART = re.compile(r"(\d{5,15})((?:-[0-9a-f]{8})?)\.h5")


def range_of(rank: int, of: int, samples: int) -> range:
    """Return the samples of one rank: the dataset cut into ``of`` ranges of nearly one length."""
    return range(rank * samples // of, (rank + 1) * samples // of)


@dataclass(frozen=True)
class Names:
    """How the parts of one build are named.

    Attributes:
        folder: of the parts.
        token: of the build; "" unless it replaces another one.
        length: of the dataset.
    """

    folder: Path
    token: str
    length: int

    def path(self, first: int) -> Path:
        """Return where the part that begins with this sample stands."""
        return self.folder / f"{first:0{_DIGITS}d}{self.token}.h5"

    def of_part(self, about: About, samples: range, failed: list[tuple[int, str]]) -> About:
        """Return what the part of these samples says of itself."""
        fingerprint = dict(about.fingerprint)
        if samples != range(self.length):
            fingerprint["first"] = samples.start
        own = [(number - samples.start, text) for number, text in failed]
        return replace(about, samples=len(samples), failed=own, fingerprint=fingerprint)


@dataclass(frozen=True)
class Part:
    """A finished part.

    Attributes:
        path: of its file.
        samples: of the dataset, those left out included.
        index: of the file.
    """

    path: Path
    samples: range
    index: Index

    @property
    def failed(self) -> int:
        """How many samples were left out."""
        return 0 if self.index.failed is None else self.index.failed[0].size


def missing_in(samples: range, parts: Iterable[Part]) -> list[range]:
    """Return what of ``samples`` no part has, in order."""
    found, first = [], samples.start
    for part in sorted(parts, key=lambda part: part.samples.start):
        if part.samples.start > first:
            found.append(range(first, min(part.samples.start, samples.stop)))
        first = max(first, part.samples.stop)
    if first < samples.stop:
        found.append(range(first, samples.stop))
    return [each for each in found if each]


class BuildFolder:
    """The parts of one cache.

    Attributes:
        path: of the folder.
        rows: samples of a part, once it is known what is built.
        names: of the parts, once it is known what is built.
    """

    def __init__(self, target: Path) -> None:
        self.path = parts_folder(target)
        self._target = target
        self.rows = 0
        self.names = Names(self.path, "", 0)
        self._settings = self.path / "build.json"
        self._fingerprint: dict[str, Any] = {}
        self._known: dict[str, tuple[tuple[int, int], Part | None]] = {}

    @property
    def is_begun(self) -> bool:
        """Whether there is an unfinished build."""
        return self._settings.exists()

    def settle(
        self,
        fingerprint: Mapping[str, Any],
        length: int,
        *,
        rows: int | None,
        default: int,
        token: str,
        overwrite: bool,
    ) -> None:
        """Begin the build of this, or go on with it.

        Args:
            fingerprint: of what is built.
            length: of the dataset.
            rows: of a part; None: as it was begun.
            default: the rows of a part where nothing was begun.
            token: of the build where nothing was begun.
            overwrite: whether a build of something else is begun anew.

        Raises:
            CacheError: it is an unfinished build of something else; or the disk is full.
        """
        before = self._loaded()
        changed = []
        if before is not None:
            changed = changes(before.get("of", {}), fingerprint, "when it was begun")
            if rows not in (None, before.get("rows")):
                changed.append(f"rows: {before.get('rows')} when it was begun, {rows} now")
            if changed and not overwrite:
                raise CacheError(
                    f"{self.path} holds an unfinished build of something else; "
                    f"{'; '.join(changed)}. Pass overwrite=True (--overwrite) to begin anew, "
                    "or give what it was begun with to go on"
                )
        self._fingerprint = json.loads(json.dumps(dict(fingerprint)))
        if before is None or changed:
            self.rows = default if rows is None else rows
            with writing(self.path.parent):
                self.path.mkdir(exist_ok=True)
                text = json.dumps({"of": self._fingerprint, "rows": self.rows, "token": token})
                unfinished = self._settings.with_suffix(f".{os.getpid()}.tmp")
                unfinished.write_text(text)
                unfinished.rename(self._settings)
                sync(self.path.parent)
        else:
            self.rows, token = before["rows"], before["token"]
        self.names = Names(self.path, token, length)

    def _loaded(self) -> dict[str, Any] | None:
        """Return what was begun; None: nothing, or it cannot be read."""
        try:
            found = json.loads(self._settings.read_text())
        except (OSError, ValueError, RecursionError):
            return None
        good = (
            type(found) is dict
            and type(found.get("of")) is dict
            and type(found.get("rows")) is int
            and found["rows"] > 0
            and type(found.get("token")) is str
            and re.fullmatch(r"(-[0-9a-f]{8})?", found["token"])
        )
        return found if good else None

    def finished(self, samples: range | None = None) -> list[Part]:
        """Return the finished parts of this build, in order; those that begin in ``samples``."""
        found = [
            part
            for name in self._listed()
            if (match := _PART.fullmatch(name)) is not None
            and match[2] == self.names.token
            and (samples is None or int(match[1]) in samples or not self.names.length)
            and (part := self._part(name, int(match[1]))) is not None
        ]
        return sorted(found, key=lambda part: part.samples.start)

    def watch(self) -> bool:
        """Have `finished` know the parts of the build that another process has begun, if any."""
        before = self._loaded()
        if before is None or type(before["of"].get("length")) is not int:
            return False
        self._fingerprint, self.rows = before["of"], before["rows"]
        self.names = Names(self.path, before["token"], before["of"]["length"])
        return True

    def sweep(self, samples: range) -> None:
        """Remove unfinished files of parts that begin in ``samples``."""
        for name in self._listed():
            match = re.fullmatch(r"(\d{5,15})(-[0-9a-f]{8})?\.h5\.\d+\.tmp", name)
            if match is not None and int(match[1]) in samples:
                (self.path / name).unlink(missing_ok=True)

    def drop(self, parts: Iterable[Part]) -> None:
        """Delete these parts."""
        for part in parts:
            part.path.unlink(missing_ok=True)

    def keep_only(self, names: Iterable[str]) -> None:
        """End the build: remove all but these files, and the folder if nothing is left.

        Only files that a build writes are removed. The lock of the cache is held.
        """
        remove_unfinished(self._target)
        kept = {*names}
        for name in self._listed():
            ours = _PART.fullmatch(name) or name.endswith(".tmp") or "-of-" in name
            if ours and name not in kept:
                (self.path / name).unlink(missing_ok=True)
        self._settings.unlink(missing_ok=True)  # last: while it is there the build is not ended
        self.remove_if_empty()

    def remove_if_empty(self) -> None:
        """Remove the folder if nothing is in it."""
        with suppress(OSError):
            self.path.rmdir()

    def _listed(self) -> list[str]:
        try:
            return os.listdir(self.path)
        except FileNotFoundError:
            return []

    def _part(self, name: str, first: int) -> Part | None:
        path = self.path / name
        with suppress(OSError, CacheError):
            found = path.stat()
            seen = found.st_ino, found.st_mtime_ns
            if self._known.get(name, (None, None))[0] != seen:
                self._known[name] = seen, None  # what cannot be read now may be later
                self._known[name] = seen, self._of(path, first, Index.parse(str(path)))
            return self._known[name][1]
        return None

    def _of(self, path: Path, first: int, index: Index) -> Part | None:
        says = dict(index.fingerprint)
        begins = says.pop("first", 0)
        samples = range(first, first + index.samples)
        is_ours = begins == first and says == self._fingerprint and not index.shards
        return Part(path, samples, index) if is_ours and samples.stop <= self.names.length else None


def unfinished(target: Path) -> Path:
    """Return where this process writes ``target``, which it renames when it is finished."""
    return target.with_name(f".{target.name}.{os.getpid()}.tmp")


def remove_unfinished(target: Path) -> None:
    """Remove what killed processes have left of ``target``; its lock is held."""
    for left in target.parent.glob(f".{glob.escape(target.name)}.*.tmp"):
        left.unlink(missing_ok=True)


def complete_builds(target: Path) -> list[Part]:
    """Return the parts in the folder of ``target`` that have all samples of one build.

    Raises:
        CacheError: there are none, some are missing, or there are several builds.
    """
    folder = parts_folder(target)
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise CacheError(
            f"there are no parts of {target}: {folder} cannot be read ({error.strerror}); "
            "precompute(..., shard=(0, 8), wait=False) builds some"
        ) from error
    builds: dict[str, list[Part]] = {}
    for name in names:
        match = _PART.fullmatch(name)
        if match is not None:
            index = Index.parse(str(folder / name))
            begins = index.fingerprint.get("first", 0)
            if begins != int(match[1]):
                raise CacheError(
                    f"{folder / name} begins with sample {str(begins)[:40]}: it was renamed or "
                    "swapped with another one; give each part the name that it was built with"
                )
            samples = range(begins, begins + index.samples)
            builds.setdefault(match[2], []).append(Part(folder / name, samples, index))
    complete, missing = [], list[range]()
    for parts in builds.values():
        length = parts[0].index.fingerprint.get("length")
        lacks = missing_in(range(length if type(length) is int else 0), parts)
        missing += lacks
        if not lacks:
            complete.append(parts)
    if not complete:
        told = [f"{each.start} to {each.stop - 1}" for each in missing[:8]]
        what = f"samples {', '.join(told)} are missing" if told else "it has no parts"
        raise CacheError(
            f"{folder} is not complete: {what}; copy the other parts there, or build them"
        )
    if len(complete) > 1:
        raise CacheError(
            f"{folder} has the parts of {len(complete)} builds; delete those of the old ones"
        )
    return complete[0]
