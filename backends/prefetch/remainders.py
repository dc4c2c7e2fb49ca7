"""Decide which part of a loader's work the prefetch thread does.

a Remainder given as tail= ────────────────────────────────────┐
tail wanted ──> proved once on samples of this loader ──> tail ─┴──> Remainder
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch

from dataloaders.backend import Backend, Remainder, Specification
from dataloaders.replaying.tail import DeviceTail, device_tail

if TYPE_CHECKING:
    from . import Prefetch


def remainder_of(
    options: Prefetch, inner: Backend, loader: Specification, device: torch.device | None
) -> Remainder | str | None:
    """Return what is left to the prefetch thread, or why there is no tail.

    None if no tail is wanted: by default on the CPU, where it would only move work from the workers
    to this process. The first call reads samples.
    """
    if isinstance(options.tail, Remainder):
        return options.tail
    on_cpu = device is None or device.type == "cpu"
    if options.tail is False or (options.tail is None and on_cpu and not options.shapes_images):
        return None
    puts_off, records = _leaves(inner)
    if not (records or puts_off):
        return f"{inner.name} makes whole batches itself"
    if not puts_off:
        return device_tail(loader, options.dtype, options.memory_format)
    description = f"where {inner.name} makes whole batches: ToTensor, Normalize once a batch"
    return DeviceTail(options.dtype, options.memory_format, description)


def leaving_tail(inner: Backend) -> Any:
    """Return ``inner``, made to leave the tail of its samples to prefetch."""
    if _leaves(inner)[0]:
        return replace(inner, puts_off=True)  # type: ignore[type-var]
    return replace(inner, view=DeviceTail.recorded)  # type: ignore[type-var]


def _leaves(inner: Backend) -> tuple[bool, bool]:
    """Return in which ways ``inner`` can leave the tail.

    It yields bytes and the steps that are left, as h5; or it iterates a view of the loader whose
    workers record the tail, as stock.
    """
    options = {field.name for field in fields(inner)}  # type: ignore[arg-type]
    return "puts_off" in options, "view" in options and inner.view is None  # type: ignore[attr-defined]
