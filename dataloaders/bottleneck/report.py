"""Hold what a check found, and write it in several forms."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dataloaders.bottleneck.arms import Verdict
from dataloaders.bottleneck.causes.preparation import Call
from dataloaders.bottleneck.outputs import saved
from dataloaders.bottleneck.outputs import text as shown
from dataloaders.bottleneck.outputs.against import Comparison, compare
from dataloaders.bottleneck.outputs.markdown import markdown
from dataloaders.findings import Finding
from dataloaders.machine.facts import machine_facts
from dataloaders.measuring.intervals import Interval, Step
from dataloaders.predicting import Candidate


@dataclass(frozen=True)
class Report:
    """Holds what a bottleneck check found.

    Attributes:
        verdict: "input-bound", "transfer-bound", "contention-bound", "step-bound" or
            "inconclusive".
        speedup_bound: real / synthetic with its 95 % interval: how many times faster the loop
            would be if batches cost nothing. 1.0 means nothing to gain.
        seconds_per_batch: arm -> seconds for one step ("synthetic", "host", "contended", "real",
            "cold"; only the arms that this loop has).
        stalls: seconds a batch lost, by cause. "prep", "transfer" and "contention" add up to real
            minus synthetic; "fetch" is what an epoch from the disk loses in addition; "launch" is
            time within the step alone in which its device waits for the host.
        smallest_gap: the smallest gap that this run could have seen, as a share of the time.
        loader: the loader in one line.
        batch: one batch in one line: dtypes and shapes.
        advice: what to try next, a sentence each.
        notes: what a reader has to know to judge the figures, a sentence each.
        rounds: complete interleaved rounds; 0 if the figures are from single steps.
        seconds: how long the check took.
        evidence: what the verdict is based on: "blocks" (real and synthetic blocks compared),
            "steps" (the same, step by step), "waits" (time in the loader's ``next()``); None
            without figures.
        machine: cores, processor, device and versions.
        waits: the loop's waits for single batches, in seconds: "p50", "p99" and "longest";
            "batches": (epoch, batch in it, seconds) of the longest, both counted from 0; "slow":
            (index, file or "", seconds) of samples that take far longer than most. None if no
            batch of the loader was measured.
        preparation: the calls that prepare a sample, the most expensive first.
        candidates: possible changes of the input, each with its gain or the reason against it.
        timeline: arm -> its last measured steps, on the host's clock.
        findings: what could be faster in the step itself. If the step is not the bottleneck, only
            those that count under every verdict, or whose gain was measured, are printed.
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

    def __str__(self) -> str:
        return shown.text(self)

    def __rich__(self) -> Any:
        """Return the report as rich prints it in a terminal."""
        return shown.renderable(self)

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return the report as JSON text; write it to ``path`` too, if one is given."""
        return _written(saved.text(self), path)

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> Report:
        """Return the report that `to_json` wrote to ``path``.

        Raises:
            OptionError: there is no such file, it is no report, or it has another format.
        """
        return saved.read(cls, path)

    def against(self, before: Report) -> Comparison:
        """Compare this report with an earlier one."""
        return compare(before, self)

    def to_markdown(
        self, path: str | os.PathLike[str] | None = None, *, against: Report | None = None
    ) -> str:
        """Return a Markdown summary, compared with ``against``; write it to ``path`` too."""
        beside = None if against is None else self.against(against)
        return _written(markdown(self, beside), path)

    def to_trace(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return the timeline as Chrome trace events, for ui.perfetto.dev; write it to ``path``."""
        return _written(saved.trace(self), path)

    def to_html(
        self, path: str | os.PathLike[str] | None = None, *, against: Report | None = None
    ) -> str:
        """Return the report as one self-contained HTML page; write it to ``path`` too.

        ``against`` is an earlier report that the page compares with this one.

        Raises:
            MissingDependency: jinja2 or matplotlib is not installed.
        """
        # Charts take a second to import, and few checks need them.
        from dataloaders.bottleneck.outputs.page import page

        beside = None if against is None else self.against(against)
        return _written(page(self, beside), path)

    def _repr_html_(self) -> str:
        """Return the text as HTML for a notebook."""
        return shown.html(self)


def _written(text: str, path: str | os.PathLike[str] | None) -> str:
    if path is not None:
        Path(path).write_text(text if text.endswith("\n") else text + "\n", encoding="utf-8")
    return text
