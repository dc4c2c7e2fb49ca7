"""What a bottleneck check found, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dataloaders.bottleneck.arms import Verdict
from dataloaders.bottleneck.causes.preparation import Call
from dataloaders.findings import Finding
from dataloaders.machine.facts import machine_facts
from dataloaders.measuring.intervals import Interval, Step
from dataloaders.predicting import Candidate


@dataclass(frozen=True)
class Result:
    """Holds what a bottleneck check found.

    Attributes:
        verdict: "input-bound", "transfer-bound", "contention-bound", "step-bound" or
            "inconclusive".
        speedup_bound: real / synthetic with its 95 % interval: how many times faster the loop
            would be if batches cost nothing. 1.0 means nothing to gain.
        seconds_per_batch: arm -> seconds for one step ("synthetic", "host", "contended",
            "real", "cold"; arms that say nothing here are missing).
        stalls: "prep", "transfer", "contention" -> seconds a batch lost to it, which add up to real
            minus synthetic; "fetch" -> seconds that an epoch from the disk loses beyond these;
            "launch" -> seconds of the step alone in which its device waits to be given work.
        smallest_gap: the smallest share of time that this run could have seen.
        loader: the loader in one line.
        batch: one batch in one line: dtypes and shapes.
        advice: what to try next, a sentence each.
        notes: what a reader must know to trust the figures, a sentence each.
        rounds: how many interleaved rounds were measured.
        seconds: how long the check took.
        evidence: what carries the verdict: "blocks" (real against synthetic blocks), "steps" (the
            same, step by step), "waits" (time in the loader's ``next()``); None for no figures.
        machine: cores, processor, device and versions.
        waits: what single batches were waited for: "p50", "p99" and "longest", in seconds;
            "batches": (epoch, batch of it, seconds) of the longest, both counted from 0; "slow":
            (index, file or "", seconds) of samples that take far longer than most; None if no
            batch of the loader was measured.
        preparation: what a sample's preparation consists of, the largest part first.
        candidates: changes of the input: what each would gain, or why it is out.
        timeline: arm -> its last measured steps, as the host's clock saw them.
        findings: what of the step itself could be faster. Where the step is not what holds the loop
            back, only those that hold anyway, or whose gain was measured, are printed.
    """

    verdict: Verdict
    speedup_bound: Interval | None
    seconds_per_batch: Mapping[str, Interval]
    stalls: Mapping[str, Interval]
    smallest_gap: float | None
    loader: str
    batch: str
    advice: tuple[str, ...]
    notes: tuple[str, ...]
    rounds: int
    seconds: float
    evidence: str | None = None
    machine: Mapping[str, str] = field(default_factory=machine_facts)
    waits: Mapping[str, Any] | None = None
    preparation: tuple[Call, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    timeline: Mapping[str, tuple[Step, ...]] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
