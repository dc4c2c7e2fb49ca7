"""One leaf of a sample as a cell: a kind and an array; and back again.

    <PIL RGB 640x480>  Cell("image:RGB", uint8 (3, 480, 640))
    3                  Cell("int", int64 ())
    [[1, 2], [3, 4]]   Cell("json", uint8 (13,))

A leaf comes back as it was: an integer as int, an array as an array, a PIL image as a PIL image of
the same mode. What it was besides its values does not: memory order, `requires_grad`, an image's
file name and EXIF, the class of an ndarray's subclass. Nothing is pickled, so that reading a cell
can run no code.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dataloaders.cache.sample.decode import EncodedFile, decoded, is_encoded
from dataloaders.cache.sample.palette import PALETTE, contents, files
from dataloaders.cache.sample.planes import PLANES, has_planes, planes_of
from dataloaders.errors import CacheError, MissingDependency

__all__ = [
    "DEEPEST",
    "DTYPES",
    "Cell",
    "cell_of",
    "fits",
    "has_surrogates",
    "is_int64",
    "is_plain",
    "leaf_of",
]

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
_TORCH: dict[str, tuple[torch.dtype, str]] = {
    name: (getattr(torch, name), stored)
    for name, stored in {
        "bool": "|b1",
        "uint8": "|u1",
        "uint16": "<u2",
        "uint32": "<u4",
        "uint64": "<u8",
        "int8": "|i1",
        "int16": "<i2",
        "int32": "<i4",
        "int64": "<i8",
        "float16": "<f2",
        "float32": "<f4",
        "float64": "<f8",
        "bfloat16": "<u2",
        "float8_e4m3fn": "|u1",
        "float8_e5m2": "|u1",
        "complex64": "<c8",
        "complex128": "<c16",
    }.items()
}
_BITS = {"|u1": torch.uint8, "<u2": torch.uint16}
_TV_TENSORS = ("Image", "Mask", "Video")
_PLAIN_KINDS = {
    "bool": ("|b1", 0),
    "int": ("<i8", 0),
    "float": ("<f8", 0),
    "complex": ("<c16", 0),
    "str": ("|u1", 1),
    "bytes": ("|u1", 1),
    "bytearray": ("|u1", 1),
    "json": ("|u1", 1),
}

# PIL's modes: type of a value, and how many there are in a pixel.
_MODES = {
    "1": ("|u1", 1),
    "L": ("|u1", 1),
    "LA": ("|u1", 2),
    "RGB": ("|u1", 3),
    "RGBA": ("|u1", 4),
    "RGBX": ("|u1", 4),
    "CMYK": ("|u1", 4),
    "YCbCr": ("|u1", 3),
    "HSV": ("|u1", 3),
    "LAB": ("|u1", 3),
    "I;16": ("<u2", 1),
    "I": ("<i4", 1),
    "F": ("<f4", 1),
}
_PLAIN = (bool, int, float, str, type(None))

_IN_COLOUR = 'call .convert("RGB")'
_NUMBERS = (
    f"{_IN_COLOUR} for its colours, or return numpy.array(image) for its numbers (those of a mask)"
)
# What to do with modes that are not kept. RGB would change what a mask or 16 bits mean.
_INSTEAD = {
    "P": _NUMBERS,
    "PA": _NUMBERS,
    "I;16B": 'call .convert("I")',
    "I;16L": 'call .convert("I")',
    "I;16N": 'call .convert("I")',
    "La": 'call .convert("LA")',
    "RGBa": 'call .convert("RGBA")',
}


@dataclass(frozen=True)
class Cell:
    """What one leaf is.

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
        """Whether it was made of a PIL image, and may be encoded in another way."""
        return self.kind.startswith("image:") or self.kind == PALETTE


def cell_of(value: Any, where: str) -> Cell:
    """Copy ``value`` into a cell; ``where`` names its place in messages.

    The cell shares no memory with ``value``, which the dataset may change for its next sample.

    Raises:
        CacheError: it cannot be kept.
    """
    kind = type(value)
    if kind is bool:
        return Cell("bool", np.array(value, "|b1"))
    if kind is int:
        if not is_int64(value):
            raise CacheError(f"{where} is an int beyond 64 bits; return it as a str")
        return Cell("int", np.array(value, "<i8"))
    if kind is float:
        return Cell("float", np.array(value, "<f8"))
    if kind is complex:
        return Cell("complex", np.array(value, "<c16"))
    if kind is str:
        return _bytes_cell("str", value.encode("utf-8", "surrogatepass"))
    if kind is bytes or kind is bytearray:
        return _bytes_cell(kind.__name__, bytes(value))
    if value is None:
        return Cell("none", np.empty(0, "|u1"))
    if kind is list:
        text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
        return _bytes_cell("json", text.encode("ascii"))
    if isinstance(value, torch.Tensor):
        return _tensor_cell(value, where)
    if isinstance(value, (np.ndarray, np.generic)) and kind is not np.matrix:
        return _array_cell(value, where)
    if kind is EncodedFile:
        return Cell("file:RGB", np.frombuffer(bytes(value.data), "|u1"), value.pixels)
    image = sys.modules.get("PIL.Image")
    if image is not None and isinstance(value, image.Image):
        return _image_cell(value, where)
    raise CacheError(
        f"{where} is of type {kind.__module__}.{kind.__qualname__}, which a cache does not keep; "
        "it keeps tensors, NumPy arrays, numbers, bool, str, bytes, PIL images, None, and dicts, "
        "lists and tuples of these. Return one of these from the dataset"
    )


def _bytes_cell(kind: str, data: bytes) -> Cell:
    return Cell(kind, np.frombuffer(data, "|u1"))


def _tensor_cell(value: torch.Tensor, where: str) -> Cell:
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
    stored = _TORCH[name][1]
    plain = value.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
    dense = plain.clone(memory_format=torch.contiguous_format)
    bits = dense.view(_BITS[stored]) if _needs_bits(name) else dense
    return Cell(f"{prefix}:{name}", bits.numpy())


def _needs_bits(name: str) -> bool:
    return name.startswith(("bfloat", "float8"))


def _array_cell(value: Any, where: str) -> Cell:
    array = np.asarray(value)
    if isinstance(value, np.ma.MaskedArray):
        raise CacheError(
            f"{where} is a masked array, of which a cache would lose the mask; return .filled(), "
            "or .data and .mask, from the dataset"
        )
    if array.dtype.str not in DTYPES:
        raise CacheError(
            f"{where} is an array of {array.dtype}; a cache keeps arrays of numbers and bool. "
            "Turn it into one, or into str, bytes or a list"
        )
    kind = "scalar" if isinstance(value, np.generic) else "array"
    return Cell(kind, np.array(array, order="C"))


def _image_cell(value: Any, where: str) -> Cell:
    why = ""
    if value.mode == "P":
        found = _palette_cell(value)
        if isinstance(found, Cell):
            return found
        why = f" ({found})"
    if value.mode not in _MODES:
        raise CacheError(
            f"{where} is a PIL image of mode {value.mode!r}, which a cache does not keep{why}; in "
            f"the dataset, {_INSTEAD.get(value.mode, _IN_COLOUR)}"
        )
    dtype, channels = _MODES[value.mode]
    kind = f"image:{value.mode}"
    if has_planes(value):
        return Cell(kind, planes_of(value))
    pixels = np.asarray(value).reshape(value.height, value.width, channels)
    planes = np.ascontiguousarray(pixels.transpose(2, 0, 1))
    return Cell(kind, planes.astype(dtype, copy=False))


def _palette_cell(image: Any) -> Cell | str:
    """The cell that gives ``image``, of mode P, back to the bit; or why there is none."""
    if 0 in image.size:
        return "it has no pixels"
    kept = contents(image)
    try:
        for file in files(kept):
            values = np.frombuffer(file, "|u1")
            if contents(leaf_of(PALETTE, values)) == kept:
                return Cell(PALETTE, values, image.width * image.height)
    except (CacheError, OSError, ValueError, TypeError, MemoryError, SystemError) as error:
        return f"as PNG: {type(error).__name__}: {error}"
    return "PNG does not give its palette and transparency back"


# And back


def _scalar(values: npt.NDArray[Any], *dtypes: str) -> Any:
    if values.shape != () or values.dtype.str not in dtypes:
        raise ValueError("not a single value of its type")
    return values.item()


def _text(values: npt.NDArray[Any]) -> bytes:
    if values.ndim != 1 or values.dtype.str != "|u1":
        raise ValueError("not bytes")
    return values.tobytes()


def _json(values: npt.NDArray[Any]) -> list[Any]:
    # Decoded first: of bytes, json would take other encodings too.
    found = json.loads(_text(values).decode("utf-8"))
    if type(found) is not list:
        raise ValueError("not a list")
    return found


def _array(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if values.dtype.str == "|b1":
        # A byte that is neither 0 nor 1 would be a bool that is both.
        found = np.empty(values.shape, "|b1")
        np.not_equal(values.view("|u1"), 0, out=found)
        return found
    copied: npt.NDArray[Any] = values.copy()
    return copied


def _one(values: npt.NDArray[Any]) -> Any:
    if values.shape != ():
        raise ValueError("not a single value")
    return _array(values)[()]


def _tensor(name: str, values: npt.NDArray[Any]) -> torch.Tensor:
    dtype, stored = _TORCH[name]
    if values.dtype.str != stored:
        raise ValueError(f"{name} is kept as {stored}")
    tensor = torch.from_numpy(_array(values))
    return tensor.view(dtype) if _needs_bits(name) else tensor


def _tv_tensor(detail: str, values: npt.NDArray[Any]) -> Any:
    from torchvision import tv_tensors

    kind, _, name = detail.partition(":")
    if kind not in _TV_TENSORS:
        raise KeyError(kind)
    return getattr(tv_tensors, kind)(_tensor(name, values))


def _image(mode: str, values: npt.NDArray[Any]) -> Any:
    from PIL import Image

    dtype, channels = _MODES[mode]
    if values.dtype.str != dtype or values.ndim != 3 or values.shape[0] != channels:
        raise ValueError(f"an image of mode {mode} is kept as {channels} planes of {dtype}")
    _, height, width = values.shape
    if 0 in (height, width):
        if max(height, width) > _LONGEST_EMPTY_IMAGE:
            raise ValueError("it has no pixels, and too many lines")
        return Image.new(mode, (width, height))
    size = (width, height)
    if channels > 1 and mode in PLANES:
        # The planes are views of the file until `merge` copies them.
        planes = (np.ascontiguousarray(plane) for plane in values)
        return Image.merge(mode, [Image.frombuffer("L", size, p, "raw", "L", 0, 1) for p in planes])
    raw = "1;8" if mode == "1" else mode
    return Image.frombytes(mode, size, values.transpose(1, 2, 0).tobytes(), "raw", raw)


_LEAVES: dict[str, Any] = {
    "bool": lambda _, values: bool(_scalar(values.view("|u1"), "|u1")),
    "int": lambda _, values: _scalar(values, "<i8"),
    "float": lambda _, values: _scalar(values, "<f8"),
    "complex": lambda _, values: _scalar(values, "<c16"),
    "str": lambda _, values: _text(values).decode("utf-8", "surrogatepass"),
    "bytes": lambda _, values: _text(values),
    "bytearray": lambda _, values: bytearray(_text(values)),
    "json": lambda _, values: _json(values),
    "none": lambda _, values: None,
    "array": lambda _, values: _array(values),
    "scalar": lambda _, values: _one(values),
    "tensor": _tensor,
    "tv_tensor": _tv_tensor,
    "image": _image,
}


def leaf_of(kind: str, values: npt.NDArray[Any], most_pixels: int | None = None) -> Any:
    """The leaf that a cell was made of, in memory of its own.

    Args:
        kind: of the cell.
        values: of the cell.
        most_pixels: that an encoded image may have; None: as many as Pillow decodes.

    Raises:
        CacheError: ``values`` cannot be of this kind.
        MissingDependency: it is of a package that is not installed here.
    """
    family, _, detail = kind.partition(":")
    try:
        if family in ("encoded", "file"):
            return decoded(kind, values, most_pixels)
        return _LEAVES[family](detail, values)
    except ImportError as error:
        package = "torchvision" if family == "tv_tensor" else "Pillow"
        raise MissingDependency(
            f"a cell of kind {kind!r} needs {package}, which cannot be imported ({error}); install "
            "it with: pip install 'gpu-dataloaders[vision]'"
        ) from error
    except (KeyError, ValueError, TypeError, RecursionError, OverflowError, RuntimeError) as error:
        raise CacheError(
            f"a cell of kind {kind!r} cannot hold {values.dtype} values of shape {values.shape}: "
            f"{error}"
        ) from error


def fits(kind: str, dtype: str, dimensions: int, shape: tuple[int, ...] | None) -> bool:
    """Whether there are cells of this kind, type and number of dimensions (and shape)."""
    family, _, detail = kind.partition(":")
    if kind in _PLAIN_KINDS:
        return (dtype, dimensions) == _PLAIN_KINDS[kind]
    if family == "tv_tensor":
        known, _, detail = detail.partition(":")
        if known not in _TV_TENSORS:
            return False
    if family in ("tensor", "tv_tensor"):
        return detail in _TORCH and _TORCH[detail][1] == dtype
    if family == "image":
        if detail not in _MODES or dimensions != 3:
            return False
        stored, channels = _MODES[detail]
        return dtype == stored and (shape is None or shape[:1] == (channels,))
    if is_encoded(kind):
        return (dtype, dimensions) == ("|u1", 1)
    return kind == "array" or (kind in ("scalar", "none") and dimensions == 0)


def is_plain(value: Any, depth: int = 0) -> bool:
    """Whether JSON gives it back as it is: lists, str-keyed dicts, numbers, strings and None."""
    kind = type(value)
    if kind is int:
        return is_int64(value)
    if kind is str:
        return not has_surrogates(value)
    if kind in _PLAIN:
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
    """Whether it fits into 64 bits with a sign."""
    return -(2**63) <= value < 2**63


def has_surrogates(text: str) -> bool:
    """Whether there are halves of characters in it, of which JSON makes whole ones."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False
