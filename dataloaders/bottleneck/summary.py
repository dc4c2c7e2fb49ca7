"""Figures into words: what the loader is, what to try next, what to know about the figures."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dataloaders.bottleneck.report import Report
from dataloaders.bottleneck.verdict import BOUND_FROM, STEP_BOUND_UP_TO, Analysis
from dataloaders.errors import DataLoadersError
from dataloaders.loader import DataLoader
from dataloaders.machine import resources
from dataloaders.measuring.feed import Feed

__all__ = ["Facts", "has_threads_of_its_own", "summarise"]


@dataclass(frozen=True)
class Facts:
    """Holds what a check knows beside its figures.

    Attributes:
        batch: one batch in one line.
        rounds: complete ones.
        seconds: spent.
        finished: whether the check ended by itself.
        writes: whether the step writes into its batch.
        behind: whether a device's clock was used.
        cycle: batches of one accumulation cycle.
        derived: whether the step copies something computed from its batch to the device.
        crowded: resident batches, if the device's memory holds fewer than wanted; else 0.
        elsewhere: seconds a batch that the loop waited for other loaders, by their names.
    """

    batch: str
    rounds: int
    seconds: float
    finished: bool
    writes: bool = False
    behind: bool = False
    cycle: int = 1
    derived: bool = False
    crowded: int = 0
    elsewhere: Mapping[str, float] = field(default_factory=dict)


def summarise(analysis: Analysis | None, *, loader: Any, feed: Feed, facts: Facts) -> Report:
    """Return the report of a check, finished or not."""
    return Report(
        verdict="inconclusive" if analysis is None else analysis.verdict,
        speedup_bound=None if analysis is None else analysis.speedup_bound,
        seconds_per_batch={} if analysis is None else analysis.seconds_per_batch,
        stalls={} if analysis is None else analysis.stalls,
        smallest_gap=None if analysis is None else analysis.smallest_gap,
        loader=_describe_loader(loader, feed),
        batch=facts.batch,
        advice=() if analysis is None else tuple(_advice(analysis, loader, feed)),
        notes=tuple(_notes(analysis, feed, facts)),
        rounds=facts.rounds,
        seconds=facts.seconds,
        evidence=None if analysis is None else analysis.evidence,
    )


def _notes(analysis: Analysis | None, feed: Feed, facts: Facts) -> list[str]:
    notes = []
    if analysis is None:
        notes.append(
            f"only {facts.rounds} complete rounds were measured; let the loop run longer "
            "(more steps or epochs, or a larger --budget)"
        )
    else:
        if not facts.finished:
            notes.append(
                "the loop ended before the check had enough; figures are what is known so far"
            )
        if analysis.speedup_bound is None:
            notes.append(
                f"the {facts.rounds} rounds differ too much for an interval; a larger budget, or "
                "a machine with nothing else to do, gives one"
            )
        if analysis.left_out:
            notes.append(
                f"{analysis.left_out} real steps are left out: each was the first on a shape, and "
                "took longer than steps on shapes seen before"
            )
        if feed.epoch == 0 and feed.length is not None:
            notes.append(
                "all of it lies within the first epoch; a dataset that fills a cache in its first "
                "epoch is faster later"
            )
    if facts.writes:
        notes.append("the step writes into its batch; resident batches were restored, unmeasured")
    if facts.cycle > 1:
        notes.append(
            f"the loop repeats itself every {facts.cycle} batches: blocks hold whole cycles"
        )
    if facts.derived:
        notes.append(
            "the step copies to the device what it computed from its batch: that transfer is part "
            "of the step here; device= says where batches belong"
        )
    if facts.crowded:
        notes.append(
            f"the device's memory has room for {facts.crowded} resident batches beside the step"
        )
    for name, seconds in facts.elsewhere.items():
        hidden = ", which a device may hide" if facts.behind else ", counted as input"
        notes.append(f"{1e3 * seconds:.1f} ms a batch are waits for another loader, {name}{hidden}")
    return notes


def _describe_loader(loader: Any, feed: Feed) -> str:
    dataset = type(getattr(loader, "dataset", loader)).__name__
    parts = [f"{type(loader).__name__} over {dataset}"]
    if feed.length is not None:
        parts.append(f"{feed.length} batches an epoch")
    parts.append(f"num_workers={feed.workers}")
    if feed.workers:
        parts.append(f"prefetch_factor={getattr(loader, 'prefetch_factor', None)}")
    if getattr(loader, "pin_memory", False):
        parts.append("pin_memory=True")
    backend = getattr(loader, "backend", None)
    if backend is not None:
        parts.append(f"backend={backend!r}")
    return ", ".join(parts)


def _advice(analysis: Analysis, loader: Any, feed: Feed) -> list[str]:
    bound = analysis.speedup_bound
    if analysis.verdict == "step-bound":
        gain = 0.0 if bound is None else max(0.0, bound.high - 1)
        return [
            f"leave the input as it is: DALI, a cache or more workers gain {gain:.0%} at most",
            "a faster step (mixed precision, torch.compile, a larger batch) is where time is",
        ]
    if analysis.verdict == "input-bound":
        if has_threads_of_its_own(loader):
            return [
                "measure its threads and its depth with `dataloaders tune`: its backend makes "
                "batches in threads of this process, and num_workers is not used",
                "if that does not reach the bound above, do less a sample: smaller images on disk, "
                "or cache the deterministic part",
            ]
        if not feed.workers:
            return [
                'let worker processes prepare batches: num_workers="auto", or measure the best '
                "setting with `dataloaders tune`",
            ]
        return [
            "measure workers and prefetching with `dataloaders tune`",
            "if that does not reach the bound above, do less a sample: cache the deterministic "
            "part, or move decoding and augmentation to the GPU",
        ]
    if analysis.verdict == "transfer-bound":
        first = (
            'copy ahead of use on a side stream: backend="prefetch", here by '
            "`dataloaders run --backend prefetch`"
        )
        return [first, "send less: uint8 images and the normalisation on the device"]
    if analysis.verdict == "contention-bound":
        return [
            *_sharing(feed.workers, on_device="host" in analysis.seconds_per_batch),
            "do less a sample on the CPU: cache the deterministic part, or decode on the GPU",
        ]
    if bound is None:
        return ["measure longer (budget_s, --budget), or with nothing else running"]
    if bound.low >= BOUND_FROM:
        return [
            "measure longer (budget_s, --budget): the gap is there, but not which of preparation "
            "and transfer is the larger part of it"
        ]
    return [
        f"measure longer (budget_s, --budget): the gap lies between {max(0.0, bound.low - 1):.0%} "
        f"and {max(0.0, bound.high - 1):.0%}, and {STEP_BOUND_UP_TO - 1:.0%} is the line"
    ]


def has_threads_of_its_own(loader: Any) -> bool:
    """Return whether its backend makes batches in threads of this process, and no workers do."""
    if not isinstance(loader, DataLoader):
        return False
    try:
        tunable = loader._tunable()
    except DataLoadersError:
        return False
    return tunable is not None and not tunable.workers


def _sharing(count: int, *, on_device: bool) -> list[str]:
    """Say how ``count`` workers and the step can share the cores."""
    cores, threads = resources.usable_cores(), torch.get_num_threads()
    share = f"the step shares {cores} cores with {count} worker{'s' * (count != 1)}"
    if on_device or threads == 1:
        return [f"{share}: `dataloaders tune` measures how many of them are best"]
    fewer = max(1, min(threads - 1, cores - count))
    advice = [
        f"{share}: give it fewer threads, torch.set_num_threads({fewer}) in place of {threads}; "
        "`dataloaders tune` measures threads and workers together"
    ]
    openmp = torch.backends.openmp.is_available()  # type: ignore[no-untyped-call]
    if openmp and "OMP_WAIT_POLICY" not in os.environ:
        advice.append(
            "or start the script with OMP_WAIT_POLICY=passive in the environment: the step's "
            "threads otherwise spin while they wait for each other, on cores that workers need"
        )
    return advice
