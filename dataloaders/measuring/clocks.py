"""Time blocks of steps on the host's clock, or on those of devices that run behind the host.

    warm-up ── mark() ── n steps ── mark() ── wait() ── seconds(first, last)
               a point on the clock's time line; making one waits for nothing

A step on a device returns before its work is done, and a training loop loads during that work. A
loop that waited for the device before each block would measure a stall that training does not have.
So marks are events on the device's streams, and `wait` comes after the last one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from dataloaders.machine.facts import accelerator_in_use

_CYCLES_PER_S = 2.5e9  # no GPU's clock is faster


class Clock(Protocol):
    """The methods that the check and tuning need of a clock.

    A device's clock may also have ``delay(seconds)``, which gives the device that much work without
    waiting for it; and the methods of `HostTime`, if the host's time is simulated as well.
    """

    def mark(self) -> Any:
        """Return the point at which all work queued so far ends; do not wait for it."""

    def seconds(self, first: Any, last: Any) -> float:
        """Return the seconds between two marks; called only after `wait`."""

    def wait(self) -> None:
        """Return when all work queued so far is done."""


class HostTime:
    """The host's time, for budgets, deadlines and waits for batches."""

    def now(self) -> float:
        """Return seconds since a fixed moment."""
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        """Return ``seconds`` later."""
        time.sleep(seconds)

    def held_up(self) -> tuple[float, float]:
        """Return seconds that this thread waited for a core, and CPU seconds of other processes.

        Between two calls, other processes have held this one up for at most the smaller increase.
        Zeros on systems that do not report this; Linux does.
        """
        try:
            waited = int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
            with open("/proc/stat") as file:
                user, nice, system, _, _, *interrupts = map(int, file.readline().split()[1:8])
        except (OSError, ValueError, IndexError):
            return 0.0, 0.0
        busy = (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")
        return waited, busy - time.process_time()


class HostClock(HostTime):
    """The clock of a step whose work is done when it returns."""

    def mark(self) -> float:
        """Return the time now, in seconds."""
        return self.now()

    def seconds(self, first: float, last: float) -> float:
        """Return ``last - first``."""
        return last - first

    def wait(self) -> None:
        """Return at once: a step has done its work when it returns."""


class DeviceClock(HostTime):
    """The clock of accelerators: an event on the current stream of each device in use.

    With several devices, the time between two marks is the longest of theirs.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = tuple(devices)

    def mark(self) -> list[torch.Event]:
        """Record an event on each device's current stream and return the events."""
        events = []
        for device in self._devices:
            event = torch.Event(device, enable_timing=True)
            event.record(torch.accelerator.current_stream(device))
            events.append(event)
        return events

    def seconds(self, first: list[torch.Event], last: list[torch.Event]) -> float:
        """Return the seconds between two marks on the device where they are furthest apart."""
        return max(a.elapsed_time(b) for a, b in zip(first, last, strict=True)) / 1e3

    def wait(self) -> None:
        """Return when every device is idle."""
        for device in self._devices:
            torch.accelerator.synchronize(device)

    def delay(self, seconds: float) -> None:
        """Keep the current stream of each CUDA device busy for at least ``seconds``."""
        for device in self._devices:
            if device.type == "cuda":
                with torch.cuda.device(device):
                    torch.cuda._sleep(int(seconds * _CYCLES_PER_S))  # type: ignore[no-untyped-call]


def clock_of(devices: Sequence[torch.device]) -> Clock:
    """Return the clock for a step on ``devices`` other than the CPU; the host's without any."""
    return DeviceClock(devices) if devices else HostClock()


def clock_in_use() -> Clock:
    """Return the clock of the devices on which this process has tensors, else the host's."""
    kind = accelerator_in_use()
    if kind is None:
        return HostClock()
    current, count = torch.accelerator.current_device_index(), torch.accelerator.device_count()
    used = [n for n in range(count) if n == current or torch.accelerator.memory_allocated(n)]
    return clock_of([torch.device(kind.type, index) for index in used])


def cpu_seconds(processes: Iterable[int]) -> float:
    """Return the CPU seconds that processes with these ids have used; 0 if not known."""
    try:
        # The id of a process's clock, computed as by clock_getcpuclockid(3) on Linux.
        return sum(time.clock_gettime(~pid << 3 | 2) for pid in processes)
    except (AttributeError, OSError):
        return 0.0


def host_time_of(clock: Any) -> HostTime:
    """Return the host's time for ``clock``: its own if it has one."""
    if hasattr(clock, "now") and hasattr(clock, "sleep"):
        return clock  # type: ignore[no-any-return]
    return HostTime()
