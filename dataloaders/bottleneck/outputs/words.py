"""The verdict in sentences, and figures as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dataloaders.bottleneck.arms import Verdict
from dataloaders.findings import Finding
from dataloaders.measuring.intervals import Interval
from dataloaders.predicting import best_of

if TYPE_CHECKING:
    from dataloaders.bottleneck.report import Report

__all__ = [
    *("MEANS", "bound_of", "change_of", "findings_of"),
    *("milliseconds", "range_of", "saved", "times"),
]

MEANS: dict[Verdict, str] = {
    "step-bound": "the training step is the bottleneck; a faster input gains next to nothing",
    "input-bound": "the step waits for batches to be prepared",
    "transfer-bound": "the step waits for batches to be copied to the device",
    "contention-bound": "the loader's workers take cores that the step needs",
    "inconclusive": "the measurement does not carry a verdict",
}
_EVIDENCE = {
    "blocks": "",
    "steps": " Few rounds fitted in: this is from single steps.",
    "waits": " This is from what the loop waits for batches, measured at each step.",
}


def bound_of(report: Report) -> str:
    """Return what a perfect input would gain, in a sentence; "" where it is not known."""
    bound = report.speedup_bound
    if bound is None:
        return ""
    return (
        f"A perfect input would make this loop {bound.estimate:.2f} x as fast "
        f"(95 % interval {bound.low:.2f} to {bound.high:.2f})."
        f"{_EVIDENCE[report.evidence or 'blocks']}"
    )


def change_of(report: Report) -> tuple[str, str]:
    """Return the one change to make, as code, and its gain; or "" and the first advice."""
    best = None if report.verdict == "step-bound" else best_of(report.candidates)
    gain = None if best is None else best.measured or best.predicted
    if best is None or gain is None:
        return "", report.advice[0] if report.advice else ""
    how = "measured" if best.measured else "predicted"
    return best.change, f"{best.name}: {times(gain)} as fast, {how}"


def findings_of(report: Report) -> list[Finding]:
    """Return what of the step could be faster; where it is not the limit, what holds anyway."""
    all_of_them = report.verdict == "step-bound"
    return [one for one in report.findings if all_of_them or one.anyway or one.gain is not None]


def saved(gain: Interval | None) -> str:
    """Return seconds that a change would save, as a sentence; "" for None."""
    if gain is None:
        return ""
    return f"Saves {milliseconds(gain.estimate)} ms a batch ({range_of(gain)})."


def times(gain: Interval | None) -> str:
    """Return a ratio as "1.50 x (1.40 to 1.60)", "" for None."""
    return "" if gain is None else f"{gain.estimate:.2f} x ({gain.low:.2f} to {gain.high:.2f})"


def milliseconds(seconds: float) -> str:
    """Return seconds as milliseconds, with about three digits."""
    value = seconds * 1000
    digits = 3 if value < 1 else 2 if value < 10 else 1
    return f"{value:.{digits}f}"


def range_of(seconds: Interval) -> str:
    """Return an interval of seconds in milliseconds, "1.23 to 4.56"."""
    return f"{milliseconds(max(0.0, seconds.low))} to {milliseconds(seconds.high)}"
