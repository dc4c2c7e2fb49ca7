"""Which settings are tried, in which order, and when that ends."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dataloaders.backend import Tunable
from dataloaders.errors import CapacityWarning, CheckError, DataLoadersError
from dataloaders.loader import DataLoader
from dataloaders.machine import resources
from dataloaders.measuring.intervals import Interval
from dataloaders.tuning import auto, device, learned, words
from dataloaders.tuning.attempts import Attempts
from dataloaders.tuning.capacity import DEFAULT_PREFETCH, capacity, own_shortage
from dataloaders.tuning.choice import Need, choose, enough
from dataloaders.tuning.climb import climb
from dataloaders.tuning.model import WORTH, Model
from dataloaders.tuning.result import Progress, Settings, Tuning
from dataloaders.tuning.trial import Observation, Steps

__all__ = ["Search"]

_DEEPER_PREFETCH = (4, 8)
_UNEVEN = 0.3  # standard deviation over mean of a batch's time from which prefetching may matter
_COMPUTING = 0.8  # CPU seconds per second of making a batch from which it hardly waits
# CPU seconds per second and core from which the idle rest is not worth a larger setting.
_SATURATED = 1 / (1 + WORTH)
# Workers beyond the cores that may pay although all compute: this process takes batches over and
# workers wait for it, for their queue and for files, and meanwhile a core has nothing to do.
_BEYOND_CORES = 2
# CPU seconds of the step per second from which it may be torch's threads that compute it, and
# the same beside a device: there one core is busy with launching the device's work.
_STEP_COMPUTES = 0.5
_STEP_COMPUTES_BESIDE_DEVICE = 1.1


class Search:
    """One tuning run, in the order of this file: `run` it, then ask for its `result`.

    Its functions are generators: they yield each batch of a trial that is to be stepped on.
    """

    def __init__(
        self,
        loader: torch.utils.data.DataLoader[Any],
        stepping: bool,
        budget_s: float,
        max_workers: int | None,
        progress: Callable[[Progress], None] | None,
        rate_needed: float | None,
    ) -> None:
        self._loader = loader
        self._stepping = stepping
        self._budget_s = budget_s
        self._max_workers = max_workers
        self._progress = progress
        self._need = Need(None if rate_needed is None else Interval(*(rate_needed,) * 3))
        self._cores = resources.usable_cores()
        self._has_cuda = torch.cuda.device_count() > 0
        pinned = bool(loader.pin_memory) and self._has_cuda
        self._pin_choice = self._pinned = pinned
        self._pin_gain = 1.0
        self._step_cores = 0.0  # CPU seconds a second
        self._prefetch = DEFAULT_PREFETCH
        self._reason = ""
        self._tunable = _tunable_of(loader)
        self._backend = None if self._tunable is None else self._tunable.backend
        count = loader.num_workers if self._tunable is None or self._tunable.workers else 0
        depth = (loader.prefetch_factor or DEFAULT_PREFETCH) if count else None
        self._given = Settings(count, depth, pinned, self._backend)
        # One process is where every search starts and what it falls back to.
        self._alone = Settings(0, None, pinned, self._backend)
        own = self._tunable is not None and not self._tunable.workers
        self._attempts = Attempts(
            loader, stepping, budget_s, self._alone, _announcing(self), own_threads=own
        )

    def run(self) -> Steps[None]:
        """Make the trials; call it once.

        Without a step it yields batches only where they are to be copied to the device.
        """
        own = self._tunable is not None and not self._tunable.workers
        why = "the loader as it is" if own else "one process: what a batch costs"
        alone = yield from self._attempts.make(self._alone, why)
        if alone is None:
            raise CheckError(f"no batch was loaded within budget_s={self._budget_s}; give it more")
        yield from self._measure_step(alone)
        if not own:
            yield from self._search_settings(alone)
        usable = self._attempts.workers_usable and self._max_workers != 0
        if self._tunable is not None and not self._attempts.rates and usable:
            # Its own options can be tried with workers only: here they would open the dataset.
            yield from self._with_workers(1, "its options are tried with a worker")
        if self._tunable is not None and self._attempts.rates:
            yield from self._search_options(self._tunable)
            self._reason = words.why_options(
                self._choice(), self._given, self._attempts, self._need
            )

    def _search_settings(self, alone: Observation) -> Steps[None]:
        """Of torch's workers."""
        model = self._model(alone)
        room = capacity(self._loader, model, alone.batch_bytes, self._max_workers)
        self._prefetch = room.prefetch
        if self._needs_no_workers(alone):
            self._warn(own_shortage(self._loader, alone.batch_bytes))
            return
        self._warn(own_shortage(self._loader, alone.batch_bytes), room.shortage)
        if room.note is not None:
            self._attempts.notes.append(room.note)
        if model.gain(room.workers) < 1 + WORTH:
            rate = alone.samples_per_second.estimate
            self._reason = words.why_no_workers(rate, model, room.workers)
            return
        yield from self._search_workers(model, room.workers)
        yield from self._search_prefetch(alone)
        yield from self._search_step_threads(model, room.workers)
        yield from self._search_pinning()

    def result(self, remember: bool = False) -> Tuning:
        """What is known by now; ``remember`` writes it to disk."""
        attempts = self._attempts
        best = self._choice()
        choice = replace(best, pin_memory=self._pin_choice)
        notes = [
            *attempts.notes,
            *words.closing_notes(best, self._loader, attempts, self._cores),
        ]
        if best.step_threads is not None:
            notes.append(words.why_threads_stay(best, self._best_for_auto(), attempts))
        path = None
        if remember:
            path = self._remember()
            if path is None:
                notes.append(words.not_kept())
        rate = attempts.rates.get(best, 0.0)
        return Tuning(
            choice=choice,
            reason=self._reason or words.why(best, attempts, self._need.clause, self._meets(rate)),
            given=self._given,
            worth_it=self._worth_it(choice, rate * self._pin_gain),
            trials=tuple(attempts.trials),
            needed_samples_per_second=self._need.samples_per_second,
            seconds=attempts.seconds,
            batch_bytes=self._batch_bytes(),
            notes=tuple(notes),
            remembered=path,
        )

    def _measure_step(self, alone: Observation) -> Steps[None]:
        if not self._stepping:
            return
        cost = yield from self._attempts.measure_step(alone.held)
        seconds, samples = cost.seconds, alone.samples_per_batch
        takes = Interval(samples / seconds.high, samples / seconds.estimate, samples / seconds.low)
        self._need = Need(takes, from_step=True)
        self._step_cores = cost.cores

    def _needs_no_workers(self, alone: Observation) -> bool:
        rate = f"{alone.samples_per_second.estimate:,.0f}"
        if self._max_workers == 0:
            self._reason = "max_workers=0: nothing else was tried"
        elif not self._attempts.workers_usable:
            self._reason = "workers cannot be used for this dataset (see the note)"
        elif self._meets(self._attempts.rates.get(self._alone, 0.0)):
            self._reason = (
                f"{self._need.clause} and one process already gives {rate}: workers will not help"
            )
        elif isinstance(self._loader, DataLoader) and auto.in_memory(self._loader.dataset):
            self._reason = (
                f"the dataset is in memory and one process gives {rate} samples/s: workers would "
                "only add a copy"
            )
        return bool(self._reason)

    def _model(self, alone: Observation) -> Model:
        loop = alone.seconds_per_batch.estimate
        takes = self._need.samples_per_second
        needed = 0.0 if takes is None else alone.samples_per_batch / takes.estimate
        if not self._stepping:
            return Model(loop, alone.cpu_waiting_per_batch, 0.0, 0.0, loop, needed, self._cores)
        step_cpu = max(0.0, alone.cpu_per_batch - alone.cpu_waiting_per_batch)
        return Model(
            batch_s=alone.waiting_per_batch,
            cpu_s=alone.cpu_waiting_per_batch,
            step_s=needed,
            step_cpu_s=step_cpu,
            loop_s=loop,
            needed_s=needed,
            cores=self._cores,
        )

    def _search_workers(self, model: Model, cap: int) -> Steps[None]:
        if 0 < self._given.num_workers <= cap:
            yield from self._attempts.make(self._given, "the loader as it is")
        cap = self._attempts.borne(cap)
        if not self._attempts.workers_usable or model.gain(cap) < 1 + WORTH:
            return
        count = model.knee(cap)
        if model.cpu_share > _COMPUTING:
            # Workers that compute take turns on the cores: beyond this many they gain nothing,
            # and on a busy machine only take cores from others.
            busy = math.ceil(self._cores / model.cpu_share)
            cap = min(cap, max(count, busy + _BEYOND_CORES))
        rate = yield from self._with_workers(count, "predicted: more should not help")
        borne = self._attempts.borne(cap)
        if rate is None and borne < count and model.gain(borne) >= 1 + WORTH:
            count, cap = borne, borne
            rate = yield from self._with_workers(count, "as many as memory bears")
        # Upwards while it pays: twice as many where they scale, else a neighbour to confirm.
        while count < (cap := self._attempts.borne(cap)) and rate and not self._meets(rate):
            if self._saturated(self._settings(count)):
                break
            samples = self._attempts.seen[self._alone].samples_per_batch
            scales = rate >= 0.8 * count * samples / max(model.batch_s, 1e-9)
            more = min(cap, count * 2 if scales else max(count + 1, count * 3 // 2))
            reason = "still scaling" if scales else "its neighbour"
            next_rate = yield from self._with_workers(more, reason)
            if next_rate is None:
                break
            if not (yield from self._pays(self._settings(count), self._settings(more))):
                break
            count, rate = more, self._attempts.rates[self._settings(more)]
        yield from self._narrow(model)

    def _narrow(self, model: Model) -> Steps[None]:
        """Downwards by bisection, to the fewest workers that still suffice."""
        rates = self._attempts.rates
        while self._attempts.workers_usable:
            high, least = self._choice().num_workers, enough(rates, self._need)
            per_worker = max(
                (rate / s.num_workers for s, rate in rates.items() if s.num_workers), default=0.0
            )
            if not (high and per_worker and least):
                return
            samples = self._attempts.seen[self._alone].samples_per_batch
            # A worker faster than this process was (its thread pool can be slow on a busy
            # machine) says that the model knows too little to rule small numbers out.
            known = samples / per_worker > 0.9 * model.batch_s
            low = max(
                model.fewest_for(samples / least, samples / per_worker) if known else 1,
                1 + max((s.num_workers for s in rates if s.num_workers < high), default=0),
            )
            if low >= high:
                return
            if (yield from self._with_workers((low + high) // 2, "fewer may do")) is None:
                return

    def _search_prefetch(self, alone: Observation) -> Steps[None]:
        rates = self._attempts.rates
        choice = self._choice()
        if not choice.num_workers or alone.variation <= _UNEVEN or self._meets(rates[choice]):
            return
        if self._saturated(choice):
            return  # the workers never wait for room in the queue: a longer one changes nothing
        for prefetch in _DEEPER_PREFETCH:
            if resources.shm_shortage(choice.num_workers, prefetch, alone.batch_bytes) is not None:
                return
            deeper = replace(choice, prefetch_factor=prefetch)
            why = "batches differ in time: a longer queue evens it out"
            if (yield from self._attempts.make(deeper, why)) is None:
                return
            if not (yield from self._pays(choice, deeper)):
                return
            choice = deeper

    def _search_step_threads(self, model: Model, cap: int) -> Steps[None]:
        """Fewer threads for a step that computes on the cores that the workers need.

        The threads of one computation wait for each other, and spin meanwhile: one of them whose
        core a worker has taken keeps all of them waiting.
        """
        best, threads = self._choice(), torch.get_num_threads()
        rates = self._attempts.rates
        beside = _STEP_COMPUTES_BESIDE_DEVICE if device.in_use() else _STEP_COMPUTES
        if threads == 1 or self._step_cores < beside or self._tunable is not None:
            return
        cap = self._attempts.borne(cap) if self._attempts.workers_usable else 0
        if self._meets(rates[best]) or cap == 0:
            return
        base = best if best.num_workers else self._settings(model.knee(cap))
        count = min(cap, base.num_workers)
        left = self._cores - math.ceil(count * model.cpu_share)
        fewer = max(1, min(threads - 1, left))
        settings = [
            replace(base, num_workers=number, step_threads=fewer) for number in range(1, cap + 1)
        ]
        why = "fewer threads for the step leave cores to the workers"
        if (yield from self._attempts.make(settings[count - 1], why)) is None:
            return
        if rates[settings[count - 1]] < rates[best]:
            return

        def better(now: int, then: int) -> Steps[bool]:
            if (yield from self._attempts.make(settings[then], "its neighbour")) is None:
                return False
            return (yield from self._pays(settings[now], settings[then]))

        yield from climb(cap, count - 1, better, reach=1)
        yield from self._confirm(best)

    def _search_options(self, tunable: Tunable) -> Steps[None]:
        """The backend's own: one after the other, and the first one's neighbours once more."""
        options = list(tunable.values.items())
        for number, (name, values) in enumerate([*options, *options[: len(options) > 1]]):
            choice = self._choice()
            settings = [_with_option(choice, name, value) for value in values]
            yield from climb(
                len(values),
                values.index(choice.numbers[name]),
                lambda now, then, name=name, settings=settings: self._is_better(  # type: ignore[misc]
                    settings[now], settings[then], name
                ),
                reach=max(1, len(values) // 3) if number < len(options) else 1,
            )
        yield from self._confirm(self._given)

    def _confirm(self, against: Settings) -> Steps[None]:
        """What is chosen, and ``against``, once more: one lucky trial must not decide."""
        sure: set[Settings] = set()
        while (best := self._choice()) not in {*sure, against}:
            for settings in (best, against):
                if settings in sure or settings not in self._attempts.rates:
                    continue
                if not (yield from self._attempts.again(settings, "again: to be sure")):
                    return
                sure.add(settings)

    def _is_better(self, now: Settings, then: Settings, option: str) -> Steps[bool]:
        """Whether ``then``, with another number for ``option``, is the better choice."""
        rates, smaller = self._attempts.rates, then.size < now.size
        if not smaller and (self._meets(rates[now]) or self._saturated(now)):
            return False
        if then not in rates:
            why = f"less {option} may do" if smaller else f"more {option} may be faster"
            if (yield from self._attempts.make(then, why)) is None:
                return False
        if smaller:
            return rates[then] >= enough(rates, self._need)
        return (yield from self._pays(now, then))

    def _search_pinning(self) -> Steps[None]:
        """With CUDA: the chosen setting both ways, each batch copied to the device."""
        choice = self._choice()
        if not self._has_cuda or self._tunable is not None or choice.num_workers == 0:
            return  # without workers pinning is a copy more in the loop itself
        rates = []
        for pinned in (choice.pin_memory, not choice.pin_memory):
            why = "pinned, with the copy to the device" if pinned else "the same, not pinned"
            pinning = replace(choice, pin_memory=pinned)
            seen = yield from self._attempts.make(pinning, why, compare=False)
            if seen is None:
                return
            rates.append(seen.samples_per_second.estimate)
        if rates[1] > rates[0] * (1 + WORTH):
            self._pin_choice = not choice.pin_memory
            self._pin_gain = rates[1] / rates[0]

    def _pays(self, now: Settings, more: Settings) -> Steps[bool]:
        """Whether ``more`` is worth it; each is tried once more where a first look left it open."""
        rates = self._attempts.rates
        if rates[more] >= rates[now] * (1 + WORTH):
            return True
        if self._attempts.seen[more].samples_per_second.high < rates[now] * (1 + WORTH):
            return False
        for settings in (now, more):
            why = "again: too uneven to tell them apart at once"
            if not (yield from self._attempts.again(settings, why)):
                return False
        return rates[more] >= rates[now] * (1 + WORTH)

    def _with_workers(self, count: int, why: str) -> Steps[float | None]:
        settings = self._settings(count)
        if settings not in self._attempts.rates:
            yield from self._attempts.make(settings, why)
        return self._attempts.rates.get(settings)

    def _settings(self, count: int) -> Settings:
        return Settings(count, self._prefetch, self._pinned, self._backend)

    def _saturated(self, settings: Settings) -> bool:
        seen = self._attempts.seen[settings]
        return seen.cpu_per_batch >= _SATURATED * self._cores * seen.seconds_per_batch.estimate

    def _meets(self, rate: float) -> bool:
        return rate >= self._need.rate

    def _choice(self) -> Settings:
        return choose(self._attempts.rates, self._need, self._alone)

    def _best_for_auto(self) -> Settings:
        rates = self._attempts.rates
        kept = {one: rate for one, rate in rates.items() if one.step_threads is None}
        return choose(kept, self._need, self._alone)

    def _worth_it(self, choice: Settings, rate: float) -> bool | None:
        now = self._attempts.rates.get(self._given)
        if choice == self._given:
            return False
        return None if now is None else rate > now * (1 + WORTH)

    def _batch_bytes(self) -> int:
        return max((seen.batch_bytes for seen in self._attempts.seen.values()), default=0)

    def _remember(self) -> Path | None:
        """The choice, or the best one that leaves the step's threads as they are.

        "auto" is a loader's, which must not change the threads of the whole process.
        """
        loader, attempts = self._loader, self._attempts
        best = self._best_for_auto()
        choice, seen = replace(best, pin_memory=self._pin_choice), attempts.seen[best]
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
            pin_memory=choice.pin_memory,
            samples_per_second=seen.samples_per_second.estimate,
            batch_bytes=self._batch_bytes(),
            memory_per_worker=seen.memory_per_worker,
            options=choice.numbers or None,
        )
        return learned.remember(key, found)

    def _warn(self, *texts: str | None) -> None:
        said = [text for text in texts if text is not None]
        self._attempts.notes.extend(said)
        if said:
            # Past this, _search_settings, run and tuning_steps, and driven and tune or what runs a
            # script's loop: the line that asked for it.
            warnings.warn(said[0], CapacityWarning, stacklevel=7)

    def _announce(self, doing: str) -> None:
        if self._progress is not None:
            seconds = self._attempts.seconds
            self._progress(Progress(seconds, self._budget_s, doing, self.result()))


def _announcing(search: Search) -> Callable[[str], None]:
    """Its announcing, without holding it: in a cycle its loader would live on, with its session."""
    method = weakref.WeakMethod(search._announce)

    def announce(doing: str) -> None:
        found = method()
        if found is not None:
            found(doing)

    return announce


def _tunable_of(loader: torch.utils.data.DataLoader[Any]) -> Tunable | None:
    """What may be chosen of its backend's options; None: nothing, or it will not serve anyway."""
    if not isinstance(loader, DataLoader):
        return None
    try:
        return loader._tunable()
    except DataLoadersError:
        return None


def _with_option(settings: Settings, name: str, value: int) -> Settings:
    return replace(settings, backend=replace(settings.backend, **{name: value}))  # type: ignore[type-var]
