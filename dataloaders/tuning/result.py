"""Hold the result of tuning: each trial, the choice, and why."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch.utils.data

from dataloaders.measuring.intervals import Interval
from dataloaders.measuring.table import table
from dataloaders.tuning.variant import Settings, with_settings

L = TypeVar("L", bound="torch.utils.data.DataLoader[object]")

_WIDTH = 160


@dataclass(frozen=True)
class Trial:
    """Holds the measurement of one setting; without rates if its workers failed."""

    settings: Settings
    why: str  # the reason for the trial
    samples_per_second: Interval | None  # in the steady state; with a step, of the whole loop
    epoch_samples_per_second: float | None  # over a whole epoch, with the start of its workers
    startup_s: float = 0.0  # from ``iter()`` to the first batch
    seconds: float = 0.0  # of the trial
    # CPU seconds of this process and the workers, per second and usable core. Near 1, more workers
    # gain nothing.
    cpu_share: float | None = None
    failed: str | None = None  # why its workers died or could not start


@dataclass(frozen=True)
class Tuning:
    """Holds the settings to use and the trials that led to them; print it.

    Attributes:
        choice: the smallest setting tried that reaches the rate of the step, or 97 % of the best.
        reason: why, in a sentence.
        given: the loader's own settings; not pinned without a CUDA device.
        worth_it: whether the choice is at least 3 % faster than ``given``; None if ``given`` failed
            or was not measured, because the choice suffices.
        trials: in order. If a setting had several, their median counts.
        needed_samples_per_second: the rate of the step alone; None if not known.
        seconds: that tuning took.
        batch_bytes: of the tensors of one batch.
        notes: further facts, a sentence each.
        remembered: the file in which ``"auto"`` finds the choice; None if it was not kept.
    """

    choice: Settings
    reason: str
    given: Settings
    worth_it: bool | None
    trials: tuple[Trial, ...]
    needed_samples_per_second: Interval | None
    seconds: float
    batch_bytes: int
    notes: tuple[str, ...] = ()
    remembered: Path | None = None

    def apply(self, loader: L) -> L:
        """Return a loader of ``loader``'s class that loads the same with the chosen settings.

        Dataset, samplers, generator and collation are shared with ``loader``, which stays as it
        is. Without workers, arguments that need them (``timeout``, ``persistent_workers``,
        ``multiprocessing_context``) go back to torch's defaults.
        """
        return with_settings(loader, self.choice)

    def to_json(self, path: str | Path | None = None) -> str:
        """Return everything as JSON (seconds, bytes, samples per second); write it to ``path``."""
        text = json.dumps(vars(self), indent=1, default=_plain) + "\n"
        if path is not None:
            Path(path).write_text(text)
        return text

    def __str__(self) -> str:
        heads = ["workers", "prefetch", "pinned", "samples/s", "start", "CPU"]
        rows = [_row(trial, self.choice) for trial in self.trials]
        text = table([*heads, ""], rows, right=heads, width=_WIDTH)
        lines = [text, "", f"use {self.choice}: {self.reason}"]
        if self.choice != self.given and not self.worth_it:
            known = "was not measured" if self.worth_it is None else "is not 3 % slower"
            lines.append(f"the loader as it is ({self.given}) {known}")
        return "\n".join((*lines, *(f"note: {note}" for note in self.notes)))


@dataclass(frozen=True)
class Progress:
    """Says how far a tuning run has come."""

    seconds: float  # since its start
    budget_s: float
    doing: str  # the trial that starts now, in a few words
    so_far: Tuning  # the result of the trials before it


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else vars(value)


def _row(trial: Trial, choice: Settings) -> tuple[str, ...]:
    settings, rate = trial.settings, trial.samples_per_second
    spread = "" if rate is None else f" ± {100 * rate.half_width / rate.estimate:.0f} %"
    return (
        str(settings.num_workers),
        "" if settings.prefetch_factor is None else str(settings.prefetch_factor),
        "yes" if settings.pin_memory else "",
        "-" if rate is None else f"{rate.estimate:,.0f}{spread}",
        f"{trial.startup_s:.2f} s",
        "" if trial.cpu_share is None else f"{100 * trial.cpu_share:.0f} %",
        ("<- " if settings == choice else "") + (trial.failed or trial.why),
    )
