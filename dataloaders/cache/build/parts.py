"""Find and name the parts of a cache: the files beside it that are built one by one.

    train.h5             the whole: joins the parts, or has all rows itself
    train.parts/
        00000.h5         samples 0 to 499, a cache by itself
        00500.h5         samples 500 to 999
        01000.h5.5e1f.tmp  samples 1000 and more, being written
        build.json       what is built; gone when it is finished
    .train.h5.lock       who builds; stays

A part is named by its first sample. The parts of builds that replace a finished cache have names of
their own (``00500-5e1f.h5``), shared by all ranks, so that nothing old is taken for something new.
A part that took too long or too much memory ends early, and another one has the rest.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from dataloaders.cache.format.block import parts_folder
from dataloaders.cache.format.disk import open_plain, rename, sync, writing
from dataloaders.cache.format.index import Index
from dataloaders.cache.read.shards import first_of
from dataloaders.errors import CacheError

_PART = re.compile(r"\d{5,15}(-[0-9a-f]{8})?\.h5")


def samples_of(rank: int, of: int, samples: int) -> range:
    """Return the samples of one rank among ``of``, whatever the size of their parts."""
    return range(rank * samples // of, (rank + 1) * samples // of)


def target_of(path: str | os.PathLike[str]) -> Path:
    """Return the real path of a cache; raise CacheError if none can be built there."""
    target = Path(os.path.realpath(path))
    try:
        # The second one has the longest name of a build's files.
        for each in (target, unfinished_at(target.with_name(f".{target.name}"))):
            with suppress(FileNotFoundError):
                each.stat()
        if target.exists() and not target.is_file():
            what = "a folder" if target.is_dir() else "no plain file"
            raise CacheError(f"{target} is {what}; give the path of a file")
        if target.parent.is_dir():
            return target
        why = "is not a folder, so no cache can be built in it; create it"
    except OSError as error:  # no permission, a link to itself, a name that is too long
        why = (
            f"cannot be read ({error.strerror}); give a path in a folder that you may read, and a "
            "shorter one if it is too long"
        )
    raise CacheError(f"{target.parent} {why}")


@dataclass(frozen=True)
class Part:
    """A part: its file, and the index of the file."""

    path: Path
    index: Index

    @property
    def samples(self) -> range:
        """The samples of the dataset that it was built from, those left out included."""
        first = first_of(self.index)
        return range(first, first + self.index.samples)

    @property
    def failed(self) -> int:
        """How many samples were left out."""
        return 0 if self.index.failed is None else self.index.failed.rows.size


def missing_in(samples: range, parts: Iterable[Part]) -> list[range]:
    """Return what of ``samples`` none of the parts has, which are in order."""
    found, first = [], samples.start
    for part in parts:
        found.append(range(first, min(part.samples.start, samples.stop)))
        first = max(first, part.samples.stop)
    return [each for each in (*found, range(first, samples.stop)) if each]


def parts_joined(target: Path) -> list[Path]:
    """Return the parts that the cache at ``target`` joins; none if there is no cache."""
    shards = Index.parse(str(target)).shards if target.exists() else ()
    return [target.parent / shard.name for shard in shards]


def unfinished_at(path: Path) -> Path:
    """Return a name beside ``path`` that no other process on any machine writes to."""
    return path.with_name(f"{path.name}.{os.urandom(4).hex()}.tmp")


def parts_in(folder: Path) -> list[Path]:
    """Return the files in ``folder`` that have the name of a part."""
    with suppress(FileNotFoundError):  # glob takes a folder that it cannot read for an empty one
        return [folder / name for name in os.listdir(folder) if _PART.fullmatch(name)]
    return []


class BuildFolder:
    """The folder of the parts of one cache.

    Attributes:
        path: of the folder.
        fingerprint: of the build: what each of its parts says of itself; empty while it is not
            known what is built.
    """

    def __init__(self, target: Path) -> None:
        self._target, self.path = target, parts_folder(target)
        self.fingerprint: dict[str, Any] = {}
        self._settings = self.path / "build.json"
        self._known: dict[Path, tuple[tuple[int, int], Part | None]] = {}

    @property
    def length(self) -> int:
        """The samples of the dataset; 0 while it is not known what is built."""
        length: int = self.fingerprint.get("length", 0)
        return length

    def begin(self, fingerprint: Mapping[str, Any]) -> None:
        """Begin the build with this fingerprint, or continue it.

        Raises:
            CacheError: the disk is full.
        """
        now = json.loads(json.dumps(fingerprint))
        if now != self.begun():
            with writing(self.path.parent):
                self.path.mkdir(exist_ok=True)
                unfinished = unfinished_at(self._settings)
                unfinished.write_text(json.dumps(now))
                rename(unfinished, self._settings)
                sync(self.path.parent)
        self.fingerprint, self._known = now, {}

    def part_path(self, first: int) -> Path:
        """Return where the part that begins with this sample stands."""
        build = self.fingerprint.get("build")  # of one that replaces a cache
        token = f"-{blake2b(str(build).encode(), digest_size=4).hexdigest()}" if build else ""
        return self.path / f"{first:05d}{token}.h5"

    def finish(self, written: Part) -> Part:
        """Sync a part that has been written, and give it its name; CacheError: the disk is full."""
        part = replace(written, path=self.part_path(written.samples.start))
        rename(written.path, part.path)
        return part

    def begun(self) -> dict[str, Any] | None:
        """Return the fingerprint of the unfinished build; None: there is none that can be read.

        Raises:
            CacheError: something else, such as a named pipe, has its file's name.
        """
        try:
            with open(open_plain(self._settings, "delete it, and build again")) as file:
                found: dict[str, Any] = json.load(file)
            good = type(found["length"]) is int
        except (OSError, ValueError, RecursionError, KeyError, TypeError):
            return None
        return found if good else None

    def has_made(self, build: str | None) -> bool:
        """Return whether the cache that is there is of the build with this id, or none."""
        with suppress(CacheError):  # there is none; or it is no cache
            return Index.parse(str(self._target)).fingerprint.get("build") == build
        return False

    def finished(self, samples: range | None = None) -> list[Part]:
        """Return the finished parts of this build, in order: those with any of ``samples``.

        No sample is in two of them: a part that begins inside another one, as builds by another
        number of ranks may leave it, counts as not built.
        """
        found, stop = [], 0
        parts = filter(None, map(self._part, parts_in(self.path)))
        for part in sorted(parts, key=lambda part: part.samples.start):
            if part.samples.start < stop:
                continue
            first, stop = part.samples.start, part.samples.stop
            is_wanted = samples is None or max(first, samples.start) < min(stop, samples.stop)
            if is_wanted or not self.length:
                found.append(part)
        return found

    def keep_only(self, kept: Iterable[Path]) -> None:
        """End the build: remove all of its files but these, and the folder if nothing is left.

        The lock of the cache is held.
        """
        names = {path.name for path in kept}
        with suppress(FileNotFoundError):
            for name in os.listdir(self.path):
                is_built = _PART.fullmatch(name) or name.endswith(".tmp") or "-of-" in name
                if is_built and name not in names:
                    with suppress(IsADirectoryError):  # no build has made it
                        (self.path / name).unlink(missing_ok=True)
            self._settings.unlink()  # last: until then the build is not ended
        with suppress(OSError):
            self.path.rmdir()

    def _part(self, path: Path) -> Part | None:
        """Return the part in this file if it is one of this build; its index is read once."""
        with suppress(OSError, CacheError):
            status = path.stat()
            seen = status.st_ino, status.st_mtime_ns
            if self._known.get(path, (None, None))[0] != seen:
                self._known[path] = seen, None  # what cannot be read now may be later
                part = part_at(path)
                says = {n: each for n, each in part.index.fingerprint.items() if n != "first"}
                is_same = part.samples.stop <= self.length and says == self.fingerprint
                if is_same and path == self.part_path(part.samples.start) and not part.index.shards:
                    self._known[path] = seen, part
            return self._known[path][1]
        return None


def part_at(path: Path) -> Part:
    """Return the part in this file; CacheError: it is none."""
    return Part(path, Index.parse(str(path)))
