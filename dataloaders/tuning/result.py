"""What tuning returns: every trial, the choice, and why."""

from __future__ import annotations

import io
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.utils.data

from dataloaders.measuring.intervals import Interval
from dataloaders.tuning.variant import Settings, with_settings

__all__ = ["Progress", "Settings", "Trial", "Tuning"]

L = TypeVar("L", bound="torch.utils.data.DataLoader[Any]")


@dataclass(frozen=True)
class Trial:
    """One setting, measured.

    Attributes:
        settings: what was tried.
        why: why it was tried.
        samples_per_second: in the steady state, start-up not counted, with its 95 % interval;
            with a step, of the loop of loading and stepping. None if its workers failed.
        epoch_samples_per_second: over a whole epoch, the start of its workers counted. None if
            its workers failed.
        startup_s: seconds from ``iter()`` to the first batch.
        seconds: what the trial took.
        cpu_share: CPU seconds of this process and the workers per second and usable core, 0 to
            about 1; near 1, no number of workers makes it faster.
        memory_per_worker: bytes that one worker takes by the end of an epoch, copy-on-write
            growth included; None without workers or where the system does not say.
        failed: why the setting cannot be used (its workers died, or take more memory than there
            is), or None.
    """

    settings: Settings
    why: str
    samples_per_second: Interval | None
    epoch_samples_per_second: float | None
    startup_s: float = 0.0
    seconds: float = 0.0
    cpu_share: float | None = None
    memory_per_worker: int | None = None
    failed: str | None = None


@dataclass(frozen=True)
class Tuning:
    """The settings to use, and the trials behind them; print it.

    Attributes:
        choice: the smallest setting that meets the rate the step needs, or that is within 3 %
            of the best, of those that were tried.
        reason: why, in a sentence; where tuning does not help, it says so.
        given: the loader as it is, with torch's default where it says nothing; not pinned where
            there is no CUDA device.
        worth_it: whether the choice is at least 3 % faster than ``given``. None where that is
            unknown: ``given`` was not measured, since the choice suffices without it (one process
            keeps up with the step), there was no room or time for it, or its workers failed.
        trials: in the order in which they were made. Of a setting that was tried several times
            the median counts.
        needed_samples_per_second: what the step takes when batches cost nothing; None if unknown.
        seconds: what tuning took.
        batch_bytes: the tensors of one batch.
        notes: further facts worth knowing, a sentence each.
        remembered: the file through which ``"auto"`` will find the choice (the best with the step's
            threads as they are, if the choice has ``step_threads``); None if not kept.
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
        is. So do torch's threads, which are the process's: ``choice.step_threads``, if there is
        one, is left to the caller's ``torch.set_num_threads()``. Without workers, arguments that
        need them (``timeout``, ``persistent_workers``, ``multiprocessing_context``) go back to
        torch's defaults.
        """
        return with_settings(loader, self.choice)

    @property
    def compared(self) -> str:
        """How the choice compares with the loader as it is, in a sentence."""
        if self.choice == self.given:
            return "that is what the loader has"
        if self.worth_it is None:
            return (
                f"the loader as it is ({self.given}) was not measured to the end, so that how much "
                "faster this is is unknown"
            )
        more = "at least" if self.worth_it else "not"
        return f"that is {more} 3 % faster than the loader as it is ({self.given})"

    def to_json(self, path: str | Path | None = None) -> str:
        """Return everything as JSON (seconds, bytes, samples per second); also into ``path``."""
        entry = asdict(self)
        settings = [self.choice, self.given, *(trial.settings for trial in self.trials)]
        entries = [entry["choice"], entry["given"], *(one["settings"] for one in entry["trials"])]
        for one, its in zip(settings, entries, strict=True):
            if one.step_threads is None:
                del its["step_threads"]
            if one.backend is None:
                del its["backend"]
            else:
                its["backend"] = {"name": one.backend.name, **its["backend"]}
        entry["remembered"] = None if self.remembered is None else str(self.remembered)
        text = json.dumps(entry, indent=1) + "\n"
        if path is not None:
            Path(path).write_text(text)
        return text

    def __str__(self) -> str:
        from rich.console import Console
        from rich.table import Table

        table = Table(box=None, pad_edge=False)
        options = list(self.choice.numbers)  # of the backend; of all trials the same
        if any(trial.settings.step_threads for trial in self.trials):
            options.append("step's threads")
        for heading in ("workers", "prefetch", "pinned", *options, "samples/s", "start", "CPU"):
            table.add_column(heading, justify="right")
        table.add_column("MiB each", justify="right")
        table.add_column("")
        for trial in self.trials:
            table.add_row(*_row(trial, options, chosen=trial.settings == self.choice))
        out = io.StringIO()
        console = Console(file=out, width=118, color_system=None, highlight=False)
        console.print(table)
        console.print()
        console.print(f"use {self.choice}: {self.reason}", markup=False, soft_wrap=True)
        if self.choice != self.given:
            console.print(self.compared, markup=False, soft_wrap=True)
        for note in self.notes:
            console.print(f"note: {note}", markup=False, soft_wrap=True)
        return "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines())


@dataclass(frozen=True)
class Progress:
    """Where a tuning run stands.

    Attributes:
        seconds: since it started.
        budget_s: what it may take.
        doing: the trial that starts now, in a few words.
        so_far: what is known by now; its choice is the best of the trials made so far.
    """

    seconds: float
    budget_s: float
    doing: str
    so_far: Tuning


def _row(trial: Trial, options: list[str], chosen: bool) -> tuple[str, ...]:
    settings = trial.settings
    numbers = {**settings.numbers, "step's threads": settings.step_threads or ""}
    rate = trial.samples_per_second
    spread = "" if rate is None else f" ± {100 * rate.half_width / rate.estimate:.0f} %"
    return (
        str(settings.num_workers),
        "" if settings.prefetch_factor is None else str(settings.prefetch_factor),
        "yes" if settings.pin_memory else "",
        *(str(numbers[name]) for name in options),
        "-" if rate is None else f"{rate.estimate:,.0f}{spread}",
        f"{trial.startup_s:.2f} s",
        "" if trial.cpu_share is None else f"{100 * trial.cpu_share:.0f} %",
        "" if trial.memory_per_worker is None else f"{trial.memory_per_worker / 2**20:,.0f}",
        ("<- " if chosen else "") + (trial.why if trial.failed is None else trial.failed),
    )
