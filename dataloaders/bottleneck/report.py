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

from dataloaders.bottleneck.arms import ARMS, STALLS, Verdict
from dataloaders.findings import Finding
from dataloaders.machine.facts import machine_facts
from dataloaders.measuring.intervals import Interval

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


@dataclass(frozen=True)
class Report:
    """Holds what a bottleneck check found.

    Attributes:
        verdict: "input-bound", "transfer-bound", "contention-bound", "step-bound" or
            "inconclusive".
        speedup_bound: real / synthetic with its 95 % interval: how many times faster the loop
            would be if batches cost nothing. 1.0 means nothing to gain.
        seconds_per_batch: arm -> seconds for one step ("synthetic", "host", "contended",
            "real"; arms that say nothing here are missing).
        stalls: "prep", "transfer", "contention" -> seconds a batch lost to it.
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
    findings: tuple[Finding, ...] = ()

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
        parts += [Text(f"-> {line}") for line in self.advice]
        all_of_them = self.verdict == "step-bound"
        shown = [one for one in self.findings if all_of_them or one.anyway or one.gain is not None]
        parts += [Text(f"step: {finding}") for finding in shown]
        parts += [Text(f"note: {line}") for line in self.notes]
        facts = ", ".join(self.machine.values())
        parts.append(Text(f"{self.rounds} rounds in {self.seconds:.0f} s; {facts}", style="dim"))
        return Group(*parts)

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return the report as JSON text; write it to ``path`` too, if one is given."""
        data = asdict(self)
        data["machine"] = dict(self.machine)
        text = json.dumps(data, indent=2)
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
            for arm in (*ARMS[1:], ARMS[0])  # the whole loop last
            if (took := self.seconds_per_batch.get(arm.name)) is not None
        ]
        return _table(("input", "ms a batch", "95 % interval", "what it is"), rows)

    def _stall_table(self) -> Table:
        real = self.seconds_per_batch["real"].estimate
        lost = [(cause, self.stalls[cause.name].estimate) for cause in STALLS]
        rows = [
            (cause.name, _ms(seconds), f"{seconds / real:.0%}", cause.tells)
            for cause, seconds in lost
            if seconds > 0
        ]
        return _table(("lost to", "ms a batch", "of the loop", "what it is"), rows)


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
