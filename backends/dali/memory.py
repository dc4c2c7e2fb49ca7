"""Predict what a loader's batches take on their device at most.

the first image's size ──decoded whole──> RUNS batches inside DALI ─┐
                       ──the chain──────> finished batches ─────────┴──> bytes
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dataloaders.transforms.actions import SampleError

from .job import Job
from .line import RUNS
from .sources import Source

__all__ = ["BatchMemory", "batch_memory"]

_BYTES = {"bytes": 1, "ints": 8, "floats": 4}


@dataclass(frozen=True)
class BatchMemory:
    """Bytes on the device, if all images are as large as the first one.

    Attributes:
        finished: bytes of one delivered batch.
        inside: bytes of the batches inside DALI: decoded whole, and processed.
        waiting: bytes of finished batches that the loop has not taken yet.
    """

    finished: int
    inside: int
    waiting: int


def batch_memory(job: Job) -> BatchMemory | None:
    """Return what the batches of ``job`` take; None if that is not known before images are made."""
    source = job.source
    if not isinstance(source, Source) or source.first_size is None:
        return None
    height, width = source.first_size
    try:
        _, sizes = job.work.chain.draw(
            np.zeros((1, 4), np.uint32),
            [height],
            [width],
            source.channels,
            source.form == "bytes",
        )
    except SampleError:  # it is raised when the image is requested
        return None
    pixels = int(sizes.height[0] * sizes.width[0] * sizes.channels[0])
    finished = job.batch_size * pixels * _BYTES[job.work.form]
    decoded = job.batch_size * height * width * source.channels
    return BatchMemory(finished, RUNS * (decoded + job.batch_size * pixels), job.depth * finished)
