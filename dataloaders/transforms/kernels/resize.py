"""Images of any sizes made one size: Pillow's Resample.c, many at once.

    images of any sizes ──> float32, side by side ──x weights──> bytes ──x weights──> bytes
                                                     across              down

Pillow sums bytes times whole numbers of 22 bits, rounds to a byte, then does the other axis. Here
each number is cut into digits, so that every product and every partial sum is a whole number
below 2**24: float32 matrix products are then exact in any order, also where a GPU multiplies in
TF32 or bfloat16.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from .kernel import Array, Images, there
from .recorded import Move
from .warp import warped

__all__ = ["FILTERS", "resize"]

_BITS = 22
"""Pillow's PRECISION_BITS."""

_DIGIT = 9
"""Bits of a digit with its sign: what bfloat16 still holds."""

_CPU_ELEMENTS = 1 << 20
"""Values of a float32 source at a time: on the CPU;"""

_DEVICE_ELEMENTS = 1 << 25
"""elsewhere (128 MiB; what is computed from it takes some times as much)."""


def _box(x: Array) -> Array:
    return np.where((x > -0.5) & (x <= 0.5), 1.0, 0.0)


def _bilinear(x: Array) -> Array:
    x = np.abs(x)
    return np.where(x < 1.0, 1.0 - x, 0.0)


def _hamming(x: Array) -> Array:
    angle = np.abs(x) * math.pi
    # 0.54f and 0.46f, as Pillow writes them.
    low, high = float(np.float32(0.54)), float(np.float32(0.46))
    safe = np.where(angle == 0.0, 1.0, angle)
    found = _each(math.sin, safe) / safe * (low + high * _each(math.cos, safe))
    return np.where(angle == 0.0, 1.0, np.where(np.abs(x) >= 1.0, 0.0, found))


def _bicubic(x: Array) -> Array:
    a, x = -0.5, np.abs(x)
    near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


def _lanczos(x: Array) -> Array:
    return np.where((x >= -3.0) & (x < 3.0), _sinc(x) * _sinc(x / 3), 0.0)


def _sinc(x: Array) -> Array:
    angle = np.where(x == 0.0, 1.0, x * math.pi)
    return np.where(x == 0.0, 1.0, _each(math.sin, angle) / angle)


def _each(function: Callable[[float], float], values: Array) -> Array:
    """By C's function, as Pillow calls it; NumPy's own may differ in the last bit."""
    found = [function(value) for value in values.ravel().tolist()]
    return np.array(found, np.float64).reshape(values.shape)


FILTERS: dict[str, tuple[Callable[[Array], Array], float]] = {
    "box": (_box, 0.5),
    "bilinear": (_bilinear, 1.0),
    "hamming": (_hamming, 1.0),
    "bicubic": (_bicubic, 2.0),
    "lanczos": (_lanczos, 3.0),
}
"""torchvision's name of an interpolation -> the filter, and how many pixels it reaches."""


def resize(images: Images, height: Array, width: Array, interpolation: str) -> Images:
    """Each image ``height`` x ``width`` pixels: ``resize`` of PIL images, always antialiased.

    Args:
        images: uint8 [k, C, H, W], or a list of tensors [C, H, W] of any sizes.
        height, width: whole numbers [k], at least 1.
        interpolation: torchvision's name of it; "nearest" and "nearest-exact" are Pillow's nearest.

    Returns:
        uint8 [k, C, height, width], or a list if they are not all the same.

    Raises:
        ValueError: for a size below 1, as Pillow does.
    """
    sizes = np.stack([np.asarray(height, np.int64), np.asarray(width, np.int64)], 1)
    if (sizes < 1).any():
        raise ValueError("height and width must be > 0")
    if not len(sizes):
        return images
    if isinstance(images, Tensor) and (sizes == images.shape[-2:]).all():
        return images
    if interpolation.startswith("nearest"):
        return _nearest(images, sizes)
    befores = np.array([image.shape[-2:] for image in images], np.int64)
    tall = _tall(befores, sizes) if _vertical_first() else np.zeros(len(sizes), np.bool_)
    groups: dict[tuple[bool, int], list[int]] = {}
    for sample, image in enumerate(images):
        groups.setdefault((bool(tall[sample]), image.shape[0]), []).append(sample)
    dense: Tensor | None = None
    if (sizes == sizes[0]).all() and len({channels for _, channels in groups}) == 1:
        shape = (len(sizes), images[0].shape[0], *sizes[0].tolist())
        dense = torch.empty(shape, dtype=torch.uint8, device=images[0].device)
    found: list[Tensor] = list(images)
    for (down_first, _), members in groups.items():
        # Alike sizes beside each other: a batch is as large as its largest image.
        members.sort(key=lambda sample: befores[sample].tolist())
        for samples in _pieces(members, befores, images[members[0]]):
            done = _resized(images, samples, sizes[samples], interpolation, down_first)
            if dense is not None:
                dense.index_copy_(0, there(np.array(samples), dense.device), done)
                continue
            for sample, image in zip(samples, done, strict=True):
                found[sample] = image[:, : sizes[sample, 0], : sizes[sample, 1]]
    return found if dense is None else dense


def _nearest(images: Images, sizes: Array) -> Images:
    groups: dict[tuple[int, ...], list[int]] = {}
    for sample, image in enumerate(images):
        groups.setdefault(tuple(image.shape), []).append(sample)
    found: list[Tensor] = list(images)
    for (_, tall, wide), samples in groups.items():
        moves = []
        for h, w in sizes[samples].tolist():
            scale = (float(np.float32(wide)) / w, 0.0, 0.0, 0.0, float(np.float32(tall)) / h, 0.0)
            moves.append(
                Move("copy", h, w) if (h, w) == (tall, wide) else Move("affine", h, w, scale)
            )
        some = torch.stack([images[sample] for sample in samples])
        for sample, image in zip(samples, warped(some, moves), strict=True):
            found[sample] = image
    if all(image.shape == found[0].shape for image in found):
        return torch.stack(found)
    return found


def _tall(befores: Array, sizes: Array) -> Array:
    """Which images Pillow shrinks in height first: those that lose much more of it."""
    lost = befores - sizes
    mask: Array = (lost[:, 0] > 0) & (lost[:, 0] > lost[:, 1] * 2)
    return mask


@functools.lru_cache(maxsize=1)
def _vertical_first() -> bool:
    """Whether the Pillow that is installed ever shrinks the height first: 13.0 does, 12.0 not."""
    from PIL import Image

    levels = (np.arange(64 * 8, dtype=np.int64) * 7919 % 251).astype(np.uint8).reshape(1, 64, 8)
    theirs = Image.fromarray(levels[0]).resize((5, 3), Image.Resampling.BICUBIC)
    ours = _resized([torch.from_numpy(levels)], [0], np.array([[3, 5]]), "bicubic", True)[0]
    return bool((ours[0].numpy() == np.asarray(theirs)).all())


def _pieces(chosen: Sequence[int], befores: Array, like: Tensor) -> list[list[int]]:
    """The chosen samples in order, so many at a time as memory may hold."""
    most = _CPU_ELEMENTS if like.device.type == "cpu" else _DEVICE_ELEMENTS
    pieces: list[list[int]] = []
    tall = wide = 0
    for sample in chosen:
        tall, wide = max(tall, int(befores[sample, 0])), max(wide, int(befores[sample, 1]))
        count = len(pieces[-1]) + 1 if pieces else 1
        if not pieces or count * tall * wide * like.shape[0] > most:
            pieces.append([])
            tall, wide = befores[sample].tolist()
        pieces[-1].append(sample)
    return pieces


def _resized(
    images: Images, samples: Sequence[int], sizes: Array, interpolation: str, down_first: bool
) -> Tensor:
    """uint8 [n, C, height, width], as large as the largest; the rest of a smaller one is void."""
    some = [images[sample] for sample in samples]
    befores = np.array([image.shape[-2:] for image in some], np.int64)
    channels, device = some[0].shape[0], some[0].device
    tall, wide = befores.max(0).tolist()
    out_tall, out_wide = sizes.max(0).tolist()
    # [n, H, C, W]: across, rows and channels are one; down, channels and columns are.
    source = torch.zeros(len(some), tall, channels, wide, device=device)
    if isinstance(images, Tensor):
        chosen = there(np.array(samples), device)
        source.copy_(images.index_select(0, chosen).permute(0, 2, 1, 3))
    else:
        for place, image in enumerate(some):
            source[place, : image.shape[-2], :, : image.shape[-1]] = image.permute(1, 0, 2)
    down = _weights(befores[:, 0], sizes[:, 0], interpolation, device)
    across = _weights(befores[:, 1], sizes[:, 1], interpolation, device)

    def horizontally(values: Tensor) -> Tensor:
        rows = values.shape[1]
        products = values.reshape(len(some), rows * channels, wide) @ across.matrix
        digits = products.reshape(len(some), rows * channels, across.digits, out_wide)
        return _rounded(digits.unbind(2), across.bits).reshape(len(some), rows, channels, out_wide)

    def vertically(values: Tensor) -> Tensor:
        columns = values.shape[-1]
        flat = values.reshape(len(some), tall, channels * columns)
        products = down.matrix.transpose(1, 2) @ flat
        digits = products.reshape(len(some), down.digits, out_tall, channels * columns)
        return _rounded(digits.unbind(1), down.bits).reshape(len(some), out_tall, channels, columns)

    first, then = (vertically, horizontally) if down_first else (horizontally, vertically)
    return then(first(source)).to(torch.uint8).permute(0, 2, 1, 3)


def _rounded(digits: Sequence[Tensor], bits: int) -> Tensor:
    """float32: the sum that the digits stand for, rounded to a byte as ``clip8`` does."""
    total = digits[-1].to(torch.int32)
    for digit in reversed(digits[:-1]):
        total.bitwise_left_shift_(bits).add_(digit.to(torch.int32))
    total.add_(1 << (_BITS - 1)).bitwise_right_shift_(_BITS)
    return total.clamp_(0, 255).to(torch.float32)


class _Weights:
    """What each pixel adds to each of those that come out.

    Attributes:
        matrix: float32 [n, size before, digits * size after].
        digits, bits: how many, the lowest first; how many bits each.
    """

    def __init__(self, matrix: Tensor, digits: int, bits: int) -> None:
        self.matrix = matrix
        self.digits = digits
        self.bits = bits


def _weights(befores: Array, afters: Array, interpolation: str, device: torch.device) -> _Weights:
    """Of each sample one matrix, all of one shape, made on the device from a few numbers each."""
    own = [
        _coefficients(before, after, interpolation)
        for before, after in zip(befores.tolist(), afters.tolist(), strict=True)
    ]
    taps, after = max(len(k) for _, k in own), int(afters.max())
    starts = np.zeros((len(own), 1, after), np.int32)
    numbers = np.zeros((len(own), taps, after), np.int32)
    for place, (first, k) in enumerate(own):
        starts[place, 0, : len(first)] = first
        numbers[place, : len(k), : len(first)] = k
    bits = min(_DIGIT, 25 - math.ceil(math.log2(255 * taps)))
    digits = math.ceil(24 / bits)
    rows = there(starts, device) + torch.arange(taps, dtype=torch.int32, device=device).reshape(
        -1, 1
    )
    before = int(befores.max())
    rows = rows.clamp_(max=before - 1).to(torch.int64)
    rest = there(numbers, device)
    matrix = torch.zeros(len(own), before, digits * after, device=device)
    half = 1 << (bits - 1)
    for digit in range(digits):
        low = rest if digit == digits - 1 else ((rest + half) & (2 * half - 1)) - half
        part = matrix[..., digit * after : (digit + 1) * after]
        part.scatter_add_(1, rows, low.to(torch.float32))
        rest = (rest - low) >> bits
    return _Weights(matrix, digits, bits)


@functools.lru_cache(maxsize=8192)
def _coefficients(before: int, after: int, interpolation: str) -> tuple[Array, Array]:
    """``precompute_coeffs`` and ``normalize_coeffs_8bpc``.

    Returns:
        int32 [after]: the first pixel that each sums; int32 [taps, after]: times what.
    """
    weigh, reach = FILTERS[interpolation]
    scale = before / after
    stretch = max(scale, 1.0)
    support = reach * stretch
    center = (np.arange(after) + 0.5) * scale
    first = np.maximum((center - support + 0.5).astype(np.int64), 0)
    count = np.minimum((center + support + 0.5).astype(np.int64), before) - first
    taps = max(1, int(count.max()))
    x = np.arange(taps).reshape(-1, 1)
    weights = weigh((x + first - center + 0.5) * (1.0 / stretch))
    weights = np.where(x < count, weights, 0.0)
    # One after the other, as Pillow adds them.
    total = np.add.accumulate(weights, 0)[-1]
    weights = weights / np.where(total == 0.0, 1.0, total)
    whole = np.where(weights < 0, -0.5, 0.5) + weights * (1 << _BITS)
    return first.astype(np.int32), whole.astype(np.int32)
