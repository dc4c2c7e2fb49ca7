"""Tune a loader: measure loading in one process, the step, then the trials of a search.

tune(loader, step)     calls step(batch) on the batches of every trial
Tuner(loader).run()    yields these batches to an existing loop, that of a script
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset

from dataloaders.batches.tree import to_device
from dataloaders.errors import CapacityWarning, CheckError, OptionError, one_line
from dataloaders.loader import DataLoader
from dataloaders.machine import resources
from dataloaders.measuring.clocks import Clock
from dataloaders.measuring.intervals import Interval
from dataloaders.observing import Unobserved
from dataloaders.observing import observe as look_at
from dataloaders.seeding.states import random_states_kept
from dataloaders.specification import batches_in
from dataloaders.tuning import auto, learned
from dataloaders.tuning.result import Progress, Trial, Tuning
from dataloaders.tuning.search import DEFAULT_PREFETCH, WORTH, Search, Spent
from dataloaders.tuning.trial import (
    Loading,
    Measured,
    Step,
    Steps,
    driven,
    observe,
    observe_step,
    rate_of,
)
from dataloaders.tuning.variant import Settings, Variants, backend_of

_ALONE = "one process: what a batch costs"
_HANG_S = 60.0
# Batches come in the order of their indices, so workers wait for the slowest one. In a simulated
# queue, 16 workers with 2 batches each reach 0.90 of their rate if the standard deviation of a
# batch's time is 0.3 of its mean, and 0.80 if it is 0.5.
_LONG_PREFETCH, _UNEVEN = 4, 0.3


def tune(
    loader: torch.utils.data.DataLoader[Any],
    step: Step | None = None,
    *,
    budget_s: float = 30.0,
    max_workers: int | None = None,
    remember: bool = True,
    progress: Callable[[Progress], None] | None = None,
    clock: Clock | None = None,
) -> Tuning:
    """Find a small ``num_workers``, ``prefetch_factor`` and ``pin_memory`` that suffice.

    A setting suffices if it reaches 97 % of what ``step`` needs, or of the best rate. Workers are
    doubled while that is 3 % faster. Settings with similar rates are tried three times, in turns,
    and their medians compared. The smallest sufficient setting is chosen. The loader keeps its
    backend.

    The loader is not iterated, its samplers and generator are copied, and random states are
    restored. Only other processes read the dataset, so that it opens nothing here: loading without
    workers is measured there, the step here, and both are added. If no other process can read the
    dataset, nothing is tried. ``step`` really trains.

    Args:
        loader: any torch DataLoader. For an iterable dataset, more workers than it has now are
            tried only if ``max_workers`` is given: a dataset that does not divide its samples among
            workers yields each of them several times.
        step: runs on every batch of every trial; None: copies it to the CUDA device, if any.
        budget_s: seconds after which no further trial starts.
        max_workers: the most to try; None: 4 for each usable core, at least 8. Fewer if memory or
            shared memory has no room.
        remember: whether to keep the choice on disk, where ``num_workers="auto"`` looks it up.
        progress: called before each trial. After a KeyboardInterrupt, ``so_far`` of its last
            argument is the result.
        clock: times trials and the step; None: that of the devices that hold tensors.

    Raises:
        TypeError: ``loader`` is not a torch DataLoader.
        OptionError: a number is out of range, or ``step`` is not a function.
        CheckError: the loader yields nothing, or its sampler cannot be copied.
        Exception: what the dataset, the collation or the step raises.

    Warns:
        CapacityWarning: the loader's own settings do not fit in shared memory, or there is no room
            in memory or shared memory for more workers, which might be faster.
    """
    if not isinstance(loader, torch.utils.data.DataLoader):
        raise TypeError(
            f"tune() takes a torch.utils.data.DataLoader and got {type(loader).__name__}; "
            "for other iterables make a DataLoader of their dataset"
        )
    for wrong, name, value, rule in (
        (not budget_s > 0, "budget_s", budget_s, "be a positive number of seconds"),
        (max_workers is not None and max_workers < 0, "max_workers", max_workers, "be 0 or more"),
        (step is not None and not callable(step), "step", step, "be a function of one batch"),
    ):
        if wrong:
            raise OptionError(f"{name}={value!r}: must {rule}")
    stepping = step is not None
    tuner = Tuner(
        loader, budget_s, stepping=stepping, max_workers=max_workers, progress=progress, clock=clock
    )
    return driven(
        tuner.run(remember), step or (lambda batch: to_device(batch, torch.device("cuda")))
    )


@dataclass
class Tuner:
    """Runs one search: exhaust `run`; `result` returns what is known, also before the end."""

    loader: torch.utils.data.DataLoader[Any]
    budget_s: float
    _: KW_ONLY
    stepping: bool = True  # whether the loop has a step; else batches are only copied to a device
    max_workers: int | None = None
    progress: Callable[[Progress], None] | None = None
    clock: Clock | None = None  # see `tune`

    def __post_init__(self) -> None:
        loader = self.loader
        self._began = time.perf_counter()
        self._trial_s = max(0.2, min(0.75, self.budget_s / 20))
        self._cores = resources.usable_cores()
        self._batches = batches_in(loader)
        self._variants = Variants(loader)
        self._notes: list[str] = []
        self._reason = ""
        self._batch_bytes = 0
        self._least_s = 0.0  # that a trial takes at least: a start and two blocks
        self._need: Interval | None = None
        has_cuda = torch.cuda.device_count() > 0
        pinned = bool(loader.pin_memory) and has_cuda
        count = loader.num_workers
        depth = (loader.prefetch_factor or DEFAULT_PREFETCH) if count else None
        given = Settings(count, depth, pinned)
        self._search = Search(given, Settings(0, None, pinned), self._make, pinning=has_cuda)
        self._steps_on = self.stepping or has_cuda

    def run(self, remember: bool = True) -> Steps[Tuning]:
        """Yield batches to a loop whose body is the step; return what was found.

        Everything runs on the loop's thread while the loop asks for its next batch. If the loop
        ends early, close the generator, which ends the workers and restores the random states.
        """
        try:
            with random_states_kept(self.loader.generator):
                yield from self._steps()
        finally:
            del self._search.make  # a reference cycle would keep the loader and its session
        return self.result(remember)

    def _steps(self) -> Steps[None]:
        search = self._search
        self._announce(search.alone, _ALONE)
        began = time.perf_counter()
        loading = self._load_elsewhere()
        if loading is None:
            return
        measured = yield from self._with_step(loading)
        alone = self._trial(search.alone, _ALONE, measured, began)
        if self._steps_on:
            alone = replace(alone, cpu_share=None)  # the step's share of the cores is not known
        search.add(alone, comparable=self._variants.loads_elsewhere)
        wanted, most = self._find_room(loading)
        self._reason = self._why_no_workers(measured.samples_per_second.estimate)
        if self._reason:
            return
        try:
            yield from search.run()
        except Spent:
            self._notes.append(
                f"the budget of {self.budget_s:g} s ended before every useful trial was made; a "
                "larger one (budget_s=, or --budget) tries them"
            )
        if search.limited and search.most == most < wanted:
            self._warn(
                resources.shm_shortage(min(wanted, 2 * most + 1), 1, loading.batch_bytes)
                or f"more workers may help, and available memory has room for {most}. Free memory, "
                "or keep the dataset in tensors or arrays, which workers share, and not in Python "
                "objects, which each of them comes to copy"
            )

    def result(self, remember: bool = False) -> Tuning:
        """Return what is known by now; ``remember`` writes it to disk."""
        search = self._search
        choice, rates = search.choice, search.rates
        notes = [*self._notes, *self._closing_notes(choice)]
        remember = remember and bool(search.trials)
        path = self._remember() if remember else None
        if remember and path is None:
            notes.append("the choice was not kept: set DATALOADERS_CACHE to a folder to write to")
        reason, given, trials = self._reason or self._why(choice), search.given, (*search.trials,)
        gain = rates.get(choice, 0.0) / rates[given] if given in rates else None
        worth_it = choice != given and (None if gain is None else gain >= 1 + WORTH)
        return Tuning(
            choice, reason, given, worth_it, trials, self._need, self._seconds, self._batch_bytes,
            tuple(notes), path,
        )  # fmt: skip

    # Before the search --------------------------------------------------------------------------

    def _load_elsewhere(self) -> Measured | None:
        """Measure loading in a separate process; None if no process can read the dataset."""
        alone = self._variants.elsewhere(self._search.alone)
        look = Loading(alone, self._trial_s, self._steps_on)
        try:
            found = look_at(self.loader, look, timeout_s=self.loader.timeout or _HANG_S)
        except Exception as error:
            if not (isinstance(error, Unobserved) or _is_workers_fault(error)):
                raise
            self._reason = f"workers cannot be used for this dataset: {one_line(error)}"
            return None
        if isinstance(found, CheckError):
            raise found
        self._variants.skip(found.batches)
        self._least_s = 3 * found.seconds_per_batch.estimate
        return found

    def _with_step(self, loading: Measured) -> Steps[Measured]:
        """Measure the step; return the loop of loading and stepping."""
        if not self._steps_on:
            return loading
        held = [self._variants.delivered(batch) for batch in loading.held]
        step = yield from observe_step(held, self._trial_s, self.clock)
        if self.stepping:
            self._need = rate_of(loading.samples_per_batch, step.seconds)
            # The loop around the step takes time, too.
            self._search.needed = self._need.estimate * (1 - WORTH)
        return loading.followed_by(step)

    def _find_room(self, loading: Measured) -> tuple[int, int]:
        """Set up the search; return how many workers are wanted, and for how many there is room."""
        search, loader, wanted = self._search, self.loader, self.max_workers
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
        search.shm_cap = lambda prefetch: auto.shm_cap(size, prefetch)
        in_shm = search.shm_cap(1)
        search.most = min(wanted, auto.memory_cap(), wanted if in_shm is None else in_shm)
        # One worker overlaps with a step. If no rate without workers is known, begin with one.
        search.fewest = 1 if self.stepping or not search.rates else 2
        if loading.variation > _UNEVEN:
            search.prefetch = _LONG_PREFETCH
        depth = loader.prefetch_factor or DEFAULT_PREFETCH
        shortage = resources.shm_shortage(loader.num_workers, depth, size)
        if shortage is not None:
            self._warn(f"the loader as it is will fail: {shortage}", stacklevel=7)
        return wanted, search.most

    def _why_no_workers(self, samples_per_second: float) -> str:
        """Return why no workers need be tried, or ""."""
        search, need = self._search, self._need
        rate = f"one process gives {samples_per_second:,.0f} samples/s"
        if self.max_workers == 0:
            return "max_workers=0: nothing else was tried"
        if need is not None and search.meets(search.alone):
            return f"the step takes {need.estimate:,.0f} and {rate}: workers will not help"
        if isinstance(self.loader, DataLoader) and auto.in_memory(self.loader.dataset):
            return f"the dataset is in memory and {rate}: workers would only add a copy"
        return ""

    # Trials -------------------------------------------------------------------------------------

    def _make(self, settings: Settings, why: str) -> Steps[Trial]:
        if self.budget_s - self._seconds <= self._least_s:
            raise Spent
        self._announce(settings, why)
        began = time.perf_counter()
        loader = self._variants.make(settings, _HANG_S)
        try:
            measured = yield from observe(
                loader, stepping=self._steps_on, seconds=self._trial_s, clock=self.clock
            )
        except Exception as error:
            if not _is_workers_fault(error):
                raise  # the dataset's own
            self._notes.append(f"{settings} failed: {one_line(error)}")
            return Trial(settings, why, None, None, failed=one_line(error))
        return self._trial(settings, why, measured, began)

    def _trial(self, settings: Settings, why: str, measured: Measured, began: float) -> Trial:
        self._batch_bytes = max(self._batch_bytes, measured.batch_bytes)
        rate, batches = measured.samples_per_second, self._batches
        batch_s, over_epoch = measured.seconds_per_batch.estimate, rate.estimate
        kept = measured.epochs > 1 or self.loader.persistent_workers
        if settings.num_workers and batches and not kept:
            whole_s = measured.startup_s + (batches - 1) * batch_s
            over_epoch = batches * measured.samples_per_batch / max(whole_s, 1e-9)
        cpu_share = measured.cpu_per_batch / batch_s / self._cores
        seconds = time.perf_counter() - began
        return Trial(settings, why, rate, over_epoch, measured.startup_s, seconds, cpu_share)

    # Results ------------------------------------------------------------------------------------

    def _why(self, best: Settings) -> str:
        """Return why ``best`` is the choice."""
        search, rates = self._search, self._search.rates
        rate, alone = rates.get(best), rates.get(search.alone)
        if rate is None:
            return "nothing is known yet"
        if best == search.alone:
            return f"nothing that was tried is 3 % faster than one process ({rate:,.0f} samples/s)"
        gain = f"{rate:,.0f} samples/s over an epoch"
        gain += f", {rate / alone:.2f} x one process" if alone else ""
        if search.meets(best):
            return f"{gain}, which is what is needed"
        need = f"; {self._need.estimate:,.0f} are needed" if self._need else ""
        return f"{gain}, within 3 % of the best that was tried{need}"

    def _closing_notes(self, best: Settings) -> list[str]:
        """Return further advice about the choice."""
        notes, last = [], self._search.last_trial(best)
        if last is not None and last.samples_per_second and last.epoch_samples_per_second:
            share = 1 - last.epoch_samples_per_second / last.samples_per_second.estimate
            if share > 0.1:
                notes.append(
                    f"starting the workers takes {100 * share:.0f} % of each epoch; "
                    "persistent_workers=True pays that once"
                )
        return notes

    def _remember(self) -> Path | None:
        """Keep the choice for "auto"; return the file, None if it could not be written."""
        loader, choice = self.loader, self._search.choice
        trial = self._search.last_trial(choice)
        if trial is None or trial.samples_per_second is None:
            return None
        found = learned.Learned(
            **vars(choice), batch_bytes=self._batch_bytes, day=time.strftime("%Y-%m-%d")
        )
        return learned.remember(learned.key_of_loader(loader, backend_of(loader).name), found)

    @property
    def _seconds(self) -> float:
        return time.perf_counter() - self._began

    def _warn(self, text: str, stacklevel: int = 6) -> None:
        self._notes.append(text)
        # The frames above are _warn, _steps and run, then driven and tune, or what runs a script's
        # loop. The next one is the line that asked for tuning.
        warnings.warn(text, CapacityWarning, stacklevel=stacklevel)

    def _announce(self, settings: Settings, why: str) -> None:
        if self.progress is not None:
            doing = f"{settings} ({why})"
            self.progress(Progress(self._seconds, self.budget_s, doing, self.result()))


def _is_workers_fault(error: Exception) -> bool:
    """Return whether the workers failed, and not the user's dataset in a worker.

    torch raises an error of the dataset again, with its type and a text that begins with "Caught".
    Other errors are about workers: the dataset cannot be sent to them, they died, they hang, or
    they were forked from a process that uses CUDA.
    """
    text = str(error)
    if "Caught " in text:
        return "CUDA" in text and "fork" in text
    kinds = (RuntimeError, OSError, TypeError, AttributeError)
    return isinstance(error, kinds) or type(error).__name__ == "PicklingError"
