"""Which shard of a cache this process is to build: as torchrun says, or the command line."""

from __future__ import annotations

import argparse
import os

from dataloaders.errors import OptionError

__all__ = ["restarted", "shard", "shard_of_rank"]


def shard(text: str) -> tuple[int, int]:
    """``3/8`` as (3, 8), for argparse."""
    rank, slash, of = text.partition("/")
    if not slash or not rank.isdecimal() or not of.isdecimal() or not int(rank) < int(of):
        raise argparse.ArgumentTypeError(
            f"{text}: give RANK/OF, such as 3/8: which one, counted from 0, and how many there are"
        )
    return int(rank), int(of)


def shard_of_rank() -> tuple[int, int] | None:
    """The rank that torchrun says this process is; None if there is only one."""
    rank, world = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if not world.isdecimal() or int(world) < 2:
        return None
    if not rank.isdecimal() or int(rank) >= int(world):
        raise OptionError(
            f"WORLD_SIZE={world} and RANK={rank!r} in the environment say nothing of a shard; give "
            "--shard RANK/OF, or unset them"
        )
    return int(rank), int(world)


def restarted() -> bool:
    """Whether torchrun has started this rank before."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") not in ("", "0")
