"""Make a report of a check's figures: describe the loader, advise, and note what to know."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dataloaders.bottleneck.blocks import Blocks
from dataloaders.bottleneck.causes.causes import Causes
from dataloaders.bottleneck.causes.preparation import Call
from dataloaders.bottleneck.evidence.verdict import BOUND_FROM, HELD_UP, STEP_BOUND_UP_TO, Analysis
from dataloaders.bottleneck.outputs.contents import counted, times
from dataloaders.bottleneck.report import Report
from dataloaders.findings import Finding
from dataloaders.measuring.feed import Feed
from dataloaders.measuring.intervals import Interval, Step
from dataloaders.predicting import Candidate, best_of, possible

_LAUNCH_SHARE = 0.05  # of a step; a smaller one is not mentioned
_COPYING = ("host", "real")  # arms whose step copies its batch, where any does


def summarise(
    known: Analysis,
    loader: Any,
    blocks: Blocks,
    causes: Causes,
    *,
    rounds: int,
    finished: bool,
    unwatched: str,
    launched: Interval | None,
    **fields: Any,
) -> Report:
    """Return the report of a check, finished or not; ``fields`` are further fields of it.

    ``unwatched`` says why there are no findings about the step.
    """
    feed, arms, stalls = blocks.feed, dict(known.seconds_per_batch), dict(known.stalls)
    if (fetch := causes.fetch) is not None and "real" in arms:
        estimate = arms["real"].estimate + fetch.estimate
        half = math.hypot(arms["real"].half_width, fetch.half_width)  # measured apart
        stalls["fetch"] = fetch
        arms["cold"] = Interval(estimate - half, estimate, estimate + half)
    if launched is not None and "synthetic" in arms:
        stalls["launch"] = _less(arms["synthetic"], launched)
    tips = [] if known.evidence is None else _advice(replace(known, stalls=stalls), causes)
    if known.verdict == "step-bound":
        tips += _surest(fields["findings"])
    return Report(
        verdict=known.verdict,
        speedup_bound=known.speedup_bound,
        seconds_per_batch=arms,
        stalls=stalls,
        smallest_gap=known.smallest_gap,
        loader=_describe_loader(loader, feed),
        advice=tuple(tips),
        notes=(*_notes(known, blocks, rounds, finished, unwatched), *causes.notes),
        rounds=rounds,
        evidence=known.evidence,
        waits=causes.waits,
        preparation=causes.preparation,
        candidates=causes.candidates,
        timeline=_with_copies(blocks.log.timeline(), stalls.get("transfer")),
        **fields,
    )


def _notes(
    known: Analysis, blocks: Blocks, rounds: int, finished: bool, unwatched: str
) -> tuple[str, ...]:
    """Return what a reader has to know to judge the figures, a sentence each."""
    feed, found = blocks.feed, known.evidence is not None
    few = f"only {counted(rounds, 'complete round')}" if rounds else "no complete round"
    notes = {
        f"{few} could be measured; let the loop run longer (more steps or epochs, or a larger "
        "--budget)": not found,
        "the loop ended before the check had enough; figures are what is known so far": (
            found and not finished
        ),
        "the measured times differ too much for an interval; a larger budget, or a machine with "
        "nothing else to do, gives one": found and known.speedup_bound is None,
        f"{counted(known.left_out, 'real step')} left out: each was the first on its shape, and "
        "took longer than steps on shapes seen before": known.left_out,
        f"other processes held the step up for {known.held:.0%} of its time, which the "
        "interval allows for; a machine with nothing else to do gives a narrower one": (
            known.held > HELD_UP
        ),
        "everything was measured within the first epoch; a dataset that fills a cache in its "
        "first epoch is faster later": found and feed.epoch == 0 and feed.length is not None,
        f"the loop leaves each epoch after {feed.most} batches, and begins a new one, workers "
        "included: so did the measurement": feed.most,
        "the step writes into its batch; resident batches were restored, unmeasured": blocks.writes,
        f"the loop repeats itself every {blocks.cycle} batches: blocks hold whole cycles": (
            blocks.cycle > 1
        ),
        f"what slows the step down is not known: {unwatched}": unwatched,
        f"the device's memory has room for {len(blocks.pool)} resident batches beside the step": (
            blocks.pool.crowded
        ),
    }
    effect = "a device may hide that" if blocks.schedule.asynchronous else "that counts as input"
    for name, total_s in blocks.log.elsewhere.items():
        waits_ms = 1e3 * total_s / max(1, blocks.log.given)
        text = f"the loop waits {waits_ms:.1f} ms a batch for {name} as well; {effect}"
        notes[text] = waits_ms >= 0.1
    return tuple(note for note, holds in notes.items() if holds)


def _with_copies(
    timeline: Mapping[str, tuple[Step, ...]], transfer: Interval | None
) -> dict[str, tuple[Step, ...]]:
    """Return the timeline with the mean seconds of a copy in the steps that copy their batch."""
    copy_s = 0.0 if transfer is None else max(0.0, round(transfer.estimate, 6))
    return {
        arm: tuple(one._replace(transfer=min(copy_s, one.step)) for one in steps)
        if arm in _COPYING
        else steps
        for arm, steps in timeline.items()
    }


def _less(whole: Interval, part: Interval) -> Interval:
    """Return whole - part, measured independently; no end is below 0."""
    half, estimate = math.hypot(whole.half_width, part.half_width), whole.estimate - part.estimate
    return Interval(*(max(0.0, end) for end in (estimate - half, estimate, estimate + half)))


def _describe_loader(loader: Any, feed: Feed) -> str:
    dataset = type(getattr(loader, "dataset", loader)).__name__
    options: dict[str, Any] = {"num_workers": feed.workers}
    if feed.workers:
        options["prefetch_factor"] = getattr(loader, "prefetch_factor", None)
    for name in ("pin_memory", "backend"):
        if value := getattr(loader, name, None):
            options[name] = value
    parts = [f"{type(loader).__name__} over {dataset}"]
    if feed.length is not None:
        parts.append(f"{feed.length} batches an epoch")
    return ", ".join([*parts, *(f"{name}={value!r}" for name, value in options.items())])


_SEND_LESS = "send less: uint8 images and the normalisation on the device"
# Changes of the input, where it is not known what they gain.
_UNPREDICTED = {
    "input-bound": [
        "let workers prepare batches: `dataloaders tune` measures how many, and how far ahead",
        "if that does not reach the bound above, do less a sample: cache the deterministic "
        "part, or move decoding and augmentation to the GPU",
    ],
    "transfer-bound": [
        'copy ahead of use on a side stream: backend="prefetch", here by '
        "`dataloaders run --backend prefetch`",
        _SEND_LESS,
    ],
    "contention-bound": [
        "do less a sample on the CPU: cache the deterministic part, or decode on the GPU",
    ],
}


def _advice(analysis: Analysis, causes: Causes) -> list[str]:
    """Return what to try next, a sentence each."""
    verdict = analysis.verdict
    tips = _by_verdict(analysis)
    if causes.candidates:
        loads = verdict in ("input-bound", "contention-bound")
        tips += _predicted(causes.candidates, causes.preparation if loads else ())
        return [*tips, _SEND_LESS] if verdict == "transfer-bound" else tips
    return tips + _UNPREDICTED.get(verdict, [])


def _surest(findings: Sequence[Finding]) -> list[str]:
    """Name the finding whose measured gain is the largest, if that gain is sure."""
    sure = [(one.gain.estimate, one) for one in findings if one.gain and one.gain.low > 0]
    largest = sorted(sure, key=lambda each: each[0])[-1:]
    return [f"the one change to make: {one}" for _, one in largest]


def _predicted(found: Sequence[Candidate], preparation: Sequence[Call]) -> list[str]:
    """Say what the predictions leave to do, beside the one change to make."""
    best = best_of(found)
    gain = None if best is None else best.gain
    tips = []
    if best is None:
        tips.append("no change of the input that was predicted is sure to gain 5 %")
    if possible(found) and not any(one.measured for one in found):
        tips.append("to measure what changes gain in this loop, give `--try` (try_candidates=True)")
    for cores in (one.predicted for one in found if one.name == "more cores"):
        if cores is not None and (gain is None or cores.estimate > gain.estimate):
            tips.append(
                f"cores are missing: with twice as many, the loop is {times(cores)} as fast"
            )
    if best is None and preparation:
        first = preparation[0]
        tips.append(f"do less a sample: {first.call} takes {first.share:.0%} of its preparation")
    return tips


def _by_verdict(analysis: Analysis) -> list[str]:
    """Return advice that no prediction is about."""
    bound, verdict = analysis.speedup_bound, analysis.verdict
    if verdict == "step-bound":
        gain = 0.0 if bound is None else max(0.0, bound.high - 1)
        launch, step = analysis.stalls.get("launch"), analysis.seconds_per_batch.get("synthetic")
        share = 0.0 if launch is None or step is None else launch.low / step.estimate
        return [
            f"leave the input as it is: DALI, a cache or more workers gain {gain:.0%} at most",
            f"{share:.0%} of each step, at the least, the device waits for work: launch less, "
            "by torch.compile(mode='reduce-overhead'), CUDA graphs or a larger batch"
            if share >= _LAUNCH_SHARE
            else "a faster step (mixed precision, torch.compile, a larger batch) is where time is",
        ]
    if verdict != "inconclusive":
        return []
    longer = "measure longer (budget_s, --budget)"
    if bound is None:
        return [f"{longer}, or with nothing else running"]
    if bound.low >= BOUND_FROM:
        known = "the gap is there, but not which of preparation and transfer is the larger part"
        return [f"{longer}: {known} of it"]
    low, high = max(0.0, bound.low - 1), max(0.0, bound.high - 1)
    between = f"the gap lies between {low:.0%} and {high:.0%}"
    return [f"{longer}: {between}, and {STEP_BOUND_UP_TO - 1:.0%} is the line"]
