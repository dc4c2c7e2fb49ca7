"""What a loader's batches take on their device at most, told beforehand.

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
        finished: of one batch, as it is delivered.
        inside: of the batches inside DALI: decoded whole, and what is made of them.
        waiting: of finished ones that the loop has not taken yet.
    """

    finished: int
    inside: int
    waiting: int


def batch_memory(job: Job) -> BatchMemory | None:
    """What the batches of ``job`` take; None if that is not known before its images are made."""
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
    except SampleError:  # it is raised where the image is asked for
        return None
    pixels = int(sizes.height[0] * sizes.width[0] * sizes.channels[0])
    finished = job.batch_size * pixels * _BYTES[job.work.form]
    decoded = job.batch_size * height * width * source.channels
    return BatchMemory(finished, RUNS * (decoded + job.batch_size * pixels), job.depth * finished)
