"""Put a report into sentences and tables of text, which all its forms share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from dataloaders.bottleneck.arms import FETCH, LAUNCH, MEANINGS, STALLS, Verdict
from dataloaders.findings import Finding
from dataloaders.measuring.intervals import Interval
from dataloaders.predicting import best_of

if TYPE_CHECKING:
    from dataloaders.bottleneck.report import Report

T = TypeVar("T")

LEAST_SHARE = 0.01
"""The least share of preparation for which a call gets a row."""

MEANS: dict[Verdict, str] = {
    "step-bound": "the training step is the bottleneck; a faster input gains next to nothing",
    "input-bound": "the step waits for batches to be prepared",
    "transfer-bound": "the step waits for batches to be copied to the device",
    "contention-bound": "the loader's workers take cores that the step needs",
    "inconclusive": "the measurement supports no verdict",
}
_EVIDENCE = {
    "blocks": "",
    "steps": " Few rounds fitted in: this is from single steps.",
    "waits": " This is from what the loop waits for batches, measured at each step.",
}


def bound_of(report: Report) -> str:
    """Return what a perfect input would gain, in a sentence; "" if that is not known."""
    bound = report.speedup_bound
    if bound is None:
        return ""
    return (
        f"A perfect input would make this loop {bound.estimate:.2f} x as fast "
        f"(95 % interval {bound.low:.2f} to {bound.high:.2f})."
        f"{_EVIDENCE[report.evidence or 'blocks']}"
    )


def gap_of(report: Report) -> str:
    """Return the smallest gap that could have been seen, in a sentence; "" if it is not known."""
    if report.smallest_gap is None:
        return ""
    return f"A gap below {report.smallest_gap:.1%} could not have been seen."


def measured(report: Report) -> str:
    """Return what was measured and how long that took.

    Without a complete round the figures come from single steps, such as those of a short epoch.
    """
    rounds = counted(report.rounds, "round") if report.rounds else "single steps"
    return f"{rounds} in {report.seconds:.0f} s"


def counted(count: int, thing: str) -> str:
    """Return a count with its noun: "1 thing", "2 things"."""
    return f"{count} {thing}{'s' * (count != 1)}"


def change_of(report: Report) -> tuple[str, str]:
    """Return the recommended change as code, and its gain; without one, "" and the first advice."""
    best = None if report.verdict == "step-bound" else best_of(report.candidates)
    if best is None:
        return "", report.advice[0] if report.advice else ""
    how = "measured" if best.measured else "predicted"
    costs = f"; {best.costs}" if best.costs else ""
    return best.code, f"{best.name}: {times(best.gain)} as fast, {how}{costs}"


def shown_findings(report: Report) -> list[Finding]:
    """Return the findings to print: all if the step is the limit, else those that always count."""
    all_of_them = report.verdict == "step-bound"
    return [one for one in report.findings if all_of_them or one.anyway or one.gain is not None]


def times(gain: Interval | None) -> str:
    """Format a ratio as "1.50 x (1.40 to 1.60)", None as ""."""
    return "" if gain is None else f"{gain.estimate:.2f} x ({gain.low:.2f} to {gain.high:.2f})"


def milliseconds(seconds: float) -> str:
    """Format seconds as milliseconds with about three digits."""
    value = seconds * 1000
    digits = 3 if value < 1 else 2 if value < 10 else 1
    return f"{value:.{digits}f}"


def range_of(seconds: Interval) -> str:
    """Format an interval of seconds as milliseconds: "1.23 to 4.56"."""
    return f"{milliseconds(max(0.0, seconds.low))} to {milliseconds(seconds.high)}"


class Table(NamedTuple):
    """Holds headings, and rows of text."""

    headings: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    @property
    def numeric(self) -> tuple[bool, ...]:
        """Return for each column whether all its cells are numbers."""
        columns = zip(*self.rows, strict=True)
        return tuple(all(not cell or cell[0] in "-0123456789" for cell in one) for one in columns)


def tables(report: Report) -> dict[str, Table]:
    """Return the tables that have rows, by name, in the order of a report."""
    found = {
        "arms": arms(report),
        "stalls": stalls(report),
        "waits": waits(report),
        "slow": slow(report),
        "preparation": preparation(report),
        "candidates": candidates(report),
    }
    return {name: table for name, table in found.items() if table.rows}


def arms(report: Report) -> Table:
    """Return the arms that were measured, the whole loop last."""
    rows = [
        (name, milliseconds(took.estimate), range_of(took), MEANINGS.get(name, ""))
        for name, took in in_order(report.seconds_per_batch, MEANINGS)
    ]
    return Table(("input", "ms a batch", "95 % interval", "what it is"), rows)


def stalls(report: Report) -> Table:
    """Return the time lost, by cause; if the step is the limit, only what the step itself loses."""
    real = report.seconds_per_batch.get("real")
    if real is None:
        return Table((), [])
    causes = (LAUNCH,) if report.verdict == "step-bound" else (*STALLS, FETCH, LAUNCH)
    tells = {cause.name: cause.meaning for cause in causes}
    rows = [
        (name, milliseconds(lost), f"{lost / real.estimate:.0%}", cause)
        for name, cause in tells.items()
        if name in report.stalls and (lost := report.stalls[name].estimate) > 0
    ]
    return Table(("lost to", "ms a batch", "of the loop", "what it is"), rows)


def in_order(found: Mapping[str, T], names: Iterable[str]) -> list[tuple[str, T]]:
    """Return the items of ``found`` in the order of ``names``, the others last."""
    order = dict.fromkeys((*names, *found))
    return [(name, found[name]) for name in order if name in found]


def waits(report: Report) -> Table:
    """Return the waits for single batches; no rows if the step is the limit."""
    found = report.waits
    if found is None or report.verdict == "step-bound":
        return Table((), [])
    longest = [
        (f"batch {batch} of epoch {epoch}", milliseconds(seconds))
        for epoch, batch, seconds in found.get("batches", ())
    ]
    rows = [
        ("median", milliseconds(found["p50"])),
        ("99th percentile", milliseconds(found["p99"])),
        *(longest or [("longest", milliseconds(found["longest"]))]),
    ]
    return Table(("wait for one batch", "ms"), rows)


def slow(report: Report) -> Table:
    """Return the slowest samples."""
    found = (report.waits or {}).get("slow", ())
    rows = [(str(index), milliseconds(seconds), file) for index, file, seconds in found]
    return Table(("slow sample", "ms", "file"), rows)


def preparation(report: Report) -> Table:
    """Return the cost of each call in preparing a sample."""
    rows = []
    for one in report.preparation:
        if one.share >= LEAST_SHARE:
            cpu = one.cpu_seconds_per_sample
            figures = milliseconds(one.seconds_per_sample), "" if cpu is None else milliseconds(cpu)
            rows.append((one.call, *figures, f"{one.share:.0%}"))
    return Table(("call", "ms a sample", "of it CPU", "share"), rows)


def candidates(report: Report) -> Table:
    """Return the possible changes, each with its gain or the reason against it."""
    tried = any(one.measured for one in report.candidates)
    rows = []
    for one in report.candidates:
        took = one.seconds and f"{milliseconds(one.seconds.estimate)} ({range_of(one.seconds)})"
        change = one.reason or " ".join(filter(None, (one.change and f"`{one.change}`", one.costs)))
        gains = (times(one.predicted), times(one.measured))
        rows.append((one.name, took or "", *gains[: 1 + tried], change))
    measured = ("measured",) * tried
    return Table(("what if", "ms a batch", "predicted", *measured, "change, or why not"), rows)
