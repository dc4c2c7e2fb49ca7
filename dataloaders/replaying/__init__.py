"""Make a recorded batch: the very steps that were written down, on pixels, many at a time.

    RecordedBatch ──plan──> heads ──decoder──> images ──steps──> bytes ──pointwise──> batch

plan.py       what can be made in bulk
host.py       decode and finish a batch in threads of the CPU
device.py     decode and finish a batch on a device; jpeg.py: of which files
grouped.py    the table of calls: which kernel makes a call for all images at once
kernels.py    colours, blurs, nearest warps and erasing, on a whole batch
pointwise.py  ToTensor, Normalize and the like in the last pass
proof.py      whether recorded batches become the dataset's own
tail.py       prefetch's part: only the last pass

Decoders are given from outside: nothing here imports DALI.
"""

from __future__ import annotations


class DecodeError(Exception):
    """A device's decoder refuses a file; ``sample``: its position in the batch, if known."""

    def __init__(self, sample: int | None, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.sample = sample


class ReplayError(Exception):
    """A batch cannot be made of what was recorded: its dataset has to be asked again.

    ``samples``: the positions in the batch of those that failed, if known.
    """

    def __init__(self, samples: list[int], cause: BaseException) -> None:
        where = f" at {samples}" if samples else ""
        super().__init__(f"replaying failed{where}: {type(cause).__name__}: {cause}")
