"""Predict the gain of each change of a loop's input, or say why the change is not possible.

The seconds a batch after a change are computed from the loop's `Stages`. For dali, and for workers
that share cores with a step of several threads, they are measured in a short run of the changed
loop. A backend's `explain()` says whether it can serve the loader.
"""

from __future__ import annotations

import math
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from dataloaders import registry
from dataloaders.backend import Backend
from dataloaders.errors import DataLoadersError, last_line
from dataloaders.loader import DataLoader as OurLoader
from dataloaders.loader import wrap
from dataloaders.measuring.intervals import Interval
from dataloaders.predicting.stages import Stages, ratio
from dataloaders.tuning.trial import Steps
from dataloaders.tuning.variant import Settings, Variants, backend_of

_ALIKE = 1.02  # speed-ups that differ by less are the same
_GAINS = 1.05
_RUN_S, _STEPS, _LOADS = 1.5, 4, 4  # the least seconds, steps and batches of a short run
_LEAST_TIMEOUT_S, _MOST_TIMEOUT_S = 5.0, 60.0  # for a worker that hangs
_ROOM = 2.0  # times those seconds that must be left


@dataclass(frozen=True)
class Candidate:
    """A change of the input.

    Attributes:
        name: what is changed: "workers", "persistent_workers", "prefetch", "h5", "dali", pairs of
            them such as "workers + prefetch", "h5 (jpeg)" with the format of images, "more cores".
        options: the arguments of DataLoader that change; "images" is `H5`'s. Empty where no
            argument changes.
        predicted: how many times as fast the loop would be; None if not known.
        measured: the same, measured in the loop; None if it was not tried.
        reason: why it is not possible, or does not help; "" otherwise.
        seconds: predicted seconds a batch.
        build_s: seconds to build the cache that it needs; 0 if it needs none.
        build_bytes: size of that cache.
        pays_after: epochs after which building has paid; None if it never does.
        ours: whether the loader is of this package, so that `code` imports nothing.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    predicted: Interval | None = None
    measured: Interval | None = None
    reason: str = ""
    seconds: Interval | None = None
    build_s: float = 0.0
    build_bytes: int = 0
    pays_after: int | None = None
    ours: bool = False

    @property
    def gain(self) -> Interval | None:
        """Return the gain, measured if it was tried; None if it is not known or not possible."""
        return None if self.reason else self.measured or self.predicted

    @property
    def change(self) -> str:
        """Return the options as arguments of a call."""
        given = dict(self.options)
        if images := given.pop("images", None):
            given["backend"] = f'H5(images="{images}")'
        elif "backend" in given:
            given["backend"] = f'"{given["backend"]}"'
        if "device" in given:
            given["device"] = f'"{given["device"]}"'
        return ", ".join(f"{name}={value}" for name, value in given.items())

    @property
    def code(self) -> str:
        """Return the change as lines of Python, the last one a call; "" if no argument changes."""
        lines = ["from backends.h5 import H5"] * ("images" in self.options)
        if {"backend", "device"} & set(self.options) and not self.ours:
            lines.append("from dataloaders import DataLoader")
        return "\n".join([*lines, f"DataLoader(..., {self.change})"]) if self.options else ""

    def cache_in(self, path: str | None) -> str | None:
        """Return the path of its cache beside ``path``, which is that of raw images."""
        images = self.options.get("images")
        return str(Path(path).with_suffix(f".{images}.h5")) if path and images else path

    @property
    def costs(self) -> str:
        """Return what its cache costs, in a few words; "" if it needs none."""
        if not self.build_s:
            return ""
        text = f"built once: about {self.build_s:.0f} s, {self.build_bytes / 2**20:,.0f} MiB"
        if self.pays_after is None:
            return text
        return f"{text}, pays after {self.pays_after} epoch{'s' * (self.pays_after != 1)}"


def candidates(
    loader: Any,
    stages: Stages,
    *,
    decodes: bool,
    batches: int | None,
    until: float,
    run: Callable[..., Steps[Interval]] | None = None,
) -> Steps[tuple[Candidate, ...]]:
    """Return all candidates, the largest gain first, those that have a reason against them last.

    Yields batches to step on.

    Args:
        loader: a torch DataLoader.
        stages: the measured stages of its loop.
        decodes: whether images are decoded for a sample.
        batches: batches in an epoch; None if not known.
        until: the time after which nothing more is measured, by ``time.perf_counter()``.
        run: yields batches of the loader with some options for some seconds, and returns the
            loop's seconds a batch; also takes a ``timeout_s``, as `variant_of`. None if there are
            no more steps.
    """
    short, failed, longer = partial(_short_run, run, stages, until), "", 1.0
    more = _more_workers(stages)
    if more is not None and stages.sharing.crowded(more[0]):
        try:
            took = yield from short({"num_workers": more[0]})
            if took is not None:
                longer = max(1.0, took.estimate / more[1].estimate)
                more = more[0], took
        except Exception as error:  # a dataset may fail in any way where a worker reads it
            failed = f"it failed: {last_line(error)}"
        if more[1].estimate * _ALIKE >= stages.real.estimate:
            more = None
    found = [*_queues(stages, more), *_prefetch(loader, stages)]
    found += _cached(loader, stages, batches or 0, longer)
    if failed:
        found = [replace(one, reason=failed) if _has_workers(one) else one for one in found]
    found.append((yield from _dali(loader, stages, decodes, short)))
    ours = isinstance(loader, OurLoader)
    return tuple(replace(one, ours=ours) for one in sorted(found, key=lambda one: -_gain(one)))


def possible(found: Sequence[Candidate]) -> list[Candidate]:
    """Return the changes of the code that have nothing against them."""
    return [one for one in found if one.options and not one.reason]


def left_open(found: Sequence[Candidate]) -> list[Candidate]:
    """Return the possible changes that may gain 5 %, and may be the best, by their predictions."""
    gains = [(one, one.predicted) for one in possible(found)]
    least = max([_GAINS, *(gain.low / _ALIKE for _, gain in gains if gain is not None)])
    return [one for one, gain in gains if gain is None or gain.high >= least]


def _has_workers(candidate: Candidate) -> bool:
    return "num_workers" in candidate.options and "backend" not in candidate.options


def best_of(found: Sequence[Candidate]) -> Candidate | None:
    """Return the change of the code with the largest gain; None if no sure gain is 5 % or more.

    Among changes within 2 %, those without a cache come first, then those with fewer options.
    """

    usable = [
        (gain.estimate, one)
        for one in possible(found)
        if (gain := one.gain) is not None and gain.low > 1 and gain.estimate >= _GAINS
    ]
    most = max((gain for gain, _ in usable), default=0.0)
    near = [one for gain, one in usable if gain * _ALIKE >= most]
    near.sort(key=lambda one: (one.build_s > 0, len(one.options), -_gain(one)))
    return near[0] if near else None


def backend_with(loader: Any, options: Mapping[str, Any], cache: str | None = None) -> Backend:
    """Return the loader's backend, or the one of a candidate's options; h5 with a ``cache``."""
    if "backend" not in options:
        return backend_of(loader)
    if options["backend"] != "h5":
        return registry.load(options["backend"])()
    h5 = registry.load("h5")(path=cache, images=options.get("images"))  # type: ignore[call-arg]
    return registry.load("prefetch")(inner=h5) if "device" in options else h5  # type: ignore[call-arg]


def settings_of(loader: Any, options: Mapping[str, Any]) -> Settings:
    """Return the loader's settings with a candidate's options."""
    workers = options.get("num_workers", loader.num_workers)
    depth = (loader.prefetch_factor or 2) if workers else None
    return Settings(workers, depth, loader.pin_memory)


def variant_of(
    loader: Any,
    options: Mapping[str, Any],
    cache: str | None = None,
    timeout_s: float = _MOST_TIMEOUT_S,
) -> Any:
    """Return ``loader`` with a candidate's options, on samplers of its own.

    A worker that hangs for ``timeout_s`` ends it.
    """
    backend = backend_with(loader, options, cache)
    changed = wrap(loader, backend=backend, device=getattr(loader, "device", None))
    return Variants(changed).make(settings_of(loader, options), timeout_s)


def _to(stages: Stages, name: str, took: Interval, **options: Any) -> Candidate:
    return Candidate(name, options, ratio(stages.real, took), seconds=took)


def _more_workers(stages: Stages, *, hidden: bool = False) -> tuple[int, Interval] | None:
    """Return the fewest workers that gain nearly as much as any number, and the seconds with them.

    ``hidden``: whether copies are made during the step. None if no number gains 2 %.
    """
    # A worker that computes for nearly all of its time takes a core.
    cores = stages.sharing.cores
    most = math.ceil(cores / max(0.25, stages.sharing.load_cores) - 0.25)
    if stages.room is not None:
        most = min(most, stages.room // stages.prefetch)
    took: dict[int, float] = {}
    for count in range(stages.workers + 1, most + 1):
        took[count] = stages.estimate(count, hidden=hidden)
        if took[count] <= _ALIKE * _floor(stages, hidden=hidden):
            break
    least = min(took.values(), default=math.inf)
    if least * _ALIKE >= stages.estimate(hidden=hidden):
        return None
    fewest = next(count for count, each in took.items() if each <= least * _ALIKE)
    return fewest, stages.seconds(workers=fewest, hidden=hidden)


def _floor(stages: Stages, *, hidden: bool = False) -> float:
    """Return the seconds a batch if preparation took no time."""
    step, copy = stages.step.estimate, stages.transfer
    both = max(step, copy) if hidden else step + copy
    return both + stages.take + stages.started(stages.workers)


def _queues(stages: Stages, more: tuple[int, Interval] | None) -> Iterator[Candidate]:
    """Yield more workers, and workers that are kept; ``more``: as of `_more_workers`."""
    own, usual = stages.workers, stages.seconds()
    now = usual.estimate
    keeps_up = now <= _ALIKE * (_floor(stages) + stages.contention)
    if more is not None:
        yield _to(stages, "workers", more[1], num_workers=more[0])
    else:
        cores = stages.sharing.cores
        text = f"{own} workers and the step share {cores} cores: more cores are missing"
        if keeps_up:
            text = "the workers keep up with the step" if own else "loading costs next to nothing"
        elif stages.room is not None and stages.room // stages.prefetch <= own:
            text = f"shared memory has room for {stages.room} batches; a larger /dev/shm is missing"
        elif stages.starting and _more_workers(replace(stages, starting=0.0)) is not None:
            text = (
                "starting them for each epoch takes as long as they save; make epochs longer, "
                "or keep the loader and give persistent_workers=True as well"
            )
        yield Candidate("workers", reason=text)
    best = own if more is None else more[0]
    twice = replace(stages.sharing, cores=2 * stages.sharing.cores)
    larger = replace(stages, sharing=twice, factor=stages.scale)
    _, there = _more_workers(larger) or (best, larger.seconds(workers=max(1, best)))
    if stages.estimate(best) > _GAINS * there.estimate and not keeps_up:
        yield _to(stages, "more cores", there)
    if own == 0:
        return
    kept = Interval(*(max(1e-9, end - stages.started(own)) for end in (usual.low, now, usual.high)))
    if kept.estimate * _ALIKE < now:
        yield _to(stages, "persistent_workers", kept, persistent_workers=True)


def _prefetch(loader: Any, stages: Stages) -> Iterator[Candidate]:
    reason = _obstacle(loader, "prefetch")
    if backend_of(loader).name == "prefetch":
        reason = "the loader uses it already"
    elif not stages.transfer:
        reason = "batches are not copied to a device: there is no copy to hide"
    if reason:
        yield Candidate("prefetch", reason=reason)
        return
    yield _to(stages, "prefetch", stages.seconds(hidden=True), backend="prefetch")
    more = _more_workers(stages, hidden=True)
    if more is not None:
        yield _to(stages, "workers + prefetch", more[1], num_workers=more[0], backend="prefetch")


def _short_run(
    run: Callable[..., Steps[Interval]] | None,
    stages: Stages,
    until: float,
    options: Mapping[str, Any],
) -> Steps[Interval | None]:
    """Yield batches to step on, and return the loop's seconds a batch with ``options``.

    For a change that the stages do not describe. Returns None if the loop has ended, or too little
    time is left. The loader's errors pass.
    """
    seconds = max(_RUN_S, _STEPS * stages.step.estimate, _LOADS * stages.load)
    took: list[Interval] = []
    now: list[Interval] = []
    # The machine's speed drifts, so the loop runs as it is beside each run with the change. Two
    # runs differ more than the blocks of one: threads share the cores in another way.
    for changes, found in 2 * [(options, took), ({}, now)]:
        left_s = until - time.perf_counter()
        # A second run leaves time for the first one of another change.
        is_over = _ROOM * seconds * (1 + len(now)) > left_s
        can_wait = now or seconds > _ROOM * _RUN_S or not stages.sharing.crowded(1)
        if run is None or (is_over and can_wait):
            break
        timeout_s = min(_MOST_TIMEOUT_S, max(_LEAST_TIMEOUT_S, left_s))
        found.append((yield from run(changes, seconds, timeout_s=timeout_s)))
    if not took:
        return None
    scale = 1.0
    if now:
        scale = stages.real.estimate / statistics.fmean(each.estimate for each in now)
    return Interval(
        scale * min(each.low for each in took),
        scale * statistics.fmean(each.estimate for each in took),
        scale * max(each.high for each in took),
    )


def _dali(
    loader: Any, stages: Stages, decodes: bool, short: Callable[..., Steps[Interval | None]]
) -> Steps[Candidate]:
    """Return dali, from a short run of the loop."""
    reason = "no images are decoded by Pillow or torchvision.io, which is what it speeds up"
    if reason := _obstacle(loader, "dali") if decodes else reason:
        return Candidate("dali", reason=reason)
    # Without workers the dataset's code would run on the loop's thread.
    workers = {} if loader.num_workers else {"num_workers": 1}
    options: dict[str, Any] = {**workers, "backend": "dali"}
    try:
        took = yield from short(options)
    except Exception as error:  # of DALI, for a loader that it cannot serve
        return Candidate("dali", reason=last_line(error))
    if took is None:
        text = "it has to run in the loop for some seconds, for which --try makes time"
        return Candidate("dali", reason=text)
    return _to(stages, "dali", took, **options)


def _cached(loader: Any, stages: Stages, batches: int, longer: float) -> Iterator[Candidate]:
    """Yield h5 by format of images, and h5 with more workers or prefetch.

    ``longer``: how many times as long as computed the loop was seen to take with more workers,
    which share cores with its step; with h5 and more workers it may take as much longer.
    """
    if reason := _obstacle(loader, "h5") or stages.uncached:
        yield Candidate("h5", reason=reason)
        return
    mean = sum(stages.loads) / len(stages.loads)
    raw_bytes, samples = math.inf, stages.samples * batches
    for images, small in stages.cached.items():
        name, how = (f"h5 ({images})", {"images": images}) if images else ("h5", {})
        build_s = mean * batches / stages.sharing.cores
        build_bytes = int(small.bytes_per_sample * samples)
        if images and 2 * build_bytes > raw_bytes:
            continue
        raw_bytes = min(raw_bytes, build_bytes)
        if build_bytes > shutil.disk_usage(".").free:
            size = f"{build_bytes / 2**30:.0f} GiB"
            reason = f"the disk has no room for {size}; a larger one is missing"
            yield Candidate(name, reason=reason)
            continue
        then = replace(
            stages,
            loads=[load * small.share for load in stages.loads],
            factor=stages.scale,
            contention=min(1.0, small.share) * stages.contention,
        )
        ways: list[tuple[str, Interval, Mapping[str, Any]]] = [(name, then.seconds(), {})]
        if not images and stages.transfer and not _obstacle(loader, "prefetch"):
            ways.append(("h5 + prefetch", then.seconds(hidden=True), {"device": "cuda"}))
        if not images and (beyond := _more_workers(then)) is not None:
            count, took = beyond
            took = Interval(took.low, longer * took.estimate, longer * took.high)
            ways.append(("h5 + workers", took, {"num_workers": count}))
        for called, took, more in ways:
            saved = (stages.real.estimate - took.estimate) * batches
            pays_after = math.ceil(build_s / saved) if saved > 0 else None
            one = _to(stages, called, took, **more, backend="h5", **how)
            yield replace(one, build_s=build_s, build_bytes=build_bytes, pays_after=pays_after)


def _obstacle(loader: Any, name: str) -> str:
    """Return why backend ``name`` cannot serve the loader; "" if it can."""
    try:
        return registry.load(name)().explain(loader).obstacle or ""
    except DataLoadersError as error:  # a package is missing
        return last_line(error)


def _gain(candidate: Candidate) -> float:
    return 0.0 if candidate.gain is None else candidate.gain.estimate
