"""Resident batches: a few real batches kept where the step wants them, handed out again and again.

real batch ──keep──> pool (host memory as delivered)  ──issue("host")──> the step copies
                          └──copy──> pool (resident)  ──issue("synthetic")──> nothing to copy
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dataloaders.batches.tree import Batch, describe, leaves, map_tensors, nbytes, to_device

__all__ = ["Placement", "Pool", "resident_everywhere"]

_MOST_BATCHES = 8
_MOST_HELD = 512
_MOST_BYTES = 1 << 30


class Placement(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notices to which device the step copies each leaf of its batch; on for a few first steps.

    ``devices[i]`` is where leaf ``i`` of a watched batch ended up, or None if the step never
    copied it to another device (lengths often stay on the CPU).
    """

    def __init__(self, batch: Batch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages = [[_storage_key(leaf) for leaf in leaves(batch)]]
        self.devices: list[torch.device | None] = [None] * len(self._storages[0])

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile compile under this mode, which otherwise leaves the step uncompiled."""
        return True

    def watch(self, batch: Batch) -> None:
        """Look for the copies of one more batch: the consumer may fetch ahead of its step."""
        self._storages.append([_storage_key(leaf) for leaf in leaves(batch)])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` unchanged and look at copies whose source is a leaf of the batch."""
        out = func(*args, **(kwargs or {}))
        name = getattr(func, "_schema", None)
        if name is not None and name.name in ("aten::_to_copy", "aten::copy_"):
            source = args[1] if name.name == "aten::copy_" else args[0]
            if isinstance(out, torch.Tensor) and out.device != source.device:
                key = _storage_key(source)
                for storages in self._storages:
                    for index, storage in enumerate(storages[: len(self.devices)]):
                        if key is not None and storage == key:
                            self.devices[index] = out.device
        return out


class Pool:
    """Several different real batches, copied when they were delivered.

    Attributes:
        varied: whether the kept batches differ in shape (then each round keeps fresh ones).
        most_batches: how many are kept, memory permitting.
    """

    def __init__(self) -> None:
        self._masters: list[Batch] = []
        self._host: list[Batch] = []
        self._resident: list[Batch] = []
        self._devices: list[torch.device | None] | None = None
        self._next = 0
        self.varied = False
        self.most_batches = _MOST_BATCHES

    def __len__(self) -> int:
        return len(self._masters)

    @property
    def wants_more(self) -> bool:
        """Whether another batch would still be kept (count and memory permitting)."""
        if not self._masters:
            return True
        if len(self._masters) >= self.most_batches:
            return False
        return len(self._masters) < self.room

    @property
    def transfers(self) -> bool:
        """Whether any leaf lives elsewhere than where the loader delivers it."""
        return self._devices is not None and any(device is not None for device in self._devices)

    @property
    def device(self) -> torch.device:
        """Where resident batches are (the first device that a leaf is copied to, else the CPU)."""
        for device in self._devices or ():
            if device is not None:
                return device
        return torch.device("cpu")

    @property
    def placed(self) -> bool:
        """Whether it is known where the step wants its batches."""
        return self._devices is not None

    @torch.inference_mode(False)
    def place(self, devices: list[torch.device | None]) -> None:
        """Fix where each leaf is resident; None leaves it where the loader delivers it."""
        self._devices = devices
        self._rebuild()

    @torch.inference_mode(False)
    def keep(self, batch: Batch) -> None:
        """Copy ``batch``, as delivered, into the pool."""
        self._masters.append(map_tensors(batch, _clone_like_delivered))
        self.varied = self.varied or describe(batch) != describe(self._masters[0])
        if self._devices is not None:
            self._rebuild()

    @property
    def room(self) -> int:
        """How many batches of the size of those it holds it could hold."""
        largest = max((nbytes(master) for master in self._masters), default=0)
        return max(2, min(_MOST_HELD, _MOST_BYTES // (3 * max(1, largest))))

    @torch.inference_mode(False)
    def refresh(self, batches: list[Batch]) -> None:
        """Replace the pool's batches by copies of these."""
        self._masters = [map_tensors(batch, _clone_like_delivered) for batch in batches]
        self._rebuild()

    @torch.inference_mode(False)
    def issue(self, arm: str, count: int) -> list[Batch]:
        """``count`` batches for ``arm`` ("host" or "synthetic"), made before the clock starts.

        Containers are new and tensors are detached aliases: a step that pops a key or calls
        ``requires_grad_`` changes only its own. One that writes into the memory is noticed by
        `written`.
        """
        source = self._host if arm == "host" else self._resident
        start = self._next
        self._next = (start + count) % len(source)
        turns = itertools.islice(itertools.cycle(range(len(source))), start, start + count)
        return [map_tensors(source[turn], torch.Tensor.detach) for turn in turns]

    def written(self) -> bool:
        """Whether a step wrote into any batch since the last `restore` (by tensor versions)."""
        return any(
            v != leaf._version for v, leaf in zip(self._versions, self._issued(), strict=True)
        )

    @torch.inference_mode(False)
    @torch.no_grad()
    def restore(self) -> None:
        """Put every batch back to what the loader delivered."""
        for master, host, resident in zip(self._masters, self._host, self._resident, strict=True):
            for original, *copies in zip(
                leaves(master), leaves(host), leaves(resident), strict=True
            ):
                for copy in copies:
                    copy.copy_(original)
        self._versions = [leaf._version for leaf in self._issued()]

    def _issued(self) -> Iterator[torch.Tensor]:
        for batch in itertools.chain(self._host, self._resident):
            yield from leaves(batch)

    def _rebuild(self) -> None:
        self._host = [map_tensors(master, _clone_like_delivered) for master in self._masters]
        self._resident = (
            [self._moved(host) for host in self._host] if self.transfers else self._host
        )
        self._next = 0
        self._versions = [leaf._version for leaf in self._issued()]

    def _moved(self, batch: Batch) -> Batch:
        devices = iter(self._devices or ())

        def move(leaf: torch.Tensor) -> torch.Tensor:
            device = next(devices)
            return leaf if device is None else leaf.to(device)

        return map_tensors(batch, move)


def resident_everywhere(batch: Batch, device: torch.device) -> list[torch.device | None]:
    """The placement in which every leaf of ``batch`` that is not there yet lives on ``device``."""
    moved = to_device(batch, device)
    return [
        target.device if target.device != leaf.device else None
        for leaf, target in zip(leaves(batch), leaves(moved), strict=True)
    ]


def _clone_like_delivered(leaf: torch.Tensor) -> torch.Tensor:
    clone = leaf.detach().clone()
    # Pinned memory is copied from asynchronously; the copy must be of the same kind.
    return clone.pin_memory() if leaf.device.type == "cpu" and _is_pinned(leaf) else clone


def _is_pinned(leaf: torch.Tensor) -> bool:
    return torch.accelerator.is_available() and leaf.is_pinned()


def _storage_key(leaf: torch.Tensor) -> int | None:
    try:
        return leaf.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse and other tensors without a storage
        return None
