"""The check's result: data, and text for a person; other forms are in outputs/."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from dataloaders.bottleneck.arms import Verdict
from dataloaders.bottleneck.outputs import contents, saved
from dataloaders.bottleneck.outputs.against import Comparison, compare
from dataloaders.bottleneck.outputs.contents import (
    MEANS,
    bound_of,
    change_of,
    findings_of,
    milliseconds,
)
from dataloaders.bottleneck.outputs.markdown import markdown
from dataloaders.bottleneck.preparation import Call
from dataloaders.findings import Finding
from dataloaders.machine.facts import machine_facts
from dataloaders.measuring.intervals import Interval, Step
from dataloaders.predicting import Candidate

R = TypeVar("R", bound="Report")


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

    def __str__(self) -> str:
        output = io.StringIO()
        self.show(Console(file=output, width=_WIDTH, force_terminal=False))
        return "\n".join(line.rstrip() for line in output.getvalue().splitlines())

    def show(self, console: Console) -> None:
        """Print the report on ``console``; the last line is the one change to make, as code."""
        console.print(self, crop=False)

    def __rich__(self) -> Group:
        """Return the report as rich shows it in a terminal."""
        parts: list[Any] = [
            Text.assemble((self.verdict.upper(), "bold"), f": {MEANS[self.verdict]}")
        ]
        if self.speedup_bound is not None:
            parts.append(bound_of(self))
        if self.smallest_gap is not None:
            parts.append(f"A gap below {self.smallest_gap:.1%} could not have been seen.")
        parts += ["", Text(f"loader  {self.loader}"), Text(f"batch   {self.batch}"), ""]
        tables = [_table(each(self)) for each in _TABLES]
        for shown in (*tables[:2], self._waits(), *tables[2:]):
            parts += [*shown, ""] if shown else []
        rounds = "1 round" if self.rounds == 1 else f"{self.rounds} rounds"
        facts = ", ".join(self.machine.values())
        parts.append(Text(f"{rounds} in {self.seconds:.0f} s; {facts}", style="dim"))
        parts += [_whole(f"note: {line}") for line in self.notes]
        parts += [Text(f"step: {finding}") for finding in findings_of(self)]
        parts += [Text(f"-> {line}") for line in self.advice]
        code, why = change_of(self)
        if code:
            parts.append(Text(f"-> the one change to make ({why}):"))
            parts += [_whole(f"   {line}") for line in code.splitlines()]
        return Group(*parts)

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return the report as JSON text; write it to ``path`` too, if one is given."""
        return _written(saved.text(self), path)

    @classmethod
    def from_json(cls: type[R], path: str | os.PathLike[str]) -> R:
        """Return the report that `to_json` wrote to ``path``.

        Raises:
            OptionError: the file is not there, no report, or one of another format.
        """
        return saved.read(cls, path)

    def against(self, before: Report) -> Comparison:
        """Return this report compared with an earlier one, with intervals."""
        return compare(before, self)

    def to_markdown(
        self, path: str | os.PathLike[str] | None = None, *, against: Report | None = None
    ) -> str:
        """Return a summary as Markdown, compared with ``against``; write it to ``path`` too."""
        beside = None if against is None else self.against(against)
        return _written(markdown(self, beside), path)

    def to_trace(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return the timeline as Chrome's trace events (open it in ui.perfetto.dev); write it."""
        return _written(saved.trace(self), path)

    def to_html(
        self, path: str | os.PathLike[str] | None = None, *, against: Report | None = None
    ) -> str:
        """Return the report as one HTML page without any other file; write it to ``path`` too.

        ``against`` is an earlier report, with which the page compares this one.

        Raises:
            MissingDependency: jinja2 or matplotlib is not installed.
        """
        # Charts take a second to import, and few checks want them.
        from dataloaders.bottleneck.outputs.page import page

        beside = None if against is None else self.against(against)
        return _written(page(self, beside), path)

    def _repr_html_(self) -> str:
        """The report as a notebook shows it."""
        console = Console(file=io.StringIO(), width=_WIDTH, record=True)
        self.show(console)
        code = '<pre style="font-family: monospace; line-height: normal">{code}</pre>'
        return console.export_html(inline_styles=True, code_format=code)

    def _waits(self) -> list[Any]:
        if self.waits is None or self.verdict == "step-bound":
            return []
        p50, p99, longest = (milliseconds(self.waits[name]) for name in ("p50", "p99", "longest"))
        lines = [f"waits for a batch, ms: half up to {p50}, 99 % up to {p99}, longest {longest}"]
        if batches := self.waits.get("batches"):
            named = (f"{milliseconds(s)} (batch {n} of epoch {epoch})" for epoch, n, s in batches)
            lines.append(f"longest waits, ms: {', '.join(named)}")
        lines += [
            f"slow: sample {index}, {milliseconds(seconds)} ms {file}".rstrip()
            for index, file, seconds in self.waits["slow"]
        ]
        return [Text(line) for line in lines]


_WIDTH = 112  # a line of the candidates' table
_TABLES = (contents.arms, contents.stalls, contents.preparation, contents.candidates)


def _table(shown: contents.Table) -> list[Table]:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for number, heading in enumerate(shown.headings):
        last = number == len(shown.headings) - 1
        table.add_column(heading, justify="right" if number > 0 and not last else "left",
                         style="dim" if last else None)  # fmt: skip
    for row in shown.rows:
        table.add_row(*row)
    return [table] if shown else []


def _whole(text: str) -> Text:
    """Return a line that is not broken: to be searched for, or copied."""
    return Text(text, no_wrap=True, overflow="ignore")


def _written(text: str, path: str | os.PathLike[str] | None) -> str:
    if path is not None:
        Path(path).write_text(text if text.endswith("\n") else text + "\n", encoding="utf-8")
    return text
