"""Stand-ins of tensors: shape, dtype and strides, without storage; calls instead of values.

    to_tensor(stand-in of an image), decode_jpeg ──> stand-in
    deterministic functions of torch ──__torch_function__──> a new stand-in
    all else, from Python or C++ ──__torch_function__, __torch_dispatch__──> done to real tensors

A stand-in that was needed for real keeps its tensor, and every later call goes to that. Stand-ins
that share memory (views of each other) get real tensors together, which share it; a write is
recorded only if no other stand-in shares the memory.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from dataloaders.recording import program
from dataloaders.recording.context import CONTAINERS, Unrecordable, frozen, map_inner, recorder
from dataloaders.recording.ops import as_flavour, run_now, substituted, writes
from dataloaders.recording.posing import posed, posing
from dataloaders.recording.program import Input, Node

_LOCK = threading.RLock()
_off = torch._C.DisableTorchFunctionSubclass


class Recorded(torch.Tensor):
    """Mixed into a tensor class: the class of stand-ins that pose as it.

    Attributes:
        _node: the step that makes it.
        _real: the tensor that stands for it once it was needed; None before.
        _family: weak references to those that may share its memory, with itself.
        _header: shape, strides and dtype.
    """

    _node: Node
    _real: torch.Tensor | None
    _family: list[weakref.ref[Recorded]]
    _header: tuple[tuple[int, ...], tuple[int, ...], torch.dtype]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record ``func``, answer it from the header, or do it to real tensors."""
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, Recorded) and first._real is None:
            if func in _HEADER:
                with _off():
                    return func(*args, **kwargs)
            if func is torch.Tensor.requires_grad_ and args[1:] == (False,):
                return first
        if func in _RECORDED:
            try:
                return _generic(func, _RECORDED[func], args, kwargs)
            except Exception:
                pass  # if it is the dataset's mistake, it is raised below
        name = getattr(func, "__name__", "")
        name = getattr(func.__self__, "__name__", name) if name == "__get__" else name
        (args, kwargs), _ = _reals((args, kwargs), f"Tensor.{name}")
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Do what C++ asks for to real tensors."""
        (args, kwargs), given = _reals((args, kwargs or {}), str(func))
        out = func(*args, **kwargs)
        return given.get(id(out), out)

    def as_subclass(self, cls: Any) -> Any:
        """See torch, which does not hand this to `__torch_function__`."""
        cls = posed(cls)
        known = cls is torch.Tensor or cls.__module__.startswith("torchvision.tv_tensors")
        if self._real is not None or not known:
            return materialise(self, "Tensor.as_subclass").as_subclass(cls)
        if cls is posed(type(self)):
            return self
        what = self._node.what._replace(flavour=cls.__name__)
        node = Node("as_subclass", (self._node,), (cls.__name__,), (), what)
        return new(node, strides=self._header[1], family=self._family)

    @classmethod
    def wrap(cls, tensor: Any, like: Any, **kwargs: Any) -> Any:
        """See torchvision's TVTensor; what is wrapped may be real."""
        return tensor.as_subclass(posed(cls))


def new(node: Node, *, strides: Any = None, family: list[Any] | None = None) -> Any:
    """Return a stand-in of what ``node`` makes; without ``strides``, it claims to be contiguous."""
    shape, dtype, flavour = node.what
    if strides is None:
        strides, step = [], 1
        for size in reversed(shape):
            strides.insert(0, step)
            step *= max(1, size)
    made: Any = torch.Tensor._make_wrapper_subclass(
        _class(flavour), shape, strides=strides, dtype=dtype, device=torch.device("cpu")
    )
    made._node, made._real = node, None
    made._header = (tuple(shape), tuple(strides), dtype)
    made._family = [] if family is None else family
    made._family.append(weakref.ref(made))
    return made


def derived(
    op: str, first: Any, args: Any, kwargs: Any, what: program.Tensor, *, inplace: bool = False
) -> Any:
    """Return a stand-in of ``op`` done to the stand-in ``first``, of which it may be a view.

    With ``inplace``, the result is written into ``first``, which is returned.
    """
    inputs = [first]
    args, kwargs = _sealed(args, inputs), _sealed(kwargs, inputs)
    nodes = tuple([each._node for each in inputs])
    node = Node(op, nodes, args, tuple(kwargs.items()), what)
    return _written(first, node) if inplace else new(node, family=first._family)


def _written(tensor: Any, node: Node) -> Any:
    """Return ``tensor``, whose value is now what ``node`` makes."""
    if any(each() is not None and each() is not tensor for each in tensor._family):
        raise Unrecordable("the memory is shared")  # it is written for real, with them
    tensor._node = node
    return tensor


def materialise(tensor: Any, why: str = "its values") -> Any:
    """Return the real tensor of a stand-in; from now on every call goes to that.

    All that may share its memory become real together.
    """
    with _LOCK:
        if tensor._real is None:
            own = recorder()
            if own is not None:
                own.looked(why)
            family = [each for each in (ref() for ref in tensor._family) if each is not None]
            family = [each for each in family if each._real is None]
            for each, real in zip(family, run_now([each._node for each in family]), strict=True):
                each._real = real
        return tensor._real


@functools.cache
def _class(flavour: str) -> Any:
    kind: Any = type(as_flavour(torch.empty(0), flavour))
    return posing(Recorded, kind)


def _reals(value: Any, why: str) -> tuple[Any, dict[int, Any]]:
    """Return ``value`` with real tensors, and the stand-ins by the ids of these."""
    given: dict[int, Any] = {}

    def real(value: Any) -> Any:
        if isinstance(value, Recorded):
            found = materialise(value, why)
            given[id(found)] = value
            return found
        if type(value) not in CONTAINERS and isinstance(value, (tuple, list)):
            made = [real(each) for each in value]
            return value._make(made) if hasattr(value, "_make") else type(value)(made)
        return map_inner(value, real)

    return real(value), given


def _sealed(value: Any, inputs: list[Any]) -> Any:
    """Return ``value`` frozen, with `Input` for tensors, which are added to ``inputs``."""
    if isinstance(value, torch.Tensor):
        recorded = isinstance(value, Recorded) and value._real is None
        inputs.append(value if recorded else _constant(value))
        return Input(len(inputs) - 1)
    if type(value) in CONTAINERS:
        return map_inner(value, lambda each: _sealed(each, inputs))
    return frozen(value)


def _constant(tensor: Any) -> Any:
    """Return a stand-in of a copy of a real tensor."""
    real: Any = tensor._real if isinstance(tensor, Recorded) else tensor
    plain = real.device.type == "cpu" and real.layout == torch.strided and not real.requires_grad
    if not plain or type(real).__name__ not in ("Tensor", "Image", "Mask", "Video"):
        raise Unrecordable(type(tensor).__name__)
    made = source(real)
    return new(made, strides=made.args[-1])


def source(real: torch.Tensor, *, copied: bool = False) -> Node:
    """Return the step that makes a copy of a tensor; ``copied``: it is a dense copy."""
    what = program.Tensor(tuple(real.shape), real.dtype, posed(type(real)).__name__)
    dense = real if copied else real.as_subclass(torch.Tensor).clone()
    data = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy()
    return Node("tensor", (), (data, *what, tuple(dense.stride())), (), what)


def _generic(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Return the stand-in of a function of torch; its shape comes from a run without storage."""
    inputs: list[Any] = []
    sealed = _sealed(args, inputs), _sealed(kwargs, inputs)
    first = inputs[0]
    if all(each._node.op == "tensor" for each in inputs):
        raise Unrecordable("no stand-in")
    flavours = {each._node.what.flavour for each in inputs} - {"Tensor"}
    if "alpha" in kwargs or (flavours and (len(flavours) > 1 or writes(name) or _wrapping())):
        raise Unrecordable(name)
    key = (name, repr(sealed), *[each._header for each in inputs])
    if key not in _outcomes:
        if len(_outcomes) > 4096:
            _outcomes.clear()
        _outcomes[key] = _outcome(func, sealed, [each._header for each in inputs])
    shape, strides, dtype, shared, same = _outcomes[key]
    flavour = first._node.what.flavour if flavours and name in _KEEP_FLAVOUR else "Tensor"
    if same and not writes(name) and flavour == inputs[0]._node.what.flavour:
        return inputs[0]
    nodes = tuple([each._node for each in inputs])
    what = program.Tensor(shape, dtype, flavour)
    node = Node(name, nodes, sealed[0], tuple(sealed[1].items()), what)
    if not writes(name):
        family = None if shared is None else inputs[shared]._family
        return new(node, strides=strides, family=family)
    if first is not args[0] or not same:
        raise Unrecordable(name)
    return _written(first, node)


_Outcome = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, "int | None", bool]
_outcomes: dict[Any, _Outcome] = {}


def _outcome(func: Any, sealed: Any, headers: Sequence[Any]) -> _Outcome:
    """Return shape, strides, dtype, the input whose memory is shared, whether it is the first."""
    metas = [
        torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        for shape, strides, dtype in headers
    ]
    out = func(*substituted(sealed[0], metas), **substituted(sealed[1], metas))
    out = metas[0] if out is None else out  # __setitem__
    if not isinstance(out, torch.Tensor):
        raise Unrecordable("several results")
    memory = [each.untyped_storage()._cdata for each in (out, *metas)]
    shared = memory.index(memory[0], 1) - 1 if memory[0] in memory[1:] else None
    same = out is metas[0] and _header(out) == headers[0]
    return (*_header(out), shared, same)


def _header(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    return tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype


def _wrapping() -> bool:
    """Whether torchvision's ``set_return_type`` is in force."""
    from torchvision.tv_tensors import _torch_function_helpers as helpers

    return bool(helpers._must_return_subclass())


def _functions(owner: Any, names: str) -> dict[Any, str]:
    prefix = {torch: "torch.", torch.Tensor: "tensor."}.get(owner, f"{owner.__name__}.")
    found = {getattr(owner, name, None): f"{prefix}{name}" for name in names.split()}
    return {function: name for function, name in found.items() if function is not None}


# These are correctly rounded, element by element, and none adds up: so neither the number of
# threads nor the processor's instructions change what they make.
_BOTH = """add sub subtract mul multiply div divide true_divide clamp clip abs neg roll flip rot90
    permute transpose movedim swapaxes unsqueeze squeeze reshape flatten narrow select clone
    detach"""
_RECORDED = {
    **_functions(torch, f"{_BOTH} stack cat concat concatenate"),
    **_functions(torch.nn.functional, "interpolate pad"),
    **_functions(
        torch.Tensor,
        f"""{_BOTH} view expand repeat contiguous to float double half bfloat16 byte int long t
        __getitem__ __setitem__ __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__
        __iadd__ __isub__ __imul__ __itruediv__ add_ sub_ mul_ div_ clamp_ fill_ zero_ copy_""",
    ),
}
_KEEP_FLAVOUR = {"tensor.to", "tensor.clone", "tensor.detach"}
_HEADER = {  # not strides: those of what torchvision makes are not known
    **_functions(torch, "numel is_floating_point is_complex"),
    **_functions(
        torch.Tensor,
        "size dim ndimension numel nelement element_size is_floating_point is_complex __len__",
    ),
}
_HEADER |= {
    getattr(torch.Tensor, name).__get__: name
    for name in ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "requires_grad")
}
