"""Keep a few real batches where the step wants them, and issue them again and again.

real batch ──keep──> master (host memory) ──> as delivered (pinned or not) ──> "host": a copy each
                                          └──> resident on the device       ──> "synthetic": none
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from dataloaders.batches.tree import Batch, copied, describe, leaves, map_tensors, nbytes
from dataloaders.errors import CheckError

_MOST_BATCHES = 8
_MOST_VARIED = 64
_MOST_BYTES = 1 << 30
_SHARE_OF_FREE = 0.5  # of a device's free memory; the rest is the step's


@dataclass
class _Kept:
    """Holds one batch."""

    master: Batch  # as it was
    host: Batch  # as the loader delivers it
    resident: Batch | None = None  # where the step wants it, once built
    versions: Sequence[int] = ()  # of its tensors before any step wrote into them

    def seen(self) -> Sequence[int]:
        return [leaf._version for leaf in (*leaves(self.host), *leaves(self.resident))]


class Pool:
    """Holds copies of several real batches."""

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._most_bytes = most_bytes  # of the host's memory, for all copies
        self._kept: list[_Kept] = []
        self._devices: list[torch.device | None] | None = None
        self._next = 0
        self.varied = False  # whether they differ in shape; each round then keeps new ones
        self.crowded = False  # whether the device's memory has room for fewer batches than wanted
        self.most_batches = _MOST_BATCHES  # to keep, if memory permits

    def __len__(self) -> int:
        return len(self._built()) or len(self._kept)

    @property
    def wants_more(self) -> bool:
        """Whether one more batch would be kept, by count and memory."""
        most = 0 if self.crowded else min(self.most_batches, self.room)
        return not self._kept or len(self._kept) < most

    @property
    def transfers(self) -> bool:
        """Whether the step copies any leaf to another device."""
        return any(device is not None for device in self._devices or ())

    @property
    def device(self) -> torch.device:
        """Return the first device that a leaf is copied to, else the CPU."""
        copied_to = (device for device in self._devices or () if device is not None)
        return next(copied_to, torch.device("cpu"))

    @property
    def placed(self) -> bool:
        """Whether it is known where the step wants its batches."""
        return self._devices is not None

    @property
    def room(self) -> int:
        """Return how many batches of this size are kept in the host's memory at most."""
        largest = max((nbytes(one.master) for one in self._kept), default=0)
        return max(2, min(_MOST_VARIED, self._most_bytes // (3 * max(1, largest))))

    def place(self, devices: list[torch.device | None]) -> None:
        """Set where each leaf is resident; None: where the loader delivers it."""
        self._devices = devices

    @torch.inference_mode(False)
    def keep(self, batch: Batch) -> None:
        """Copy ``batch`` into the pool, if the device's memory has room.

        Raises:
            CheckError: the device's memory does not hold two of them.
        """
        delivered = [leaf.device if leaf.device.type != "cpu" else None for leaf in leaves(batch)]
        copy = self._beside_the_step(len(self._kept), batch, delivered, copied)
        if copy is not None:
            self._kept.append(_Kept(map_tensors(batch, _to_host), copy))
            self.varied = self.varied or describe(batch) != describe(self._kept[0].master)

    @torch.inference_mode(False)
    def record(self, batch: Batch) -> None:
        """Keep ``batch``, instead of the oldest one if there is no room for one more."""
        most = len(self._kept) if self.crowded else self.room
        if not self.crowded or most > 2:
            del self._kept[: max(0, len(self._kept) + 1 - most)]
            self.keep(batch)

    @torch.inference_mode(False)
    def build(self) -> None:
        """Make the kept batches resident, as many as the device's free memory allows.

        Call it after the step has run a few times, so that it has allocated its own memory.

        Raises:
            CheckError: the device's memory does not hold two of them.
        """
        for index in range(len(self._built()), len(self._kept)):
            one = self._kept[index]
            if self.transfers:
                devices = self._devices or []
                one.resident = self._beside_the_step(index, one.host, devices, self._moved)
            else:
                one.resident = one.host
            if one.resident is None:
                del self._kept[index:]
                break
            one.versions = one.seen()

    @torch.inference_mode(False)
    def issue(self, arm: str, count: int) -> list[Batch]:
        """Return ``count`` batches for ``arm`` ("host" or "synthetic"); call it before a mark.

        Containers are new and tensors are detached aliases: a step that pops a key or calls
        ``requires_grad_`` changes only its own batch. `written` notices writes into memory.
        """
        self.build()
        kept = self._kept
        turns = range(self._next, self._next + count)
        self._next = (self._next + count) % len(kept)
        issued = (kept[turn % len(kept)] for turn in turns)
        source = [one.host if arm == "host" else one.resident for one in issued]
        return [map_tensors(batch, torch.Tensor.detach) for batch in source]

    def written(self) -> bool:
        """Return whether a step has written into a batch since the last `restore`."""
        return any(one.versions != one.seen() for one in self._built())

    @torch.inference_mode(False)
    @torch.no_grad()
    def restore(self) -> None:
        """Restore every batch to what the loader delivered."""
        for one in self._built():
            for original, *copies in zip(
                leaves(one.master), leaves(one.host), leaves(one.resident), strict=True
            ):
                for copy in copies:
                    copy.copy_(original)
            one.versions = one.seen()

    def _beside_the_step(
        self,
        number: int,
        batch: Batch,
        devices: Sequence[torch.device | None],
        make: Callable[[Batch], Batch],
    ) -> Batch | None:
        """Return ``make(batch)``; None if memory has room for no more than ``number`` batches.

        ``devices``: where each leaf is allocated; None for the host.
        """
        sizes: dict[torch.device, int] = {}
        for leaf, device in zip(leaves(batch), devices, strict=True):
            if device is not None:
                sizes[device] = sizes.get(device, 0) + nbytes(leaf)
        try:
            if number >= 2 and not all(_fits(size, device) for device, size in sizes.items()):
                raise torch.OutOfMemoryError
            return make(batch)
        except torch.OutOfMemoryError:
            if number < 2:
                raise CheckError(
                    f"the memory of {', '.join(map(str, sizes))} does not hold 2 batches of "
                    f"{nbytes(batch) / 2**20:.0f} MiB beside the step, which the check needs; "
                    "use a smaller batch for it"
                ) from None
            self.crowded = True
            return None

    def _built(self) -> list[_Kept]:
        return [one for one in self._kept if one.resident is not None]

    def _moved(self, batch: Batch) -> Batch:
        devices = iter(self._devices or ())

        def move(leaf: torch.Tensor) -> torch.Tensor:
            device = next(devices)
            return leaf if device is None else leaf.to(device)

        return map_tensors(batch, move)


def _fits(size: int, device: torch.device) -> bool:
    """Whether ``size`` more bytes leave the step enough of the device's memory."""
    if device.type in ("cpu", "meta") or size == 0:
        return True
    try:
        free, _ = torch.accelerator.get_memory_info(device)
        # Memory that the allocator holds is free, too, except for the most that the step has used.
        free += torch.accelerator.memory_reserved(device)
        free -= torch.accelerator.max_memory_allocated(device)
    except (RuntimeError, NotImplementedError, AttributeError):
        return True  # this allocator does not report it; if it fails, that is handled
    return size <= _SHARE_OF_FREE * free


def _to_host(leaf: torch.Tensor) -> torch.Tensor:
    return leaf.detach().clone() if leaf.device.type in ("cpu", "meta") else leaf.detach().cpu()
