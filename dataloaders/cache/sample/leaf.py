"""Convert a value of a sample to a leaf, a kind and an array, and back.

    <PIL RGB 640x480>  Leaf("image:RGB", uint8 (3, 480, 640))
    3                  Leaf("int", int64 ())
    [[1, 2], [3, 4]]   Leaf("json", uint8 (13,))

A value comes back as it was: an integer as int, an array as an array, a PIL image as a PIL image of
the same mode. What it was besides its values does not: memory order, `requires_grad`, an image's
file name and EXIF, the class of an ndarray's subclass. Nothing is pickled, so that reading a leaf
can run no code.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dataloaders.cache.sample.decode import EncodedFile, decoded, is_encoded
from dataloaders.cache.sample.palette import PALETTE, file_of
from dataloaders.errors import CacheError, MissingDependency

DEEPEST = 64
"""Containers within containers, at most."""

_LONGEST_EMPTY_IMAGE = 1 << 16  # PIL allocates a pointer a line, even for lines without pixels

_WIDTHS = {"b": (1,), "u": (1, 2, 4, 8), "i": (1, 2, 4, 8), "f": (2, 4, 8), "c": (8, 16)}
DTYPES = frozenset(
    f"{order}{kind}{width}"
    for kind, widths in _WIDTHS.items()
    for width in widths
    for order in ("|" if width == 1 else "<>")
)
"""What a column may consist of, as NumPy writes it; no objects, so no pickles."""

# Those that NumPy lacks are kept as unsigned integers of the same width.
_BITS = {"bfloat16": "<u2", "float8_e4m3fn": "|u1", "float8_e5m2": "|u1"}
_TORCH = _BITS | {
    name: np.dtype(name).newbyteorder("<").str
    for name in (
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
}
_TV_TENSORS = ("Image", "Mask", "Video")
# PIL's modes: type of a value, and how many there are in a pixel.
_MODES = {
    **dict.fromkeys(("1", "L"), ("|u1", 1)),
    "LA": ("|u1", 2),
    **dict.fromkeys(("RGB", "YCbCr", "HSV", "LAB"), ("|u1", 3)),
    **dict.fromkeys(("RGBA", "RGBX", "CMYK"), ("|u1", 4)),
    "I;16": ("<u2", 1),
    "I": ("<i4", 1),
    "F": ("<f4", 1),
}
# Split and merged by PIL, which takes a fifth of the time of a copy by NumPy.
_PLANES = ("RGB", "RGBA", "CMYK", "YCbCr", "HSV")


@dataclass(frozen=True)
class Leaf:
    """One value of a sample, as it is stored.

    Attributes:
        kind: ``int``, ``float``, ``complex``, ``bool``, ``str``, ``bytes``, ``bytearray``,
            ``none``, ``json`` (a list of what JSON keeps), ``array``, ``scalar`` (NumPy's),
            ``tensor:<dtype>``, ``tv_tensor:<class>:<dtype>``, ``image:<mode>``,
            ``encoded:<format>:<mode>`` or ``file:<mode>``.
        values: in C order; of an image its planes, (channels, height, width); of an encoded image
            the bytes of its file.
        pixels: of an encoded image, width times height; 0 of anything else.
    """

    kind: str
    values: npt.NDArray[Any]
    pixels: int = 0

    @property
    def is_image(self) -> bool:
        """Whether the leaf was made of a PIL image, and may be encoded in another way."""
        return self.kind.startswith("image:") or self.kind == PALETTE


def leaf_of(value: Any, where: str) -> Leaf:
    """Copy ``value`` into a leaf; ``where`` names its place in messages.

    The leaf shares no memory with ``value``, which the dataset may change for its next sample.

    Raises:
        CacheError: ``value`` cannot be stored.
    """
    kind = type(value)
    if kind in (bool, int, float, complex):
        if kind is int and not is_int64(value):
            raise CacheError(f"{where} is an int beyond 64 bits; return it as a str")
        return Leaf(kind.__name__, np.array(value, _PLAIN[kind.__name__][0]))
    if value is None:
        return Leaf("none", np.empty(0, "|u1"))
    if kind is str:
        return _bytes_leaf("str", value.encode("utf-8", "surrogatepass"))
    if kind is bytes or kind is bytearray:
        return _bytes_leaf(kind.__name__, bytes(value))
    if kind is list:
        text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
        return _bytes_leaf("json", text.encode("ascii"))
    if isinstance(value, torch.Tensor):
        return _tensor_leaf(value, where)
    if isinstance(value, (np.ndarray, np.generic)) and kind is not np.matrix:
        return _array_leaf(value, where)
    if kind is EncodedFile:
        return Leaf("file:RGB", np.frombuffer(bytes(value.data), "|u1"), value.pixels)
    image = sys.modules.get("PIL.Image")
    if image is not None and isinstance(value, image.Image):
        return _image_leaf(value, where)
    raise CacheError(
        f"{where} is of type {kind.__module__}.{kind.__qualname__}, which a cache does not keep; "
        "it keeps tensors, NumPy arrays, numbers, bool, str, bytes, PIL images, None, and dicts, "
        "lists and tuples of these. Return one of these from the dataset"
    )


def _bytes_leaf(kind: str, data: bytes) -> Leaf:
    return Leaf(kind, np.frombuffer(data, "|u1"))


def _tensor_leaf(value: torch.Tensor, where: str) -> Leaf:
    name = str(value.dtype).removeprefix("torch.")
    kind = type(value)
    known = kind is torch.Tensor or kind is torch.nn.Parameter
    prefix = "tensor"
    if kind.__module__.startswith("torchvision.tv_tensors") and kind.__name__ in _TV_TENSORS:
        known, prefix = True, f"tv_tensor:{kind.__name__}"
    if not known or value.layout != torch.strided or value.is_nested or value.is_quantized:
        raise CacheError(
            f"{where} is a {kind.__name__} of {value.dtype} and layout {value.layout}; a cache "
            "keeps dense tensors without a class of their own: call .to_dense(), .dequantize() or "
            ".as_subclass(torch.Tensor) in the dataset, or return nested tensors as a list"
        )
    if name not in _TORCH:
        raise CacheError(
            f"{where} is a tensor of {value.dtype}, which a cache does not keep; convert it to "
            "another dtype in the dataset, such as float32"
        )
    if value.device.type != "cpu":
        raise CacheError(f"{where} is on {value.device}; return .cpu() from the dataset")
    plain = value.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
    dense = plain.clone(memory_format=torch.contiguous_format)
    if name in _BITS:
        dense = dense.view(torch.uint8 if _BITS[name] == "|u1" else torch.uint16)
    return Leaf(f"{prefix}:{name}", dense.numpy())


def _array_leaf(value: Any, where: str) -> Leaf:
    if isinstance(value, np.ma.MaskedArray):
        raise CacheError(
            f"{where} is a masked array, of which a cache would lose the mask; return .filled(), "
            "or .data and .mask, from the dataset"
        )
    array = np.array(value, order="C")
    if array.dtype.str not in DTYPES:
        raise CacheError(
            f"{where} is an array of {array.dtype}; a cache keeps arrays of numbers and bool. "
            "Turn it into one, or into str, bytes or a list"
        )
    return Leaf("scalar" if isinstance(value, np.generic) else "array", array)


def _image_leaf(value: Any, where: str) -> Leaf:
    why = ""
    if value.mode == "P":
        try:
            return Leaf(PALETTE, np.frombuffer(file_of(value), "|u1"), value.width * value.height)
        except Exception as error:  # any of Pillow's
            why = f" ({type(error).__name__}: {error})"
    if value.mode not in _MODES:
        raise CacheError(
            f"{where} is a PIL image of mode {value.mode!r}, which a cache does not keep{why}; in "
            f"the dataset, convert it to one of {', '.join(_MODES)}, or return "
            "numpy.array(image) for its numbers (those of a mask)"
        )
    dtype, channels = _MODES[value.mode]
    if value.mode in _PLANES:
        planes = b"".join(value.tobytes("raw", band) for band in value.getbands())
        values = np.frombuffer(planes, dtype).reshape(channels, value.height, value.width)
    else:
        pixels = np.asarray(value, dtype).reshape(value.height, value.width, channels)
        values = np.array(pixels.transpose(2, 0, 1), order="C")
    return Leaf(f"image:{value.mode}", values)


# From leaves back to values; each array fits its kind


def _json(values: npt.NDArray[Any]) -> list[Any]:
    # Decoded first: of bytes, json would take other encodings too.
    found = json.loads(values.tobytes().decode("utf-8"))
    if type(found) is not list:
        raise ValueError("not a list")
    return found


def _array(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if values.dtype.str == "|b1":  # a byte that is neither 0 nor 1 would be a bool that is both
        return np.asarray(values.view("|u1") != 0)
    return np.array(values)


def _tensor(name: str, values: npt.NDArray[Any]) -> torch.Tensor:
    tensor = torch.from_numpy(_array(values))
    return tensor.view(getattr(torch, name)) if name in _BITS else tensor


def _tv_tensor(detail: str, values: npt.NDArray[Any]) -> Any:
    from torchvision import tv_tensors

    kind, _, name = detail.partition(":")
    return getattr(tv_tensors, kind)(_tensor(name, values))


def _image(mode: str, values: npt.NDArray[Any]) -> Any:
    from PIL import Image

    _, height, width = values.shape
    size = width, height
    if 0 in size:
        if max(size) > _LONGEST_EMPTY_IMAGE:
            raise ValueError("it has no pixels, and too many lines")
        return Image.new(mode, size)
    if mode in _PLANES:
        # The planes are views of the file until `merge` copies them.
        planes = (np.ascontiguousarray(plane) for plane in values)
        return Image.merge(mode, [Image.frombuffer("L", size, p, "raw", "L", 0, 1) for p in planes])
    raw = "1;8" if mode == "1" else mode
    return Image.frombytes(mode, size, values.transpose(1, 2, 0).tobytes(), "raw", raw)


# Kinds that are named after Python's types: dtype, number of dimensions, and how to get the value.
_PLAIN: dict[str, tuple[str, int, Callable[[npt.NDArray[Any]], Any]]] = {
    "bool": ("|b1", 0, lambda values: bool(values.view("|u1"))),
    "int": ("<i8", 0, np.ndarray.item),
    "float": ("<f8", 0, np.ndarray.item),
    "complex": ("<c16", 0, np.ndarray.item),
    "str": ("|u1", 1, lambda values: values.tobytes().decode("utf-8", "surrogatepass")),
    "bytes": ("|u1", 1, np.ndarray.tobytes),
    "bytearray": ("|u1", 1, lambda values: bytearray(values.tobytes())),
    "json": ("|u1", 1, _json),
}
# The others get what stands after the colon of their kind, too.
_VALUES: dict[str, Callable[[str, npt.NDArray[Any]], Any]] = {
    "array": lambda _, values: _array(values),
    "scalar": lambda _, values: _array(values)[()],
    "tensor": _tensor,
    "tv_tensor": _tv_tensor,
    "image": _image,
}


def value_of(kind: str, values: npt.NDArray[Any], most_pixels: int | None = None) -> Any:
    """Return the value that a leaf was made of, in memory of its own.

    Args:
        kind: the kind of the leaf.
        values: the array of the leaf.
        most_pixels: the most that an encoded image may have; None: as many as Pillow decodes.

    Raises:
        CacheError: ``values`` cannot be of this kind.
        MissingDependency: it is of a package that is not installed here.
    """
    if kind == "none":
        return None
    family, _, detail = kind.partition(":")
    try:
        if not fits(kind, values.dtype.str, values.ndim, values.shape):
            raise ValueError("no leaf of this kind has such values")
        if kind in _PLAIN:
            return _PLAIN[kind][2](values)
        if family in _VALUES:
            return _VALUES[family](detail, values)
        return decoded(kind, values, most_pixels)
    except ImportError as error:
        package = "torchvision" if family == "tv_tensor" else "Pillow"
        raise MissingDependency(
            f"a leaf of kind {kind!r} needs {package}, which cannot be imported ({error}); install "
            "it with: pip install 'gpu-dataloaders[vision]'"
        ) from error
    except (KeyError, ValueError, TypeError, RecursionError, OverflowError, RuntimeError) as error:
        raise CacheError(
            f"a leaf of kind {kind!r} cannot hold {values.dtype} values of shape {values.shape}: "
            f"{error}"
        ) from error


def fits(kind: str, dtype: str, dimensions: int, shape: tuple[int, ...] | None) -> bool:
    """Return whether a leaf of this kind can have this dtype, dimensions and shape."""
    family, _, detail = kind.partition(":")
    if kind in _PLAIN:
        return (dtype, dimensions) == _PLAIN[kind][:2]
    if family in ("tensor", "tv_tensor"):
        known, _, name = detail.rpartition(":")
        known_class = known in _TV_TENSORS if family == "tv_tensor" else not known
        return known_class and _TORCH.get(name) == dtype
    if family == "image":
        stored, channels = _MODES.get(detail, ("", 0))
        fitting = (dtype, dimensions) == (stored, 3)
        return fitting and (shape is None or shape[:1] == (channels,))
    if is_encoded(kind):
        return (dtype, dimensions) == ("|u1", 1)
    return kind == "array" or (kind in ("scalar", "none") and dimensions == 0)


def is_plain(value: Any, depth: int = 0) -> bool:
    """Return whether JSON keeps ``value``: lists, dicts by str, numbers, strings and None."""
    kind = type(value)
    if kind is int:
        return is_int64(value)
    if kind is str:
        return not has_surrogates(value)
    if value is None or kind in (bool, float):
        return True
    if depth > DEEPEST:
        return False
    if kind is list:
        return all(is_plain(inner, depth + 1) for inner in value)
    if kind is dict:
        return all(
            type(key) is str and is_plain(key) and is_plain(inner, depth + 1)
            for key, inner in value.items()
        )
    return False


def is_int64(value: int) -> bool:
    """Return whether ``value`` fits into a signed 64-bit integer."""
    return -(2**63) <= value < 2**63


def has_surrogates(text: str) -> bool:
    """Return whether ``text`` has surrogates, pairs of which JSON would combine."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False
