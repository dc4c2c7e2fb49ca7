"""Find out where the step wants its batches, from the copies that it makes in its first steps."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from dataloaders.batches.tree import Batch, leaves, to_device
from dataloaders.findings.watch import Onlooker


class Placement(Onlooker):  # type: ignore[no-untyped-call]
    """Notices to which device the step copies each leaf of its batch."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._places: dict[int | None, set[int]] = {}  # numbers of leaves, by their storage's key
        # Where each leaf was copied to; None if it was not (lengths often stay on the CPU).
        self.devices: list[torch.device | None] = []
        self.used: set[torch.device] = set()  # of batches, and where the step made tensors

    def watch(self, batch: Batch) -> None:
        """Notice copies of one more batch: the loop may fetch batches ahead of the step."""
        tensors = list(leaves(batch))
        self.used.update(leaf.device for leaf in tensors)
        self.devices = self.devices or [None] * len(tensors)
        for index, leaf in enumerate(tensors[: len(self.devices)]):
            if (key := _storage_key(leaf)) is not None:
                self._places.setdefault(key, set()).add(index)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` unchanged; note which leaves it copies to another device."""
        out = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.used.update(leaf.device for leaf in made if leaf.device.type not in ("cpu", "meta"))
        for source in tree_leaves((args, kwargs)):
            if isinstance(source, torch.Tensor) and source.device.type == "cpu":
                for leaf in made:
                    if leaf.device != source.device:
                        for index in self._places.get(_storage_key(source), ()):
                            self.devices[index] = leaf.device
        return out


def resident_everywhere(batch: Batch, device: torch.device) -> list[torch.device | None]:
    """Return the placement in which every leaf of ``batch`` lives on ``device``."""
    moved = to_device(batch, device)
    return [
        target.device if target.device != leaf.device else None
        for leaf, target in zip(leaves(batch), leaves(moved), strict=True)
    ]


def _storage_key(leaf: torch.Tensor) -> int | None:
    try:
        return leaf.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse and other tensors without a storage
        return None
