"""Time the preparation of samples by calls; note the files that they read, and slow samples.

this process               a process started as torch starts a worker of the loader (observing)
observe(loader, Look) ───> dataset[i] x n, collate_fn, pickling for the queue are timed;
                           a thread samples the running call 1,000 times a second;
                 <─ facts  an audit hook notes the files that are opened
"""

from __future__ import annotations

import functools
import os
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from typing import Any

import psutil
from torch.utils.data import IterableDataset

from dataloaders.bottleneck.causes.profile import Profile
from dataloaders.findings.sites import owner_of
from dataloaders.measuring.clocks import HostTime
from dataloaders.observing.opened import files_opened

_FEWEST_BATCHES = 8  # and one more for each worker, which a cold block needs
_SLOW, _SLOW_FROM_S = 3.0, 1e-3  # times the median sample; and seconds
_MOST_SLOW = 5
_SYSTEM = ("/proc/", "/dev/", "/sys/", "/etc/", "/usr/")
PASSING = "passing between processes"


@dataclass(frozen=True)
class Call:
    """Holds the cost of one part of preparation."""

    # A transform's class, "decode", "read", "collate", "passing between processes", "pinning", or
    # a function with its file and line.
    call: str
    seconds_per_sample: float  # of one worker's time
    share: float  # of all preparation, from 0 to 1
    cpu_seconds_per_sample: float | None = None  # of that time; None where it is not known


@dataclass
class Prepared:
    """Holds what was seen of some samples."""

    samples: list[float] = field(default_factory=list)  # seconds of each, in the order of keys
    chosen: int = 0  # how many of the first samples were asked for by index
    keys: list[Any] = field(default_factory=list)  # indices; none for an iterable dataset
    files: list[list[str]] = field(default_factory=list)  # that each sample opened
    shared: list[str] = field(default_factory=list)  # files that were open or mapped all the time
    # (index, file, seconds) of samples that took far longer than most, twice in a row.
    slow: list[tuple[Any, str, float]] = field(default_factory=list)
    cores: float = 1.0  # share of the seconds that needed a core; the rest waits for data
    collate_s: float = 0.0  # of a sample in collation, and in pickling its batch
    pass_s: float = 0.0
    by_call: dict[str, float] = field(default_factory=dict)  # seconds a sample, the dataset's own
    # CPU seconds a sample of these, of collation and of pickling.
    cpu: dict[str, float] = field(default_factory=dict)

    @property
    def usual(self) -> list[float]:
        """Return the seconds of the samples drawn at random; of all if there are none."""
        return self.samples[self.chosen :] or self.samples

    def rows(self, *, passing: bool, pin_s: float, pin_cpu_s: float) -> tuple[Call, ...]:
        """Return the parts of preparation, largest first; pinning a sample takes ``pin_s``."""
        parts, cpu = {**self.by_call, "collate": self.collate_s}, {**self.cpu, "pinning": pin_cpu_s}
        if passing:
            parts[PASSING] = self.pass_s
        if pin_s:
            parts["pinning"] = pin_s
        total = sum(parts.values()) or 1.0
        rows = (
            Call(call, seconds, seconds / total, cpu.get(call))
            for call, seconds in parts.items()
            if seconds
        )
        return tuple(sorted(rows, key=lambda row: -row.seconds_per_sample))


@dataclass(frozen=True)
class Look:
    """Times samples of a dataset; `observe` calls it in a separate process."""

    collate_fn: Callable[[Any], Any]
    batch: int  # samples of one
    whole: bool  # whether collate_fn takes the samples of a batch, and not one sample
    workers: int  # of the loader
    seconds: float  # after which no further sample is begun
    first: list[Any]  # indices to begin with, for at most half of the time
    now: Callable[[], float]  # the clock of samples

    def __call__(self, dataset: Any) -> Prepared:
        """Return what was seen; errors of the dataset are raised."""
        found, now = Prepared(), self.now
        fetches = self._fetches(dataset)
        waiting: list[Any] = []
        collated = spent = computed = 0.0
        usual = 0
        next(fetches)[1]()  # the first sample imports modules and opens files
        until = time.perf_counter() + self.seconds
        opened = files_opened()
        with Profile(Look.__call__) as profile:
            for key, fetch, chosen in fetches:
                opened.clear()
                begin, cpu = now(), _wanted_s()
                profile.watching = not chosen
                try:
                    sample = fetch()
                except StopIteration:  # of an iterable dataset
                    break
                finally:
                    profile.watching = False
                took = now() - begin
                if not chosen:
                    computed += _wanted_s() - cpu
                    spent += took
                    usual += 1
                found.chosen += chosen
                found.samples.append(took)
                found.files.append(_of_data(opened))
                found.keys += [] if key is None else [key]
                waiting.append(sample)
                late = time.perf_counter() > until or spent > self.seconds
                if len(waiting) == self.batch or (late and not collated):
                    collated += len(waiting)
                    self._collate(waiting, found)
                    waiting = []
                if late:
                    break
        found.collate_s /= max(1.0, collated)
        found.pass_s /= max(1.0, collated)
        found.cpu = {call: cpu / max(1.0, collated) for call, cpu in found.cpu.items()}
        looks = sum(profile.seconds.values()) or 1.0
        mean = spent / max(1, usual)
        found.by_call = {call: mean * part / looks for call, part in profile.seconds.items()}
        found.cpu |= {call: mean * part / looks for call, part in profile.cpu.items()}
        if not found.by_call:  # too quick to be sampled, or on a simulated clock
            found.by_call = {"samples": mean}
        found.cores = min(1.0, computed / spent) if spent > 0 else 1.0
        found.shared = _held_open()
        found.slow = self._slow(dataset, found)
        return found

    def _slow(self, dataset: Any, found: Prepared) -> list[tuple[Any, str, float]]:
        """Return the slowest samples that are slow again; once may be the machine's fault."""
        median = statistics.median(found.usual or [0.0])
        named = zip(found.samples, found.keys, found.files, strict=False)
        slow: dict[str, tuple[Any, str, float]] = {}  # by its key as text: a list has no hash
        for seconds, key, files in sorted(named, key=lambda each: -each[0])[:_MOST_SLOW]:
            if seconds > max(_SLOW * median, _SLOW_FROM_S) and repr(key) not in slow:
                begin = self.now()
                self._one(dataset)(key)
                seconds = min(seconds, self.now() - begin)
                if seconds > _SLOW * median:
                    slow[repr(key)] = (key, next(iter(files), ""), seconds)
        return list(slow.values())

    def _one(self, dataset: Any) -> Callable[[Any], Any]:
        """Return the function that makes one sample."""
        bulk = getattr(dataset, "__getitems__", None)
        return dataset.__getitem__ if bulk is None else lambda key: bulk([key])[0]

    @property
    def _count(self) -> int:
        return self.batch * (_FEWEST_BATCHES + self.workers)

    def _fetches(self, dataset: Any) -> Iterator[tuple[Any, Callable[[], Any], bool]]:
        """Yield the index of a sample, the function that makes it, and whether it was asked for."""
        if isinstance(dataset, IterableDataset):
            samples = iter(dataset)
            for _ in range(1 + self._count):
                yield None, lambda: next(samples), False
            return
        one = self._one(dataset)
        own = bool(self.first) and not isinstance(self.first[0], int)  # keys of another kind
        half = time.perf_counter() + self.seconds / 2
        for number, key in enumerate(self.first[:1] + self.first):
            if number < 2 or own or time.perf_counter() < half:
                yield key, functools.partial(one, key), not own
        if own:
            return
        count = len(dataset)
        for key in random.Random(0).sample(range(count), min(count, 1 + self._count)):
            yield key, functools.partial(one, key), False

    def _collate(self, samples: list[Any], found: Prepared) -> None:
        begin, cpu = self.now(), time.thread_time()
        batch = self.collate_fn(samples if self.whole else samples[0])
        done, done_cpu = self.now(), time.thread_time()
        found.collate_s += done - begin
        found.cpu["collate"] = found.cpu.get("collate", 0.0) + done_cpu - cpu
        try:
            ForkingPickler.dumps(batch)
        except Exception:  # torch could not send such a batch either
            return
        found.pass_s += self.now() - done
        found.cpu[PASSING] = found.cpu.get(PASSING, 0.0) + time.thread_time() - done_cpu


def _of_data(files: Iterable[str]) -> list[str]:
    """Return those of the files that are neither code nor the system's."""
    return [path for path in files if os.path.isfile(path) and not _is_code(path)]


def _is_code(path: str) -> bool:
    return (
        owner_of(path) != "user"
        or path.startswith(_SYSTEM)
        or path.endswith((".py", ".pyc"))
        or ".so" in os.path.basename(path)
    )


def _wanted_s() -> float:
    """Return the seconds for which this thread has had a core, or waited for one."""
    return time.thread_time() + HostTime().held_up()[0]


def _held_open() -> list[str]:
    """Return the files that this process has open for reading, or mapped."""
    this = psutil.Process()
    try:
        found = {each.path for each in this.open_files() if each.mode == "r"}
        shared = (each.path for each in this.memory_maps(grouped=False) if "s" in each.perms)
        return sorted(_of_data(found.union(shared)))
    except (psutil.Error, OSError, AttributeError):  # not every system reports it
        return []
