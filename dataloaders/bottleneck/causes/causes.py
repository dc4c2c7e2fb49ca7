"""Finds, once the verdict stands: slow samples, preparation by calls, cold files, remedies.

    verdict ──> Look          in a process of its own: samples timed, their files known
            ──> candidates()  what each remedy would gain, from the stages measured so far
            ──> fetch         those files evicted: the loop on those samples, twice in turn
            ──> trials        each remedy's loader with the step, if that is wanted

For a loop of one process over a torch DataLoader, if input costs anything. All but the trials take
half of the check's budget together: what does not fit in is left out, and a note says so.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from dataloaders import observing
from dataloaders.batches.tree import Batch, map_tensors, nbytes, samples_in, to_device
from dataloaders.bottleneck.blocks import Blocks
from dataloaders.bottleneck.causes.cold import cold_block
from dataloaders.bottleneck.causes.preparation import Call, Look, Prepared
from dataloaders.bottleneck.evidence.verdict import Analysis
from dataloaders.errors import last_line
from dataloaders.machine import resources
from dataloaders.measuring.intervals import Interval
from dataloaders.predicting import (
    Candidate,
    Sharing,
    SmallCache,
    Stages,
    build,
    candidates,
    ratio,
    seconds_of_a_worker,
    small_caches,
    variant_of,
)
from dataloaders.specification import batches_in
from dataloaders.tuning.trial import observe
from dataloaders.tuning.variant import backend_of, inner_name_of

_SHARE, _LEAST_S = 0.5, 5.0  # of the budget, for all but trials; and seconds at the least
_LOOK_SHARE, _MOST_LOOK_S = 0.1, 2.0
_TRIAL_SHARE, _LEAST_TRIAL_S = 0.1, 1.0


class Causes:
    """Holds what was found; each part is empty until `find`."""

    def __init__(self, loader: Any, blocks: Blocks, cache: str | None = None) -> None:
        self.preparation: tuple[Call, ...] = ()
        self.candidates: tuple[Candidate, ...] = ()
        self.slow: tuple[tuple[Any, str, float], ...] = ()  # index, file, seconds of samples
        self.fetch: Interval | None = None  # a batch's seconds for files on disk, beyond the rest
        self.notes: list[str] = []  # what was not found, and why
        self._loader = loader
        self._blocks = blocks
        self._budget_s = blocks.schedule.budget_s
        self._cache = cache  # where to find or build one; None: one for the trials only

    @property
    def waits(self) -> Mapping[str, Any] | None:
        """Return the loop's waits for single batches; None if no real block ran."""
        log = self._blocks.log
        if not log.waits:
            return None
        p50, p99, longest = np.percentile(log.waits, (50, 99, 100)).tolist()
        batches = tuple((one.epoch, one.batch, one.seconds) for one in log.longest)
        waits = {"p50": p50, "p99": p99, "longest": longest}
        return {**waits, "batches": batches, "slow": self.slow}

    def find(
        self,
        known: Analysis,
        progress: Callable[[str], None],
        *,
        trying: Callable[[Sequence[Candidate]], Sequence[Candidate]] | None,
        stepping: bool,
    ) -> Iterator[Batch]:
        """Find the causes; yield batches to step on, if ``stepping`` says that the loop goes on.

        ``progress`` is called with each phase that begins, ``trying`` to choose what to try.
        """
        loader = self._loader
        if not isinstance(loader, DataLoader):
            return
        backend = inner_name_of(backend_of(loader))
        if backend != "stock":
            self.notes.append(
                f"of backend {backend!r} it is not known what preparation consists of; "
                "loader.explain() says what it does where"
            )
            return
        until = time.perf_counter() + max(_LEAST_S, _SHARE * self._budget_s)
        progress("what preparation consists of")
        # A loader may deliver on a device, but workers and pinning handle batches in host memory.
        issued = self._blocks.pool.issue("host", 1)[0]
        host = to_device(issued, torch.device("cpu"))
        drawn = [wait.keys for wait in self._blocks.log.longest if wait.keys is not None]
        size = 1  # a sample is a batch
        if whole := loader.batch_sampler is not None:
            size = loader.batch_size or (len(drawn[0]) if drawn else samples_in(host)) or 1
        keys = [key for batch in drawn for key in (batch if whole else [batch])]
        first = [key.tolist() if getattr(key, "ndim", 1) == 0 else key for key in keys]
        seconds = min(_MOST_LOOK_S, _LOOK_SHARE * self._budget_s)
        try:
            workers, now = loader.num_workers, self._blocks.now
            look = Look(loader.collate_fn, size, whole, workers, seconds, first, now)
            seen = observing.observe(loader, look)
        except Exception as error:  # a dataset may fail in any way
            self.notes.append(f"what preparation consists of is not known: {last_line(error)}")
            return
        if not seen.samples:
            return
        self.slow = tuple(seen.slow)
        pin_s, pin_cpu_s = _pinning(host) if loader.pin_memory else (0.0, 0.0)
        self.preparation = seen.rows(
            passing=loader.num_workers > 0, pin_s=pin_s / size, pin_cpu_s=pin_cpu_s / size
        )
        self._note_memory(seen)
        if "real" not in known.seconds_per_batch:
            return
        progress("what changes would gain")
        unknown = "what changes would gain is not known"
        self.notes.append(ended := f"{unknown}: the loop ended first")
        try:
            stages = self._stages(known, seen, size, host, until)
            run = partial(self._turn, stages)
            # A script whose epoch is over may fail on more batches. Where a prediction needs them,
            # there is one without them first.
            ways = [run] if stepping else [None, run] if stages.sharing.crowded(1) else [None]
            for way in ways:
                self.candidates = yield from candidates(
                    loader,
                    stages,
                    decodes="decode" in seen.by_call,
                    batches=batches_in(loader) or self._blocks.feed.length,
                    until=until,
                    run=way,
                )
                self.notes = [note for note in self.notes if note != ended]
        except Exception as error:  # the loader's own, or what a study of it ran into
            if not self.candidates:
                self.notes[-1] = f"{unknown}: {last_line(error)}"
                return
        most = max(one.options.get("num_workers", 0) for one in self.candidates)
        if isinstance(loader.dataset, IterableDataset) and most > max(1, loader.num_workers):
            self.notes.append(
                "the dataset is iterable: if it does not divide its samples among workers "
                "(torch.utils.data.get_worker_info), each of them yields all samples"
            )
        if stepping:
            progress("what files cost that are not in memory")
            left_s = until - time.perf_counter()
            self.fetch = yield from cold_block(loader, self._blocks, seen, size, left_s, self.notes)
        if trying is not None:
            yield from self._try(stages, trying(self.candidates))

    def _stages(
        self, known: Analysis, seen: Prepared, size: int, host: Batch, until: float
    ) -> Stages:
        arms, workers = known.seconds_per_batch, self._blocks.feed.workers
        asynchronous = self._blocks.schedule.asynchronous
        samples = np.array(seen.usual)
        each = seen.collate_s + seen.pass_s * (workers > 0)
        whole = len(samples) // size
        loads = [float(samples.mean() + each) * size]
        if whole >= 4:
            loads = list(samples[: whole * size].reshape(whole, size).sum(axis=1) + each * size)
        spread = 0.3
        if len(samples) > 2:
            spread = 2 * samples.std() / math.sqrt(len(samples)) / max(1e-9, samples.mean())
        step, contention = arms["synthetic"], known.stalls.get("contention")
        context = self._loader.multiprocessing_context
        transfer = max(0.0, known.stalls["transfer"].estimate) if "host" in arms else 0.0
        mean, real = statistics.fmean(loads), arms["real"].estimate
        beside, after = max(mean, step.estimate) + transfer, mean + step.estimate + transfer
        length = self._blocks.feed.length
        take = start_s = 0.0  # a device's work hides what taking a batch costs
        if not (asynchronous and workers):
            take, start_s = seconds_of_a_worker(host, context, self._blocks.now)
        cached, uncached = dict[str, SmallCache](), ""
        if not isinstance(self._loader.dataset, IterableDataset):
            sample_s = sum(seen.by_call.values())
            cached, uncached = small_caches(self._loader, size, sample_s, until)
        return Stages(
            real=arms["real"],
            step=step,
            loads=[max(1e-9, float(load)) for load in loads],
            spread=min(0.5, max(0.03, float(spread))),
            transfer=transfer,
            overlaps=asynchronous and abs(real - beside) < abs(real - after),
            pinned=bool(self._loader.pin_memory),
            take=0.0 if asynchronous else take,
            sharing=Sharing(
                resources.usable_cores(), seen.cores, self._blocks.step_cores, behind=asynchronous
            ),
            contention=contention.estimate if contention and contention.low > 0 else 0.0,
            starting=self._starting() if workers or not length else start_s / length,
            cached=cached,
            uncached=uncached,
            samples=size,
            workers=workers,
            prefetch=self._loader.prefetch_factor or 2,
            room=resources.batches_that_fit(nbytes(host), resources.shm_room()),
        )

    def _note_memory(self, seen: Prepared) -> None:
        """Add a note if the files of the dataset are larger than the available memory."""
        if not seen.keys or not any(seen.files):
            return
        with contextlib.suppress(OSError, TypeError):
            sizes = [sum(map(os.path.getsize, of)) for of in seen.files]
            whole = statistics.fmean(sizes) * len(self._loader.dataset)
            room = resources.available_memory()
            if whole > room:
                self.notes.append(
                    f"the dataset's files take about {whole / 2**30:.0f} GiB and memory has room "
                    f"for {room / 2**30:.0f}: each epoch reads the disk; more memory is missing"
                )

    def _starting(self) -> float:
        """Return the seconds a batch that starting workers anew for each epoch takes."""
        loader, feed = self._loader, self._blocks.feed
        if loader.persistent_workers or not (feed.workers and feed.length and feed.epoch_starts):
            return 0.0
        ends = statistics.fmean(feed.epoch_ends) if feed.epoch_ends else 0.0
        usual = statistics.median(self._blocks.log.waits or [0.0])
        return max(0.0, statistics.median(feed.epoch_starts) + ends - usual) / feed.length

    def _try(self, stages: Stages, chosen: Sequence[Candidate]) -> Iterator[Batch]:
        """Run each candidate with the step, between two turns of the loader as it is.

        A cache is built in a temporary folder if that takes no longer than the check.
        """
        before: Interval | None = None
        seconds = max(_LEAST_TRIAL_S, _TRIAL_SHARE * self._budget_s)
        with tempfile.TemporaryDirectory() as folder:
            for candidate in chosen:
                options = candidate.options
                if self._cache is None and candidate.build_s > self._budget_s:
                    continue
                cache = candidate.cache_in(self._cache or os.path.join(folder, "train.h5"))
                try:
                    if candidate.build_s and cache and not os.path.exists(cache):
                        build(self._loader.dataset, cache, self._loader, options.get("images"))
                    before = before or (yield from self._turn(stages, {}, seconds))
                    took = yield from self._turn(stages, options, seconds, cache=cache)
                    after = yield from self._turn(stages, {}, seconds)
                except Exception as error:  # the variant's own: the step's is raised at the loop
                    tried = replace(candidate, reason=f"it failed: {last_line(error)}")
                    before = None
                else:
                    # The machine's speed drifts: compare with the mean of the turns around it.
                    mean = (before.estimate + after.estimate) / 2
                    low, high = min(before.low, after.low), max(before.high, after.high)
                    tried = replace(candidate, measured=ratio(Interval(low, mean, high), took))
                    before = after
                found = (tried if one is candidate else one for one in self.candidates)
                self.candidates = tuple(found)

    def _turn(
        self, stages: Stages, options: Mapping[str, Any], seconds: float, **how: Any
    ) -> Generator[Batch, None, Interval]:
        """Yield batches of the loader with ``options``; return the loop's seconds a batch.

        ``how``: as for `variant_of`.
        """
        loader, clock = variant_of(self._loader, options, **how), self._blocks.clock
        seen = yield from observe(loader, stepping=True, seconds=seconds, clock=clock)
        # A trial's epoch does not end.
        starts_s = 0.0 if "persistent_workers" in options else stages.started(loader.num_workers)
        took = seen.seconds_per_batch
        return Interval(*(end + starts_s for end in (took.low, took.estimate, took.high)))


def _pinning(host: Batch) -> tuple[float, float]:
    """Return the seconds that pinning a batch takes, and the CPU seconds; 0 if none is pinned."""
    if not torch.accelerator.is_available():
        return 0.0, 0.0
    copied = map_tensors(host, torch.Tensor.clone)
    begin, cpu = time.perf_counter(), time.thread_time()
    map_tensors(copied, torch.Tensor.pin_memory)
    return time.perf_counter() - begin, time.thread_time() - cpu
