"""Predicted against measured speed-ups: datasets x transforms x steps x remedies, on real loops.

The check predicts, in a loop as it stands. Then each remedy is made, and its loop runs in turns
with the first one. A third of the pairs are steps on a played device (`bench.played`), whose copies
and kernels take a known time while everything else is real.

    python -m bench what_if           some 20 minutes; needs a machine with nothing else to do
"""

from __future__ import annotations

import ast
import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.utils.data import DataLoader, Dataset

from bench.dali import folder_of_photos
from bench.harness import Case, Result, Scale, in_folder
from bench.known_work import burn
from bench.played import CopiedAhead, Device, Loop, PlayedStep, RealTime
from bench.truth import clock_of_step
from dataloaders import registry
from dataloaders.bottleneck import Report, check_bottleneck
from dataloaders.loader import wrap
from dataloaders.measuring.feed import Feed
from dataloaders.predicting import Candidate, best_of

BAR_MEDIAN, BAR_NEAR, NEAR, BAR_BEST = 0.05, 0.90, 0.10, 0.95
_ROUNDS = 3
_TRIES, _SAME = 3, 0.05


Made: TypeAlias = "Callable[..., tuple[Any, Callable[[Any], Any]]]"


@dataclass(frozen=True)
class Training:
    """A loop: ``make`` returns what makes its loader and step, given options of DataLoader."""

    name: str
    make: Callable[[Path], Made]
    device: str | None = None


class Rows(Dataset[torch.Tensor]):
    """Rows of known cost: some seconds of a core, some of waiting; ``random``: none is the same."""

    def __init__(self, work_s: float, wait_s: float, *, random: bool = False) -> None:
        self.work_s, self.wait_s, self.random = work_s, wait_s, random

    def __len__(self) -> int:
        return 1_000_000 if self.random else 4_000

    def __getitem__(self, index: int) -> torch.Tensor:
        burn("work", self.work_s)
        burn("wait", self.wait_s)
        return torch.randn(64) if self.random else torch.full((64,), float(index))


def _on_host(loader: Any, step_s: float, cache: Path, backend: str) -> Any:
    """Return a loop on the host, over a cache where ``backend`` is h5."""
    if backend == "h5":
        h5: Any = registry.load("h5")
        loader = wrap(loader, backend=h5(cache))
    return loader, lambda batch: burn("busy", step_s)


def _photos(chain: str, step_s: float, workers: int) -> Callable[[Path], Made]:
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

        def made(backend: str = "stock", num_workers: int = workers, **options: Any) -> Any:
            loader: Any = DataLoader(dataset, 16, True, num_workers=num_workers, **options)
            return _on_host(loader, step_s, folder / f"{chain}.h5", backend)

        return made

    return make


def _known(work_ms: float, wait_ms: float, step_s: float, workers: int) -> Callable[[Path], Made]:
    def make(folder: Path) -> Made:
        rows = Rows(work_ms / 1e3, wait_ms / 1e3)

        def made(backend: str = "stock", num_workers: int = workers, **options: Any) -> Any:
            loader: Any = DataLoader(rows, 4, num_workers=num_workers, **options)
            return _on_host(loader, step_s, folder / f"{work_ms}_{wait_ms}.h5", backend)

        return made

    return make


def _played(loop: Loop) -> Callable[[Path], Made]:
    def make(folder: Path) -> Made:
        rows = Rows(0, loop.loads[0] / 4, random=True)

        def made(backend: str = "stock", num_workers: int = loop.workers, **options: Any) -> Any:
            device = Device(RealTime(), queue=loop.queue, bytes_per_s=loop.bytes_per_s)
            loader: Any = DataLoader(rows, 4, num_workers=num_workers, **options)
            ahead = replace(loop, ahead=2)
            inside = CopiedAhead(loader, ahead, device) if backend == "prefetch" else loader
            return inside, PlayedStep(loop, device, loader)

        return made

    return make


TRAININGS = (
    *(
        Training(f"photos, {chain}, step {ms} ms, {n} workers", _photos(chain, ms / 1e3, n))
        for chain, ms, n in itertools.product(("crop", "heavy"), (10, 50), (0, 1))
    ),
    *(
        Training(f"rows, {work} + {wait} ms, step 8 ms, {n} workers",
                 _known(work, wait, 0.008, n))
        for (work, wait), n in itertools.product(((4, 0), (1, 3), (0, 6)), (0, 1))
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
            (60, 30, 5, 1), (10, 10, 20, 1),
        )
    ),
)  # fmt: skip


@in_folder
def run(scale: Scale, folder: Path) -> Result:
    seconds = scale.pick(full=8.0, tiny=0.3)
    rows: list[tuple[Any, ...]] = []
    best: list[bool] = []
    for training in scale.pick(full=TRAININGS, tiny=(TRAININGS[8], TRAININGS[-1])):
        made = training.make(folder)
        report = _checked(training, made, scale.pick(full=20.0, tiny=2.0), seconds / _ROUNDS)
        loader, step = made()
        found: dict[str, tuple[float, float]] = {}
        for candidate in report.candidates:
            if candidate.reason or candidate.predicted is None or not candidate.change:
                continue
            gain = _measured((loader, step), made(**_options_of(candidate)), seconds)
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
    met = statistics.median(errors) <= BAR_MEDIAN and near >= BAR_NEAR and right >= BAR_BEST
    note = (
        f"{len(rows)} pairs: median error {statistics.median(errors):.1%}, {near:.0%} within "
        f"{NEAR:.0%}, {statistics.fmean(row[5] for row in rows):.0%} inside their interval; the "
        f"change recommended is the best or within 5 % of it in {right:.0%} of {len(best)} loops."
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


def _options_of(candidate: Candidate) -> dict[str, Any]:
    options = dict(each.split("=") for each in candidate.change.partition("  #")[0].split(", "))
    return {name: ast.literal_eval(value) for name, value in options.items()}


def _measured(own: tuple[Any, Any], changed: tuple[Any, Any], seconds: float) -> float:
    """Return how many times faster the changed loop is: the median of some turns."""
    turns = [
        _seconds_per_batch(*own, seconds / _ROUNDS)
        / _seconds_per_batch(*changed, seconds / _ROUNDS)
        for _ in range(_ROUNDS)
    ]
    return statistics.median(turns)


def _seconds_per_batch(loader: Any, step: Callable[[Any], Any], seconds: float) -> float:
    """Return those of a plain loop that runs for some seconds, epoch after epoch."""
    feed, clock = Feed(loader), clock_of_step(step)
    for _ in range(2 * feed.in_flight + 1):
        step(feed.next())
    first, last, count = clock.mark(), clock.mark(), 0
    while not count or clock.seconds(first, last) < seconds:
        step(feed.next())
        last, count = clock.mark(), count + 1
    clock.wait()
    feed.close()  # its workers would take cores from the other loop
    return clock.seconds(first, last) / count


CASES = [
    Case(
        "what_if",
        "Does a remedy gain what the check predicts?",
        f"median error <= {BAR_MEDIAN:.0%}, {BAR_NEAR:.0%} within {NEAR:.0%}, the change that is "
        f"recommended within 5 % of the best in {BAR_BEST:.0%}",
        run,
    )
]
