"""Run any other backend ahead of the step, and copy its batches on a stream of their own.

inner backend ──> prefetch thread ──> pinned memory ──> side stream ──> the step
                  (or the loop's own thread, where the user's own Python makes the batches)

session.py   what lives across epochs            device.py      the few calls of CUDA or XPU
epoch.py     what a loop iterates                remainders.py  normalisation after the copy
thread.py    the thread, and one epoch of it     transfer.py    copies, events, finished batches
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch

from dataloaders import registry
from dataloaders.backend import Backend, Remainder, Session, Specification, check_images
from dataloaders.errors import BackendUnavailable, DataLoadersError, OptionError
from dataloaders.plan import Plan, Stage
from dataloaders.specification import check_device, device_of

from .device import Device, has_streams
from .remainders import divided
from .session import PrefetchSession
from .transfer import StreamTransfer, Transfer

__all__ = ["Prefetch"]


@dataclass(frozen=True)
class Prefetch(Backend):
    """Deliver the batches of ``inner`` on the device before the step asks for them.

    The batches are those of ``inner``, in its order, any nesting of tensors; what is not a tensor
    passes through. A thread takes them, at most ``ahead`` at a time, and copies them on a stream
    beside the step's. The step's stream waits for its own batch and for no other. A batch is safe
    to keep for ever. Without a device there is nothing to copy, and batches are only taken ahead.

    Where the user's own Python makes the batches in this process (``num_workers=0`` with anything
    but tensors in memory), it runs on the loop's thread: on another one its random numbers would
    mix with the step's. Then only the copy overlaps with the device's earlier work.

    Attributes:
        inner: a backend that delivers in host memory, or its name.
        ahead: batches that are taken and copied before they are asked for. At most one more is on
            the device, beside the one in use.
        device: where batches are delivered; None: on the loader's ``device``, else on the current
            CUDA device at ``iter()``, else on the CPU.
        pin_memory: whether pageable batches are copied into page-locked memory first, from which
            the device copies beside the step. If memory cannot be locked, a warning says so and
            pageable memory is used.
        tail: whether torchvision's ToTensor (or ToDtype) and Normalize, where they end a sample,
            run on the device after the copy, once a batch, so that bytes are copied. Only if
            samples of this dataset prove that batches stay the same to the bit; `explain` says why
            not. None: on a device, not on the CPU. See docs/prefetch.md.
        dtype: a float dtype for those images, such as ``torch.bfloat16``; each value is rounded
            to it once. None: the dataset's own.
        memory_format: ``torch.channels_last`` or ``torch.contiguous_format`` for those images.

    Raises:
        OptionError: an option has a value that it cannot take.
    """

    inner: Backend | str = "stock"
    ahead: int = 2
    device: torch.device | str | int | None = None
    pin_memory: bool = True
    tail: bool | Remainder | None = None
    dtype: torch.dtype | None = None
    memory_format: torch.memory_format = torch.preserve_format

    name: ClassVar[str] = "prefetch"
    delivers: ClassVar[Literal["host", "device"]] = "device"

    def __post_init__(self) -> None:
        if isinstance(self.ahead, bool) or not isinstance(self.ahead, int) or self.ahead < 1:
            raise OptionError(
                f"Prefetch(ahead={self.ahead!r}): must be an int of at least 1; 2 is enough unless "
                "batches take very different times to make"
            )
        if not isinstance(self.pin_memory, bool):
            raise OptionError(f"Prefetch(pin_memory={self.pin_memory!r}): must be True or False")
        check_device(self.device, f"Prefetch(device={self.device!r})")
        check_images(self)
        if self.tail is False and self.shapes_images:
            raise OptionError(
                "Prefetch(tail=False) with dtype= or memory_format=: only the tail makes images of "
                "another dtype or layout; leave out tail=False"
            )
        if isinstance(self.inner, Backend):
            self._check(self.inner)
        elif not isinstance(self.inner, str):
            raise OptionError(
                f"Prefetch(inner={self.inner!r}): must be a backend such as Stock(), or its name"
            )

    @property
    def shapes_images(self) -> bool:
        """Whether images are asked for in another dtype or layout than the dataset's own."""
        return self.dtype is not None or self.memory_format is not torch.preserve_format

    def explain(self, loader: Specification) -> Plan:
        """Return the inner backend's plan, then who takes its batches and how they are copied."""
        try:
            inner = self._inner()
            plan = inner.explain(loader)
            device = device_of(loader, self.device)
            left = None if plan.obstacle else divided(self, inner, loader, device)[1]
        except DataLoadersError as error:
            return Plan(self.name, obstacle=str(error))
        except Exception as error:  # explaining must not fail, whatever the loader holds
            return Plan(self.name, obstacle=f"this loader could not be read: {error!r}")
        if plan.obstacle is not None:
            return replace(plan, backend=self.name)
        stages = (*plan.stages, self._transfer_stage(device))
        notes = (*plan.notes, self._note(loader, inner, device))
        if isinstance(left, Remainder):
            stages = (*stages, Stage("normalise", str(device), left.description))
        elif left is not None:
            if self.shapes_images:
                return Plan(self.name, obstacle=f"dtype= or memory_format=: {left}")
            notes = (*notes, f"images are normalised before the copy: {left}")
        return Plan(self.name, stages, str(device), notes=notes)

    def open(self, loader: Specification) -> Session:
        """Return a session whose stream, thread and buffers are made at the first epoch."""
        plan = self.explain(loader)
        if plan.obstacle is not None:
            raise BackendUnavailable(str(plan))
        return PrefetchSession(self, self._inner(), loader)

    def transfer(self, device: torch.device) -> Transfer:
        """Return a new way to ``device``."""
        if not has_streams(device):
            return Transfer(device, self.ahead)
        return StreamTransfer(Device(device), ahead=self.ahead, pins=self.pin_memory)

    def changes(self, loader: Specification, device: torch.device) -> dict[str, Any]:
        """Return the attributes of the loader to replace for the inner backend."""
        changes: dict[str, Any] = {}
        if loader.num_workers > 0 and loader.prefetch_factor:  # torch refuses 0
            # The workers must have at least ``ahead`` batches to make.
            needed = -(-self.ahead // loader.num_workers)
            changes["prefetch_factor"] = max(operator.index(loader.prefetch_factor), needed)
        if has_streams(device):
            changes["pin_memory"] = False  # the transfer pins what it copies
        return changes

    def _inner(self) -> Backend:
        inner = self.inner if isinstance(self.inner, Backend) else registry.load(self.inner)()
        self._check(inner)
        return inner

    def _check(self, inner: Backend) -> None:
        if inner.delivers != "host":
            raise OptionError(
                f"Prefetch(inner={inner.name!r}): that backend delivers on the device itself; "
                f"use backend={inner.name!r} alone"
            )

    def _transfer_stage(self, device: torch.device) -> Stage:
        if device.type == "cpu":
            return Stage("transfer", "nowhere", "nothing to copy: batches are wanted on the CPU")
        if not has_streams(device):
            return Stage("transfer", "this process", f"copied to {device} as they are asked for")
        memory = "pinned" if self.pin_memory else "pageable"
        return Stage("transfer", str(device), f"copied on a side stream, from {memory} memory")

    def _note(self, loader: Specification, inner: Backend, device: torch.device) -> str:
        if inner.takes_ahead(loader):
            return f"a thread takes up to {self.ahead} batches ahead of the step"
        overlap = "only the copy overlaps" if has_streams(device) else "nothing overlaps"
        return (
            f"num_workers=0: the dataset's own code runs on the loop's thread, so {overlap} with "
            "the step; with num_workers=1 or more batches are made ahead"
        )
