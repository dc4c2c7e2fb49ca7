"""Where stand-ins come from, and the functions of Pillow and torchvision that are recorded.

A function's code is swapped, since ``from PIL.Image import open`` binds the function itself.
Outside of a recording, and for anything but stand-ins, the original code runs.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import sys
import types
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from dataloaders.recording import ops, program, tail, tensor
from dataloaders.recording.context import Unrecordable, files_only, recorder
from dataloaders.recording.program import Node

_installed: set[str] = set()
_counter = itertools.count()


def install() -> None:
    """Hook Pillow, if it is installed, and those modules of torchvision that have been imported."""
    if "torch" not in _installed:
        _installed.add("torch")
        swap(torch.utils.data._utils.collate.collate_tensor_fn, _collated)
    if "PIL" not in _installed and importlib.util.find_spec("PIL") is not None:
        _installed.add("PIL")
        _install_pillow()
    if "PIL" not in _installed:
        return
    for name, hook in _TORCHVISION.items():
        if name not in _installed and name in sys.modules:
            _installed.add(name)
            hook(sys.modules[name])


def obstacle() -> str | None:
    """Return why Pillow's images cannot be recorded here; None if they can."""
    try:
        from PIL import __version__
    except ImportError:
        return None
    old = int(__version__.partition(".")[0]) < 11
    return f"Pillow {__version__} is older than 11" if old else None


def swap(function: Any, hook: Callable[..., Any]) -> None:
    """Replace the code of ``function`` by a call of ``hook(original, *args, **kwargs)``."""
    if not isinstance(function, types.FunctionType) or function.__closure__:
        return  # another version's: its calls are not recorded
    original = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__
    )
    original.__kwdefaults__ = function.__kwdefaults__
    own = function.__code__
    name = f"_dataloaders_hook_{next(_counter)}"
    function.__globals__[name] = partial(hook, original)
    code = _template.__code__.replace(
        co_names=(name,),
        co_filename=own.co_filename,
        co_firstlineno=own.co_firstlineno,  # inspect.getsource and TorchScript read it from there
        co_name=own.co_name,
    )
    function.__wrapped__ = original  # type: ignore[attr-defined]  # inspect.signature
    function.__code__ = code


def _template(*args: Any, **kwargs: Any) -> Any:
    return HOOK(*args, **kwargs)  # type: ignore[name-defined]  # noqa: F821


def _collated(original: Any, batch: Any, **kwargs: Any) -> Any:
    """Stack as torch does, but not in memory that it has allocated itself."""
    stand_ins = [each for each in batch if isinstance(each, tensor.Recorded)]
    if stand_ins:
        if any(each._real is None for each in stand_ins):
            return torch.stack(batch, 0)
        batch = [each._real if isinstance(each, tensor.Recorded) else each for each in batch]
    return original(batch, **kwargs)


def _install_pillow() -> None:
    from PIL import Image, ImageEnhance, ImageOps

    from dataloaders.recording import image as images

    def opened(original: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        own = recorder()
        if own is None or own.tail:
            return found
        own.sources += 1
        return images.pose(found)

    def enhancer(original: Any, self: Any, image: Any) -> None:
        if isinstance(image, images.Recorded) and image.mode in ("L", "RGB"):
            self.image, self._before = image, image.copy()
            self._init = original
        else:
            original(self, image)

    def enhance(original: Any, self: Any, factor: Any) -> Any:
        before = vars(self).pop("_before", None)
        if before is not None:
            now, self._before = self.image, before
            if isinstance(now, images.Recorded) and images.node_of(now) is images.node_of(before):
                made = images.recorded(f"enhance.{type(self).__name__}", _factor)(before, factor)
                if made is not None:
                    return made
            del self._before
            self._init(self, images.materialise(before, "ImageEnhance"))
            self.image = now
        return original(self, factor)

    def _factor(image: Any, factor: Any) -> Any:
        return (float(factor),), program.Image(image.mode, image.size)

    swap(Image.open, opened)
    swap(Image.fromarray, _from_array)
    swap(ImageEnhance._Enhance.enhance, enhance)
    for name in ("Color", "Contrast", "Brightness", "Sharpness"):
        swap(getattr(ImageEnhance, name).__init__, enhancer)
    for name, rule in _IMAGE_OPS.items():
        _swap_for_images(getattr(ImageOps, name), f"imageops.{name}", rule)


def _from_array(original: Any, obj: Any, mode: Any = None) -> Any:
    own = recorder()
    bytes_ = type(obj) is np.ndarray and obj.dtype == np.uint8 and obj.size
    if own is not None and not own.files and not own.tail and bytes_:
        from dataloaders.recording import image as images

        natural = {(): "L", (3,): "RGB", (4,): "RGBA"}.get(obj.shape[2:])
        if natural is not None and obj.ndim > 1 and mode in (None, natural):
            own.sources += 1
            what = program.Image(natural, (obj.shape[1], obj.shape[0]))
            return images.new(Node("array", (), (obj.tobytes(), obj.shape), (), what))
    return original(obj) if mode is None else original(obj, mode)


def _swap_for_images(function: Any, op: str, rule: Callable[..., Any]) -> None:
    from dataloaders.recording import image as images

    record = images.recorded(op, rule)

    def hook(original: Any, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], images.Recorded):
            made = record(*args, **kwargs)
            if made is not None:
                return made
        return original(*args, **kwargs)

    swap(function, hook)


def _same(image: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the arguments, and an image of the same mode and size; not for calls with a mask."""
    if image.mode not in ("L", "RGB") or kwargs:
        return None
    return args, program.Image(image.mode, image.size)


def _grey(image: Any, num_output_channels: int) -> Any:
    if num_output_channels != 3:
        return None  # a call of Image.convert, which is recorded
    return (num_output_channels,), program.Image("RGB", image.size)


def _pad(image: Any, padding: Any, fill: Any = 0, padding_mode: str = "constant") -> Any:
    height, width = _padded(image.size[::-1], padding)
    if padding_mode == "constant" or image.mode not in ("L", "RGB"):
        return None  # a call of ImageOps.expand, which is recorded
    if width < image.size[0] or height < image.size[1] or max(width, height) > 3 * min(image.size):
        return None
    return (padding, fill, padding_mode), program.Image(image.mode, (width, height))


def _expand(image: Any, border: Any = 0, fill: Any = 0) -> Any:
    height, width = _padded(image.size[::-1], border)
    return _same(image, border, fill)[0], program.Image(image.mode, (width, height))


def _hue(image: Any, hue_factor: float) -> Any:
    return _same(image, hue_factor) if abs(hue_factor) <= 0.5 and image.mode == "RGB" else None


def _gamma(image: Any, gamma: float, gain: float = 1.0) -> Any:
    return _same(image, gamma, gain) if gamma >= 0 else None


_IMAGE_OPS = dict.fromkeys(("invert", "posterize", "solarize", "autocontrast", "equalize"), _same)
_IMAGE_OPS["expand"] = _expand
_FUNCTIONAL_PIL: dict[str, Callable[..., Any]] = {
    "adjust_hue": _hue,
    "adjust_gamma": _gamma,
    "to_grayscale": _grey,
    "pad": _pad,
}


def _install_functional(module: Any) -> None:
    """Hook ``torchvision.transforms.functional`` and what it calls."""
    from dataloaders.recording import image as images

    def of_image(op: str, dtype: torch.dtype, original: Any, pic: Any) -> Any:
        if op == "to_tensor" and torch.get_default_dtype() == torch.float32:
            bytes_ = None if isinstance(pic, torch.Tensor) else tail.bytes_of(pic)
            if bytes_ is not None:  # which are divided by 255 in either function
                what = bytes_._node.what._replace(dtype=dtype)
                return tensor.derived("v1t.convert_image_dtype", bytes_, (dtype,), {}, what)
        if isinstance(pic, images.Recorded) and pic.mode in images.MODES and not files_only():
            node = images.node_of(pic)
            if node is not None and torch.get_default_dtype() == torch.float32:
                channels, (width, height) = images.MODES[pic.mode], pic.size
                what = program.Tensor((channels, height, width), dtype)
                strides = (1, width * channels, channels) if dtype == torch.uint8 else None
                return tensor.new(Node(op, (node,), (), (), what), strides=strides)
        return original(pic)

    def to_pil_image(original: Any, pic: Any, mode: Any = None) -> Any:
        if isinstance(pic, tensor.Recorded) and pic._real is None and pic.ndim == 3:
            natural = {1: "L", 3: "RGB", 4: "RGBA"}.get(pic.shape[0])
            bytes_ = pic.dtype == torch.uint8 or (pic.dtype.is_floating_point and natural != "L")
            if natural is not None and mode in (None, natural) and bytes_:
                what = program.Image(natural, (pic.shape[2], pic.shape[1]))
                return images.new(Node("to_pil_image", (pic._node,), (mode,), (), what))
        return original(pic, mode)

    swap(module.to_tensor, partial(of_image, "to_tensor", torch.float32))
    swap(module.pil_to_tensor, partial(of_image, "pil_to_tensor", torch.uint8))
    swap(module.to_pil_image, to_pil_image)
    of_images = importlib.import_module("torchvision.transforms._functional_pil")
    of_tensors = importlib.import_module("torchvision.transforms._functional_tensor")
    for name, rule in _FUNCTIONAL_PIL.items():
        _swap_for_images(getattr(of_images, name), f"fpil.{name}", rule)
    for name in _SIZES:
        swap(getattr(of_tensors, name, None), partial(_on_tensor, f"v1t.{name}"))


def _on_tensor(op: str, original: Any, image: Any, *args: Any, **kwargs: Any) -> Any:
    """Record a functional of torchvision on a stand-in; else run it."""
    if op in _MAKE_FLOATS and tail.makes_floats(args, kwargs):
        image = image if (bytes_ := tail.bytes_of(image)) is None else bytes_
    if not isinstance(image, tensor.Recorded):
        return original(image, *args, **kwargs)
    if image._real is None:
        named = dict(kwargs)
        inplace = named.pop("inplace", False)
        version, _, name = op.partition(".")
        try:
            if name == "normalize":  # arrays and tensors would be inputs
                lists = {
                    key: each.tolist() for key, each in named.items() if hasattr(each, "tolist")
                }
                named.update(lists)
            if version == "v1t" and image._node.what.flavour != "Tensor":
                raise Unrecordable(op)
            made = _outcome(name, image._node.what, args, named)
            return tensor.derived(op, image, args, named, made, inplace=inplace)
        except Exception:
            pass  # if it is the dataset's mistake, it is raised below
    return original(tensor.materialise(image, op), *args, **kwargs)


_MAKE_FLOATS = ("v1t.convert_image_dtype", "v2.to_dtype")


def _install_v2(module: Any) -> None:
    """Hook ``torchvision.transforms.v2.functional._utils``."""

    def get_kernel(original: Any, functional: Any, input_type: Any, **kwargs: Any) -> Any:
        kernel = original(functional, input_type, **kwargs)
        name, own = functional.__name__, recorder()
        begins = name == "to_dtype" and own is not None and own.tail
        hooked = name in _SIZES and (begins or issubclass(input_type, tensor.Recorded))
        # Without a kernel of its flavour (a Mask has no normalize), the input passes through.
        if hooked and input_type in module._KERNEL_REGISTRY.get(functional, {}):
            return partial(_on_tensor, f"v2.{name}", kernel)
        return kernel

    swap(module._get_kernel, get_kernel)


def _install_decoders(module: Any) -> None:
    """Hook the operators that ``torchvision.io`` calls."""
    for name in ("decode_image", "decode_jpeg", "decode_png"):
        if module._has_image_ops() and hasattr(torch.ops.image, name):
            ops.DECODERS[name] = getattr(torch.ops.image, name)
            setattr(torch.ops.image, name, partial(_decoded, name))


def _install_torchcodec(module: Any) -> None:
    """Hook the operators that ``torchcodec.decoders`` calls."""
    for name in ("decode_jpeg", "decode_png"):
        original = getattr(module, f"_{name}", None)
        if original is not None:
            ops.DECODERS[f"torchcodec.{name}"] = original
            setattr(module, f"_{name}", partial(_decoded, f"torchcodec.{name}"))


def _decoded(name: str, data: Any, mode: int = 0, *options: Any) -> Any:
    """Record an operator that decodes; ``options``: turned by EXIF data, or a code of a dtype."""
    own = recorder()
    plain = not any(options) and type(data) is torch.Tensor
    if own is not None and own.files:
        own.looked(f"the decoder {name}")
    elif own is not None and not own.tail and plain:
        from dataloaders.recording import image as images

        encoded = data.numpy().tobytes()
        format = name.rpartition("_")[2].upper()
        header = images.header_of(encoded, [format] if format != "IMAGE" else ["JPEG", "PNG"])
        if header is not None:
            channels = {0: images.MODES[header.mode], 1: 1, 3: 3}.get(mode)
            if channels is not None:
                own.sources += 1
                width, height = header.size
                what = program.Tensor((channels, height, width), torch.uint8)
                node = Node("decode", (), (encoded, name, mode, *options), (), what)
                return tensor.new(node, strides=(1, width * channels, channels))
    return ops.DECODERS[name](data, mode, *options)


_TORCHVISION: dict[str, Callable[[Any], None]] = {
    "torchvision.transforms.functional": _install_functional,
    "torchvision.transforms.v2.functional._utils": _install_v2,
    "torchvision.io.image": _install_decoders,
    "torchcodec.decoders._image_decoders": _install_torchcodec,
    "torchvision.utils": lambda module: swap(
        getattr(module, "_Image_fromarray", None), _from_array
    ),
}


# Height and width of what a functional returns for a tensor; None: those of its input. A call for
# which these raise an error is not recorded.


def _padded(shape: Any, padding: Any, mode: str = "constant") -> tuple[int, int]:
    numbers = (padding,) if type(padding) is int else tuple(padding)
    left, top, right, bottom = numbers * (4 // len(numbers))
    if mode != "constant":
        _mirrored(shape, (left, top, right, bottom))
    return shape[-2] + top + bottom, shape[-1] + left + right


def _mirrored(shape: Any, borders: Sequence[int]) -> None:
    if max(borders) >= min(shape[-2:]):
        raise Unrecordable("a border larger than the image")


def _sized(shape: Any, size: Any, max_size: Any = None) -> Any:
    module = sys.modules["torchvision.transforms.functional"]
    sizes = [size] if type(size) is int else list(size)
    return module._compute_resized_output_size(shape[-2:], sizes, max_size)


def _rotated(shape: Any, /, *args: Any, **kwargs: Any) -> None:
    if kwargs.get("expand") or any(each is True for each in args):
        raise Unrecordable("expand")


_COLOUR_NAMES = """adjust_brightness adjust_contrast adjust_hue adjust_saturation adjust_gamma
    adjust_sharpness invert posterize solarize autocontrast equalize rgb_to_grayscale"""
_OTHER_NAMES = """hflip vflip horizontal_flip vertical_flip convert_image_dtype to_dtype normalize
    erase gaussian_blur affine perspective elastic"""
_COLOURS = set(_COLOUR_NAMES.split())
_SIZES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(_COLOURS.union(_OTHER_NAMES.split()), lambda shape, /, *args, **kwargs: None),
    "crop": lambda shape, /, top, left, height, width: (height, width),
    "center_crop": lambda shape, /, output_size: (
        (output_size,) * 2 if type(output_size) is int else (output_size[0], output_size[-1])
    ),
    "resize": lambda shape, /, size, *args, max_size=None, **kwargs: _sized(shape, size, max_size),
    "resized_crop": lambda shape, /, top, left, height, width, size, **kwargs: _sized(
        (height, width), size
    ),
    "pad": lambda shape, /, padding, fill=0, padding_mode="constant": _padded(
        shape, padding, padding_mode
    ),
    "gaussian_blur": lambda shape, /, kernel_size, *args, **kwargs: _mirrored(
        shape, [size // 2 for size in kernel_size]
    ),
    "rotate": _rotated,
}


def _outcome(name: str, what: Any, args: Any, named: Any) -> Any:
    """Return what the functional ``name`` makes."""
    shape, dtype, flavour = what
    height, width = _SIZES[name](shape, *args, **named) or shape[-2:]
    good = len(shape) > 2 and (name not in _COLOURS or shape[-3] in (1, 3))
    if name in ("to_dtype", "convert_image_dtype"):
        dtype, scale = (*args, *named.values(), name != "to_dtype")[:2]
        good = isinstance(dtype, torch.dtype)
        good = good and (dtype.is_floating_point or flavour == "Mask" or not scale)
    elif name == "normalize":
        mean, std = (each if isinstance(each, (list, tuple)) else [each] for each in named.values())
        good = good and dtype.is_floating_point and all(std)
        good = good and {len(mean), len(std)} <= {1, shape[-3]}
    elif name == "rgb_to_grayscale":
        good = good and shape[-3] == 3
        shape = (*shape[:-3], (*args, *named.values(), 1)[0], *shape[-2:])
    elif name in ("posterize", "equalize", "solarize"):
        good = good and dtype == torch.uint8
    if not good:
        raise Unrecordable(name)
    return program.Tensor((*shape[:-2], int(height), int(width)), dtype, flavour)
