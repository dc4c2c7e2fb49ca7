"""Choose how many threads replay, and how many batches are made ahead: as given, or by a rule."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dataloaders.backend import Specification
from dataloaders.machine.resources import usable_cores
from dataloaders.specification import device_of

if TYPE_CHECKING:
    from . import Dali

_MOST_THREADS = 32
_MOST_BESIDE_A_GPU = 8
"""Each thread of DALI's decoder holds 32 MiB of pinned and device memory for a graph."""


class Numbers(NamedTuple):
    """The options ``threads`` and ``depth`` of `Dali` as numbers, and whether a rule chose one."""

    threads: int
    depth: int
    by_rule: bool


def numbers_of(options: Dali, loader: Specification) -> Numbers:
    """Return the numbers for ``loader``."""
    on_gpu = device_of(getattr(loader, "device", None)).type == "cuda"
    most = _MOST_BESIDE_A_GPU if on_gpu else _MOST_THREADS
    threads, depth = options.threads, options.depth
    return Numbers(
        min(usable_cores(), most) if threads == "auto" else threads,
        (4 if on_gpu else 3) if depth == "auto" else depth,
        "auto" in (threads, depth),
    )
