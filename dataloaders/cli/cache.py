"""``dataloaders cache``: build, merge, look at and check caches."""

from __future__ import annotations

import argparse
import inspect
import io
import os
import re
import sys
from collections.abc import Callable
from contextlib import closing
from typing import Any

from dataloaders.cache import (
    CachedDataset,
    Compressed,
    Encoded,
    Estimate,
    merge,
    precompute,
    verify,
)
from dataloaders.cache.format.disk import size_of
from dataloaders.cli.cache_info import info
from dataloaders.cli.cache_source import dataset_of
from dataloaders.errors import OptionError
from dataloaders.measuring.progress import ProgressLine
from dataloaders.options import FLAGS, option

__all__ = ["carry_out"]

_MADE_UP = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def carry_out(parsed: argparse.Namespace) -> int:
    """Do what the command line says; return the exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # names of columns may be in any script
        sys.stdout.reconfigure(errors="backslashreplace")
    return _ACTIONS[parsed.action](parsed)


def _build(parsed: argparse.Namespace) -> int:
    if parsed.level is not None and parsed.compress is None:
        raise OptionError(f"{option('level', parsed.level)}: give {FLAGS['compress']} too")
    rank = parsed.shard or _shard_of_rank()
    if not parsed.wait and rank is None:
        raise OptionError(
            f"{FLAGS['wait']} is for shards: give {FLAGS['shard']} RANK/OF, or start it by torchrun"
        )
    # All ranks would print the same: the first one does.
    speaks = rank is None or not parsed.wait or rank[0] == 0
    announced = []

    def announce(estimate: Estimate) -> None:
        announced.append(estimate)
        if speaks and not parsed.quiet:
            print(f"build  {estimate}", file=sys.stderr)

    takes = inspect.signature(precompute).parameters
    given = {name: value for name, value in vars(parsed).items() if name in takes}
    given["dataset"] = dataset_of(parsed.dataset, resize=parsed.resize, crop=parsed.crop)
    if parsed.quality is not None or parsed.max_side is not None:
        how: Any = parsed.images or "raw"  # any text: `Encoded` checks it
        given["images"] = Encoded(how, parsed.quality, parsed.max_side)
    given["compress"] = parsed.compress and Compressed(parsed.compress, parsed.level)
    given["shard"] = rank
    run = os.environ.get("TORCHELASTIC_RUN_ID", "")
    # Only an id that torchrun made up, on one machine: a user may give the same id again.
    if parsed.build_id is None and _MADE_UP.fullmatch(run):
        given["build_id"] = run
    with closing(ProgressLine(quiet=parsed.quiet or not speaks)) as line:
        cached = precompute(**given, announce=announce, progress=lambda now: line(str(now)))
    if speaks:
        path = parsed.path if parsed.wait else cached.path
        print(f"{path}: {_summary(cached)}{'' if announced else ', built before'}")
        if cached.failed:
            print(f"{len(cached.failed)} samples were left out; dataloaders cache info lists them")
    return 0


def _shard_of_rank() -> tuple[int, int] | None:
    """Return the rank that torchrun says this process is; None if there is only one."""
    rank, world = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    return None if rank is None or world in (None, "", "1") else (int(rank), int(world))


def _merge(parsed: argparse.Namespace) -> int:
    if not parsed.quiet:
        size = size_of(CachedDataset(parsed.path).index.all_bytes)
        print(f"merge  the copy takes {size} of disk, besides the parts", file=sys.stderr)
    with closing(ProgressLine(quiet=parsed.quiet)) as line:
        merge(parsed.path, parsed.one_file, progress=lambda *done: line(_bytes("merge", *done)))
    print(f"{parsed.one_file}: {_summary(CachedDataset(parsed.one_file))}")
    return 0


def _bytes(what: str, done: int, whole: int) -> str:
    return f"{what}  {size_of(done)} of {size_of(whole)}"


def _summary(cached: CachedDataset) -> str:
    parts = f" in {len(cached.shards)} parts" if cached.shards else ""
    return f"{len(cached):,} samples{parts}, {size_of(cached.index.all_bytes)}"


def _verify(parsed: argparse.Namespace) -> int:
    path = parsed.path
    with closing(ProgressLine(quiet=parsed.quiet)) as line:
        damages = verify(path, lambda *done: line(_bytes("verify", *done)))
    if not damages:
        print(f"{path} is whole")
        return 0
    for damage in damages:
        where = f"{damage.shard}: " if damage.shard else ""
        print(f"{where}{damage.what} (bytes {damage.offset} to {damage.offset + damage.bytes})")
    parts = sorted({damage.shard for damage in damages} - {""})
    if parts:
        print(f"{path} is damaged: delete {', '.join(parts)} and build again")
    elif "is a part" in damages[0].what:
        print(f"delete {path} and build again: only what is missing is built")
    elif "is no cache" in damages[0].what:  # overwriting it may not be what is wanted
        print(f"if {path} was one, its first bytes are damaged: delete it, build it again")
    else:
        print(f"{path} is damaged: build it again: dataloaders cache build {FLAGS['overwrite']}")
    return 1


_ACTIONS: dict[str, Callable[[argparse.Namespace], int]] = {
    "build": _build,
    "merge": _merge,
    "info": lambda parsed: info(parsed.path),
    "verify": _verify,
}
