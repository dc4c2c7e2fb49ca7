"""A device that is played: it runs behind the host, as CUDA does, and its durations are known.

    host    launch launch launch │ launch …            blocks where the launch queue is full
    stream         kernel─────── kernel─────── …       in order; streams run beside each other
    engine         copy── copy── …                     one at a time; pageable: the host waits

On `RealTime` the host waits by the clock, which is what the bench examines the check with. On
`VirtualTime` a wait only moves the time on: a loop of minutes is computed in milliseconds and to
the last digit. Truths come from there, and so do the tests.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import DataLoader

from bench.check.known_work import BATCH, Kind, Rows, as_array, burn, wait
from dataloaders.measuring.clocks import HostClock, HostTime


class RealTime:
    """The host's real time."""

    now = staticmethod(time.perf_counter)
    sleep = staticmethod(wait)
    held_up = HostTime().held_up

    def burn(self, kind: Kind, seconds: float) -> None:
        """Spend ``seconds`` on this thread in the named way."""
        burn(kind, seconds)


class VirtualTime:
    """A time that only waiting moves on.

    Args:
        neighbour: another process that takes a share of the core at random: at work or away for
            so many seconds (low, high) each, and the share; None: no other process.
        seed: of that.
    """

    def __init__(
        self,
        neighbour: tuple[tuple[float, float], tuple[float, float], float] | None = None,
        seed: int = 0,
    ) -> None:
        self._now = 0.0
        self._neighbour = neighbour
        self._draw = random.Random(seed).uniform
        self._takes = False
        self._until = self._draw(*neighbour[1]) if neighbour else math.inf
        self._held = 0.0

    def now(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += max(0.0, seconds)

    def burn(self, kind: Kind, seconds: float) -> None:
        began, left = self._now, seconds
        while self._neighbour:
            at_work, away, share = self._neighbour
            while self._until <= self._now:
                self._takes = not self._takes
                self._until += self._draw(*(at_work if self._takes else away))
            rate = 1 - share * self._takes
            done = min(left, (self._until - self._now) * rate)
            self._now += done / rate
            left -= done
            if left <= 0:
                break
        else:
            self._now += seconds
        self._held += self._now - began - seconds

    def held_up(self) -> tuple[float, float]:
        return self._held, self._held


Time = RealTime | VirtualTime


class HostOn(HostClock):
    """The host's clock on a played time, for steps that are over when they return."""

    def __init__(self, time: Time) -> None:
        self.now = time.now  # type: ignore[method-assign]
        self.sleep = time.sleep  # type: ignore[method-assign]
        self.held_up = time.held_up  # type: ignore[method-assign]


class Stream:
    """Work in order; ``ready`` is when all that was given to it so far is done."""

    def __init__(self) -> None:
        self.ready = 0.0


class Device:
    """Streams, a copy engine and a launch queue of bounded length.

    Args:
        time: the host's.
        queue: the most launches that wait for the device; the next one blocks the host.
        bytes_per_s: of a copy from the host.
    """

    def __init__(self, time: Time, *, queue: int = 1024, bytes_per_s: float = 10e9) -> None:
        self.time = time
        self.current = Stream()
        self._streams = [self.current]
        self._engine_ready = 0.0
        self._queue = queue
        self._bytes_per_s = bytes_per_s
        self._ends: list[float] = []  # of launches under way, a heap

    def holds(self, batch: Any) -> bool:
        """Return whether a batch needs no copy."""
        return bool(batch.is_meta)

    def stream(self) -> Stream:
        """Return a new stream that runs beside the others."""
        self._streams.append(Stream())
        return self._streams[-1]

    def launch(self, seconds: float, stream: Stream | None = None) -> None:
        """Give a kernel of ``seconds`` to ``stream``; wait only while the queue is full."""
        stream = stream or self.current
        self._admit()
        stream.ready = max(self.time.now(), stream.ready) + seconds
        heapq.heappush(self._ends, stream.ready)

    def copy(self, nbytes: int, *, pinned: bool, stream: Stream | None = None) -> None:
        """Copy from the host: beside other work if ``pinned``, else the host waits for its end."""
        stream = stream or self.current
        self._admit()
        start = max(self.time.now(), stream.ready, self._engine_ready)
        stream.ready = self._engine_ready = start + nbytes / self._bytes_per_s
        heapq.heappush(self._ends, stream.ready)
        if not pinned:
            self._until(stream.ready)

    def record(self, stream: Stream | None = None) -> float:
        """Return an event: when all that ``stream`` was given so far is done."""
        return max(self.time.now(), (stream or self.current).ready)

    def wait_for(self, event: float, stream: Stream | None = None) -> None:
        """Make ``stream`` start later work after ``event``."""
        stream = stream or self.current
        stream.ready = max(stream.ready, event)

    def synchronize(self) -> None:
        """Make the host wait for all streams."""
        self._until(max(stream.ready for stream in self._streams))

    def _admit(self) -> None:
        while self._ends and self._ends[0] <= self.time.now():
            heapq.heappop(self._ends)
        while len(self._ends) >= self._queue:
            self._until(heapq.heappop(self._ends))

    def _until(self, moment: float) -> None:
        left = moment - self.time.now()
        if left > 0:
            self.time.sleep(left)


class PlayedClock:
    """The device's own time line, as events on the current stream show it, and its host's time."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.now = device.time.now
        self.sleep = device.time.sleep
        self.held_up = device.time.held_up

    def mark(self) -> float:
        return self._device.record()

    def seconds(self, first: float, last: float) -> float:
        return last - first

    def wait(self) -> None:
        self._device.synchronize()

    def delay(self, seconds: float) -> None:
        self._device.launch(seconds)


class PlayedLoader:
    """torch's loader on a played time: batches made by workers, or between two steps.

    The rules are those of `torch.utils.data.DataLoader` (2.11 to 2.15). An epoch starts with idle
    workers; ``workers * prefetch`` batches are ordered at once, then one for each that is taken.
    Batch ``k`` goes to worker ``k % workers``; with ``in_order=False`` to the next worker in turn
    with fewer than ``prefetch`` batches under way, and whichever is ready first is taken.
    """

    def __init__(
        self,
        time: Time,
        loads: Sequence[float],
        *,
        workers: int = 0,
        prefetch: int = 2,
        batches: int | None = None,
        made: Sequence[Any] = (torch.zeros(4),),
        take_s: float = 0.0,
        in_order: bool = True,
    ) -> None:
        self.in_order = in_order
        self.time = time
        self.loads = tuple(loads)
        self.num_workers = workers
        self.prefetch_factor = prefetch if workers else None
        self.dataset = self
        self.batches = batches
        self.made = list(made)
        self.take_s = take_s
        self.working = 0.0
        """Until when some worker is at work."""

    def __len__(self) -> int:
        if self.batches is None:
            raise TypeError("this loader has no length")
        return self.batches

    def __iter__(self) -> Iterator[Any]:
        return _Epoch(self) if self.num_workers else self._serial()

    def _serial(self) -> Iterator[Any]:
        for number in itertools.count() if self.batches is None else range(self.batches):
            self.time.sleep(self.loads[number % len(self.loads)] + self.take_s)
            yield self.made[number % len(self.made)]


class _Epoch:
    """One epoch from played workers."""

    def __init__(self, loader: PlayedLoader) -> None:
        self._loader = loader
        self._time = loader.time
        self._free_at = [self._time.now()] * loader.num_workers
        self._given = [0] * loader.num_workers
        self._turn = itertools.cycle(range(loader.num_workers))
        self._ready: dict[int, tuple[float, int]] = {}  # number -> when, and its worker
        self._sent = self._taken = 0
        for _ in range(loader.num_workers * (loader.prefetch_factor or 2)):
            self._send()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        loader, ready = self._loader, self._ready
        if self._taken == loader.batches:
            raise StopIteration
        number = self._taken if loader.in_order else min(ready, key=ready.__getitem__)
        at, worker = ready.pop(number)
        self._time.sleep(max(0.0, at - self._time.now()) + loader.take_s)
        self._given[worker] -= 1
        self._taken += 1
        self._send()
        return loader.made[number % len(loader.made)]

    def counts(self) -> tuple[int, int]:
        """(ready, outstanding), as `dataloaders.measuring.queues` asks for them."""
        now = self._time.now()
        return sum(at <= now for at, _ in self._ready.values()), len(self._ready)

    def _send(self) -> None:
        loader, most = self._loader, self._loader.prefetch_factor or 2
        turns = itertools.islice(self._turn, loader.num_workers)
        worker = next((one for one in turns if loader.in_order or self._given[one] < most), None)
        if self._sent == loader.batches or worker is None:
            return
        load = loader.loads[self._sent % len(loader.loads)]
        self._free_at[worker] = max(self._free_at[worker], self._time.now()) + load
        self._ready[self._sent] = self._free_at[worker], worker
        self._given[worker] += 1
        loader.working = max(self._free_at)
        self._sent += 1


@dataclass(frozen=True)
class Overhead:
    """Seconds that torch itself adds to each batch: to take it, and where it is made."""

    take: float = 0.0
    make: float = 0.0


def seconds_per_batch(
    loads: Sequence[float],
    steps: Sequence[float],
    *,
    workers: int = 0,
    prefetch: int = 2,
    in_order: bool = True,
    batches: int | None = None,
    overhead: Overhead = Overhead(),
) -> float:
    """Return the mean seconds of a batch of a plain loop in the long run, on a virtual time.

    ``steps`` go on from epoch to epoch; the rest is `PlayedLoader`'s. Of an epoch without end the
    start is left out.
    """
    time, seconds = VirtualTime(), itertools.cycle(steps)
    loader = PlayedLoader(
        time,
        [load + overhead.make for load in loads],
        workers=workers,
        prefetch=prefetch,
        batches=batches,
        take_s=overhead.take,
        in_order=in_order,
    )
    skipped, counted = (
        20 * workers * prefetch + 2 * len(loads),
        20 * max(len(loads), len(steps), 50),
    )
    if batches is not None:
        skipped, counted = 0, 20 * len(steps) * batches
    epochs = itertools.chain.from_iterable(itertools.repeat(loader))
    began = 0.0
    for number, _ in enumerate(itertools.islice(epochs, skipped + counted), 1):
        time.sleep(next(seconds))
        began = time.now() if number == skipped else began
    return (time.now() - began) / counted


@dataclass(frozen=True)
class Loop:
    """A training loop on a played device, whose every duration is known.

    Attributes:
        loads: seconds to make batch ``k``: ``loads[k % len(loads)]``.
        kernels: seconds of each kernel of step ``k``: ``kernels[k % len(kernels)]``.
        launches: kernels of a step.
        host_s: seconds of the host before each launch, and how they are spent.
        workers, prefetch: as torch's loader has them.
        queue: the length of the device's launch queue.
        nbytes: of a batch, copied by the step; 0: the step needs no copy.
        pinned: whether the copy runs beside the host.
        bytes_per_s: of the copy.
        ahead: batches that are copied ahead on a stream of their own, in place of the step.
        item_every: the step waits for the device at every so many batches; 0: never.
        side_s: seconds of a kernel on a second stream that each step starts and joins.
        slowed: how many times longer the host takes while workers are at work.
        optimizer_every: a real optimizer steps after every so many batches; 0: none does.
    """

    loads: tuple[float, ...]
    kernels: tuple[float, ...]
    launches: int = 1
    host_s: float = 0.0
    host_kind: Kind = "busy"
    load_kind: Kind = "wait"
    workers: int = 0
    prefetch: int = 2
    queue: int = 1024
    nbytes: int = 0
    pinned: bool = True
    bytes_per_s: float = 10e9
    ahead: int = 0
    item_every: int = 0
    side_s: float = 0.0
    slowed: float = 1.0
    optimizer_every: int = 0

    def made(self, time: Time, inner: Any = None) -> tuple[Any, PlayedStep]:
        """Return a loader, which may be over ``inner``, and a step; in real time it is torch's."""
        device = Device(time, queue=self.queue, bytes_per_s=self.bytes_per_s)
        if isinstance(time, VirtualTime):
            inner = PlayedLoader(time, self.loads, workers=self.workers, prefetch=self.prefetch)
        elif inner is None:
            inner = self.loader()
        step = PlayedStep(self, device, inner)
        return (CopiedAhead(inner, self, device) if self.ahead else inner), step

    def loader(self, *, pin_memory: bool = False) -> DataLoader[Any]:
        """Return torch's own loader, of batches that take their time."""
        return DataLoader(
            Rows(self.loads, self.load_kind, batches=1_000_000),
            BATCH,
            num_workers=self.workers,
            collate_fn=as_array if self.workers and not self.nbytes else None,
            pin_memory=pin_memory,
            prefetch_factor=self.prefetch if self.workers else None,
        )

    def truth(self, batches: int = 2250, *, take_s: float = 0.0, make_s: float = 0.0) -> float:
        """Return real / synthetic in the long run, computed on a virtual time.

        ``take_s`` and ``make_s`` are torch's own cost a batch, in the loop and in a worker.
        """
        real = replace(self, loads=tuple(load + make_s for load in self.loads))
        return real._plain(batches, take_s=take_s) / self._plain(batches, resident=True)

    def _plain(self, batches: int, *, resident: bool = False, take_s: float = 0.0) -> float:
        """Seconds a batch of a plain loop, its first third left out."""
        time = VirtualTime()
        loader, step = self.made(time)
        step.loader.take_s = take_s
        held = torch.zeros(4, device="meta")
        source = itertools.repeat(held) if resident else iter(loader)
        skipped, first = batches // 3, 0.0
        for number, batch in enumerate(itertools.islice(source, batches)):
            if number == skipped:
                first = step.device.record()
            step(batch)
        return (step.device.record() - first) / (batches - skipped)


class PlayedStep:
    """A training step on a played device, or what has its methods; ``clock`` is the device's."""

    def __init__(self, loop: Loop, device: Any, loader: Any) -> None:
        self.device = device
        self.clock = PlayedClock(device)
        self.loader = loader
        self._loop = loop
        self._side = device.stream()
        self._kernels = itertools.cycle(loop.kernels)
        self._calls = 0
        self._optimizer = None
        if loop.optimizer_every:
            self._optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])

    def __call__(self, batch: Any) -> None:
        loop, device = self._loop, self.device
        if loop.nbytes and not device.holds(batch):
            device.copy(loop.nbytes, pinned=loop.pinned)
        if loop.side_s:
            device.wait_for(device.record(), self._side)
            device.launch(loop.side_s, self._side)
        host_s = loop.host_s
        if loop.slowed != 1.0 and device.time.now() < getattr(self.loader, "working", 0.0):
            host_s *= loop.slowed
        kernel = next(self._kernels)
        for _ in range(loop.launches):
            if host_s:
                device.time.burn(loop.host_kind, host_s)
            device.launch(kernel)
        if loop.side_s:
            device.wait_for(device.record(self._side))
        self._calls += 1
        if self._optimizer is not None and self._calls % loop.optimizer_every == 0:
            self._optimizer.step()
        if loop.item_every and self._calls % loop.item_every == 0:
            device.synchronize()


class CopiedAhead:
    """A loader whose batches are copied on a stream of their own, ``ahead`` of their use."""

    def __init__(self, inner: Any, loop: Loop, device: Device) -> None:
        self.inner, self.loop, self.device, self.stream = inner, loop, device, device.stream()
        self.num_workers = inner.num_workers
        self.prefetch_factor = inner.prefetch_factor

    def __iter__(self) -> Iterator[Any]:
        return _CopiedEpoch(self)


class _CopiedEpoch:
    def __init__(self, loader: CopiedAhead) -> None:
        self._loader = loader
        self._batches = iter(loader.inner)
        self._copied: list[float] = []
        self.ahead = loader.loop.ahead

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        device, stream = self._loader.device, self._loader.stream
        while len(self._copied) <= self.ahead:
            next(self._batches)
            device.copy(self._loader.loop.nbytes, pinned=True, stream=stream)
            self._copied.append(device.record(stream))
        device.wait_for(self._copied.pop(0))
        return torch.zeros(4, device="meta")

    def counts(self) -> tuple[int, int] | None:
        from dataloaders.measuring.queues import counts_of

        return counts_of(self._batches)
