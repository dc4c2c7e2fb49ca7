"""The trials of one tuning run: made one by one, within the time there is, and kept."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.data
from torch.utils.data import IterableDataset

from dataloaders.batches.tree import Batch
from dataloaders.errors import CheckError
from dataloaders.machine import resources
from dataloaders.observing import Unobserved
from dataloaders.observing import observe as look_at
from dataloaders.tuning import auto
from dataloaders.tuning.result import Settings, Trial
from dataloaders.tuning.trial import (
    Loading,
    Observation,
    StepCost,
    Steps,
    observe,
    observe_step,
)
from dataloaders.tuning.variant import Variants

__all__ = ["Attempts"]

_LONGEST_TRIAL_S = 1.5
_HANG_S = 60.0


class Attempts:
    """What was tried and seen so far.

    Attributes:
        alone: the setting of one process, which is tried first.
        trials: every trial, in order.
        seen: what a trial saw, by its settings; those that cannot be used are not in it.
        rates: samples per second over an epoch, the start of its workers counted; of the same.
        out_of_time: whether a trial was left out because the budget was spent.
        workers_usable: False once a trial with workers has failed.
        notes: what the user should know of the trials.
        step: what the step takes, once it was measured.
    """

    def __init__(
        self,
        loader: torch.utils.data.DataLoader[Any],
        stepping: bool,
        budget_s: float,
        alone: Settings,
        announce: Callable[[str], None],
        own_threads: bool = False,
    ) -> None:
        self._began = time.perf_counter()
        self._loader = loader
        self._stepping = stepping
        self._budget_s = budget_s
        self._announce = announce
        self._own_threads = own_threads
        self._variants = Variants(loader)
        self._cores = resources.usable_cores()
        self.alone = alone
        self.trials: list[Trial] = []
        self.seen: dict[Settings, Observation] = {}
        self.rates: dict[Settings, float] = {}
        self.out_of_time = False
        self.workers_usable = True
        self.step: StepCost | None = None
        self._most: int | None = None  # workers, by the memory that one was seen to take
        self.notes = self._variants.notes
        self.batches_in_epoch = _length(loader)

    @property
    def seconds(self) -> float:
        """Since the run began."""
        return time.perf_counter() - self._began

    @property
    def trial_s(self) -> float:
        """What a trial that starts now should take."""
        return max(0.2, min(_LONGEST_TRIAL_S, (self._budget_s - self.seconds) / 3))

    def make(
        self, settings: Settings, why: str, *, compare: bool = True
    ) -> Steps[Observation | None]:
        """The observation, or None if there was no time for it or the setting cannot be used.

        Yields its batches where there is a step. Without ``compare`` it yields them in any case,
        and is only reported: what is done with the batches makes other rates.
        """
        if self.trials and not self._has_time():
            self.out_of_time = True
            return None
        self._announce(f"{settings} ({why})")
        began = time.perf_counter()
        stepping = self._stepping or not compare
        try:
            with _threads(settings.step_threads):
                if settings.num_workers or self._own_threads:
                    seen = yield from observe(
                        self._variants.make(settings, self._hang_s()),
                        stepping=stepping,
                        cap_s=self.trial_s,
                        epoch_samples=self._epoch_samples,
                        keep=stepping and not settings.num_workers,
                    )
                else:
                    seen = yield from self._alone(settings)
        except Exception as error:
            if settings.num_workers == 0 or not _is_workers_fault(error):
                raise
            self._failed(settings, why, time.perf_counter() - began, error)
            return None
        rate = self._over_epoch(settings, seen)
        failed = self._too_large(settings, seen) if compare else None
        if compare and failed is None:
            self.seen[settings] = seen
            # The dataset's own code in one process says what a worker has to do, and not how fast
            # a backend is that does the rest by itself.
            if settings.num_workers or self._own_threads or settings.backend is None:
                self.rates[settings] = rate
        trial = Trial(
            settings=settings,
            why=why,
            samples_per_second=seen.samples_per_second,
            epoch_samples_per_second=rate,
            startup_s=seen.startup_s,
            seconds=time.perf_counter() - began,
            cpu_share=seen.cpu_per_batch / seen.seconds_per_batch.estimate / self._cores,
            memory_per_worker=seen.memory_per_worker,
            failed=failed,
        )
        self.trials.append(trial)
        return seen if failed is None else None

    def measure_step(self, held: list[Batch]) -> Steps[StepCost]:
        """What the step takes for copies of ``held``; measured once."""
        if self.step is None:
            self._announce("the step, on batches that cost nothing")
            self.step = yield from observe_step(held, self.trial_s)
        return self.step

    def _alone(self, settings: Settings) -> Steps[Observation]:
        """Loading in one process, then the step: a loop without workers.

        The dataset is read in a process of its own. Where it cannot be sent to one, no workers can
        be forked after it either, and it is read here, as the loop itself will.
        """
        look = Loading(
            self._variants.elsewhere(settings), self.trial_s, self._epoch_samples, self._stepping
        )
        try:
            found = look_at(self._loader, look, timeout_s=self._loader.timeout or _HANG_S)
        except Unobserved as error:
            if self._loader.num_workers and error.started:
                raise CheckError(f"the dataset cannot be read by a worker: {error}") from error
            found = yield from self._alone_here(look, error)
        except Exception as error:
            if not _is_workers_fault(error):
                raise
            found = yield from self._alone_here(look, error)
        else:
            if isinstance(found, Observation):
                self._variants.skip(found.batches)
        if isinstance(found, CheckError):
            raise found
        if not self._stepping:
            return found
        found.held = [self._variants.delivered(batch) for batch in found.held]
        return found.followed_by((yield from self.measure_step(found.held)))

    def _alone_here(self, look: Loading, error: Exception) -> Steps[Observation]:
        """No workers are forked afterwards: they would share what the dataset opens here."""
        self.workers_usable = False
        self.notes.append(f"workers were not tried: {' '.join(str(error).split())[:300]}")
        return (
            yield from observe(
                look.loader,
                stepping=False,
                cap_s=look.cap_s,
                epoch_samples=look.epoch_samples,
                keep=look.keep,
            )
        )

    @property
    def _epoch_samples(self) -> int | None:
        batches = self.batches_in_epoch
        return None if batches is None else batches * (self._loader.batch_size or 1)

    def _hang_s(self) -> float:
        alone = self.seen.get(self.alone)
        return max(_HANG_S, 20 * (alone.startup_s if alone else 0.0))

    def again(self, settings: Settings, why: str) -> Steps[bool]:
        """Another trial of ``settings``, whose rate becomes the mean; False if there was none."""
        before = self.rates[settings]
        if (yield from self.make(settings, why)) is None:
            return False
        self.rates[settings] = (before + self.rates[settings]) / 2
        return True

    def borne(self, most: int) -> int:
        """``most`` workers, or as many of them as memory bears by what the trials have seen."""
        return most if self._most is None else min(most, self._most)

    def _has_time(self) -> bool:
        # A start and two blocks of a batch from each worker, none of them faster than alone.
        alone = self.seen.get(self.alone)
        least = 3 * alone.waiting_per_batch if alone is not None else 0.0
        return self._budget_s - self.seconds > least

    def _too_large(self, settings: Settings, seen: Observation) -> str | None:
        """Why memory does not bear ``settings``, or None; the user is told once, by a note."""
        if not seen.memory_per_worker:
            return None
        # As auto.resolve(), which would give a remembered setting fewer workers than this.
        most = self.borne(auto.memory_cap(seen.memory_per_worker))
        if settings.num_workers <= most:
            return None
        each = seen.memory_per_worker / 2**20
        if self._most is None:
            self.notes.append(
                f"{settings}: a worker takes {each:,.0f} MiB by the end of an epoch, and "
                f"available memory bears {most} of them: settings with more were ruled out. "
                "Free memory, or keep the dataset in tensors or arrays, which workers share, and "
                "not in Python objects, which each of them comes to copy"
            )
        self._most = most
        return f"{settings.num_workers} x {each:,.0f} MiB do not fit in available memory"

    def _failed(self, settings: Settings, why: str, seconds: float, error: Exception) -> None:
        self.workers_usable = False
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        self.trials.append(Trial(settings, why, None, None, 0.0, seconds, failed=reason))
        self.notes.append(f"{settings} failed: {reason}")

    def _over_epoch(self, settings: Settings, seen: Observation) -> float:
        """Samples per second over an epoch, with its workers' start unless they persist."""
        steady = seen.samples_per_second.estimate
        batches = self.batches_in_epoch
        if not (settings.num_workers and batches) or seen.epochs_inside:
            return steady
        if self._loader.persistent_workers:
            return steady
        whole = seen.startup_s + (batches - 1) * seen.seconds_per_batch.estimate
        return batches * seen.samples_per_batch / max(whole, 1e-9)


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Inside: torch computes with ``count`` threads; None leaves them as they are."""
    if count is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _is_workers_fault(error: Exception) -> bool:
    """Whether the workers failed, and not the user's dataset in a worker.

    torch raises an error of the dataset again, with its type and a text that begins "Caught".
    All else that starting or asking workers raises speaks against workers only: they cannot be
    sent the dataset, they died, they hang, or they were forked from a process that uses CUDA.
    """
    text = str(error)
    if "Caught " in text:
        return "CUDA" in text and "fork" in text
    kinds = (RuntimeError, OSError, TypeError, AttributeError)
    return isinstance(error, kinds) or type(error).__name__ == "PicklingError"


def _length(loader: torch.utils.data.DataLoader[Any]) -> int | None:
    # Not len(loader) of an iterable dataset: torch remembers that it was asked, and warns later.
    try:
        if isinstance(loader.dataset, IterableDataset):
            size = len(loader.dataset)  # type: ignore[arg-type]
            return math.ceil(size / (loader.batch_size or 1))
        return len(loader)
    except TypeError:
        return None
