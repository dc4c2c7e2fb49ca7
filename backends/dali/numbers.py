"""Choose how many threads, and how many batches in flight: given, learned, or by a rule.

Dali(threads=, depth=) ── a number ──────────────────────────────────────> Numbers
                       ── "auto" ── what tune() learned ─────────────────>
                                 └─ nothing: cores, 3 (a device: 8, 4) ──>
Numbers ──candidates──> what tune() may try beside them
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from dataloaders.backend import Specification
from dataloaders.machine.resources import usable_cores
from dataloaders.specification import device_of
from dataloaders.tuning import learned

if TYPE_CHECKING:
    from . import Dali

_MOST_THREADS = 32
_MOST_BESIDE_A_GPU = 8
"""Each thread of DALI's decoder holds 32 MiB of pinned and device memory for a graph."""
_DEPTHS = (1, 2, 3, 4, 6, 8)
# Powers of two and the values half-way between them.
_THREADS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


class Numbers(NamedTuple):
    """The options of `Dali` that are numbers or "auto".

    Attributes:
        threads, depth: as in `Dali`, always numbers.
        by: who chose what was "auto": "tune", or "rule"; "user" if nothing was.
    """

    threads: int
    depth: int
    by: Literal["user", "tune", "rule"]


def numbers_of(options: Dali, loader: Specification) -> Numbers:
    """Return the numbers for ``loader``."""
    most = _most_threads(loader)
    threads = min(usable_cores(), most)
    depth = 4 if _on_gpu(loader) else 3
    if options.threads != "auto" and options.depth != "auto":
        return Numbers(options.threads, options.depth, "user")
    key = learned.key_of(
        loader.dataset, loader.batch_size, loader.batch_sampler, loader.collate_fn, options.name
    )
    found = learned.recall(key)
    known = {} if found is None or found.options is None else found.options
    return Numbers(
        min(known.get("threads") or threads, most)
        if options.threads == "auto"
        else options.threads,
        (known.get("depth") or depth) if options.depth == "auto" else options.depth,
        "tune" if known else "rule",
    )


def candidates(numbers: Numbers, loader: Specification) -> dict[str, tuple[int, ...]]:
    """Return for each option what may be worth trying on this machine, smallest first."""
    cores, bound = usable_cores(), _most_threads(loader)
    most = min(2 * cores, bound)
    threads = {each for each in _THREADS if each <= most} | {min(cores, bound)}
    return {
        "threads": tuple(sorted(threads | {numbers.threads})),
        "depth": tuple(sorted({*_DEPTHS, numbers.depth})),
    }


def _on_gpu(loader: Specification) -> bool:
    return device_of(getattr(loader, "device", None)).type == "cuda"


def _most_threads(loader: Specification) -> int:
    return _MOST_BESIDE_A_GPU if _on_gpu(loader) else _MOST_THREADS
