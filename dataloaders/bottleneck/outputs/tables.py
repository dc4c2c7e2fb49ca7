"""The report's tables as text, for a terminal, a page and Markdown alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from dataloaders.bottleneck.arms import ARMS, COLD, FETCH, STALLS
from dataloaders.bottleneck.outputs.words import milliseconds, range_of, times

if TYPE_CHECKING:
    from dataloaders.bottleneck.outputs.against import Comparison
    from dataloaders.bottleneck.report import Report

__all__ = [
    "LEAST_SHARE",
    "Table",
    "arms",
    "candidates",
    "compared",
    "in_order",
    "preparation",
    "slow",
    "stalls",
    "waits",
]

LEAST_SHARE = 0.01
"""Of preparation, for a row of its own."""

T = TypeVar("T")


@dataclass(frozen=True)
class Table:
    """Holds headings and rows of text; false where there are no rows."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __bool__(self) -> bool:
        return bool(self.rows)

    @property
    def numeric(self) -> tuple[bool, ...]:
        """Return for each column whether its cells are figures."""
        columns = zip(*self.rows, strict=True)
        return tuple(all(not cell or cell[0] in "-0123456789" for cell in one) for one in columns)


def arms(report: Report) -> Table:
    """Return the arms that were measured, the whole loop last."""
    tells = {arm.name: arm.tells for arm in (*ARMS[1:], ARMS[0], COLD)}
    rows = [
        (name, milliseconds(took.estimate), range_of(took), tells.get(name, ""))
        for name, took in in_order(report.seconds_per_batch, tells)
    ]
    return Table(("input", "ms a batch", "95 % interval", "what it is"), tuple(rows))


def stalls(report: Report) -> Table:
    """Return what the loop loses, by cause; none where the step is the limit."""
    real = report.seconds_per_batch.get("real")
    if real is None or report.verdict == "step-bound":
        return Table((), ())
    tells = {cause.name: cause.tells for cause in (*STALLS, FETCH)}
    rows = [
        (
            name,
            milliseconds(lost.estimate),
            f"{lost.estimate / real.estimate:.0%}",
            tells.get(name, ""),
        )
        for name, lost in in_order(report.stalls, tells)
        if lost.estimate > 0
    ]
    return Table(("lost to", "ms a batch", "of the loop", "what it is"), tuple(rows))


def in_order(found: Mapping[str, T], names: Iterable[str]) -> list[tuple[str, T]]:
    """Return what was found in the order of ``names``, others last."""
    order = dict.fromkeys((*names, *found))
    return [(name, found[name]) for name in order if name in found]


def waits(report: Report) -> Table:
    """Return how long single batches are waited for."""
    found = report.waits or {}
    kinds = {"p50": "half of them at most", "p99": "99 of 100 at most", "longest": "the longest"}
    rows = [(text, milliseconds(found[key])) for key, text in kinds.items() if key in found]
    return Table(("wait for one batch", "ms"), tuple(rows))


def slow(report: Report) -> Table:
    """Return the samples that took longest."""
    found = (report.waits or {}).get("slow", ())
    rows = [(str(index), milliseconds(seconds), file) for index, file, seconds in found]
    return Table(("slow sample", "ms", "file"), tuple(rows))


def preparation(report: Report) -> Table:
    """Return what the calls of one sample cost."""
    rows = [
        (one.call, milliseconds(one.seconds_per_sample), f"{one.share:.0%}")
        for one in report.preparation
        if one.share >= LEAST_SHARE
    ]
    return Table(("call", "ms a sample", "share"), tuple(rows))


def candidates(report: Report) -> Table:
    """Return what could be changed, with what it gains or why not."""
    rows = [
        (
            one.name,
            times(one.predicted),
            times(one.measured),
            one.reason or (one.change and f"`{one.change}`"),
        )
        for one in report.candidates
    ]
    return Table(("what if", "predicted", "measured", "the change, or why not"), tuple(rows))


def compared(comparison: Comparison) -> Table:
    """Return how many times as fast each arm is as before."""
    rows = [
        (name, milliseconds(before.estimate), milliseconds(now.estimate), times(ratio))
        for name, (before, now, ratio) in comparison.arms.items()
    ]
    return Table(("input", "ms before", "ms now", "as fast as before"), tuple(rows))
