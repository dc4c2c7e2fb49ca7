"""What if: the seconds a batch of a loop after a change of its input, or why it cannot be made.

    step, copy, samples: each measured alone ──> queue model ──> seconds of the loop as it is
                                                   │             (scaled to what was measured)
    workers, prefetch, rows of a cache, DALI ──────┴───────────> seconds after it; the speed-up

An interval spans the samples' and the step's own intervals, the model with and without the scale
that makes it agree with the loop, and steps and workers that compete for cores or do not.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from dataloaders import registry
from dataloaders.backend import Backend
from dataloaders.errors import DataLoadersError, last_line
from dataloaders.loader import DataLoader as OurLoader
from dataloaders.loader import wrap
from dataloaders.measuring.intervals import Interval
from dataloaders.predicting.model import Overhead, seconds_per_batch
from dataloaders.transforms.find import find_chains
from dataloaders.transforms.kinds import Kind
from dataloaders.tuning.trial import driven, observe
from dataloaders.tuning.variant import Settings, Variants

__all__ = [
    "Candidate",
    "Stages",
    "backend_of",
    "best_of",
    "candidates",
    "settings_of",
    "variant_of",
]

_ALIKE = 1.02  # speed-ups that differ by less are the same
_GAINS = 1.05
_DALI_S = 1.5
_PINNED_GAINS = 5.0  # from pinned memory a copy is at most so many times as fast
_COMPETING = 0.5  # of the steps beside workers, when both want all cores
_ROW_S = 5e-6  # of finding a row in a cache
_LONGEST_QUEUE = 8
_LOOKED_AT_S = 0.25  # of a sample: a cache's estimate reads some thirty
_DONE_IN_BATCHES = {
    *("RandomCrop", "RandomHorizontalFlip", "RandomVerticalFlip"),
    *("CenterCrop", "ToTensor", "PILToTensor", "ConvertImageDtype", "ToDtype", "Normalize"),
}
"""Live transforms that h5 does for a batch at once."""


@dataclass(frozen=True)
class Candidate:
    """A change of the input.

    Attributes:
        name: what is changed: "workers", "prefetch_factor", "persistent_workers", "prefetch", "h5",
            "dali", pairs of them such as "workers + prefetch", "more cores".
        change: the change as a user writes it; "" where it is none of the code.
        predicted: how many times faster the loop would be; None if that is not known.
        measured: the same, as measured in the loop; None if it was not tried.
        reason: why it is out, "" if it is not.
    """

    name: str
    change: str
    predicted: Interval | None = None
    measured: Interval | None = None
    reason: str = ""


@dataclass(frozen=True)
class Stages:
    """Holds what short runs of a loop's stages measured, in seconds a batch and in cores."""

    real: Interval  # the loop
    step: Interval  # its step alone, on resident batches
    loads: Sequence[float]  # preparing each of some batches alone, in one process
    spread: float = 0.05  # the relative half width of their mean's interval
    transfer: float = 0.0  # that the step waits for its copy; 0 if nothing is copied
    pinned: bool = False  # whether it is copied from pinned memory: as fast as it can be
    take: float = 0.0  # of the loop, to take a batch that a worker has ready
    starting: float = 0.0  # within real, that starting workers for each epoch takes
    load_cores: float = 1.0  # the share of loads that wants a core; the rest waits
    step_cores: float = 1.0  # that the step computes on
    workers: int = 0  # of the loader
    prefetch: int = 2  # of the loader
    cores: int = 1  # that the loop may use
    room: int | None = None  # batches that fit into the workers' shared memory; None: no limit
    factor: float | None = None  # scale, where it is known

    def seconds(
        self, *, workers: int | None = None, prefetch: int | None = None, hidden: bool = False
    ) -> Interval:
        """Return the predicted seconds a batch with other workers, or with copies ``hidden``."""
        workers = self.workers if workers is None else workers
        prefetch = prefetch or self.prefetch
        copy = self.transfer
        quickest = copy if self.pinned else copy / _PINNED_GAINS
        scale, ends = self.scale, []
        # In a worker torch computes with one thread, as it did alone.
        usual = 1.0 if workers and not self.workers else scale
        for step, load, competing, beside in (
            (self.step.low, min(1.0, scale) * (1 - self.spread), 0.0, quickest),
            (self.step.estimate, usual, _COMPETING, copy),
            (self.step.high, max(1.0, scale) * (1 + self.spread), 1.0, copy),
        ):
            # Beside the step, copies wait for each other still.
            own = max(step, beside) if hidden else step + copy
            took = self._seconds(workers, prefetch, load, own, competing)
            ends.append(took + self.starting * (workers > 0))
        low, estimate, high = ends
        return Interval(min(low, estimate), estimate, max(estimate, high))

    def speedup(self, **change: Any) -> Interval:
        """Return real / predicted."""
        return self.gain(self.seconds(**change))

    def gain(self, took: Interval, more: float = 0.0) -> Interval:
        """Return real / (``took`` + ``more``)."""
        real, low = self.real, max(1e-9, took.low + more)
        return Interval(
            real.low / (took.high + more), real.estimate / (took.estimate + more), real.high / low
        )

    @cached_property
    def scale(self) -> float:
        """How much longer preparation takes in the loop than alone; 1 if the loop does not tell."""
        if self.factor is not None:
            return self.factor
        step, real = self.step.estimate + self.transfer, self.real.estimate - self.starting

        def modelled(scale: float) -> float:
            return self._seconds(self.workers, self.prefetch, scale, step, 0.0)

        low, high = 0.2, 20.0
        if not modelled(low) * 1.01 < real:
            return 1.0
        for _ in range(20):
            middle = math.sqrt(low * high)
            below = modelled(middle) < real
            low, high = (middle, high) if below else (low, middle)
        return math.sqrt(low * high)

    def _seconds(
        self, workers: int, prefetch: int, scale: float, step: float, competing: float
    ) -> float:
        wanted = min(workers, self.cores) * self.load_cores + self.step_cores
        slower = 1 + competing * max(0.0, wanted / self.cores - 1) if workers else 1.0
        # Workers that keep up are idle for a part of the time, and then compete for nothing.
        mean = sum(self.loads) / len(self.loads) * scale
        busy = min(1.0, mean / max(1e-9, workers * step)) if workers else 0.0
        slower = 1 + (slower - 1) * busy
        loads = [load * scale * slower for load in self.loads]
        took = seconds_per_batch(
            loads,
            [step * slower],
            workers=workers,
            prefetch=prefetch,
            overhead=Overhead(take=self.take),
        )
        computed = mean * self.load_cores + self.step.estimate * self.step_cores
        return max(took, computed / self.cores) if workers else took


def candidates(
    loader: Any,
    stages: Stages,
    *,
    by_call: Mapping[str, float],
    batch: int,
    batches: int | None,
    random: bool,
    sample_bytes: int,
) -> tuple[Candidate, ...]:
    """Return every candidate, those that are out last, the most promising first.

    Args:
        loader: a torch DataLoader.
        stages: of its loop.
        by_call: seconds a sample of preparation, by call, without collation.
        batch: samples of a batch.
        batches: of an epoch, if that is known.
        random: whether the dataset draws random numbers.
        sample_bytes: of a delivered one.
    """
    found = [*_queues(stages), *_prefetch(loader, stages), _dali(loader, stages)]
    found += _cached(loader, stages, by_call, batch, batches or 0, random, sample_bytes)
    return tuple(sorted(found, key=lambda one: -_gain(one)))


def best_of(found: Sequence[Candidate]) -> Candidate | None:
    """Return the change of the code that is to gain most; None if none surely gains, or 5 %.

    Of some that gain alike, one that needs no build and is one change. One that gained nothing when
    it was tried is left out.
    """

    def gains(one: Candidate) -> bool:
        gain, tried = one.measured or one.predicted, one.measured
        return gain is not None and gain.low > 1 and (not tried or tried.estimate >= _GAINS)

    usable = [one for one in found if one.change and not one.reason and gains(one)]
    best = max(usable, key=_gain, default=None)
    if best is None or _gain(best) < _GAINS:
        return None
    near = [one for one in usable if _gain(one) * _ALIKE >= _gain(best)]
    return min(near, key=lambda one: ("h5" in one.name, "+" in one.name, -_gain(one)))


def backend_of(loader: Any) -> str:
    """Return the name of the loader's backend; "stock" for torch's own loader."""
    wanted = loader._wanted_backend() if isinstance(loader, OurLoader) else "stock"
    if wanted == "auto":
        wanted = loader._resolve_backend(wanted)[0]
    return wanted if isinstance(wanted, str) else wanted.name


def settings_of(loader: Any, change: str = "", cache: str | None = None) -> Settings | None:
    """Return the loader's settings after a candidate's change; None for h5 without a ``cache``."""
    options = dict(each.split("=") for each in change.partition("  #")[0].split(", ") if each)
    name = options.get("backend", backend_of(loader)).strip('"')
    own = loader.backend if isinstance(loader, OurLoader) else None
    if "backend" not in options and isinstance(own, Backend):
        backend: Any = own
    elif name == "h5":
        if cache is None:
            return None
        backend = registry.load("h5")(path=cache)  # type: ignore[call-arg]
        if "device" in options:
            backend = registry.load("prefetch")(inner=backend)  # type: ignore[call-arg]
    else:
        backend = registry.load(name)()
    workers = int(options.get("num_workers", loader.num_workers))
    prefetch = int(options.get("prefetch_factor", loader.prefetch_factor or 2))
    return Settings(workers, prefetch if workers else None, loader.pin_memory, backend)


def variant_of(loader: Any, candidate: Candidate) -> Any:
    """Return ``loader`` with the change, on samplers of its own; None if that takes a build."""
    usable = candidate.change and not candidate.reason
    settings = settings_of(loader, candidate.change) if usable else None
    if settings is None:
        return None
    device = getattr(loader, "device", None)
    return Variants(wrap(loader, backend=settings.backend, device=device)).make(settings, 60.0)


def _queues(stages: Stages) -> Iterator[Candidate]:
    """Yield other numbers of workers, and of batches ahead."""
    own = stages.workers
    most = math.ceil(stages.cores / max(0.25, stages.load_cores))
    if stages.room is not None:
        most = min(most, stages.room // stages.prefetch)
    usual = stages.seconds()
    now = usual.estimate
    floor = stages.step.estimate + stages.transfer + stages.take + stages.starting
    keeps_up = now <= _ALIKE * floor
    took: dict[int, float] = {}
    for count in range(own + 1, most + 1):
        took[count] = stages.seconds(workers=count).estimate
        if took[count] <= _ALIKE * floor:
            break
    least = min(took.values(), default=math.inf)
    more = next((n for n in took if took[n] <= least * _ALIKE), own)
    if took.get(more, math.inf) < now / _ALIKE:
        yield Candidate("workers", f"num_workers={more}", stages.speedup(workers=more))
    else:
        text = f"{own} workers and the step share {stages.cores} cores: more cores are missing"
        if keeps_up:
            text = "the workers that there are keep up with the step"
        elif stages.room is not None and stages.room // stages.prefetch <= own:
            text = f"shared memory has room for {stages.room} batches; a larger /dev/shm is missing"
        yield Candidate("workers", "", reason=text)
    best = more if took.get(more, math.inf) < now else own
    larger = replace(stages, cores=2 * stages.cores, factor=stages.scale)
    there = larger.seconds(workers=max(1, 2 * best))
    if stages.seconds(workers=best).estimate > _GAINS * there.estimate and not keeps_up:
        yield Candidate("more cores", "", stages.gain(there))
    if own == 0:
        return
    kept = Interval(*(max(1e-9, end - stages.starting) for end in (usual.low, now, usual.high)))
    if kept.estimate * _ALIKE < now:
        yield Candidate("persistent_workers", "persistent_workers=True", stages.gain(kept))
    longer = stages.seconds(prefetch=_LONGEST_QUEUE)
    if stages.room is not None and own * _LONGEST_QUEUE > stages.room:
        yield Candidate("prefetch_factor", "", reason="shared memory has no room for longer queues")
    elif longer.estimate * _ALIKE < now:
        change = f"prefetch_factor={_LONGEST_QUEUE}"
        yield Candidate("prefetch_factor", change, stages.gain(longer))
    else:
        text = "batches take alike long: longer queues even out nothing"
        yield Candidate("prefetch_factor", "", reason=text)


def _prefetch(loader: Any, stages: Stages) -> Iterator[Candidate]:
    reason = _obstacle(loader, "prefetch")
    if backend_of(loader) == "prefetch":
        reason = "the loader has it"
    elif not stages.transfer:
        reason = "batches are not copied to a device: there is no copy to hide"
    if reason:
        yield Candidate("prefetch", "", reason=reason)
        return
    yield Candidate("prefetch", 'backend="prefetch"', stages.speedup(hidden=True))
    for each in _queues(stages):
        if each.name == "workers" and each.change:
            gain = stages.speedup(workers=int(each.change.partition("=")[2]), hidden=True)
            yield Candidate("workers + prefetch", f'{each.change}, backend="prefetch"', gain)


def _dali(loader: Any, stages: Stages) -> Candidate:
    if not torch.cuda.is_available():
        return Candidate("dali", "", reason="torch sees no CUDA device on which DALI could decode")
    reason = _obstacle(loader, "dali")
    if reason:
        return Candidate("dali", "", reason=reason)
    change = Candidate("dali", 'backend="dali"')
    try:
        alone = driven(
            observe(variant_of(loader, change), stepping=False, seconds=_DALI_S), lambda batch: None
        ).seconds_per_batch
    except Exception as error:  # what a third library raises for a loader that it was not made for
        return replace(change, reason=last_line(error))
    step = stages.step
    # Beside the step, or one after the other on the same device.
    took = Interval(
        max(step.low, alone.low), max(step.estimate, alone.estimate), step.high + alone.high
    )
    return replace(change, predicted=stages.gain(took))


def _cached(
    loader: Any,
    stages: Stages,
    by_call: Mapping[str, float],
    batch: int,
    batches: int,
    random: bool,
    sample_bytes: int,
) -> Iterator[Candidate]:
    """Yield h5, and pairs with it."""
    from dataloaders.cache import estimate
    from dataloaders.cache.format.disk import size_of

    chains = [chain.members for chain in find_chains(loader.dataset)]
    live: set[str] = set()  # from the first one of a chain on that no cache can hold
    for members in chains:
        random_on = itertools.dropwhile(lambda each: each.kind is Kind.DETERMINISTIC, members)
        live |= {member.name for member in random_on}
    whole = sum(by_call.values()) or 1e-9
    live_s = sum(seconds for call, seconds in by_call.items() if call in live)
    reason = ""
    if random and not live:
        reason = "its samples are random, and no chain of transforms was found to keep live"
    elif live_s > whole / _GAINS:
        reason = "what is random, or code of your own, comes first: next to nothing could be cached"
    if reason:
        yield Candidate("h5", "", reason=reason)
        return
    if whole > _LOOKED_AT_S:  # reading some more would take long
        build_s, size = (whole - live_s) * batch * batches / stages.cores, sample_bytes
        costs = f"  # built once: about {build_s:.0f} s"
    else:
        try:
            context = loader.multiprocessing_context
            told = estimate(loader.dataset, "train.h5", multiprocessing_context=context)
        except Exception as error:  # the dataset's own, or why no cache can hold it
            yield Candidate("h5", "", reason=last_line(error))
            return
        if told.low_needed > told.disk_free:
            room = f"the disk has no room for {size_of(told.disk_needed)}; a larger one is missing"
            yield Candidate("h5", "", reason=room)
            return
        build_s, size = told.seconds, told.bytes // max(1, told.samples)
        costs = f"  # built once: {build_s:.0f} s, {size_of(told.bytes)}"
    row_s = batch * (_ROW_S + _copy_s(max(1, size)))
    rest = max(0.0, sum(stages.loads) / len(stages.loads) - batch * whole)  # collation, sending

    def holding(live_s: float) -> Stages:
        loads = [(load - rest) * live_s / whole + rest + row_s for load in stages.loads]
        return replace(stages, loads=[max(row_s, load) for load in loads], factor=stages.scale)

    then = holding(live_s)
    took = then.seconds()
    if live <= _DONE_IN_BATCHES:  # in a part of what was measured for single samples
        took = replace(took, low=min(took.low, holding(0.0).seconds().low))
    saved = (stages.real.estimate - took.estimate) * batches
    if saved > 0:
        epochs = math.ceil(build_s / saved)
        costs += f", paid for after {epochs} epoch{'s' * (epochs != 1)}"
    cached = Candidate("h5", f'backend="h5"{costs}', stages.gain(took))
    yield cached
    if stages.transfer and not _obstacle(loader, "prefetch"):
        gain = then.speedup(hidden=True)
        yield Candidate("h5 + prefetch", f'backend="h5", device="cuda"{costs}', gain)
    for each in _queues(then):
        if each.name == "workers" and _gain(each) > _ALIKE * _gain(cached):
            yield replace(each, name="h5 + workers", change=f'{each.change}, backend="h5"{costs}')


def _copy_s(size: int) -> float:
    """Return the seconds that copying ``size`` bytes takes here."""
    source = np.ones(size, np.uint8)
    begin = time.perf_counter()
    for _ in range(4):
        source.copy()
    return (time.perf_counter() - begin) / 4


def _obstacle(loader: Any, name: str) -> str:
    """Return why backend ``name`` cannot serve the loader; "" if it can."""
    try:
        return registry.load(name)().explain(loader).obstacle or ""
    except DataLoadersError as error:  # a package is missing
        return last_line(error)


def _gain(candidate: Candidate) -> float:
    gain = candidate.predicted
    return 0.0 if gain is None or candidate.reason else gain.estimate
