"""Recorded steps, done for real: the very functions that were called.

Nothing is imported before a step needs it.
"""

from __future__ import annotations

import functools
import importlib
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from dataloaders.recording.context import map_inner, recorder, recording
from dataloaders.recording.program import Image, Input, Node, ordered


def run(
    wanted: Sequence[Node], known: Mapping[Node, Any] | None = None, *, keep: bool = False
) -> list[Any]:
    """Return what the steps ``wanted`` make, exactly as the calls that were recorded.

    Values that share memory in the dataset's own code (views of one tensor) share it here.

    Args:
        wanted: steps.
        known: values of steps that have been made elsewhere.
        keep: whether samples are still being recorded, so that later calls may need the images that
            are made now, and an opened image has the class of its plugin.
    """
    values: dict[Node, Any] = dict(known or {})
    order = ordered(wanted, dict.fromkeys(values, 0))
    last = {each: node for node in order for each in node.inputs}
    with recording(None):
        for node in order:
            if node in values:
                continue
            values[node] = _made(node, values, keep) if node.value is None else node.value
            if keep and isinstance(node.what, Image) and node.uses > bool(node.inputs):
                node.value = values[node]
            for each in node.inputs:
                if last[each] is node and each not in wanted:
                    values.pop(each, None)
    return [values[node] for node in wanted]


def run_now(wanted: Sequence[Node]) -> list[Any]:
    """Return what `run` does, while recording; note a failure."""
    try:
        return run(wanted, keep=True)
    except Exception:
        if (own := recorder()) is not None:
            own.failed = True
        raise


def _made(node: Node, values: dict[Node, Any], keep: bool) -> Any:
    function = function_of(node.op)
    if not node.inputs:
        made = function(*node.args)
        return made if keep or node.op != "open" else made._new(made.im)
    inputs = [values[each] for each in node.inputs]
    if writes(node.op):
        inputs[0] = inputs[0].clone()  # others may need what it was
    args = substituted(node.args, inputs)
    kwargs = {name: substituted(value, inputs) for name, value in node.kwargs}
    if node.op.startswith(("torch.", "tensor.")):
        made = function(*args, **kwargs)
        return inputs[0] if node.op == "tensor.__setitem__" else made
    return function(inputs[0], *args, **kwargs)


def substituted(value: Any, inputs: Sequence[Any]) -> Any:
    """Return ``value`` with each `Input` in it replaced by that input."""
    if type(value) is Input:
        return inputs[value.number]
    return map_inner(value, lambda each: substituted(each, inputs))


def writes(op: str) -> bool:
    """Whether the operation writes into its first input."""
    name = op.removeprefix("tensor.")
    return name != op and (
        name == "__setitem__"
        or name.startswith("__i")
        or (name.endswith("_") and not name.endswith("__"))
    )


_MODULES = {
    "imageops": "PIL.ImageOps",
    "fpil": "torchvision.transforms._functional_pil",
    "v1t": "torchvision.transforms._functional_tensor",
    "v2": "torchvision.transforms.v2.functional",
}


@functools.cache
def function_of(op: str) -> Any:
    """Return the function that does ``op``.

    It takes the first input, if the step is no source, and then the arguments, with inputs in
    place. Steps of ``torch.`` and ``tensor.`` take the arguments only.
    """
    kind, _, name = op.rpartition(".")
    if not kind:
        if op in _OWN:
            return _OWN[op]
        return _attribute("torchvision.transforms.functional", op)
    if kind == "pil":
        return _attribute("PIL.Image", "Image", name)
    if kind == "enhance":
        enhancer = _attribute("PIL.ImageEnhance", name)
        return lambda image, factor: enhancer(image).enhance(factor)
    if kind == "tensor":
        return _attribute("torch", "Tensor", name)
    return _attribute(_MODULES.get(kind, kind), name)


def _attribute(module: str, *names: str) -> Any:
    found: Any = importlib.import_module(module)
    for name in names:
        found = getattr(found, name)
    return found


def _open(data: Any, format: str) -> Any:
    from PIL import Image

    Image.init()
    image = Image.OPEN[format][0](io.BytesIO(data), "")
    image.load()
    return image


def _array(data: Any, shape: tuple[int, ...]) -> Any:
    from PIL import Image

    return Image.fromarray(np.frombuffer(bytes(data), np.uint8).reshape(shape))


def _tensor(
    data: Any, shape: tuple[int, ...], dtype: torch.dtype, flavour: str, strides: tuple[int, ...]
) -> Any:
    flat = torch.frombuffer(bytearray(data), dtype=dtype) if len(data) else torch.empty(0)
    return as_flavour(flat.to(dtype).as_strided(shape, strides), flavour)


def _decode(data: Any, function: str, *args: Any) -> Any:
    library, _, name = function.rpartition(".")
    if library:
        module: Any = importlib.import_module("torchcodec.decoders._image_decoders")
        name = f"_{name}"
    else:
        importlib.import_module("torchvision.io")
        module = torch.ops.image
    operator = DECODERS.get(function) or getattr(module, name)
    return operator(torch.frombuffer(bytearray(data), dtype=torch.uint8), *args)


def as_flavour(tensor: torch.Tensor, flavour: str) -> Any:
    """Return ``tensor`` as one of ``flavour``: see `program.Tensor`."""
    plain = flavour == "Tensor"
    return tensor.as_subclass(
        torch.Tensor if plain else _attribute("torchvision.tv_tensors", flavour)
    )


DECODERS: dict[str, Any] = {}
"""Operators of ``torch.ops.image``, or of torchcodec, that a hook has replaced."""

_OWN: dict[str, Callable[..., Any]] = {
    "open": _open,
    "array": _array,
    "tensor": _tensor,
    "decode": _decode,
    "as_subclass": as_flavour,
}
