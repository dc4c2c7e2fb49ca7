"""Does tune() find, in a few trials, what an exhaustive sweep finds?

Every workload is swept over workers and prefetch factors with the same trials that tune() makes;
then the two choices are measured again in turns, since the best of many noisy numbers is partly
luck. The workloads are of known kinds: CPU work, waiting, memory copies, both mixed, with a step.
"""

from __future__ import annotations

import io
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from bench.check.known_work import burn
from bench.check.truth import seconds_per_batch
from bench.harness import Result, Samples, Scale, case
from dataloaders.tuning import Settings, tune
from dataloaders.tuning.trial import driven, observe
from dataloaders.tuning.variant import Variants

BAR_RATE = 0.95
BAR_TIME = 0.20
TRIAL_S = 1.5
HANG_S = 120.0

Step = Callable[[Any], object]
Workload = tuple[Callable[[], Dataset[Any]], int, Step | None]
"""A dataset, the size of its batches, and what is done with each."""


def jpegs() -> Dataset[Any]:
    """Decoding and resizing: CPU work, its amount differing from image to image."""
    from PIL import Image

    generator = np.random.default_rng(0)
    files = []
    for _ in range(32):
        width, height = (int(side) for side in generator.integers(200, 640, 2))
        pixels = generator.normal(128, 40, (height // 8 + 1, width // 8 + 1, 3))
        image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).resize((width, height))
        file = io.BytesIO()
        image.save(file, "JPEG", quality=90)
        files.append(file.getvalue())

    def decoded(index: int) -> torch.Tensor:
        image = Image.open(io.BytesIO(files[index % len(files)])).convert("RGB")
        return torch.from_numpy(np.array(image.resize((128, 128)))).permute(2, 0, 1)

    return Samples(decoded, 100_000)


def waited(index: int) -> torch.Tensor:
    """Waiting only, as for a far disk."""
    time.sleep(0.003)
    return torch.zeros(16)


def uneven(index: int) -> torch.Tensor:
    """Half waiting, half CPU work, a few samples ten times as long as the others."""
    seconds = 0.02 if (index * 7919) % 10 == 0 else 0.002
    time.sleep(seconds / 2)
    burn("work", seconds / 2)
    return torch.zeros(16)


def tiny(index: int) -> torch.Tensor:
    return torch.tensor([float(index), 1.0])


def large(index: int) -> torch.Tensor:
    """The cost is writing and copying memory: 19 MB a batch of 32."""
    return torch.full((3, 224, 224), float(index))


def step_of_40_ms(batch: Any) -> None:
    time.sleep(0.04)


WORKLOADS: dict[str, Workload] = {
    "JPEG decoding": (jpegs, 32, None),
    "waiting": (lambda: Samples(waited, 100_000), 16, None),
    "tensors in memory": (lambda: TensorDataset(torch.zeros(60_000, 784)), 256, None),
    "tiny samples": (lambda: Samples(tiny, 1_000_000), 64, None),
    "large batches": (lambda: Samples(large, 100_000), 32, None),
    "uneven batches": (lambda: Samples(uneven, 100_000), 4, None),
    "waiting, with a step": (lambda: Samples(waited, 100_000), 32, step_of_40_ms),
    "JPEG decoding, with a step": (jpegs, 16, step_of_40_ms),
}


@case("tuned / best >= 0.95 on every workload, in <= 20 % of the sweep's time")
def tuning(scale: Scale, folder: Path) -> Result:
    """Does tune() find what an exhaustive sweep finds, in a fraction of its time?"""
    counts = scale.pick(full=(1, 2, 3, 4, 6, 8), tiny=(1,))
    prefetches = scale.pick(full=(1, 2, 4, 8), tiny=(2,))
    rows, met = [], True
    tuning_s = sweep_s = 0.0
    for name in scale.named(WORKLOADS, ("waiting", "large batches")):
        make, batch_size, step = WORKLOADS[name]
        loader = DataLoader(make(), batch_size, shuffle=True)
        found = tune(
            loader,
            step,
            max_workers=max(counts),
            remember=False,
            budget_s=scale.pick(full=30.0, tiny=1.0),
        )
        began = time.perf_counter()
        swept = [Settings(0, None, False)]
        swept += [Settings(count, depth, False) for count in counts for depth in prefetches]
        rates = {one: _rate(loader, step, one, scale) for one in swept}
        seconds = time.perf_counter() - began
        best = max(rates, key=lambda settings: rates[settings])
        shares = _against(loader, step, found.choice, best, scale)
        share = statistics.median(shares)
        rows.append(
            (name, _short(found.choice), _short(best), rates[best],
             f"{share:.3f} ({min(shares):.3f} to {max(shares):.3f})", len(found.trials),
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


def _against(
    loader: DataLoader[Any], step: Step | None, tuned: Settings, best: Settings, scale: Scale
) -> list[float]:
    """Return the rate of ``tuned`` / that of ``best``, in turns.

    A trial is too short for this where many batches are in flight: it counts those that were half
    made when it began, with 8 x 4 a fifth of those that it takes.
    """
    if tuned == best:
        return [1.0]
    ratios, took = [], {}
    for turn in range(scale.pick(full=6, tiny=1)):
        for settings in (tuned, best) if turn % 2 == 0 else (best, tuned):
            variant = Variants(loader).make(settings, HANG_S)
            seconds = scale.pick(full=3.0, tiny=0.1)
            took[settings] = seconds_per_batch(variant, step or len, seconds)
        ratios.append(took[best] / took[tuned])
    return ratios


def _rate(loader: DataLoader[Any], step: Step | None, settings: Settings, scale: Scale) -> float:
    seconds = scale.pick(full=TRIAL_S, tiny=0.1)
    variant = Variants(loader).make(settings, HANG_S)
    seen = driven(observe(variant, stepping=step is not None, seconds=seconds), step or print)
    return seen.samples_per_second.estimate


def _short(settings: Settings) -> str:
    depth = settings.prefetch_factor
    return str(settings.num_workers) if depth is None else f"{settings.num_workers} x {depth}"
