"""Seconds of a batch without a step, from the dataset and from small caches of some samples.

some samples ───────────────────> stock, without workers and with one ──┐ in turns: changes of the
             └──small caches──> h5, without workers and with one ───────┘ machine's speed cancel
"""

from __future__ import annotations

import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Generator
from torch.utils.data import Subset

from dataloaders import registry
from dataloaders.errors import last_line
from dataloaders.loader import DataLoader as OurLoader
from dataloaders.seeding.states import random_states_kept
from dataloaders.specification import view_of

__all__ = ["Alone", "build", "seconds_alone"]

Alone = dict[tuple[str | None, int], float]
"""Seconds of a batch by how a cache stores images ("": raw; None: no cache) and by workers."""

_BUILD_S, _FEWEST, _MOST = 1.0, 8, 64  # of the small cache: seconds of one process, samples
_BATCH_S = 0.1  # batches of samples that take long are smaller
_IN_FLIGHT = 2
_STEP_BYTES = 16 << 20
_TURN_S, _TURNS, _FEWEST_TIMED, _MOST_TIMED = 0.1, 4, 3, 100


def seconds_alone(
    loader: Any,
    size: int,
    sample_s: float,
    workers: Iterable[int],
    formats: Sequence[str] = (),
    now: Callable[[], float] = time.perf_counter,
) -> tuple[Alone, str]:
    """Measure seconds of a batch; return them, and why no cache is among them ("" if one is).

    Args:
        loader: a torch DataLoader over a map-style dataset.
        size: samples in a batch.
        sample_s: seconds to prepare one sample.
        workers: numbers of workers; 0 reads in this process, whose random states are kept.
        formats: ways to store images beside raw, measured if the samples hold images.
        now: returns the time.
    """
    draw, length = random.Random(0), len(loader.dataset)
    sample_s = max(1e-6, sample_s)
    rows = min(length, max(_FEWEST, min(_MOST, int(_BUILD_S / sample_s))))
    some = Subset(loader.dataset, draw.sample(range(length), rows))
    size = max(1, min(size, int(_BATCH_S / sample_s)))
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        reason = ""
        stock: Any = registry.load("stock")
        backends: dict[str | None, Any] = {None: stock(gather=isinstance(loader, OurLoader))}
        for images in ("", *formats):
            try:
                cached = build(some, Path(folder, f"{images}.h5"), loader, images)
            except Exception as error:  # the dataset's own, or why no cache can hold it
                if images:
                    continue
                reason = last_line(error)
                break
            h5: Any = registry.load("h5")
            backends[images] = h5(cached.path)
            if not _holds_images(cached):
                break
        views: list[Any] = []  # a session does not keep its loader alive
        open_: dict[tuple[str | None, int], Iterator[Any]] = {}
        stack.enter_context(random_states_kept())
        for name, backend in backends.items():
            for count in sorted(workers):
                views.append(_view(loader, some, size, count, draw))
                session = backend.open(views[-1])
                stack.callback(session.close)
                open_[name, count] = session.epoch()
        took: dict[tuple[str | None, int], list[float]] = {name: [] for name in open_}
        other = np.zeros(_STEP_BYTES, np.uint8)
        for _ in range(_TURNS):
            for (name, count), batches in open_.items():
                mean = _turn(batches, now) if count else _turn_here(batches, now, other)
                took[name, count].append(mean)
                time.sleep((count > 0) * _IN_FLIGHT * mean)  # until its worker is idle
        # Other processes only slow turns down: the second quickest of them counts.
        return {name: sorted(each)[1] for name, each in took.items()}, reason


def build(dataset: Any, path: str | Path, loader: Any, images: Any = None) -> Any:
    """Build a cache of ``dataset`` in workers like the loader's, print nothing, and return it."""
    from dataloaders.cache import precompute

    return precompute(
        dataset,
        path,
        images=images or None,
        announce=lambda text: None,
        multiprocessing_context=loader.multiprocessing_context,
        worker_init_fn=loader.worker_init_fn,
    )


def _holds_images(cached: Any) -> bool:
    kinds = [kind for column in cached.columns for kind, _ in column.variants]
    return any(kind.startswith("image") for kind in kinds)


class _Keys:
    """An endless sampler of row numbers, one by one or in batches of ``size``."""

    def __init__(self, rows: int, size: int | None, seed: int) -> None:
        self._rows, self._size, self._draw = rows, size, random.Random(seed)

    def __iter__(self) -> Iterator[Any]:
        while True:
            keys = [self._draw.randrange(self._rows) for _ in range(self._size or 1)]
            yield keys if self._size else keys[0]


def _view(loader: Any, some: Any, size: int, count: int, draw: random.Random) -> Any:
    whole = loader.batch_sampler is not None
    keys = _Keys(len(some), size if whole else None, draw.randrange(1 << 30))
    changes: dict[str, Any] = {"batch_sampler" if whole else "sampler": keys}
    if not count:
        changes["timeout"] = 0
    return view_of(
        loader,
        dataset=some,
        generator=Generator(),
        num_workers=count,
        prefetch_factor=_IN_FLIGHT if count else None,
        persistent_workers=False,
        **changes,
    )


def _turn(batches: Iterator[Any], now: Callable[[], float]) -> float:
    """Return the mean seconds of some batches, measured after the ones that were ready."""
    for _ in range(_IN_FLIGHT + 1):
        next(batches)
    begin, count = now(), 0
    while count < _FEWEST_TIMED or (now() - begin < _TURN_S and count < _MOST_TIMED):
        next(batches)
        count += 1
    return (now() - begin) / count


def _turn_here(batches: Iterator[Any], now: Callable[[], float], other: Any) -> float:
    """Return the mean seconds of some batches, each after a pass over memory as a step makes it."""
    took: list[float] = []
    until = time.perf_counter() + _TURN_S
    while len(took) < _FEWEST_TIMED or time.perf_counter() < until:
        other += 1  # evicts the last batch from the processor's caches
        begin = now()
        next(batches)
        took.append(now() - begin)
    return statistics.fmean(took)
