"""Does tune() find, in a few trials, what an exhaustive sweep finds?

Every workload is swept over workers and prefetch factors with the same trials that tune() makes;
then the two choices are measured again in turns, since the best of many noisy numbers is partly
luck. The workloads are of known kinds: CPU work, waiting, memory copies, both mixed, with a step.
"""

from __future__ import annotations

import io
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from bench.harness import Case, Result, Scale, show
from dataloaders.seeding.states import random_states_kept
from dataloaders.tuning import Settings, tune
from dataloaders.tuning.trial import driven, observe
from dataloaders.tuning.variant import Variants

BAR_RATE = 0.95
BAR_TIME = 0.20
TRIAL_S = 1.5
HANG_S = 120.0

Step = Callable[[Any], object]


@dataclass(frozen=True)
class Workload:
    name: str
    make: Callable[[], Dataset[Any]]
    batch_size: int
    step: Step | None = None


class Jpegs(Dataset[torch.Tensor]):
    """Decoding and resizing: CPU work, its amount differing from image to image."""

    def __init__(self) -> None:
        from PIL import Image

        generator = np.random.default_rng(0)
        self.files = []
        for _ in range(32):
            width, height = (int(side) for side in generator.integers(200, 640, 2))
            pixels = generator.normal(128, 40, (height // 8 + 1, width // 8 + 1, 3))
            image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).resize((width, height))
            file = io.BytesIO()
            image.save(file, "JPEG", quality=90)
            self.files.append(file.getvalue())

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        from PIL import Image

        image = Image.open(io.BytesIO(self.files[index % len(self.files)])).convert("RGB")
        pixels = np.asarray(image.resize((128, 128)))
        return torch.from_numpy(pixels.copy()).permute(2, 0, 1)


class Waits(Dataset[torch.Tensor]):
    """Waiting only, as for a far disk."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.zeros(16)


class Tiny(Dataset[torch.Tensor]):
    """Next to no work a sample."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), 1.0])


class Large(Dataset[torch.Tensor]):
    """Samples whose cost is writing and copying memory: 19 MB a batch of 32."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3, 224, 224), float(index))


class Uneven(Dataset[torch.Tensor]):
    """Half waiting, half CPU work, a few samples ten times as long as the others."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        seconds = 0.02 if (index * 7919) % 10 == 0 else 0.002
        time.sleep(seconds / 2)
        end = time.thread_time() + seconds / 2
        while time.thread_time() < end:
            pass
        return torch.zeros(16)


def step_of_40_ms(batch: Any) -> None:
    time.sleep(0.04)


WORKLOADS = (
    Workload("JPEG decoding", Jpegs, 32),
    Workload("waiting", lambda: Waits(0.003), 16),
    Workload("tensors in memory", lambda: TensorDataset(torch.zeros(60_000, 784)), 256),
    Workload("tiny samples", Tiny, 64),
    Workload("large batches", Large, 32),
    Workload("uneven batches", Uneven, 4),
    Workload("waiting, with a step", lambda: Waits(0.003), 32, step_of_40_ms),
    Workload("JPEG decoding, with a step", Jpegs, 16, step_of_40_ms),
)

TINY_WORKLOADS = (WORKLOADS[1], WORKLOADS[4])


def run(scale: Scale, only: Sequence[str] = ()) -> Result:
    """Workloads whose names start with one of ``only``; all of them without it."""
    workloads = scale.pick(full=WORKLOADS, tiny=TINY_WORKLOADS)
    if only:
        workloads = tuple(one for one in WORKLOADS if one.name.startswith(tuple(only)))
    counts = scale.pick(full=(1, 2, 3, 4, 6, 8), tiny=(1,))
    prefetches = scale.pick(full=(1, 2, 4, 8), tiny=(2,))
    rows, met = [], True
    tuning_s = sweep_s = 0.0
    for workload in workloads:
        loader = DataLoader(workload.make(), workload.batch_size, shuffle=True)
        found = tune(
            loader,
            workload.step,
            max_workers=max(counts),
            remember=False,
            budget_s=scale.pick(full=30.0, tiny=1.0),
        )
        rates, seconds = _sweep(loader, workload.step, counts, prefetches, scale)
        best = max(rates, key=lambda settings: rates[settings])
        share, spread = _against(loader, workload.step, found.choice, best, scale)
        rows.append(
            (workload.name, _short(found.choice), _short(best), rates[best],
             f"{share:.3f} ({spread[0]:.3f} to {spread[1]:.3f})", len(found.trials),
             found.seconds, seconds, found.seconds / seconds)
        )  # fmt: skip
        met = met and share >= BAR_RATE
        tuning_s, sweep_s = tuning_s + found.seconds, sweep_s + seconds
    share_of_time = tuning_s / sweep_s
    return Result(
        headings=("workload", "tuned", "best of the sweep", "its samples/s", "tuned / best",
                  "trials", "tuning, s", "sweep, s", "time share"),
        rows=tuple(rows),
        met=met and share_of_time <= BAR_TIME,
        notes=(
            f"All workloads together: tuning took {100 * share_of_time:.1f} % of the sweeps' time.",
            "Settings are workers x prefetch factor. Rates are of the steady state; with a step, "
            "of the loop. The step is a sleep of 40 ms, as of work on a device.",
            "tuned / best: both measured again in turns, for longer and after a longer start than "
            "in the sweep; the median of the rounds' ratios, the smallest and the largest.",
        ),
    )  # fmt: skip


def _sweep(
    loader: DataLoader[Any],
    step: Step | None,
    counts: tuple[int, ...],
    prefetches: tuple[int, ...],
    scale: Scale,
) -> tuple[dict[Settings, float], float]:
    began = time.perf_counter()
    settings = [Settings(0, None, False)]
    settings += [Settings(count, depth, False) for count in counts for depth in prefetches]
    rates = {one: _rate(loader, step, one, scale) for one in settings}
    return rates, time.perf_counter() - began


def _against(
    loader: DataLoader[Any], step: Step | None, tuned: Settings, best: Settings, scale: Scale
) -> tuple[float, tuple[float, float]]:
    if tuned == best:
        return 1.0, (1.0, 1.0)
    ratios = []
    for turn in range(scale.pick(full=6, tiny=1)):
        order = (tuned, best) if turn % 2 == 0 else (best, tuned)
        rates = {one: _steady_rate(loader, step, one, scale) for one in order}
        ratios.append(rates[tuned] / rates[best])
    return statistics.median(ratios), (min(ratios), max(ratios))


def _steady_rate(
    loader: DataLoader[Any], step: Step | None, settings: Settings, scale: Scale
) -> float:
    """Samples per second, once twice as many batches as can be in flight have gone by.

    A trial is too short for this where many are: it counts batches that were half made when it
    began, with 8 x 4 a fifth of those that it takes.
    """
    with random_states_kept():
        batches = iter(Variants(loader).make(settings, HANG_S))
        flight = settings.num_workers * (settings.prefetch_factor or 0)

        def take() -> int:
            batch = next(batches)
            if step is not None:
                step(batch)
            return len(batch[0] if isinstance(batch, list) else batch)

        for _ in range(scale.pick(full=2 * flight + 2, tiny=1)):
            take()
        seconds, began, taken = scale.pick(full=3.0, tiny=0.1), time.perf_counter(), 0
        while (passed := time.perf_counter() - began) < seconds:
            taken += take()
        return taken / passed


def _rate(loader: DataLoader[Any], step: Step | None, settings: Settings, scale: Scale) -> float:
    with random_states_kept():
        steps = observe(
            Variants(loader).make(settings, HANG_S),
            stepping=step is not None,
            seconds=scale.pick(full=TRIAL_S, tiny=0.1),
        )
        seen = driven(steps, step or print)
    return seen.samples_per_second.estimate


def _short(settings: Settings) -> str:
    depth = settings.prefetch_factor
    return str(settings.num_workers) if depth is None else f"{settings.num_workers} x {depth}"


CASES = [
    Case(
        "tuning",
        "Does tune() find what an exhaustive sweep finds, in a fraction of its time?",
        "tuned / best >= 0.95 on every workload, in <= 20 % of the sweep's time",
        run,
    )
]


if __name__ == "__main__":
    # python -m bench.loaders.tuning [WORKLOAD ...]: some of the workloads.
    show(CASES[0], run(Scale(tiny=False), sys.argv[1:]))
