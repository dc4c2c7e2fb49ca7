"""The dataset's own code draws, on stand-ins for its images; their pixels are made in bulk.

    torch's workers   dataset[i] and collate_fn on stand-ins ──> files, recorded calls, the rest
    prefetch thread   files ──nvImageCodec, or DALI on a GPU──> pixels ──the calls──> the batch

Workers and their order are stock's; the thread, streams and endings are prefetch's. What is
recorded, and how it is replayed, is in `dataloaders.recording` and `dataloaders.replaying`.

replay.py   what the prefetch thread does      decode.py    windows of files, by nvImageCodec
explain.py  one sample's record, as a plan     graph.py     decode, crop, resize, flip on a GPU
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar, Literal

import nvidia.dali  # noqa: F401 - an error here names the command that installs it
import torch

from dataloaders import registry
from dataloaders.backend import Backend, Session, Specification, check_images
from dataloaders.errors import BackendUnavailable, OptionError
from dataloaders.machine.resources import usable_cores
from dataloaders.plan import Plan
from dataloaders.specification import device_of

from .explain import explained, obstacle_of
from .replay import Replayed

__all__ = ["Dali"]

FAST = ("resize",)

_MOST_THREADS = 32
_MOST_BESIDE_A_GPU = 8
"""Each thread of DALI's decoder holds 32 MiB of pinned and device memory for a graph."""


@dataclass(frozen=True)
class Dali(Backend):
    """Batches of any dataset, with the images decoded and transformed in bulk.

    The dataset's own code and transforms run in torch's workers on stand-ins: images that know
    their size, and record what is done to them. So samples, order and random numbers are torch's
    by construction, with ``seed=`` and without it. On the CPU the pixels equal stock's to the bit
    with ``fast=()``; by default bilinear resizing is torch's, at most 2 levels of 256 off. On a
    CUDA device DALI decodes, crops, resizes and flips, and docs/transforms.md gives the largest
    difference of each call. Code that looks at pixels gets them, in the worker, as under stock.

    Batches are delivered on the loader's ``device``, else on the current CUDA device if there is
    one, else on the CPU. A batch may be kept for ever.

    Attributes:
        threads: those that decode and replay in this process; "auto": the cores that this process
            may use, at most 32 (8 with a CUDA device).
        fast: calls that may differ by rounding because they are faster; ``("resize",)`` or ``()``.
        dtype: a float dtype for the images of a batch, its float tensors of 3 dimensions or more,
            such as ``torch.bfloat16``; each value is rounded to it once. None: the dataset's own.
        memory_format: ``torch.channels_last`` or ``torch.contiguous_format`` for tensors of 4.
        hw_decoder_load: the share of JPEG files that the decoding engine of a GPU takes, if it has
            one. Between 0 and 1 a file's pixels depend on its place in the batch; at 1 too, if
            fewer files of the first batch could be decoded on the device than of a later one.

    Raises:
        OptionError: an option has a value that it cannot take.
    """

    threads: int | Literal["auto"] = "auto"
    fast: Collection[str] = FAST
    dtype: torch.dtype | None = None
    memory_format: torch.memory_format = torch.preserve_format
    hw_decoder_load: float = 1.0

    name: ClassVar[str] = "dali"
    delivers: ClassVar[Literal["host", "device"]] = "device"

    def __post_init__(self) -> None:
        if self.threads != "auto" and (not isinstance(self.threads, int) or self.threads < 1):
            raise OptionError(
                f"Dali(threads={self.threads!r}): must be an int of at least 1, or 'auto'"
            )
        if isinstance(self.fast, str) or not set(self.fast) <= set(FAST):
            raise OptionError(f"Dali(fast={self.fast!r}): must be ('resize',) or ()")
        check_images(self)
        if not 0 <= self.hw_decoder_load <= 1:
            raise OptionError(
                f"Dali(hw_decoder_load={self.hw_decoder_load!r}): must be between 0 and 1"
            )
        object.__setattr__(self, "fast", tuple(self.fast))  # must be comparable and hashable

    def explain(self, loader: Specification) -> Plan:
        """Return what is recorded of one sample and where each call runs, or the obstacle.

        Reads one sample, in a process of its own.
        """
        try:
            return explained(self, loader)
        except Exception as error:  # a loader may hold anything; explaining it must not fail
            return Plan(self.name, obstacle=f"this loader could not be read: {error!r}")

    def threads_for(self, loader: Specification) -> int:
        """Return the number of threads that replay batches of ``loader``."""
        if self.threads != "auto":
            return self.threads
        return min(usable_cores(), _MOST_BESIDE_A_GPU if _on_gpu(loader) else _MOST_THREADS)

    def takes_ahead(self, loader: Specification) -> bool:
        """Whether torch's workers run the dataset's code."""
        return loader.num_workers > 0

    def open(self, loader: Specification) -> Session:
        """Return a session whose threads are made at the first epoch."""
        obstacle = obstacle_of(loader)
        if obstacle is not None:
            raise BackendUnavailable(str(Plan(self.name, obstacle=obstacle)))
        prefetch: type[Backend] = registry.load("prefetch")
        replayed = Replayed(self, loader)
        stock = registry.load("stock")(gather=False, view=replayed.recorded)  # type: ignore[call-arg]
        ahead = 4 if _on_gpu(loader) else 3
        return prefetch(inner=stock, ahead=ahead, tail=replayed).open(loader)  # type: ignore[call-arg]


def _on_gpu(loader: Specification) -> bool:
    return device_of(loader).type == "cuda"
