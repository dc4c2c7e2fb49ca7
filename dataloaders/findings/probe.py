"""Find the largest batch that a step takes, and its rate at each size, without reading data.

a batch ──its samples repeated──> batches of 2, 4, 8 … times the size
    ──step──> seconds, peak memory │ out of memory ──> the gap in between is halved
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dataloaders.batches.tree import Batch, leaves, map_children, to_device
from dataloaders.errors import OptionError
from dataloaders.machine import resources
from dataloaders.measuring.clocks import clock_in_use
from dataloaders.measuring.intervals import Interval, mean_of
from dataloaders.measuring.table import table
from dataloaders.seeding.states import random_states_kept

_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "bad_alloc", "ALLOC_FAILED")
_MOST = 1 << 20
_FEWEST_STEPS = 3
_MOST_STEPS = 50
_SHARE_OF_ROOM = 0.9
_SHOWN_ERROR = 200
_WIDTH = 160


@dataclass(frozen=True)
class Trial:
    """Holds the measurement of one batch size."""

    batch_size: int
    seconds: Interval | None = None  # of a step, without the first two; None: out of memory
    memory: int | None = None  # peak, in bytes: the device's tensors, else the resident set
    why_not: str | None = None  # why it does not fit; None if it does

    @property
    def rate(self) -> float:
        """Return the samples a second; 0 where the batch does not fit."""
        return 0.0 if self.seconds is None else self.batch_size / self.seconds.estimate


@dataclass(frozen=True)
class Probe:
    """Holds all trials, the smallest batch first."""

    trials: tuple[Trial, ...]

    @property
    def largest(self) -> int | None:
        """Return the largest batch size that fits, of those tried; None if none fits."""
        return max((one.batch_size for one in self.trials if one.why_not is None), default=None)

    @property
    def fastest(self) -> int | None:
        """Return the smallest batch size whose rate is within 5 % of the best."""
        best = max((one.rate for one in self.trials), default=0.0)
        near = [one.batch_size for one in self.trials if one.rate >= 0.95 * best > 0]
        return min(near, default=None)

    def __str__(self) -> str:
        heads = ["batch", "samples/s", "ms a step", "95 % interval", "memory MiB"]
        rows = []
        for one in self.trials:
            texts = ["", "", ""]
            if (took := one.seconds) is not None:
                ends = f"{1e3 * max(0.0, took.low):.2f} to {1e3 * took.high:.2f}"
                texts = [f"{one.rate:.1f}", f"{1e3 * took.estimate:.2f}", ends]
            memory = "" if one.memory is None else f"{one.memory / 2**20:.0f}"
            rows.append([str(one.batch_size), *texts, memory, one.why_not or ""])
        last = f"largest that fits: {self.largest}; within 5 % of the best rate from {self.fastest}"
        return f"{table([*heads, ''], rows, right=heads, width=_WIDTH)}\n\n{last}"

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return the probe as JSON text; write it to ``path`` too, if one is given."""
        data = {**asdict(self), "largest": self.largest, "fastest": self.fastest}
        text = json.dumps(data, indent=2)
        if path is not None:
            Path(path).write_text(text + "\n", encoding="utf-8")
        return text


def probe_batch_sizes(
    batch: Batch,
    step: Callable[[Batch], object],
    *,
    batch_size: int | None = None,
    most: int = _MOST,
    seconds_each: float = 1.0,
    device: torch.device | str | None = None,
) -> Probe:
    """Return how fast ``step`` is at growing batch sizes, up to the largest that fits in memory.

    The size doubles until one does not fit; then the gap is halved down to a sixteenth of the size.
    The step really runs and trains its model. Random states are restored.

    Args:
        batch: one batch of the loader, or tensors of its shapes and dtypes. If sequences vary in
            length, give the longest, with which every size is tried.
        step: takes one batch; copies it to its device, unless ``device`` is given.
        batch_size: samples in ``batch``; None: the first size of its first tensor.
        most: the largest size to try.
        seconds_each: how long to measure each size, after two steps; three steps at least.
        device: where to put batches.

    Raises:
        OptionError: ``batch`` holds nothing that has one row a sample; ``most`` is less than 1.
        Exception: whatever the step raises, except for running out of memory.
    """
    if most < 1:
        raise OptionError(f"most={most!r}: must be a number of samples from 1 on")
    of = batch_size or next((len(leaf) for leaf in leaves(batch) if leaf.dim()), 0)
    trials: list[Trial] = []
    with random_states_kept():
        while (size := _next_size(of, trials, most)) is not None:
            need = 0.0 if _on_cuda() else _more_memory(size, trials)
            if need > resources.available_memory():  # the kernel would kill this process
                text = f"main memory has no room for {need / 2**20:.0f} MiB more"
                trials.append(Trial(size, why_not=text))
                continue
            try:
                made = _resized(batch, of, size)
                made = made if device is None else to_device(made, torch.device(device))
                trials.append(_timed(made, size, step, seconds_each))
            except (RuntimeError, MemoryError) as error:
                if not _ran_out(error):
                    raise
                text = str(error).partition("\n")[0][:_SHOWN_ERROR]
                trials.append(Trial(size, why_not=text or "out of memory"))
            made = None
            gc.collect()  # what the failed step's frames held
            torch.cuda.empty_cache()  # does nothing where CUDA is not in use
    return Probe(tuple(sorted(trials, key=lambda trial: trial.batch_size)))


def _next_size(start: int, trials: list[Trial], most: int) -> int | None:
    """Return the batch size to try after ``trials``; None if the largest that fits is known."""
    if not trials:
        return min(start, most)
    fits = Probe(tuple(trials)).largest or 0
    fails = min((one.batch_size for one in trials if one.why_not is not None), default=None)
    if fails is None:
        return min(2 * fits, most) if fits < most else None
    if not fits:
        return fails // 2 or None
    return (fits + fails) // 2 if fails - fits > max(1, fits // 16) else None


def _timed(batch: Batch, size: int, step: Callable[[Batch], object], seconds: float) -> Trial:
    """Run ``step`` for about so many seconds; return the trial."""
    _forget_peak()
    took: list[float] = []
    while len(took) < _FEWEST_STEPS + 2 or (sum(took[2:]) < seconds and len(took) < _MOST_STEPS):
        clock = clock_in_use()
        first = clock.mark()
        step(batch)
        last = clock.mark()
        clock.wait()
        took.append(clock.seconds(first, last))
    return Trial(size, mean_of(took[2:]), _peak())


def _resized(batch: Batch, of: int, size: int) -> Batch:
    """Return a batch of ``size`` samples: the ``of`` samples of ``batch``, repeated in place.

    Raises:
        OptionError: nothing in it has a row for each sample.
    """
    rows = [row * of // size for row in range(size)]
    changed = False

    def change(child: Any) -> Any:
        nonlocal changed
        if isinstance(child, torch.Tensor):
            if not child.dim() or len(child) != of or child.layout is not torch.strided:
                return child
            changed = True
            return child[torch.tensor(rows, device=child.device)]
        if type(child) in (list, tuple) and len(child) == of:
            columns = [one for one in child if isinstance(one, torch.Tensor)]
            if not columns or any(not one.dim() or len(one) != of for one in columns):
                changed = True
                return type(child)(child[row] for row in rows)
        return map_children(child, change)

    made = change(batch)
    if not changed:
        raise OptionError(f"the batch has nothing with {of} rows, one a sample; give batch_size=")
    return made


def _ran_out(error: Exception) -> bool:
    """Return whether ``error`` says that memory ran out, on a device or the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)


def _more_memory(size: int, before: list[Trial]) -> float:
    """Return how many bytes more than now ``size`` needs, judged by the trials ``before``."""
    known = sorted((one.batch_size, one.memory) for one in before if one.memory is not None)
    if len(known) < 2:
        return 0.0
    (fewer, less), (more, most) = known[-2:]
    each = max(0, most - less) / (more - fewer)
    return (each * (size - more) + most - _status("VmRSS")) / _SHARE_OF_ROOM


def _on_cuda() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _forget_peak() -> None:
    if _on_cuda():
        torch.cuda.reset_peak_memory_stats()
        return
    with contextlib.suppress(OSError):  # only Linux has the peak
        Path("/proc/self/clear_refs").write_text("5")  # the resident set's peak, see proc(5)


def _peak() -> int | None:
    return torch.cuda.max_memory_allocated() if _on_cuda() else _status("VmHWM") or None


def _status(name: str) -> int:
    """Return a field of /proc/self/status in bytes; 0 where there is none."""
    return 1024 * resources.numbers_in(Path("/proc/self/status")).get(f"{name}:", 0)
