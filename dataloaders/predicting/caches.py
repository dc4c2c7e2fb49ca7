"""Small caches of some samples: what each way to store images takes to read and on the disk.

The dataset and its caches are read one after the other, in the same way, with the same draws: what
differs between these runs and the loop, as the machine's speed, is in both and is divided out.
"""

from __future__ import annotations

import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import BatchSampler, RandomSampler, Subset

from dataloaders import registry
from dataloaders.backend import Backend
from dataloaders.errors import last_line
from dataloaders.loader import wrap
from dataloaders.seeding.states import random_states_kept
from dataloaders.specification import view_of
from dataloaders.tuning.trial import driven, observe

_WAYS = ("", "jpeg", "packed")  # to store images, raw first; the others only where there are images
_BUILD_S, _READ_S, _FEWEST, _MOST = 1.0, 0.4, 2, 64  # seconds for all samples; samples
_BATCHES = 5  # that are read, at the least
_PAUSE_S = 0.005  # of work, as for a step: threads that share a batch's work fall asleep in it
_SHARE = 0.25  # of the time that is left, for the fewest samples


@dataclass(frozen=True)
class SmallCache:
    """Holds what a cache of some samples costs."""

    share: float  # of the dataset's seconds a batch that reading the cache takes
    bytes_per_sample: float


def small_caches(
    loader: Any, size: int, sample_s: float, until: float
) -> tuple[dict[str, SmallCache], str]:
    """Return caches by how they store images ("": raw), and the reason if there is none, else "".

    Args:
        loader: a torch DataLoader over a map-style dataset.
        size: samples in a batch.
        sample_s: seconds to prepare one sample.
        until: the time after which no further cache is begun, by ``time.perf_counter()``.
    """
    if _FEWEST * sample_s > _SHARE * (until - time.perf_counter()):
        return {}, "a small cache has to be built and read, and this check has too small a budget"
    length, found = len(loader.dataset), dict[str, SmallCache]()
    rows = min(length, max(_FEWEST, min(_MOST, int(_BUILD_S / max(1e-6, sample_s)))))
    some = Subset(loader.dataset, random.Random(0).sample(range(length), rows))
    own_s = size * sample_s
    with tempfile.TemporaryDirectory() as folder:
        for images in _WAYS:
            if found and time.perf_counter() > until:
                break
            path = Path(folder, f"{images}.h5")
            try:
                if not images and _BATCHES * own_s < _SHARE * (until - time.perf_counter()):
                    own_s = _seconds_to_read(loader, some, size, registry.load("stock")())
                cached = build(some, path, loader, images)
                h5: Any = registry.load("h5")
                seconds = _seconds_to_read(loader, some, size, h5(path))
            except Exception as error:  # the dataset's own, or why no cache can hold it
                if not images:
                    return {}, last_line(error)
                continue
            found[images] = SmallCache(seconds / own_s, path.stat().st_size / rows)
            kinds = [kind for column in cached.columns for kind, _ in column.variants]
            if not images and not any(kind.startswith("image") for kind in kinds):
                break
    return found, ""


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


def _seconds_to_read(loader: Any, some: Any, size: int, backend: Backend) -> float:
    """Return the seconds of a batch of the loader's size by ``backend``.

    In one worker, or in this process if the loader has no workers: then nothing is passed on.
    """
    keys: Any = RandomSampler(some, True, 1 << 40, generator=torch.Generator())
    whole = loader.batch_sampler is not None
    view = view_of(
        loader,
        dataset=some,
        **({"batch_sampler": BatchSampler(keys, size, False)} if whole else {"sampler": keys}),
        generator=torch.Generator(),  # nothing is drawn from the user's
        num_workers=min(1, loader.num_workers),
        prefetch_factor=2 if loader.num_workers else None,
        persistent_workers=False,
    )
    read = wrap(view, backend=backend)
    trial = observe(read, stepping=not view.num_workers, seconds=_READ_S)
    with random_states_kept():
        took = driven(trial, lambda batch: _work()).seconds_per_batch.estimate
    return took if view.num_workers else max(1e-9, took - _PAUSE_S)


def _work() -> None:
    """Keep this thread busy, as a step does."""
    until = time.perf_counter() + _PAUSE_S
    while time.perf_counter() < until:
        pass
