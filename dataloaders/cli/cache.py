"""``dataloaders cache``: build, join, merge, look at and check caches."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dataloaders.cli.cache_options import BUILD, add_parsers
from dataloaders.errors import OptionError

if TYPE_CHECKING:
    from dataloaders.cache import CachedDataset
    from dataloaders.cache.build.estimation import Estimate
    from dataloaders.cache.build.progress import BuildProgress

__all__ = ["add_parsers", "carry_out"]


def carry_out(parsed: argparse.Namespace) -> int:
    """Do what the command line says; returns the exit status."""
    if parsed.action == "build":
        return _build(parsed)
    if parsed.action == "join":
        return _join(parsed.path)
    if parsed.action == "merge":
        return _merge(parsed.path, parsed.one_file, quiet=parsed.quiet)
    if parsed.action == "verify":
        return _verify(parsed.path, quiet=parsed.quiet)
    from dataloaders.cli import cache_info

    return cache_info.info(parsed.path)


def _build(parsed: argparse.Namespace) -> int:
    from dataloaders.cache import Compressed, precompute
    from dataloaders.cli.cache_source import dataset_of, images_of

    if parsed.level is not None and parsed.compress is None:
        raise OptionError(f"--level {parsed.level}: give --compress too, whose level it is")
    names = [how["dest"] for how in BUILD.values() if "dest" in how]
    given = {name: getattr(parsed, name) for name in names if name in parsed}
    rank = given["shard"] = parsed.shard or _shard_of_rank()
    if not parsed.wait and rank is None:
        raise OptionError("--no-wait is for shards: give --shard RANK/OF, or start it by torchrun")
    # A rank that torchrun starts again goes on with what it had begun anew.
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") not in ("", "0")
    given["overwrite"] = parsed.overwrite and not restarted
    # One of the ranks on a terminal speaks for all, of which each would say the same.
    speaks = rank is None or not parsed.wait or rank[0] == 0
    dataset = dataset_of(parsed.dataset, resize=parsed.resize, crop=parsed.crop)
    before = None if parsed.overwrite else _stamp(parsed.path)
    with _line(quiet=parsed.quiet or not speaks) as line:

        def announce(estimate: Estimate) -> None:
            for text in filter(None, (str(estimate), estimate.advice)):
                if speaks and not parsed.quiet:
                    print(f"build  {text}", file=sys.stderr)

        cached = precompute(
            dataset,
            parsed.path,
            images=images_of(parsed.images, quality=parsed.quality, max_side=parsed.max_side),
            compress=parsed.compress and Compressed(parsed.compress, parsed.level),
            progress=lambda progress: line(_told(progress)),
            announce=announce,
            **given,
        )
    if not speaks:
        return 0
    path = parsed.path if parsed.wait else cached.path
    same = ", built before" if before is not None and before == _stamp(parsed.path) else ""
    print(f"{path}: {_summary(cached)}{same}")
    if cached.failed:
        print(f"{len(cached.failed)} samples were left out; dataloaders cache info lists them")
    return 0


def _shard_of_rank() -> tuple[int, int] | None:
    """Return the rank that torchrun says this process is; None if there is only one."""
    rank, world = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if not world.isdecimal() or int(world) < 2:
        return None
    if not rank.isdecimal() or int(rank) >= int(world):
        raise OptionError(
            f"WORLD_SIZE={world} and RANK={rank!r} in the environment say nothing of a shard; give "
            "--shard RANK/OF, or unset them"
        )
    return int(rank), int(world)


def _stamp(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _join(path: str) -> int:
    from dataloaders.cache import CachedDataset, join

    join(path)
    print(f"{path}: {_summary(CachedDataset(path))}")
    print(f"dataloaders cache verify {path} finds what was damaged on the way")
    return 0


def _merge(path: str, one_file: str, *, quiet: bool) -> int:
    from dataloaders.cache import CachedDataset, merge
    from dataloaders.cache.format.disk import size_of

    if not quiet:
        size = size_of(CachedDataset(path).index.all_bytes)
        print(f"merge  the copy takes {size} of disk, besides the parts", file=sys.stderr)
    with _bytes_shown("merge", quiet=quiet) as shown:
        merge(path, one_file, progress=shown)
    print(f"{one_file}: {_summary(CachedDataset(one_file))}")
    return 0


@contextmanager
def _line(*, quiet: bool) -> Iterator[Callable[[str], None]]:
    from dataloaders.measuring.progress import ProgressLine

    line = ProgressLine(quiet=quiet)
    try:
        yield line
    finally:
        line.close()


@contextmanager
def _bytes_shown(what: str, *, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    from dataloaders.cache.format.disk import size_of

    with _line(quiet=quiet) as line:
        yield lambda done, whole: line(f"{what}  {size_of(done)} of {size_of(whole)}")


def _summary(cached: CachedDataset) -> str:
    from dataloaders.cache.format.disk import size_of

    parts = f" in {len(cached.shards)} parts" if cached.shards else ""
    return f"{len(cached):,} samples{parts}, {size_of(cached.index.all_bytes)}"


def _verify(path: str, *, quiet: bool) -> int:
    from dataloaders.cache import verify

    with _bytes_shown("verify", quiet=quiet) as shown:
        damages = verify(path, shown)
    if not damages:
        print(f"{path} is whole")
        return 0
    for damage in damages:
        where = f"{damage.shard}: " if damage.shard else ""
        print(f"{where}{damage.what} (bytes {damage.offset} to {damage.offset + damage.bytes})")
    parts = sorted({damage.shard for damage in damages} - {""})
    if parts:
        print(f"{path} is damaged: delete {', '.join(parts)} and build again")
    elif "is no cache" in damages[0].what:  # overwriting it may not be what is wanted
        print(f"if {path} was one, its first bytes are damaged: delete it, build it again")
    else:
        print(f"{path} is damaged: build it again, dataloaders cache build --overwrite")
    return 1


def _told(progress: BuildProgress) -> str:
    """Return a build's progress in one line."""
    from dataloaders.cache.format.disk import size_of

    doing: str = progress.phase
    if progress.waiting:
        doing = "waiting for the process that builds it"
    if progress.shards_left:
        doing = f"waiting for {progress.shards_left} other ranks"
    text = f"{doing}  {progress.samples_done:,} of {progress.samples:,} samples"
    if progress.samples_per_second:
        text += f", {progress.samples_per_second:,.0f}/s"
    text += f", {size_of(progress.bytes_done)}"
    if progress.bytes_expected:
        about = "about " if progress.phase == "compute" else ""
        text += f" of {about}{size_of(progress.bytes_expected)}"
    if progress.failed:
        text += f", {progress.failed} left out"
    if progress.seconds_left is not None:
        text += f", {progress.seconds_left:,.0f} s left"
    return text
