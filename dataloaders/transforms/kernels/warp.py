"""Turned, moved, sheared and tilted images: Pillow's Geometry.c, many at once.

    Move of each sample ──> where each pixel comes from ──gather──> nearest
                                                        └─4 or 16 gathers, float64──> bilinear, ...

Which arithmetic Pillow takes depends on the numbers, and so it does here: whole numbers of 16.16
bits for nearest; sums that grow step by step for nearest without rotation or shear, or far
outside; float64 for all else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from torch import Tensor

from .kernel import Array, Images, in_pieces, there

if TYPE_CHECKING:
    from .recorded import Move

__all__ = ["warped"]

_NEAREST, _BILINEAR, _BICUBIC = 0, 2, 3

_FAR = 32768.0
"""Pixels from which on Pillow leaves its fixed point."""

_BYTES_EACH = {_NEAREST: 16, _BILINEAR: 64, _BICUBIC: 128}
"""Temporary memory a value, by Pillow's number of the filter."""

_Places: TypeAlias = Callable[..., tuple[Tensor, Tensor]]
"""Numbers of some samples -> column and row that each pixel comes from, to be broadcast."""

_Maps: TypeAlias = tuple[tuple[Tensor, ...], _Places]
"""Numbers of all samples, [k, ...] each, and what makes places of some of them."""


def warped(images: Tensor, moves: Sequence[Move]) -> Images:
    """What Pillow makes of each image by its move.

    Args:
        images: uint8 [k, C, H, W].
        moves: one for each image.

    Returns:
        uint8 [k, C, height, width]; a list if the moves differ in size.
    """
    groups: dict[tuple[object, ...], list[int]] = {}
    for sample, move in enumerate(moves):
        own = move.data if move.kind == "transpose" else ()
        key = (move.kind, own, move.height, move.width, move.resample, move.fill)
        groups.setdefault(key, []).append(sample)
    if len(groups) == 1:
        return _alike(images, moves)
    found: list[Tensor] = [images[0]] * len(moves)
    for samples in groups.values():
        some = images.index_select(0, there(np.asarray(samples), images.device))
        done = _alike(some, [moves[sample] for sample in samples])
        for sample, image in zip(samples, done, strict=True):
            found[sample] = image
    if all(image.shape == found[0].shape for image in found):
        return torch.stack(found)
    return found


def _alike(images: Tensor, moves: Sequence[Move]) -> Tensor:
    """`warped` for moves that differ in their coefficients only."""
    move = moves[0]
    if move.kind == "copy":
        return images
    if move.kind == "transpose":
        return _transposed(images, int(move.data[0]))
    matrices = np.array([move.data for move in moves], np.float64)
    if not images[0].numel():
        return (
            _filling(images, move)
            .expand(-1, -1, move.height, move.width)
            .repeat(len(images), images.shape[1] // len(move.fill), 1, 1)
        )
    if move.kind == "affine" and move.resample == _NEAREST:
        return _nearest_affine(images, matrices, move)
    return _generic(images, matrices, move)


def _transposed(images: Tensor, method: int) -> Tensor:
    from PIL import Image

    moves: dict[int, Callable[[Tensor], Tensor]] = {
        Image.Transpose.FLIP_LEFT_RIGHT: lambda x: x.flip(-1),
        Image.Transpose.FLIP_TOP_BOTTOM: lambda x: x.flip(-2),
        Image.Transpose.ROTATE_90: lambda x: x.rot90(1, (-2, -1)),
        Image.Transpose.ROTATE_180: lambda x: x.flip((-2, -1)),
        Image.Transpose.ROTATE_270: lambda x: x.rot90(3, (-2, -1)),
        Image.Transpose.TRANSPOSE: lambda x: x.transpose(-2, -1),
        Image.Transpose.TRANSVERSE: lambda x: x.flip((-2, -1)).transpose(-2, -1),
    }
    return moves[method](images)


def _nearest_affine(images: Tensor, matrices: Array, move: Move) -> Tensor:
    """``ImagingTransformAffine``: three ways, each for the samples that Pillow takes it for."""
    scaled = (matrices[:, 1] == 0) & (matrices[:, 3] == 0)
    near = np.ones(len(matrices), np.bool_)
    for x, y in ((0, 0), (move.width, move.height), (0, move.height), (move.width, 0)):
        for a, b, c in (matrices[:, :3].T, matrices[:, 3:].T):
            near &= np.abs(x * a + y * b + c) < _FAR
    ways = [
        (scaled, _scaled_maps),
        (~scaled & near, _fixed_maps),
        (~scaled & ~near, _far_maps),
    ]
    out: Tensor | None = None
    for mask, maps in ways:
        if mask.all():
            return _picked(images, maps, matrices, move)
        if mask.any():
            chosen = there(np.flatnonzero(mask), images.device)
            done = _picked(images.index_select(0, chosen), maps, matrices[mask], move)
            if out is None:
                out = images.new_empty(len(images), *done.shape[1:])
            out.index_copy_(0, chosen, done)
    assert out is not None  # the three masks leave no sample out
    return out


def _picked(images: Tensor, maps: Callable[..., _Maps], matrices: Array, move: Move) -> Tensor:
    """Each pixel from where ``maps`` says, those from outside filled."""
    height, width = images.shape[-2:]
    fill = _filling(images, move)
    numbers, places = maps(matrices, move, images.device)

    def work(some: Tensor, *own: Tensor) -> Tensor:
        x, y = places(*own)
        inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
        index = (y * width + x).masked_fill_(~inside, 0)
        found = _gathered(some, index)
        return torch.where(inside.unsqueeze(1), found, fill)

    return _sized(work, images, numbers, move)


def _fixed_maps(matrices: Array, move: Move, device: torch.device) -> _Maps:
    """``affine_fixed``: 16.16 whole numbers, which wrap as C's ``int`` does."""
    a = matrices
    rows = [
        a[:, 0],
        a[:, 1],
        a[:, 2] + a[:, 0] * 0.5 + a[:, 1] * 0.5,
        a[:, 3],
        a[:, 4],
        a[:, 5] + a[:, 3] * 0.5 + a[:, 4] * 0.5,
    ]
    fixed = np.floor(np.stack(rows, 1) * 65536.0 + 0.5).astype(np.int64).astype(np.int32)
    column = torch.arange(move.width, dtype=torch.int32, device=device).reshape(1, 1, -1)
    row = torch.arange(move.height, dtype=torch.int32, device=device).reshape(1, -1, 1)

    def places(own: Tensor) -> tuple[Tensor, Tensor]:
        a0, a1, a2, a3, a4, a5 = own.reshape(-1, 6, 1, 1).unbind(1)
        x = (a2 + row * a1) + column * a0
        y = (a5 + row * a4) + column * a3
        return x.bitwise_right_shift_(16), y.bitwise_right_shift_(16)

    return (there(fixed, device),), places


def _scaled_maps(matrices: Array, move: Move, device: torch.device) -> _Maps:
    """``ImagingScaleAffine``: neither turned nor sheared; each axis a sum that grows."""
    x = _grown(matrices[:, 2] + matrices[:, 0] * 0.5, matrices[:, 0], move.width)
    y = _grown(matrices[:, 5] + matrices[:, 4] * 0.5, matrices[:, 4], move.height)

    def places(across: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
        return across.unsqueeze(1), down.unsqueeze(2)

    return (there(_coord(x), device), there(_coord(y), device)), places


def _far_maps(matrices: Array, move: Move, device: torch.device) -> _Maps:
    """The rest of ``ImagingTransformAffine``: sums that grow down, then across."""
    a = matrices
    maps = []
    for first, step in (
        (a[:, 2] + a[:, 1] * 0.5 + a[:, 0] * 0.5, (a[:, 1], a[:, 0])),
        (a[:, 5] + a[:, 4] * 0.5 + a[:, 3] * 0.5, (a[:, 4], a[:, 3])),
    ):
        down = _grown(first, step[0], move.height)
        across = np.broadcast_to(step[1][:, None], down.shape)
        maps.append(there(_coord(_grown(down, across, move.width)), device))
    return tuple(maps), lambda x, y: (x, y)


def _grown(first: Array, step: Array, length: int) -> Array:
    """float64 [..., length]: ``first``, and ``step`` added again and again, rounded each time."""
    terms = np.repeat(step[..., None], max(1, length), -1)
    terms[..., 0] = first
    sums: Array = np.add.accumulate(terms, -1)[..., :length]
    return sums


def _coord(values: Array) -> Array:
    """int32: towards zero, below zero -1."""
    top = float(np.iinfo(np.int32).max)
    found: Array = np.where(values < 0.0, -1, np.minimum(values, top)).astype(np.int32)
    return found


def _generic(images: Tensor, matrices: Array, move: Move) -> Tensor:
    """``ImagingGenericTransform``: the place of each pixel in float64, then a filter."""
    height, width = images.shape[-2:]
    fill = _filling(images, move)
    device = images.device
    column = torch.arange(move.width, dtype=torch.float64, device=device).reshape(1, 1, -1) + 0.5
    row = torch.arange(move.height, dtype=torch.float64, device=device).reshape(1, -1, 1) + 0.5
    filtered = {_NEAREST: _nearest, _BILINEAR: _bilinear, _BICUBIC: _bicubic}[move.resample]

    def work(some: Tensor, own: Tensor) -> Tensor:
        a = own.reshape(len(own), -1, 1, 1).unbind(1)
        x = (a[0] * column + a[1] * row).add_(a[2])
        y = (a[3] * column + a[4] * row).add_(a[5])
        if move.kind == "perspective":
            depth = (a[6] * column + a[7] * row).add_(1.0)
            x, y = x.div_(depth), y.div_(depth)
        inside = (x >= 0.0) & (x < width) & (y >= 0.0) & (y < height)
        # Places outside are not looked at; they only must not lead out of the image.
        x.masked_fill_(~inside, 0.5)
        y.masked_fill_(~inside, 0.5)
        return torch.where(inside.unsqueeze(1), filtered(some, x, y), fill)

    return _sized(work, images, (there(matrices, device),), move)


def _nearest(images: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return _gathered(images, y.to(torch.int64).mul_(images.shape[-1]).add_(x.to(torch.int64)))


def _bilinear(images: Tensor, x: Tensor, y: Tensor) -> Tensor:
    columns, dx = _taps(x, images.shape[-1], (0, 1))
    rows, dy = _taps(y, images.shape[-2], (0, 1))
    lines = []
    for row in rows:
        start = row.mul_(images.shape[-1])
        a, b = (_gathered(images, start + at).to(torch.float64) for at in columns)
        lines.append(b.sub_(a).mul_(dx).add_(a))
    low, high = lines
    return high.sub_(low).mul_(dy).add_(low).to(torch.uint8)


def _bicubic(images: Tensor, x: Tensor, y: Tensor) -> Tensor:
    columns, dx = _taps(x, images.shape[-1], (-1, 0, 1, 2))
    rows, dy = _taps(y, images.shape[-2], (-1, 0, 1, 2))
    lines = []
    for row in rows:
        start = row.mul_(images.shape[-1])
        v1, v2, v3, v4 = (_gathered(images, start + at).to(torch.float64) for at in columns)
        lines.append(_cubic(v1, v2, v3, v4, dx))
    v1, v2, v3, v4 = lines
    return _cubic(v1, v2, v3, v4, dy).clamp_(0, 255).to(torch.uint8)


def _cubic(v1: Tensor, v2: Tensor, v3: Tensor, v4: Tensor, d: Tensor) -> Tensor:
    """Pillow's BICUBIC, operation by operation."""
    p2 = v3 - v1
    p3 = (v1 - v2).mul_(2).add_(v3).sub_(v4)
    p4 = (v2 - v1).sub_(v3).add_(v4)
    return p4.mul_(d).add_(p3).mul_(d).add_(p2).mul_(d).add_(v2)


def _taps(places: Tensor, length: int, around: Sequence[int]) -> tuple[list[Tensor], Tensor]:
    """Pixels around each place, those past the edge replaced by it; and the way past the first."""
    shifted = places - 0.5
    first = shifted.floor()
    rest = shifted.sub_(first).unsqueeze(1)
    whole = first.to(torch.int64)
    return [(whole + step).clamp_(0, length - 1) for step in around], rest


def _gathered(images: Tensor, index: Tensor) -> Tensor:
    """[n, C, h, w]: pixels by their place in the flat image; ``index``: [n, h, w]."""
    count, channels = images.shape[:2]
    flat = index.to(torch.int64).reshape(count, 1, -1).expand(-1, channels, -1)
    found = images.reshape(count, channels, -1).gather(2, flat)
    return found.reshape(count, channels, *index.shape[1:])


def _filling(images: Tensor, move: Move) -> Tensor:
    levels = np.clip(np.asarray(move.fill, np.int64), 0, 255)
    return there(levels, images.device, torch.uint8).reshape(1, -1, 1, 1)


def _sized(
    work: Callable[..., Tensor], images: Tensor, numbers: Sequence[Tensor], move: Move
) -> Tensor:
    shape = (images.shape[1], move.height, move.width)
    return in_pieces(work, images, *numbers, shape=shape, bytes_each=_BYTES_EACH[move.resample])
