"""Any other backend, run ahead of the step and copied to the device on a stream of its own.

inner backend ──> courier: a thread of ours ──> pinned ring ──> side stream ──> the step
                  (or the loop's own thread, where the user's own Python makes the batches)

session.py   what lives across epochs           staging.py   the ring of pinned buffers
epoch.py     what a loop iterates               transfer.py  copies, events, what may be reused
courier.py   the thread                         cuda.py      the few CUDA calls
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch

from dataloaders import registry
from dataloaders.backend import Backend, Session, Specification
from dataloaders.errors import BackendUnavailable, DataLoadersError, OptionError
from dataloaders.plan import Plan, Stage
from dataloaders.transforms import NoTail

from .cuda import Cuda
from .session import PrefetchSession, device_of
from .tails import tail_of
from .transfer import CudaTransfer, PlainTransfer, Transfer

__all__ = ["Prefetch"]

_FORMATS = (torch.preserve_format, torch.contiguous_format, torch.channels_last)


@dataclass(frozen=True)
class Prefetch(Backend):
    """Batches of ``inner``, on the device before the step asks for them.

    The same batches in the same order as ``inner`` gives, any nesting of tensors; what is not a
    tensor passes through. A thread takes them, at most ``ahead`` at a time, and copies them on a
    CUDA stream beside the step's; the step's stream waits for its own batch and for no other. A
    batch is safe to keep for ever. Without a CUDA device there is nothing to copy, and batches are
    only taken ahead.

    Where the user's own Python makes the batches in this process (``num_workers=0`` with anything
    but tensors in memory), it runs on the loop's thread, since in ours its random numbers would mix
    with the step's; then only the copy overlaps with the device's earlier work.

    Attributes:
        inner: a backend that delivers in host memory, or its name.
        ahead: batches that are taken and copied before they are asked for. On the device are at
            most one more than these beside the one in use.
        device: where batches are delivered; None for the loader's ``device``, else the current
            CUDA device at ``iter()``, else the CPU.
        reuse: deliver in static device buffers, at the same few addresses again and again: a batch
            is valid until ``ahead`` more were taken. For CUDA graphs: one captured graph for each
            address. Needs batches of one shape; a larger one moves its slot.
        pin_memory: whether pageable batches pass through a ring of page-locked buffers; "auto"
            tries both on the first batches and keeps the quicker.
        tail: whether a trailing ToTensor and Normalize of the dataset's torchvision transforms run
            behind the copy, once a batch, so that bytes cross the bus. Only where that is proved,
            on samples of this dataset, to give the dataset's own batches to the bit; `explain`
            says why not. None: on a device, not on the CPU. See docs/transforms.md.
        dtype: a float dtype for those images, such as ``torch.bfloat16``; each value is rounded
            to it once. None: the dataset's own.
        memory_format: ``torch.channels_last`` or ``torch.contiguous_format`` for those images.

    Raises:
        OptionError: an option has a value that it cannot take.
    """

    inner: Backend | str = "stock"
    ahead: int = 2
    device: torch.device | str | int | None = None
    reuse: bool = False
    pin_memory: bool | Literal["auto"] = "auto"
    tail: bool | None = None
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
        if self.pin_memory not in (True, False, "auto"):
            raise OptionError(
                f"Prefetch(pin_memory={self.pin_memory!r}): must be True, False or 'auto'"
            )
        if self.device is not None:
            try:
                torch.device(self.device)
            except (RuntimeError, TypeError) as error:
                raise OptionError(
                    f"Prefetch(device={self.device!r}): must be a torch device such as 'cuda:1' "
                    f"({error})"
                ) from None
        if self.dtype is not None and not getattr(self.dtype, "is_floating_point", False):
            raise OptionError(
                f"Prefetch(dtype={self.dtype!r}): must be a float dtype such as torch.bfloat16"
            )
        if self.memory_format not in _FORMATS:
            raise OptionError(
                f"Prefetch(memory_format={self.memory_format!r}): must be one of "
                f"{', '.join(map(str, _FORMATS))}"
            )
        if self.tail is False and self.shapes_images:
            raise OptionError(
                "Prefetch(tail=False) with dtype= or memory_format=: it is the tail that makes "
                "images of another dtype or layout; leave out tail=False"
            )
        if isinstance(self.inner, Backend):
            self._check(self.inner)
        elif not isinstance(self.inner, str):
            raise OptionError(
                f"Prefetch(inner={self.inner!r}): must be a backend such as Stock(), or its name"
            )

    @property
    def same_samples(self) -> bool:  # type: ignore[override]
        """As the inner backend."""
        return self.inner.same_samples if isinstance(self.inner, Backend) else True

    @property
    def shapes_images(self) -> bool:
        """Whether images are asked for in another dtype or layout than the dataset's own."""
        return self.dtype is not None or self.memory_format is not torch.preserve_format

    def explain(self, loader: Specification) -> Plan:
        """The inner backend's plan, then who takes its batches and how they are copied."""
        try:
            inner = self._inner()
            plan = inner.explain(loader)
            device = device_of(self, loader)
            tail = None if plan.obstacle is not None else tail_of(self, loader, device)
        except DataLoadersError as error:
            return Plan(self.name, obstacle=str(error))
        except Exception as error:  # explaining must not fail, whatever the loader holds
            return Plan(self.name, obstacle=f"this loader could not be read: {error!r}")
        if plan.obstacle is not None:
            return replace(plan, backend=self.name)
        where = str(device or torch.device("cpu"))
        stages = (*plan.stages, self._transfer_stage(device))
        notes = (*plan.notes, *self._notes(loader, inner, device))
        if isinstance(tail, tuple):
            stages = (*stages, Stage("normalise", where, tail[0].describe()))
        elif isinstance(tail, NoTail):
            if self.shapes_images:
                return Plan(self.name, obstacle=f"dtype= or memory_format=: {tail.reason}")
            notes = (*notes, f"images are normalised before the copy: {tail.reason}")
        delivers = plan.delivers if device is None else where
        return Plan(self.name, stages, delivers, notes=notes)

    def open(self, loader: Specification) -> Session:
        """A session whose stream, thread and buffers are made at the first epoch."""
        plan = self.explain(loader)
        if plan.obstacle is not None:
            raise BackendUnavailable(str(plan))
        return PrefetchSession(self, self._inner(), loader)

    def transfer(self, device: torch.device | None) -> Transfer:
        """The way to ``device`` (None: batches stay where they are)."""
        if device is None or device.type != "cuda":
            return PlainTransfer(device, self.ahead)
        pins = None if self.pin_memory == "auto" else bool(self.pin_memory)
        return CudaTransfer(Cuda(device), ahead=self.ahead, reuse=self.reuse, pins=pins)

    def changes(
        self, loader: Specification, device: torch.device | None, inner: Backend
    ) -> dict[str, Any]:
        """What ``inner`` sees otherwise than the loader has it, for ``device``."""
        if device is None or device.type != "cuda":
            return {}
        if loader.num_workers > 0 or not inner.takes_ahead(loader):
            # The ring pins, without a fresh pin for each batch; and the user's own code may give
            # what cannot be pinned, such as tensors on a device.
            return {"pin_memory": False}
        # In this process batches are made in pinned memory at once, and need no ring.
        return {"pin_memory": self.pin_memory is not False}

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

    def _transfer_stage(self, device: torch.device | None) -> Stage:
        if device is None or device.type == "cpu":
            return Stage("transfer", "nowhere", "nothing to copy: batches are wanted on the CPU")
        if device.type != "cuda":
            return Stage("transfer", "this process", f"copied to {device} as they are asked for")
        ways = {
            True: "through a ring of pinned buffers",
            False: "from pageable memory",
            "auto": "pinned or not, as the first batches show",
        }
        how = f"copied on a side stream, {ways[self.pin_memory]}"
        if self.reuse:
            how += f", into static buffers: a batch is valid until {self.ahead} more were taken"
        return Stage("transfer", str(device), how)

    def _notes(
        self, loader: Specification, inner: Backend, device: torch.device | None
    ) -> tuple[str, ...]:
        if inner.takes_ahead(loader):
            between: Any = getattr(inner, "between_epochs", None)
            said = (between(loader),) if callable(between) and loader.num_workers else ()
            return (f"a thread takes up to {self.ahead} batches ahead of the step", *said)
        copied = device is not None and device.type == "cuda"
        beside = "only the copy overlaps with the step" if copied else "nothing overlaps"
        return (
            f"num_workers=0: the dataset's own code runs on the loop's thread, so that {beside}; "
            "with num_workers=1 or more batches are made ahead",
        )
