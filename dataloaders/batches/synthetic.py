"""Make batches that look like real ones: the same shapes, dtypes, strides and value ranges.

    real batch ──Recipe.like()──┐
    spec nest  ──Recipe.spec()──┴──> Recipe ──make(device, generator)──> a new batch, each time

Values are random within the range. The values of different leaves are unrelated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dataloaders.batches.tree import Batch, map_children, map_tensors, to_device
from dataloaders.errors import OptionError

_DTYPES = frozenset(
    getattr(torch, name)
    for name in (
        *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
        *("float16", "bfloat16", "float32", "float64"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    )
)


@dataclass(frozen=True)
class TensorSpec:
    """A description of one tensor of a synthetic batch.

    Attributes:
        shape: its sizes, including the batch dimension.
        dtype: bool, a float (also float8) or an integer dtype.
        low: the least value.
        high: the greatest value, below 2**63. Integers include it; floats may stay just below it.
            For bool, the share of True, from 0 to 1.
        stride: its strides in elements, such as those of channels_last; None for contiguous.

    Raises:
        OptionError: the shape is not made of sizes, the bounds are not finite or not in order, or
            they do not fit in the dtype.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    low: float = 0
    high: float = 1
    stride: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(size) for size in self.shape))
        if any(size < 0 for size in self.shape):
            raise OptionError(f"TensorSpec shape={self.shape}: sizes must not be negative")
        if self.dtype not in _DTYPES:
            raise OptionError(
                f"TensorSpec dtype={self.dtype!r}: must be a torch.dtype of plain numbers, such as "
                "torch.float32 or torch.int64"
            )
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low <= self.high):
            raise OptionError(
                f"TensorSpec low={self.low}, high={self.high}: both must be finite, low not above "
                "high"
            )
        limits: Any
        if self.dtype is torch.bool:
            least, greatest = 0.0, 1.0
        else:
            limits = torch.finfo if self.dtype.is_floating_point else torch.iinfo
            least, greatest = limits(self.dtype).min, limits(self.dtype).max
        if self.low < least or self.high > greatest:
            raise OptionError(
                f"TensorSpec low={self.low}, high={self.high}: {self.dtype} holds values "
                f"from {least} to {greatest}"
            )

    @classmethod
    def of(cls, leaf: torch.Tensor) -> TensorSpec | None:
        """Describe ``leaf``; None if no tensor like it can be made from numbers alone.

        That is the case for a sparse, nested, quantized or complex tensor, a subclass, a tensor
        that requires grad, and one without finite values or with integers from 2**63 on. Values
        that are not finite are left out of the range.
        """
        if type(leaf) is not torch.Tensor or leaf.dtype not in _DTYPES:
            return None
        if leaf.layout is not torch.strided or leaf.is_nested or leaf.requires_grad:
            return None
        shape = tuple(leaf.shape)
        # Only strides that a new tensor can have: not those of expanded or overlapping views.
        kept = torch.empty_like(leaf, device="meta").stride() == leaf.stride()
        stride = leaf.stride() if kept and not leaf.is_contiguous() else None
        if leaf.numel() == 0 or leaf.device.type == "meta":
            return cls(shape, leaf.dtype, 0, 0 if leaf.dtype is torch.bool else 1, stride)
        bounds = _bounds(leaf.detach())
        return None if bounds is None else cls(shape, leaf.dtype, *bounds, stride)

    def make(self, device: torch.device, generator: torch.Generator | None) -> torch.Tensor:
        """Return a new tensor on ``device`` with values drawn uniformly from ``generator``.

        Without a generator (the meta device has none) the values are not set.
        """
        if self.stride is None:
            tensor = torch.empty(self.shape, dtype=self.dtype, device=device)
        else:
            tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
        if generator is None or tensor.numel() == 0:
            return tensor
        if self.dtype.is_floating_point or self.dtype is torch.bool:
            wide = torch.float64 if self.dtype is torch.float64 else torch.float32
            share = torch.rand(self.shape, dtype=wide, device=device, generator=generator)
            if self.dtype is torch.bool:
                return tensor.copy_(share < self.high)
            # Not low + share * (high - low), where the difference may overflow.
            values = (self.low * (1 - share)).add_(share, alpha=self.high)
            return tensor.copy_(values.clamp_(self.low, self.high))
        low, end = int(self.low), min(int(self.high) + 1, 2**63 - 1)  # exclusive, within int64
        if low >= end:
            return tensor.fill_(low)
        return tensor.copy_(torch.randint(low, end, self.shape, device=device, generator=generator))


class Recipe:
    """One batch, kept as its containers and a description of each tensor.

    Tensors without a description (see `TensorSpec.of`) and everything that is not a tensor are kept
    and reused as they are.
    """

    def __init__(self, template: Batch, specs: list[TensorSpec | None]) -> None:
        self._template = template
        self._specs = specs

    @classmethod
    def like(cls, batch: Batch) -> Recipe:
        """Return the recipe of batches like ``batch``.

        Tensors inside custom types (those with a ``.to()``, such as PackedSequence) are kept,
        because their values usually have to fit together.
        """
        return cls._of(batch, TensorSpec.of)

    @classmethod
    def spec(cls, nest: Any) -> Recipe:
        """Return the recipe of batches with a tensor wherever ``nest`` has a `TensorSpec`.

        Real tensors in ``nest`` are kept. Use them for values that must fit together, such as
        offsets or boxes.

        Raises:
            OptionError: there is no TensorSpec and no tensor in ``nest``.
        """
        found = cls._of(nest, lambda leaf: leaf if isinstance(leaf, TensorSpec) else None)
        if not found._specs:
            raise OptionError(
                f"spec={nest!r}: holds no TensorSpec; give one for each tensor of a batch, such "
                "as [TensorSpec((64, 3, 224, 224)), TensorSpec((64,), torch.int64, 0, 999)]"
            )
        return found

    @classmethod
    def _of(cls, nest: Any, spec_of: Callable[[Any], TensorSpec | None]) -> Recipe:
        specs: list[TensorSpec | None] = []

        def described(child: Any) -> Any:
            if isinstance(child, (TensorSpec, torch.Tensor)):
                specs.append(spec_of(child))
                return child if specs[-1] is None else torch.empty(0)
            return child if _is_custom(child) else map_children(child, described)

        return cls(described(nest), specs)

    def make(self, device: torch.device, generator: torch.Generator | None) -> Batch:
        """Return a new batch on ``device``: new containers, new tensors, copies of kept leaves."""
        specs = iter(self._specs)

        def instantiate(child: Any) -> Any:
            if isinstance(child, torch.Tensor):
                spec = next(specs)
                if spec is not None:
                    return spec.make(device, generator)
                # Copied even if it is there already, because a step may write into it.
                return child.to(device, copy=True)
            if _is_custom(child):
                # Its own .to() knows what must stay, such as the lengths in a PackedSequence.
                return to_device(map_tensors(child, torch.clone), device)
            return map_children(child, instantiate)

        return instantiate(self._template)


def shortened(batch: Batch, samples: int, of: int) -> Batch:
    """Return the first ``samples`` samples of ``batch``, which has ``of``: views in new containers.

    Cuts tensors whose first size is ``of``, and lists and tuples of that length that hold no
    tensors or one a sample. Custom types are returned whole.
    """
    if isinstance(batch, torch.Tensor):
        cut = batch.layout is torch.strided and not batch.is_nested and batch.ndim > 0
        return batch[:samples] if cut and batch.shape[0] == of else batch
    if type(batch) in (list, tuple) and len(batch) == of:
        columns = [child for child in batch if isinstance(child, torch.Tensor)]
        if not columns or any(not leaf.ndim or leaf.shape[0] != of for leaf in columns):
            return batch[:samples]
    if _is_custom(batch):
        return batch
    return map_children(batch, lambda child: shortened(child, samples, of))


def _is_custom(value: object) -> bool:
    return hasattr(value, "to") and not isinstance(value, Mapping)


def _bounds(leaf: torch.Tensor) -> tuple[float, float] | None:
    """Return (low, high) of the finite values, for bool (0, share of True); None without any."""
    if leaf.dtype is torch.bool:
        return 0, float(leaf.float().mean())
    if not leaf.dtype.is_floating_point:
        array = leaf.cpu().numpy()  # NumPy supports minimum and maximum of unsigned types too
        low, high = int(array.min()), int(array.max())
        return None if high >= 2**63 else (low, high)
    values = leaf if leaf.dtype in (torch.float32, torch.float64) else leaf.float()
    values = values[torch.isfinite(values)]
    if not values.numel():
        return None
    least, greatest = torch.aminmax(values)
    return float(least), float(greatest)
