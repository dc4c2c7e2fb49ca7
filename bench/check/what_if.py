"""Predicted against measured speed-ups: datasets x transforms x steps x remedies, on real loops.

The check predicts, in a loop as it stands. Then each remedy is made, and its loop runs in turns
with the first one. A third of the pairs are steps on a played device (`bench.check.played`), whose
copies and kernels take a known time while everything else is real.

    python -m bench what_if           some 40 minutes; needs a machine with nothing else to do
    python -m bench.check.what_if photos    the loops whose names begin so; nothing is kept
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.utils.data import DataLoader, Dataset

from bench.check.known_work import burn
from bench.check.played import CopiedAhead, Device, Loop, PlayedStep, RealTime
from bench.check.truth import clock_of_step
from bench.dali.photos import folder_of_photos
from bench.harness import Case, Result, Scale, in_folder, show
from dataloaders import registry
from dataloaders.bottleneck import Report, check_bottleneck
from dataloaders.loader import wrap
from dataloaders.measuring.feed import Feed
from dataloaders.predicting import best_of

BAR_MEDIAN, BAR_NEAR, NEAR, BAR_BEST = 0.05, 0.90, 0.10, 0.95
LEAST_PAIRS, PLAYED_SHARE = 24, 1 / 3
_FEWEST, _MOST, _ALIKE = 3, 7, 0.1  # turns: the fewest, unless their ratios differ by more
_TRIES, _SAME = 3, 0.05
_EPOCH_S = 5.0


Made: TypeAlias = "Callable[..., tuple[Any, Callable[[Any], Any]]]"


@dataclass(frozen=True)
class Training:
    """A loop: ``make`` returns what makes its loader and step, given options of DataLoader."""

    name: str
    make: Callable[[Path], Made]
    device: str | None = None


class Rows(Dataset[torch.Tensor]):
    """Rows of known cost: some seconds of a core, some of waiting."""

    def __init__(self, work_s: float, wait_s: float) -> None:
        self.work_s, self.wait_s = work_s, wait_s

    def __len__(self) -> int:
        return 4_000

    def __getitem__(self, index: int) -> torch.Tensor:
        burn("work", self.work_s)
        burn("wait", self.wait_s)
        return torch.full((64,), float(index))


def _with_cache(loader: Any, cache: Path, backend: str, images: str | None = None) -> Any:
    """Return the loader, over a cache where ``backend`` is h5, by ours where it is another."""
    if backend == "h5":
        h5: Any = registry.load("h5")
        cache = cache.with_suffix(f".{images}.h5") if images else cache
        return wrap(loader, backend=h5(cache, images=images))
    return loader if backend in ("stock", "prefetch") else wrap(loader, backend=backend)


def _convolutions(batch: Any) -> None:
    """Train a small network on the CPU, for as long as that takes."""
    if not _NETWORK:
        _NETWORK.append(
            torch.nn.Sequential(
                torch.nn.Conv2d(3, 16, 5, stride=4),
                torch.nn.ReLU(),
                torch.nn.Conv2d(16, 32, 3, stride=2),
                torch.nn.ReLU(),
                torch.nn.Flatten(),
                torch.nn.LazyLinear(10),
            )
        )
    images, labels = batch
    network = _NETWORK[0]
    torch.nn.functional.cross_entropy(network(images), labels % 10).backward()
    for parameter in network.parameters():
        parameter.grad = None


_NETWORK: list[torch.nn.Module] = []


def _photos(chain: str, step_s: float | None, workers: int) -> Callable[[Path], Made]:
    def make(folder: Path) -> Made:
        from torchvision import transforms as T
        from torchvision.datasets import ImageFolder

        crop = T.Compose([T.Resize(160), T.RandomCrop(128), T.RandomHorizontalFlip(), T.ToTensor()])
        heavy = T.Compose(
            [T.RandomRotation(15), T.RandomResizedCrop(128), T.ColorJitter(0.4, 0.4), T.ToTensor()]
        )
        photos = folder / "photos"
        if not photos.exists():
            folder_of_photos(folder, 1200, 60)
        dataset = ImageFolder(str(photos), {"crop": crop, "heavy": heavy}[chain])

        def made(
            backend: str = "stock",
            num_workers: int = workers,
            images: str | None = None,
            **options: Any,
        ) -> Any:
            loader: Any = DataLoader(dataset, 16, True, num_workers=num_workers, **options)
            loader = _with_cache(loader, folder / f"{chain}.h5", backend, images)
            if step_s is None:
                return loader, _convolutions
            return loader, lambda batch: burn("busy", step_s)

        return made

    return make


def _known(work_ms: float, wait_ms: float, step_s: float, workers: int) -> Callable[[Path], Made]:
    def make(folder: Path) -> Made:
        rows = Rows(work_ms / 1e3, wait_ms / 1e3)

        def made(backend: str = "stock", num_workers: int = workers, **options: Any) -> Any:
            loader: Any = DataLoader(rows, 4, num_workers=num_workers, **options)
            loader = _with_cache(loader, folder / f"{work_ms}_{wait_ms}.h5", backend)
            return loader, lambda batch: burn("busy", step_s)

        return made

    return make


def _played(loop: Loop) -> Callable[[Path], Made]:
    def make(folder: Path) -> Made:
        rows = Rows(0, loop.loads[0] / 4)
        cache = folder / f"{loop.loads[0]}.h5"

        def made(
            backend: str = "stock",
            num_workers: int = loop.workers,
            device: str | None = None,
            **options: Any,
        ) -> Any:
            played = Device(RealTime(), queue=loop.queue, bytes_per_s=loop.bytes_per_s)
            loader: Any = DataLoader(rows, 4, num_workers=num_workers, **options)
            loader = _with_cache(loader, cache, backend)
            step = PlayedStep(loop, played, loader)
            if backend == "prefetch" or device:
                loader = CopiedAhead(loader, replace(loop, ahead=2), played)
            return loader, step

        return made

    return make


TRAININGS = (
    *(
        Training(f"photos, {chain}, step {ms} ms, {n} workers", _photos(chain, ms / 1e3, n))
        for chain, ms, n in (("crop", 10, 0), ("crop", 50, 1), ("heavy", 10, 1), ("heavy", 50, 0))
    ),
    Training("photos, crop, step a small CNN, 0 workers", _photos("crop", None, 0)),
    *(
        Training(f"rows, {work} + {wait} ms, step 8 ms, {n} workers",
                 _known(work, wait, 0.008, n))
        for (work, wait), n in (((4, 0), 0), ((4, 0), 1), ((1, 3), 1), ((0, 6), 0))
    ),
    *(
        Training(
            f"played, load {load} ms, kernel {kernel} ms, copy {copy} ms, {n} workers",
            _played(
                Loop((load / 1e3,), (kernel / 1e3,), workers=n, pinned=False,
                     nbytes=int(copy * 1e7), host_s=0.001)
            ),
            "meta" if copy else None,
        )
        for load, kernel, copy, n in (
            (40, 20, 0, 0), (40, 20, 0, 1), (30, 20, 10, 1), (10, 20, 10, 1),
            (60, 30, 5, 1), (10, 10, 20, 1), (20, 10, 0, 0), (20, 40, 15, 1),
            (50, 10, 10, 2), (15, 20, 8, 0), (80, 20, 0, 2),
        )
    ),
)  # fmt: skip


@in_folder
def run(scale: Scale, folder: Path) -> Result:
    seconds = scale.pick(full=2.0, tiny=0.1)
    rows: list[tuple[Any, ...]] = []
    best: list[bool] = []
    for training in scale.pick(full=TRAININGS, tiny=TRAININGS[5::13]):
        made = training.make(folder)
        report = _checked(training, made, scale.pick(full=30.0, tiny=2.0), seconds)
        loader, step = made()
        found: dict[str, tuple[float, float]] = {}
        for candidate in report.candidates:
            if candidate.reason or candidate.predicted is None or not candidate.options:
                continue
            gain = _measured((loader, step), made(**candidate.options), seconds)
            found[candidate.name] = candidate.predicted.estimate, gain
            error = abs(candidate.predicted.estimate / gain - 1)
            inside = candidate.predicted.low <= gain <= candidate.predicted.high
            rows.append(
                (training.name, candidate.name, candidate.predicted.estimate, gain, error, inside)
            )
        chosen = best_of(report.candidates)
        if found:
            most = max(1.0, *(gain for _, gain in found.values()))
            own = found[chosen.name][1] if chosen and chosen.name in found else 1.0
            best.append(own >= 0.95 * most)
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


def _checked(training: Training, made: Made, budget_s: float, seconds: float) -> Report:
    """Return what the check says of a loop, on a machine as quick as it is then.

    Steps take a known time by the clock, samples as long as the machine needs, whose speed changes:
    the loop as it is must run as it did in the check, else the check is made again.
    """
    for _ in range(_TRIES):
        loader, step = made()
        clock = getattr(step, "clock", None)
        report = check_bottleneck(
            loader, step, budget_s=budget_s, device=training.device, clock=clock
        )
        for file, _ in getattr(loader.dataset, "samples", ()):  # the check's cold arm evicted some
            Path(file).read_bytes()
        real = report.seconds_per_batch.get("real")
        now = _seconds_per_batch(*made(), seconds)
        if real is not None and abs(now / real.estimate - 1) <= _SAME:
            break
    return report


def _measured(own: tuple[Any, Any], changed: tuple[Any, Any], seconds: float) -> float:
    """Return how many times faster the changed loop is: the median of some turns."""
    turns: list[float] = []
    while len(turns) < _FEWEST or (
        len(turns) < _MOST and max(turns) - min(turns) > _ALIKE * statistics.median(turns)
    ):
        before = _seconds_per_batch(*own, seconds)
        turns.append(before / _seconds_per_batch(*changed, seconds))
    return statistics.median(turns)


def _seconds_per_batch(loader: Any, step: Callable[[Any], Any], seconds: float) -> float:
    """Return those of a plain loop that runs for some seconds, epoch after epoch."""
    feed, clock = Feed(loader), clock_of_step(step)
    for _ in range(2 * feed.in_flight + 1):
        step(feed.next())
    first, last, count = clock.mark(), clock.mark(), 0
    took, epoch_s = 0.0, 0.0
    # A turn has a start of the workers where epochs are short: the predictions count these.
    while took < seconds or (feed.epoch == 0 and epoch_s < _EPOCH_S):
        step(feed.next())
        last, count = clock.mark(), count + 1
        took = clock.seconds(first, last)
        epoch_s = took / count * (feed.length or math.inf)
    clock.wait()
    feed.close()  # its workers would take cores from the other loop
    return clock.seconds(first, last) / count


CASES = [
    Case(
        "what_if",
        "Does a remedy gain what the check predicts?",
        f"{LEAST_PAIRS} pairs or more, a third of them on the played device; median error <= "
        f"{BAR_MEDIAN:.0%}, {BAR_NEAR:.0%} within {NEAR:.0%}, the change that is recommended "
        f"within 5 % of the best in {BAR_BEST:.0%}",
        run,
    )
]


if __name__ == "__main__":
    TRAININGS = tuple(one for one in TRAININGS if one.name.startswith(tuple(sys.argv[1:])))
    show(CASES[0], run(Scale(tiny=False)))
