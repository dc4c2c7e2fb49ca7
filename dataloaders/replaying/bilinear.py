"""Pillow's bilinear resize of bytes, to the bit, for some half of its time.

    bytes [H, W, 3] ──columns summed──> floor ──rows summed──> floor ──> bytes [height, width, 3]

Pillow adds up pixels times whole numbers of 22 bits, and shifts. Here the upper and the lower 11
bits are summed apart, by ``embedding_bag``. Each sum has at most 24 bits, so that float32 holds it
in whatever order it is added up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

_BITS = 11
_MOST_TAPS = 32
"""Pixels that are summed; of more, the lower bits' sum does not fit float32."""

DownFirst: TypeAlias = Callable[[int, int, int, int], bool]
"""Whether Pillow shrinks the height first, from the width and height before and after."""


def resized(
    pixels: Any, size: tuple[int, int], crop: Any, flips: tuple[bool, bool]
) -> Tensor | None:
    """Return uint8 [height, width, 3]: what Pillow makes of ``pixels``, cropped and flipped.

    None: Pillow has to do it.

    Args:
        pixels: uint8 [H, W, 3].
        size: (width, height) that all of the pixels are resized to.
        crop: (left, upper, right, lower) of these; None: all.
        flips: whether left and right, and top and bottom, are exchanged then.
    """
    down_first = _order()
    return None if down_first is None else _made(pixels, size, crop, flips, down_first)


def _made(
    pixels: Any, size: tuple[int, int], crop: Any, flips: tuple[bool, bool], first: DownFirst
) -> Tensor | None:
    left, upper, right, lower = crop or (0, 0, *size)
    height, width = pixels.shape[:2]
    across = _bags(width, size[0], left, right, flips[0])
    down = _bags(height, size[1], upper, lower, flips[1])
    if across is None or down is None:
        return None
    if first(width, height, *size):
        table = torch.empty(height, _padded(width), 3, dtype=torch.float32, device="cpu")
        table[:, :width] = torch.from_numpy(pixels)
        rows = _summed(table.view(height, -1), down)
        columns = rows.t().contiguous().view(table.shape[1], -1)
        made = _summed(columns, across).view(right - left, 3, -1).numpy()
        return torch.from_numpy(np.ascontiguousarray(made.astype(np.uint8).transpose(2, 0, 1)))
    turned = np.empty((width, 3, _padded(height)), np.uint8)
    turned[:, :, :height] = pixels.transpose(1, 2, 0)
    columns = _summed(torch.from_numpy(turned).view(width, -1).float(), across)
    rows = columns.view(-1, turned.shape[2]).t().contiguous()
    made = _summed(rows, down).view(lower - upper, -1, 3).numpy()
    return torch.from_numpy(made.astype(np.uint8))


def _padded(length: int) -> int:
    """Return the next multiple of 32: FBGEMM makes and keeps a kernel for each length of rows."""
    return -(-length // 32) * 32


class _Bags(NamedTuple):
    """For each row that comes out, the rows that are summed and their weights: upper, then lower.

    Attributes:
        rows: int32, of one bag after the other.
        begins: int32, of the bags.
        weights: float32, whole numbers over 2**11.
    """

    rows: Tensor
    begins: Tensor
    weights: Tensor


@functools.lru_cache(maxsize=1024)
def _bags(count: int, made: int, begin: int, end: int, flip: bool) -> _Bags | None:
    """Return Pillow's weights for ``made`` pixels of ``count``, of which some are wanted."""
    scale = count / made
    support = max(scale, 1.0)
    taps = int(np.ceil(support)) * 2 + 1
    if taps > _MOST_TAPS:
        return None
    centre = (np.arange(made)[begin:end] + 0.5) * scale
    first = np.maximum((centre - support + 0.5).astype(np.int64), 0)
    last = np.minimum((centre + support + 0.5).astype(np.int64), count)
    rows = first[:, None] + np.arange(taps)
    distance = np.abs((rows - centre[:, None] + 0.5) * (1.0 / support))
    weights = np.where((distance < 1.0) & (rows < last[:, None]), 1.0 - distance, 0.0)
    weights /= np.add.accumulate(weights, 1)[:, -1:]  # in Pillow's order
    whole = (0.5 + weights * (1 << 2 * _BITS)).astype(np.int64)
    if flip:
        rows, whole = rows[::-1], whole[::-1]
    used = whole > 0
    number = used.sum(1)
    parts = np.concatenate([whole[used] >> _BITS, whole[used] & (1 << _BITS) - 1])
    begins = np.cumsum(np.concatenate([[0], number, number[:-1]]))
    return _Bags(
        torch.from_numpy(np.tile(rows[used], 2).astype(np.int32)),
        torch.from_numpy(begins.astype(np.int32)),
        torch.from_numpy((parts / (1 << _BITS)).astype(np.float32)),
    )


def _summed(table: Tensor, bags: _Bags) -> Tensor:
    """Return float32 [bags, length], levels from 0 to 255, of ``table``, float32 [rows, length]."""
    sums = torch.embedding_bag(table, bags.rows, bags.begins, False, 0, False, bags.weights)[0]
    upper, lower = sums.chunk(2)
    return upper.add_(lower.floor_(), alpha=2.0**-_BITS).add_(0.5).floor_()


@functools.cache
def _order() -> DownFirst | None:
    """Return in which order this Pillow resizes, as it is found out; None if in none known."""
    from PIL import Image

    random = np.random.default_rng(0)
    sizes = [tuple(random.integers(8, 80, 4).tolist()) for _ in range(48)]
    sizes += [(40, 60 + more, 30, 40) for more in (-1, 0, 1)]  # where the order changes
    sizes += [(30, 40, 30, 30), (30, 40, 20, 40), (30, 40, 31, 41), (64, 64, 32, 32)]
    images = [random.integers(0, 256, (high, wide, 3), np.uint8) for wide, high, _, _ in sizes]
    whole = [
        np.asarray(Image.fromarray(a).resize(s[2:], 2)) for a, s in zip(images, sizes, strict=True)
    ]
    for order in _ORDERS:
        made = [
            _made(a, s[2:], None, (False, False), order) for a, s in zip(images, sizes, strict=True)
        ]
        if all(
            one is not None and np.array_equal(one.numpy(), other)
            for one, other in zip(made, whole, strict=True)
        ):
            return order
    return None


_ORDERS: tuple[DownFirst, ...] = (
    lambda wide, high, width, height: high > height and high - height > 2 * (wide - width),
    lambda wide, high, width, height: False,
)
"""That of Pillow 13, and of those before."""
