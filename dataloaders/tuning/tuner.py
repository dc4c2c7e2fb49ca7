"""One tuning run: measure one process and the step, then make the trials that a search asks for."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset

from dataloaders.backend import Tunable
from dataloaders.errors import CapacityWarning, CheckError, DataLoadersError
from dataloaders.loader import DataLoader
from dataloaders.machine import resources
from dataloaders.measuring.intervals import Interval
from dataloaders.observing import Unobserved
from dataloaders.observing import observe as look_at
from dataloaders.specification import batches_in
from dataloaders.tuning import auto, learned
from dataloaders.tuning.result import Progress, Settings, Trial, Tuning
from dataloaders.tuning.search import (
    DEFAULT_PREFETCH,
    WORTH,
    Ask,
    Asks,
    ComputingStep,
    Need,
    Search,
)
from dataloaders.tuning.trial import (
    Loading,
    Seen,
    StepCost,
    Steps,
    device_in_use,
    observe,
    observe_step,
)
from dataloaders.tuning.variant import Variants

__all__ = ["Tuner"]

_HANG_S = 60.0
# CPU seconds of the step per second from which it may be torch's threads that compute it, and
# the same beside a device: there one core is busy with launching the device's work.
_STEP_COMPUTES = 0.5
_STEP_COMPUTES_BESIDE_DEVICE = 1.1
_FREE_MEMORY = (
    "Free memory, or keep the dataset in tensors or arrays, which workers share, and not in Python "
    "objects, which each of them comes to copy"
)


class Tuner:
    """Runs one search: exhaust `steps`; `result` tells what is known, also before their end."""

    def __init__(
        self,
        loader: torch.utils.data.DataLoader[Any],
        stepping: bool,
        budget_s: float,
        max_workers: int | None,
        progress: Callable[[Progress], None] | None,
        rate_needed: float | None,
    ) -> None:
        self._began = time.perf_counter()
        self._loader = loader
        self._stepping = stepping
        self._budget_s = budget_s
        self._trial_s = max(0.2, min(0.75, budget_s / 20))
        self._max_workers = max_workers
        self._progress = progress
        self._cores = resources.usable_cores()
        self._batches = batches_in(loader)
        self._variants = Variants(loader)
        self._notes = self._variants.notes
        self._reason = ""
        self._shortage: str | None = None  # of what more workers would need
        self._batch_bytes = 0
        self._least_s = 0.0  # what a trial takes at least: a start and two blocks
        self._timeout_s = _HANG_S
        self._step: StepCost | None = None
        self._workers_usable = True
        self._tunable = _tunable_of(loader)
        has_cuda = torch.cuda.device_count() > 0
        pinned = bool(loader.pin_memory) and has_cuda
        backend = None if self._tunable is None else self._tunable.backend
        count = loader.num_workers
        depth = (loader.prefetch_factor or DEFAULT_PREFETCH) if count else None
        self._search = Search(
            given=Settings(count, depth, pinned, backend),
            alone=Settings(0, None, pinned, backend),
            need=Need(None if rate_needed is None else Interval(*(rate_needed,) * 3)),
            cores=self._cores,
            options={} if self._tunable is None else self._tunable.values,
            pinning=has_cuda and self._tunable is None,
        )

    def steps(self) -> Steps[None]:
        """Make the trials.

        Yields batches to be stepped on; without a step only those that are to be copied to the
        device.
        """
        search = self._search
        first = Ask(search.alone, "one process: what a batch costs")
        self._announce(f"{first.settings} ({first.why})")
        began = time.perf_counter()
        loading, seen = yield from self._measure_alone(search.alone)
        trial = self._trial(first, seen, began)
        # The dataset's own code in one process says what a worker has to do, and not how fast a
        # backend is that does the rest by itself.
        search.add(trial, comparable=self._tunable is None)
        self._warn(self._find_room(loading))
        self._reason = self._why_no_workers(seen.samples_per_second.estimate)
        workers = not self._reason
        if self._stepping:
            search.step = self._computing_step(loading)
        room = search.most
        yield from self._make_all(search.run(workers=workers))
        if workers and search.limited and search.most == room:
            self._warn(self._shortage)
        if self._tunable is not None and search.rates:
            self._reason = ""

    def result(self, remember: bool = False) -> Tuning:
        """Return what is known by now; ``remember`` writes it to disk."""
        search = self._search
        best = search.choice
        choice = replace(best, pin_memory=search.pin_memory)
        rates, notes = search.rates, [*self._notes, *self._closing_notes(best)]
        path = None
        if remember:
            path = self._remember()
            if path is None:
                notes.append(
                    "the choice could not be kept: set DATALOADERS_CACHE to a folder that can be "
                    "written to"
                )
        worth_it = None
        if choice == search.given:
            worth_it = False
        elif search.given in rates:
            rate = rates.get(best, 0.0) * search.pin_gain
            worth_it = rate >= rates[search.given] * (1 + WORTH)
        return Tuning(
            choice=choice,
            reason=self._reason or self._why(best),
            given=search.given,
            worth_it=worth_it,
            trials=tuple(search.trials),
            needed_samples_per_second=search.need.samples_per_second,
            seconds=self._seconds,
            batch_bytes=self._batch_bytes,
            notes=tuple(notes),
            remembered=path,
        )

    # What is known before the search ------------------------------------------------------------

    def _measure_alone(self, alone: Settings) -> Steps[tuple[Seen, Seen]]:
        """Measure loading in one process, and the loop of loading and stepping."""
        loading = yield from self._load_elsewhere(alone)
        held = [self._variants.delivered(batch) for batch in loading.held]
        seen = loading
        self._least_s = 3 * loading.seconds_per_batch.estimate
        self._timeout_s = max(_HANG_S, 20 * loading.startup_s)
        if self._stepping:
            self._announce("the step, on batches that cost nothing")
            self._step = yield from observe_step(held, self._trial_s)
            samples, cost = seen.samples_per_batch, self._step.seconds
            takes = Interval(samples / cost.high, samples / cost.estimate, samples / cost.low)
            self._search.need = Need(takes, from_step=True)
            seen = loading.followed_by(self._step)
        return loading, seen

    def _load_elsewhere(self, alone: Settings) -> Steps[Seen]:
        """Measure loading in a process of its own, or here where the dataset cannot be sent to one.

        Then no workers are forked afterwards: they would share what the dataset opens here.
        """
        look = Loading(self._variants.elsewhere(alone), self._trial_s, self._stepping)
        why_here: Exception
        try:
            found = look_at(self._loader, look, timeout_s=self._loader.timeout or _HANG_S)
        except Unobserved as error:
            if self._loader.num_workers and error.started:
                raise CheckError(f"the dataset cannot be read by a worker: {error}") from error
            why_here = error
        except Exception as error:
            if not _is_workers_fault(error):
                raise
            why_here = error
        else:
            if isinstance(found, CheckError):
                raise found
            self._variants.skip(found.batches)
            return found
        self._workers_usable = False
        self._notes.append(f"workers were not tried: {_text(why_here)}")
        return (yield from look.steps())

    def _find_room(self, loading: Seen) -> str | None:
        """Find how many workers the user, memory and shared memory allow.

        Returns why the loader as it is will fail, or None.
        """
        search, loader, wanted = self._search, self._loader, self._max_workers
        if wanted is None:
            wanted = auto.most_workers(self._cores)
            if isinstance(loader.dataset, IterableDataset):
                wanted = max(1, loader.num_workers)
                self._notes.append(
                    f"the dataset is iterable: no more than {wanted} workers were tried, since one "
                    "that does not share its samples out yields them several times; give "
                    "max_workers= if it does"
                )
        size = loading.batch_bytes
        in_memory, in_shm = auto.memory_cap(), auto.shm_cap(size, 1)
        most = min(wanted, in_memory, wanted if in_shm is None else in_shm)
        if most < wanted and in_shm == most:
            self._shortage = resources.shm_shortage(min(wanted, 2 * most + 1), 1, size)
        elif most < wanted:
            self._shortage = (
                f"more workers may help, and available memory bears {most}. {_FREE_MEMORY}"
            )
        search.most = most if self._workers_usable else 0
        # Beside a step one worker overlaps with it; and of a backend that has workers read for
        # it nothing is known without one.
        search.fewest = 1 if self._stepping or self._tunable is not None else 2
        search.variation = loading.variation
        search.shm_cap = lambda prefetch: auto.shm_cap(size, prefetch)
        depth = loader.prefetch_factor or DEFAULT_PREFETCH
        own = resources.shm_shortage(loader.num_workers, depth, size)
        return None if own is None else f"the loader as it is will fail: {own}"

    def _why_no_workers(self, samples_per_second: float) -> str:
        """Return why workers need not be tried, or ""."""
        search, rate = self._search, f"one process gives {samples_per_second:,.0f} samples/s"
        if self._max_workers == 0:
            return "max_workers=0: nothing else was tried"
        if not self._workers_usable:
            return "workers cannot be used for this dataset (see the note)"
        if search.meets(search.alone):
            return f"{search.need} and {rate}: workers will not help"
        if isinstance(self._loader, DataLoader) and auto.in_memory(self._loader.dataset):
            return f"the dataset is in memory and {rate}: workers would only add a copy"
        if search.most == 1 < search.fewest and self._shortage is None:
            return f"{rate}, and one worker could only do the same"
        return ""

    def _computing_step(self, loading: Seen) -> ComputingStep | None:
        step, threads = self._step, torch.get_num_threads()
        least = _STEP_COMPUTES_BESIDE_DEVICE if device_in_use() else _STEP_COMPUTES
        if step is None or threads == 1 or step.cores < least or self._tunable is not None:
            return None
        load_s = loading.seconds_per_batch.estimate
        busy = min(1.0, loading.cpu_per_batch / load_s)
        return ComputingStep(threads, math.ceil(load_s / step.seconds.estimate), busy)

    # Trials -------------------------------------------------------------------------------------

    def _make_all(self, asks: Asks[None]) -> Steps[None]:
        """Make the trials that a search asks for, until it has no more or the budget is spent."""
        trial: Any = None
        while (ask := _next_of(asks, trial)) is not None:
            if self._budget_s - self._seconds <= self._least_s:
                self._notes.append(
                    "the budget ended before every useful trial was made: give budget_s more"
                )
                return
            self._announce(f"{ask.settings} ({ask.why})")
            trial = yield from self._make(ask)

    def _make(self, ask: Ask) -> Steps[Trial]:
        settings, began, threads = ask.settings, time.perf_counter(), torch.get_num_threads()
        loader = self._variants.make(settings, self._timeout_s)
        try:
            if settings.step_threads is not None:
                torch.set_num_threads(settings.step_threads)
            seen = yield from observe(
                loader, stepping=self._stepping or ask.copied, seconds=self._trial_s
            )
        except Exception as error:
            if settings.num_workers == 0 or not _is_workers_fault(error):
                raise
            self._search.most = 0
            self._notes.append(f"{settings} failed: {_text(error)}")
            seconds = time.perf_counter() - began
            return Trial(settings, ask.why, None, None, seconds=seconds, failed=_text(error))
        finally:
            if settings.step_threads is not None:
                torch.set_num_threads(threads)
        return self._trial(ask, seen, began)

    def _trial(self, ask: Ask, seen: Seen, began: float) -> Trial:
        self._batch_bytes = max(self._batch_bytes, seen.batch_bytes)
        return Trial(
            settings=ask.settings,
            why=ask.why,
            samples_per_second=seen.samples_per_second,
            epoch_samples_per_second=self._over_epoch(ask.settings, seen),
            startup_s=seen.startup_s,
            seconds=time.perf_counter() - began,
            cpu_share=seen.cpu_per_batch / seen.seconds_per_batch.estimate / self._cores,
            memory_per_worker=seen.memory_per_worker,
            failed=self._too_large(ask.settings, seen.memory_per_worker),
        )

    def _over_epoch(self, settings: Settings, seen: Seen) -> float:
        """Return samples per second over an epoch, with the start of its workers."""
        steady, batches = seen.samples_per_second.estimate, self._batches
        inside = seen.epochs > 1 or self._loader.persistent_workers
        if not (settings.num_workers and batches) or inside:
            return steady
        whole = seen.startup_s + (batches - 1) * seen.seconds_per_batch.estimate
        return batches * seen.samples_per_batch / max(whole, 1e-9)

    def _too_large(self, settings: Settings, memory_per_worker: int | None) -> str | None:
        """Return why memory does not bear ``settings``, or None; add a note."""
        if not memory_per_worker:
            return None
        # As auto.resolve(), which would give a remembered setting fewer workers than this.
        bears, each = auto.memory_cap(memory_per_worker), memory_per_worker / 2**20
        if settings.num_workers <= bears:
            return None
        self._search.most = min(self._search.most, bears)
        self._notes.append(
            f"{settings}: a worker takes {each:,.0f} MiB by the end of an epoch, and available "
            f"memory bears {bears} of them: settings with more were ruled out. {_FREE_MEMORY}"
        )
        return f"{settings.num_workers} x {each:,.0f} MiB do not fit in available memory"

    # What is said -------------------------------------------------------------------------------

    def _why(self, best: Settings) -> str:
        """Return why ``best`` is the choice."""
        search, rates = self._search, self._search.rates
        base, name = search.alone, "one process"
        if self._tunable is not None:
            base, name = search.given, "the loader as it is"
        rate, now = rates.get(best), rates.get(base)
        if rate is None:
            return "nothing is known yet"
        if best == base and best == search.alone and self._tunable is None:
            return f"nothing that was tried is 3 % faster than one process ({rate:,.0f} samples/s)"
        gain = f"{rate:,.0f} samples/s over an epoch"
        gain += f", {rate / now:.2f} x {name}" if now and best != base else ""
        if search.meets(best):
            return f"{gain}; {search.need}"
        unmet = f"; {search.need}, which was not reached" if str(search.need) else ""
        return f"{gain}, within 3 % of the best that was tried{unmet}"

    def _closing_notes(self, best: Settings) -> list[str]:
        """Return what else the user should know about the choice."""
        notes, search, last = [], self._search, self._search.last_trial(best)
        if last is not None and last.samples_per_second and last.epoch_samples_per_second:
            share = 1 - last.epoch_samples_per_second / last.samples_per_second.estimate
            if share > 0.1:
                notes.append(
                    f"starting the workers takes {100 * share:.0f} % of each epoch; "
                    "persistent_workers=True pays that once"
                )
        if best.num_workers > self._cores:
            notes.append(
                f"these are more workers than the {self._cores} usable cores, of which torch may "
                "warn; they mostly wait, and were measured"
            )
        if not isinstance(self._loader, DataLoader) and auto.in_memory(self._loader.dataset):
            notes.append(
                "the dataset is in memory: dataloaders.DataLoader fetches a batch of it by one "
                "indexed gather, in one process"
            )
        if best.step_threads is not None:
            others, known = search.choice_for_auto, search.rates
            notes.append(
                f"torch.set_num_threads({best.step_threads}) is the process's: no loader changes "
                f'it, and "auto" keeps to {others.arguments}, the best with '
                f"{torch.get_num_threads()} threads ({known[others]:,.0f} samples/s; with both "
                f"changes {known[best]:,.0f}). Put it into the script, tune again, and that is "
                'what "auto" has'
            )
        return notes

    def _remember(self) -> Path | None:
        """Keep the choice, or the best one that leaves the step's threads as they are.

        "auto" is a loader's, which must not change the threads of the whole process.
        """
        loader, choice = self._loader, self._search.choice_for_auto
        trial = self._search.last_trial(choice)
        assert trial is not None
        assert trial.samples_per_second is not None
        key = learned.key_of(
            loader.dataset,
            loader.batch_size,
            loader.batch_sampler,
            loader.collate_fn,
            "" if choice.backend is None else choice.backend.name,
        )
        found = learned.Learned(
            num_workers=choice.num_workers,
            prefetch_factor=choice.prefetch_factor,
            pin_memory=self._search.pin_memory,
            samples_per_second=trial.samples_per_second.estimate,
            batch_bytes=self._batch_bytes,
            memory_per_worker=trial.memory_per_worker,
            options=choice.numbers or None,
        )
        return learned.remember(key, found)

    @property
    def _seconds(self) -> float:
        return time.perf_counter() - self._began

    def _warn(self, text: str | None) -> None:
        if text is not None:
            self._notes.append(text)
            # Frames above: this, steps, tuning_steps, then driven and tune, or what runs a script's
            # loop. The next one is the line that asked for tuning.
            warnings.warn(text, CapacityWarning, stacklevel=6)

    def _announce(self, doing: str) -> None:
        if self._progress is not None:
            self._progress(Progress(self._seconds, self._budget_s, doing, self.result()))


def _next_of(asks: Asks[None], trial: Any) -> Ask | None:
    try:
        return asks.send(trial)
    except StopIteration:
        return None


def _is_workers_fault(error: Exception) -> bool:
    """Return whether the workers failed, and not the user's dataset in a worker.

    torch raises an error of the dataset again, with its type and a text that begins "Caught".
    All else that starting or asking workers raises speaks against workers only: they cannot be
    sent the dataset, they died, they hang, or they were forked from a process that uses CUDA.
    """
    text = str(error)
    if "Caught " in text:
        return "CUDA" in text and "fork" in text
    kinds = (RuntimeError, OSError, TypeError, AttributeError)
    return isinstance(error, kinds) or type(error).__name__ == "PicklingError"


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _tunable_of(loader: torch.utils.data.DataLoader[Any]) -> Tunable | None:
    """Return what may be chosen of its backend's options; None: nothing, or it serves no loader."""
    if not isinstance(loader, DataLoader):
        return None
    try:
        return loader._tunable()
    except DataLoadersError:
        return None
