"""Predicted against measured speed-ups: datasets x transforms x steps x remedies, on real loops.

The check predicts, in a loop as it stands. Then each remedy is made, and its loop runs in turns
with the first one. A third of the pairs are steps on a played device (`bench.check.played`), whose
copies and kernels take a known time while everything else is real.

    python -m bench what_if                  some 40 minutes; needs an idle machine
    python -m bench what_if --only photos    the loops whose names begin so; nothing is kept
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from bench.check.known_work import Step, burn
from bench.check.played import Loop, RealTime
from bench.check.truth import seconds_per_batch
from bench.dali.photos import folder_of_photos
from bench.harness import Result, Samples, Scale, case
from dataloaders import registry
from dataloaders.bottleneck import Report, check_bottleneck
from dataloaders.loader import wrap
from dataloaders.predicting import best_of

BAR_MEDIAN, BAR_NEAR, NEAR, BAR_BEST = 0.05, 0.90, 0.10, 0.95
LEAST_PAIRS, PLAYED_SHARE = 24, 1 / 3
_FEWEST, _MOST, _ALIKE = 3, 7, 0.1  # turns: the fewest, unless their ratios differ by more
_TRIES, _SAME = 3, 0.05
_EPOCH_S = 5.0


@dataclass(frozen=True)
class Training:
    """A loop.

    Attributes:
        data: photographs under a chain of transforms, by its name; or the seconds of a core and
            of waiting that each row takes.
        workers: of its loader.
        step: its seconds; or a network's; or what a device plays.
    """

    data: str | tuple[float, float]
    workers: int
    step: float | Callable[[Any], None] | Loop

    def made(
        self,
        folder: Path,
        backend: str = "stock",
        num_workers: int | None = None,
        images: str | None = None,
        device: str | None = None,
        **options: Any,
    ) -> tuple[Any, Callable[[Any], Any]]:
        """Return its loader and step, given options of DataLoader."""
        if isinstance(self.data, str):
            dataset, batch = _photos(folder, self.data), 16
        else:
            dataset, batch = Samples(functools.partial(_row, *self.data), 4_000), 4
        workers = self.workers if num_workers is None else num_workers
        loader: Any = DataLoader(dataset, batch, True, num_workers=workers, **options)
        if backend == "h5":
            h5: Any = registry.load("h5")
            loader = wrap(loader, backend=h5(folder / f"{self.data} {images}.h5", images=images))
        elif backend not in ("stock", "prefetch"):
            loader = wrap(loader, backend=backend)
        if isinstance(self.step, Loop):
            ahead = 2 if backend == "prefetch" or device else 0
            return replace(self.step, ahead=ahead).made(RealTime(), loader)
        return loader, Step((self.step,)) if isinstance(self.step, float) else self.step


def _row(work_s: float, wait_s: float, index: int) -> torch.Tensor:
    burn("work", work_s)
    burn("wait", wait_s)
    return torch.full((64,), float(index))


def _photos(folder: Path, chain: str) -> Any:
    from torchvision import transforms as T
    from torchvision.datasets import ImageFolder

    crop = [T.Resize(160), T.RandomCrop(128), T.RandomHorizontalFlip()]
    heavy = [T.RandomRotation(15), T.RandomResizedCrop(128), T.ColorJitter(0.4, 0.4)]
    if not (folder / "photos").exists():
        folder_of_photos(folder, 1200, 60)
    calls = {"crop": crop, "heavy": heavy}[chain]
    return ImageFolder(str(folder / "photos"), T.Compose([*calls, T.ToTensor()]))


@functools.cache
def _network() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 5, stride=4),
        torch.nn.ReLU(),
        torch.nn.Conv2d(16, 32, 3, stride=2),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.LazyLinear(10),
    )


def _convolutions(batch: Any) -> None:
    """Train a small network on the CPU, for as long as that takes."""
    images, labels = batch
    torch.nn.functional.cross_entropy(_network()(images), labels % 10).backward()
    _network().zero_grad()


TRAININGS = {
    **{
        f"photos, {chain}, step {ms} ms, {n} workers": Training(chain, n, ms / 1e3)
        for chain, ms, n in (("crop", 10, 0), ("crop", 50, 1), ("heavy", 10, 1), ("heavy", 50, 0))
    },
    "photos, crop, step a small CNN, 0 workers": Training("crop", 0, _convolutions),
    **{
        f"rows, {work} + {wait} ms, step 8 ms, {n} workers": Training(
            (work / 1e3, wait / 1e3), n, 0.008
        )
        for (work, wait), n in (((4, 0), 0), ((4, 0), 1), ((1, 3), 1), ((0, 6), 0))
    },
    **{
        f"played, load {load} ms, kernel {kernel} ms, copy {copy} ms, {n} workers": Training(
            (0.0, load / 4e3),
            n,
            Loop((load / 1e3,), (kernel / 1e3,), workers=n, pinned=False,
                 nbytes=int(copy * 1e7), host_s=0.001),
        )
        for load, kernel, copy, n in (
            (40, 20, 0, 0), (40, 20, 0, 1), (30, 20, 10, 1), (10, 20, 10, 1),
            (60, 30, 5, 1), (10, 10, 20, 1), (20, 10, 0, 0), (20, 40, 15, 1),
            (50, 10, 10, 2), (15, 20, 8, 0), (80, 20, 0, 2),
        )
    },
}  # fmt: skip


@case(
    f"{LEAST_PAIRS} pairs or more, a third of them on the played device; median error <= "
    f"{BAR_MEDIAN:.0%}, {BAR_NEAR:.0%} within {NEAR:.0%}, the change that is recommended "
    f"within 5 % of the best in {BAR_BEST:.0%}"
)
def what_if(scale: Scale, folder: Path) -> Result:
    """Does a remedy gain what the check predicts?"""
    seconds = scale.pick(full=2.0, tiny=0.1)
    rows: list[tuple[Any, ...]] = []
    best: list[bool] = []
    for name in scale.named(TRAININGS, list(TRAININGS)[5::13]):
        training = TRAININGS[name]
        report = _checked(training, folder, scale.pick(full=30.0, tiny=2.0), seconds)
        own = training.made(folder)
        found: dict[str, tuple[float, float]] = {}
        for candidate in report.candidates:
            if candidate.reason or candidate.predicted is None or not candidate.options:
                continue
            gain = _measured(own, training.made(folder, **candidate.options), seconds)
            found[candidate.name] = candidate.predicted.estimate, gain
            error = abs(candidate.predicted.estimate / gain - 1)
            inside = candidate.predicted.low <= gain <= candidate.predicted.high
            rows.append((name, candidate.name, candidate.predicted.estimate, gain, error, inside))
        chosen = best_of(report.candidates)
        if found:
            most = max(1.0, *(gain for _, gain in found.values()))
            its = found[chosen.name][1] if chosen and chosen.name in found else 1.0
            best.append(its >= 0.95 * most)
    errors = [row[4] for row in rows]
    if not errors:
        return Result(("loop",), (), False, ("nothing was predicted",))
    near = statistics.fmean(error <= NEAR for error in errors)
    right = statistics.fmean(best)
    played = statistics.fmean(row[0].startswith("played") for row in rows)
    many = len(rows) >= LEAST_PAIRS and played >= PLAYED_SHARE
    exact = statistics.median(errors) <= BAR_MEDIAN and near >= BAR_NEAR
    met = many and exact and right >= BAR_BEST
    inside = statistics.fmean(row[5] for row in rows)
    note = (
        f"{len(rows)} pairs, {played:.0%} on the played device: median error "
        f"{statistics.median(errors):.1%}, {near:.0%} within {NEAR:.0%}, {inside:.0%} inside their "
        "interval; the change recommended is the best or within 5 % of it in "
        f"{right:.0%} of {len(best)} loops."
    )
    headings = ("loop", "remedy", "predicted", "measured", "error", "inside the interval")
    return Result(headings, tuple(rows), met, (note,))


def _checked(training: Training, folder: Path, budget_s: float, seconds: float) -> Report:
    """Return what the check says of a loop, on a machine as quick as it is then.

    Steps take a known time by the clock, samples as long as the machine needs, whose speed changes:
    the loop as it is must run as it did in the check, else the check is made again.
    """
    for _ in range(_TRIES):
        loader, step = training.made(folder)
        clock = getattr(step, "clock", None)
        device = "meta" if isinstance(training.step, Loop) and training.step.nbytes else None
        report = check_bottleneck(loader, step, budget_s=budget_s, device=device, clock=clock)
        for file, _ in getattr(loader.dataset, "samples", ()):  # the check's cold arm evicted some
            Path(file).read_bytes()
        real = report.seconds_per_batch.get("real")
        now = seconds_per_batch(*training.made(folder), seconds, _EPOCH_S)
        if real is not None and abs(now / real.estimate - 1) <= _SAME:
            break
    return report


def _measured(own: tuple[Any, Any], changed: tuple[Any, Any], seconds: float) -> float:
    """Return how many times faster the changed loop is: the median of some turns."""
    turns: list[float] = []
    while len(turns) < _FEWEST or (
        len(turns) < _MOST and max(turns) - min(turns) > _ALIKE * statistics.median(turns)
    ):
        before = seconds_per_batch(*own, seconds, _EPOCH_S)
        turns.append(before / seconds_per_batch(*changed, seconds, _EPOCH_S))
    return statistics.median(turns)
