"""The check's result: text for a person, HTML for a notebook, JSON for a program."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from dataloaders.bottleneck.arms import ARMS, COLD, FETCH, STALLS, Verdict
from dataloaders.bottleneck.preparation import Call
from dataloaders.machine.facts import machine_facts
from dataloaders.measuring.intervals import Interval
from dataloaders.predicting import Candidate

__all__ = ["Report"]

_MEANS: dict[Verdict, str] = {
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


_LEAST_SHARE = 0.01
"""Of preparation, for a row of its own."""


@dataclass(frozen=True)
class Report:
    """Holds what a bottleneck check found.

    Attributes:
        verdict: "input-bound", "transfer-bound", "contention-bound", "step-bound" or
            "inconclusive".
        speedup_bound: real / synthetic with its 95 % interval: how many times faster the loop
            would be if batches cost nothing. 1.0 means nothing to gain.
        seconds_per_batch: arm -> seconds for one step ("synthetic", "host", "contended",
            "real", "cold"; arms that say nothing here are missing).
        stalls: "prep", "transfer", "contention" -> seconds a batch lost to it, which add up to real
            minus synthetic; "fetch" -> seconds that an epoch from the disk loses beyond these.
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
        waits: what single batches were waited for: "p50", "p99" and "longest", in seconds, and
            "slow": (index, file or "", seconds) of samples that take far longer than most; None if
            no batch of the loader was measured.
        preparation: what a sample's preparation consists of, the largest part first.
        candidates: changes of the input: what each would gain, or why it is out.
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

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=96, force_terminal=False)
        console.print(self.__rich__())
        output = console.file
        assert isinstance(output, io.StringIO)
        return "\n".join(line.rstrip() for line in output.getvalue().splitlines())

    def __rich__(self) -> Group:
        """Return the report as rich shows it in a terminal."""
        parts: list[Any] = [
            Text.assemble((self.verdict.upper(), "bold"), f": {_MEANS[self.verdict]}")
        ]
        if self.speedup_bound is not None:
            bound = self.speedup_bound
            parts.append(
                f"A perfect input would make this loop {bound.estimate:.2f} x as fast "
                f"(95 % interval {bound.low:.2f} to {bound.high:.2f})."
                f"{_EVIDENCE[self.evidence or 'blocks']}"
            )
        if self.smallest_gap is not None:
            parts.append(f"A gap below {self.smallest_gap:.1%} could not have been seen.")
        parts += ["", Text(f"loader  {self.loader}"), Text(f"batch   {self.batch}"), ""]
        if self.seconds_per_batch:
            parts += [self._arms(), ""]
        lost = [name for name, stall in self.stalls.items() if stall.estimate > 0]
        if lost and self.verdict != "step-bound":
            parts += [self._stall_table(), ""]
        if self.waits is not None and self.verdict != "step-bound":
            parts += [*self._waits(), ""]
        if self.preparation:
            parts += [self._preparation_table(), ""]
        if self.candidates:
            parts += [self._candidate_table(), ""]
        parts += [Text(f"-> {line}") for line in self.advice]
        parts += [Text(f"note: {line}") for line in self.notes]
        facts = ", ".join(self.machine.values())
        parts.append(Text(f"{self.rounds} rounds in {self.seconds:.0f} s; {facts}", style="dim"))
        return Group(*parts)

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return the report as JSON text; write it to ``path`` too, if one is given."""
        data = asdict(self)
        data["machine"] = dict(self.machine)
        text = json.dumps(data, indent=2, default=str)  # a sampler's keys may be anything
        if path is not None:
            Path(path).write_text(text + "\n", encoding="utf-8")
        return text

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write the report as one HTML page without any other file."""
        Path(path).write_text(self._recorded().export_html(), encoding="utf-8")

    def _repr_html_(self) -> str:
        """The report as a notebook shows it."""
        code = '<pre style="font-family: monospace; line-height: normal">{code}</pre>'
        return self._recorded().export_html(inline_styles=True, code_format=code)

    def _recorded(self) -> Console:
        console = Console(file=io.StringIO(), width=96, record=True)
        console.print(self.__rich__())
        return console

    def _arms(self) -> Table:
        rows = [
            (arm.name, _ms(took.estimate), _range_ms(took), arm.tells)
            for arm in (*ARMS[1:], ARMS[0], COLD)  # the whole loop last
            if (took := self.seconds_per_batch.get(arm.name)) is not None
        ]
        return _table(("input", "ms a batch", "95 % interval", "what it is"), rows)

    def _stall_table(self) -> Table:
        real = self.seconds_per_batch["real"].estimate
        causes = [cause for cause in (*STALLS, FETCH) if cause.name in self.stalls]
        lost = [(cause, self.stalls[cause.name].estimate) for cause in causes]
        rows = [
            (cause.name, _ms(seconds), f"{seconds / real:.0%}", cause.tells)
            for cause, seconds in lost
            if seconds > 0
        ]
        return _table(("lost to", "ms a batch", "of the loop", "what it is"), rows)

    def _waits(self) -> list[str]:
        assert self.waits is not None
        p50, p99, longest = (_ms(self.waits[name]) for name in ("p50", "p99", "longest"))
        lines = [f"waits for a batch, ms: half up to {p50}, 99 % up to {p99}, longest {longest}"]
        for index, file, seconds in self.waits["slow"]:
            lines.append(f"slow: sample {index}, {_ms(seconds)} ms{' ' + file if file else ''}")
        return lines

    def _preparation_table(self) -> Table:
        rows = [
            (row.call, _ms(row.seconds_per_sample), f"{row.share:.0%}", "")
            for row in self.preparation
            if row.share >= _LEAST_SHARE
        ]
        return _table(("preparation", "ms a sample", "of it", ""), rows)

    def _candidate_table(self) -> Table:
        rows = [
            (one.name, _times(one.predicted), _times(one.measured), one.reason or one.change)
            for one in self.candidates
        ]
        return _table(("what if", "predicted", "measured", "the change, or why not"), rows)


def _times(gain: Interval | None) -> str:
    return "" if gain is None else f"{gain:.2f}"


def _table(headings: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for number, heading in enumerate(headings):
        last = number == len(headings) - 1
        table.add_column(heading, justify="right" if number > 0 and not last else "left",
                         style="dim" if last else None)  # fmt: skip
    for row in rows:
        table.add_row(*row)
    return table


def _ms(seconds: float) -> str:
    milliseconds = seconds * 1000
    digits = 3 if milliseconds < 1 else 2 if milliseconds < 10 else 1
    return f"{milliseconds:.{digits}f}"


def _range_ms(interval: Interval) -> str:
    return f"{_ms(max(0.0, interval.low))} to {_ms(interval.high)}"
