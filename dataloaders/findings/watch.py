"""Sees a few steps operator by operator; what they compute stays as it is.

    for batch in check:  step 1 │ step 2, watched │ step 3, watched │ step 4 …
                                   └── places, flops, modules ──┴─> Facts

A watched step is slow, and never part of a measured block. What only one of the watched steps does
(a line for the log, every so many steps) is no fact about each step.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from dataloaders.findings.facts import Facts, Place, environment

_WATCHED = (2, 3)  # the first one makes lazy modules, compiles and chooses kernels
_LARGE = 1 << 16  # elements from which a kernel's reading and writing shows

_SYNCS = {
    "_local_scalar_dense": "reading a value (.item(), float(), bool())",
    "nonzero": "nonzero()",
    "masked_select": "masked_select()",
    "_unique2": "unique()",
    "unique_consecutive": "unique_consecutive()",
    "equal": "torch.equal()",
}
_NOT_THE_USERS = ("torch/optim/", "torch/amp/", "torch/nn/parallel/", "torch/distributed/",
                  "torch/nn/utils/")  # fmt: skip
_BATCH_NORMS = {
    "native_batch_norm": 5, "cudnn_batch_norm": 5, "miopen_batch_norm": 5,
    "_native_batch_norm_legit": 5, "_batch_norm_with_update": None, "batch_norm_stats": None,
}  # fmt: skip
"""Their names, and which argument tells that they train; None: they always do."""
_MODES = ("ours", "torch/_dynamo/", "torch/_compile.py", "torch/utils/")
_TORCH = str(Path(torch.__file__).parent) + os.sep
_OURS = str(Path(__file__).parents[1]) + os.sep
_INSTALLED = tuple(
    str(Path(sysconfig.get_path(kind))) + os.sep for kind in ("stdlib", "purelib", "platlib")
)


class _Site(NamedTuple):
    """Says where an operator was called."""

    where: str | None  # file:line of the user's innermost frame
    torch: tuple[str, ...]  # files and functions of torch between that frame and the operator
    call: tuple[object, int] | None  # innermost; None in a thread of autograd's own

    def within(self, *prefixes: str) -> bool:
        return any(name.startswith(prefixes) for name in self.torch)


@dataclass
class _Step:
    """Holds what one watched step did."""

    places: Counter[Place] = field(default_factory=Counter)
    flops: Counter[tuple[str, torch.dtype, str]] = field(default_factory=Counter)
    shapes: list[tuple[Any, ...]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)  # fields of `Facts`
    reduced: bool = False
    stepped: bool = False


class Onlooker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that torch.compile compiles under as without it, and that only its thread leaves.

    Modes are a stack of each thread. A step that never comes back is given up from another thread,
    whose own stack is none of this mode's.
    """

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile compile under this mode, which otherwise leaves the step uncompiled."""
        return True

    def __enter__(self) -> Any:
        self._thread = threading.get_ident()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *exception: Any) -> None:
        """Stop watching until the mode is entered again."""
        if threading.get_ident() == self._thread:
            super().__exit__(*exception)  # type: ignore[no-untyped-call]


class Watch(Onlooker):  # type: ignore[no-untyped-call]
    """Watches two early steps of a loop: ``with watch.step(number)`` around each step.

    ``facts()`` is None until one of them has ended.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._steps: list[_Step] = []
        self._now = _Step()
        self._failed = False
        # By id: tensors of the running step, as long as they live.
        self._made: dict[int, weakref.ref[torch.Tensor]] = {}
        self._biased: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}
        self._chains: dict[int, tuple[weakref.ref[torch.Tensor], frozenset[object]]] = {}

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Watch the step inside the block, if it is one of those to watch; restore all after."""
        if number not in _WATCHED or self._failed:
            yield
            return
        self._now = _Step()
        with ExitStack() as stack:
            stepped = functools.partial(setattr, self._now, "stepped", True)
            stack.callback(register_optimizer_step_post_hook(lambda *_: stepped()).remove)
            for module, name, noted in (
                (torch.cuda, "empty_cache", self._emptied),
                (torch.cuda.memory, "empty_cache", self._emptied),
                (torch._tensor_str, "_str", self._printed),  # switches all modes off
            ):
                noting = functools.partial(noted, getattr(module, name))
                stack.enter_context(mock.patch.object(module, name, noting))
            stack.enter_context(self)
            yield
        for known in (self._made, self._biased, self._chains):
            known.clear()
        self._steps.append(self._now)

    def facts(self, **more: Any) -> Facts | None:
        """Return what the watched steps have in common, and ``more`` fields of it."""
        if not self._steps or self._failed:
            return None
        first, last = self._steps[0], self._steps[-1]
        by_device: Counter[str] = Counter()
        for (device, *_), flops in last.flops.items():
            by_device[device] += flops
        device = by_device.most_common(1)[0][0] if by_device else "cpu"
        return Facts(
            device=device,
            places={place: min(much, last.places[place]) for place, much in first.places.items()
                    if place in last.places},
            convolutions=len(last.shapes),
            fixed_shapes=first.shapes == last.shapes,
            reduces_early=any(step.reduced and not step.stepped for step in self._steps),
            flops=last.flops,
            **{**first.settings, **last.settings, **environment(device), **more},
        )  # fmt: skip

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` unchanged and note what it was."""
        out = func(*args, **(kwargs or {}))
        if not self._failed:
            try:
                self._note(func, args, kwargs or {}, out)
            except Exception:  # whatever an operator looks like: the user's training goes on
                self._failed = True
        return out

    def _note(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        if not isinstance(func, torch._ops.OpOverload) or func.namespace not in ("aten", "c10d"):
            return
        name = func._schema.name.partition("::")[2]
        if func.namespace == "c10d":
            backward = _site()  # in a thread of autograd's there is no frame
            backwards = backward.call is None or backward.within("torch/autograd/")
            self._now.reduced |= backwards and name.startswith("allreduce")
            return
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        site = _site()
        self._note_debugging(site)
        copies = name in ("_to_copy", "copy_")
        self._note_made(given, made, copies, site)
        if copies:
            waits = not (kwargs.get("non_blocking") or (name == "copy_" and any(args[2:])))
            to_host = made[0].device.type == "cpu" != given[-1].device.type
            what = ".cpu()" if waits and to_host else None
        elif name == "index" and any(leaf.dtype == torch.bool for leaf in given[1:]):
            what = "a boolean mask as index"
        else:
            what = _SYNCS.get(name)
        if what is not None and not site.within(*_NOT_THE_USERS):
            self._now.places[Place("sync", what, given[-1].device.type, site.where)] += 1
        if name in ("zero_", "_foreach_zero_") and "zero_grad" in site.torch:
            place = Place("zeroed", "zero_grad", given[0].device.type, site.where)
            self._now.places[place] += sum(leaf.nbytes for leaf in given)
        if func.overloadpacket in flop_registry and made:
            self._note_work(func, args, kwargs, out, made[0])
        if name == "convolution":
            self._note_convolution(args, made[0])
        elif name in _BATCH_NORMS:
            known, training = self._biased.get(id(args[0])), _BATCH_NORMS[name]
            if known and known[0]() is args[0] and (training is None or args[training]):
                self._now.places[Place("bias", known[1], "", None)] += 1
        if torch.Tag.pointwise in func.tags and made:
            self._note_chain(given, made[0], site)
        elif not func.is_view and any(leaf.numel() >= _LARGE for leaf in made):
            self._chains.clear()  # what comes before it and after it is no row

    def _note_debugging(self, site: _Site) -> None:
        on = {"gradcheck"} if site.within("torch/autograd/gradcheck.py") else set()
        if torch.is_anomaly_enabled():
            on.add("anomaly detection")
        if torch.autograd.profiler._is_profiler_enabled:
            on.add("a profiler")
        for what in on:
            where = site.where if what == "gradcheck" else None
            self._now.places[Place("debugging", what, "", where)] += 1
        if site.within("torch/utils/checkpoint.py"):
            self._now.settings["checkpointed"] = True
        if site.within("torch/nn/parallel/data_parallel.py"):
            for module in _modules_running():
                if isinstance(module, torch.nn.DataParallel):
                    self._now.settings["data_parallel"] = len(module.device_ids)

    def _note_made(self, given: Any, made: Any, copies: bool, site: _Site) -> None:
        """Follow what is made on the CPU from nothing, until it is copied to a device."""
        from_nothing = all(self._is_made(leaf) for leaf in given)
        for leaf in made:
            if leaf.device.type == "cpu":
                if from_nothing and not any(one is leaf for one in given):
                    self._made[id(leaf)] = weakref.ref(leaf)
            elif copies and self._is_made(given[-1]) and not site.within(*_NOT_THE_USERS):
                what = "a tensor that is made on the CPU"
                self._now.places[Place("moved", what, leaf.device.type, site.where)] += 1

    def _is_made(self, leaf: torch.Tensor) -> bool:
        known = self._made.get(id(leaf))
        return known is not None and known() is leaf

    def _note_work(self, func: Any, args: Any, kwargs: Any, out: Any, made: torch.Tensor) -> None:
        formula = flop_registry[func.overloadpacket]
        kind = "convolution" if "convolution" in func._schema.name else "product"
        count = int(formula(*args, **kwargs, out_val=out))
        self._now.flops[made.device.type, made.dtype, kind] += count
        if made.dtype == torch.float32:
            self._now.settings["matmul_precision"] = "set by backend"  # by the newer settings
            with suppress(RuntimeError):
                precision = torch.get_float32_matmul_precision()
                self._now.settings["matmul_precision"] = precision

    def _note_convolution(self, args: Any, made: torch.Tensor) -> None:
        step, (image, weight, bias, *_) = self._now, args
        step.shapes.append((tuple(image.shape), tuple(weight.shape), image.dtype))
        step.settings["autotuner"] = torch.backends.cudnn.benchmark
        step.settings["deterministic"] = torch.backends.cudnn.deterministic
        if image.dim() == 4 and image.shape[1] > 1 and image.is_contiguous():
            planar = not image.is_contiguous(memory_format=torch.channels_last)
            step.settings["planar"] = step.settings.get("planar", 0) + planar
        if bias is not None:
            running = _modules_running()
            named = running[-1].named_modules() if running else ()
            names = (
                name or type(module).__name__ for name, module in named if module is running[0]
            )
            self._biased[id(made)] = weakref.ref(made), next(names, "a convolution")

    def _note_chain(self, given: Any, made: torch.Tensor, site: _Site) -> None:
        if made.numel() < _LARGE or site.call is None:
            return
        if site.within("torch/autograd/", "torch/optim/", "torch/nn/utils/"):
            return
        chain: frozenset[object] = frozenset([site.call])
        for leaf in given:
            known = self._chains.get(id(leaf))
            if known is not None and known[0]() is leaf:
                chain |= known[1]
        self._chains[id(made)] = weakref.ref(made), chain
        place = Place("chain", "pointwise operators", made.device.type, site.where)
        self._now.places[place] = max(self._now.places[place], len(chain))

    def _emptied(self, original: Any) -> Any:
        self._now.places[Place("empty_cache", "empty_cache()", "cuda", _site().where)] += 1
        return original()

    def _printed(self, original: Any, tensor: torch.Tensor, **options: Any) -> Any:
        place = Place("sync", "printing a tensor", tensor.device.type, _site().where)
        self._now.places[place] += 1
        return original(tensor, **options)


def _modules_running() -> list[torch.nn.Module]:
    """Return the modules whose methods are on the stack, innermost first.

    A global hook would tell them too, but torch warns of it where a model is compiled.
    """
    running = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch.nn.Module):
            running.append(owner)
        frame = frame.f_back
    return running


def _site() -> _Site:
    """Return where the operator that is dispatched was called; stops at our own check."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _room(frame.f_code.co_filename).startswith(_MODES):
        frame = frame.f_back  # this mode, one that is inside it, and what torch wraps them in
    call = None if frame is None else (frame.f_code, frame.f_lasti)
    between: list[str] = []
    while frame is not None:
        room = _room(frame.f_code.co_filename)
        if room == "ours":
            break
        if room == "user":
            return _Site(
                f"{_short(frame.f_code.co_filename)}:{frame.f_lineno}", tuple(between), call
            )
        if room != "installed":
            between += [room, frame.f_code.co_name]
        frame = frame.f_back
    return _Site(None, tuple(between), call)


@functools.cache
def _room(path: str) -> str:
    """Return whose a file is: "ours", "user", "installed", or its path below torch's folder."""
    if path.startswith(_OURS):
        return "ours"
    if path.startswith(_TORCH):
        return "torch/" + path[len(_TORCH) :].replace(os.sep, "/")
    generated = path.startswith("<") and not path.startswith(("<stdin", "<string", "<ipython"))
    if generated or path.startswith(_INSTALLED) or f"{os.sep}site-packages{os.sep}" in path:
        return "installed"
    return "user"


def _short(path: str) -> str:
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except (ValueError, OSError):
        return path
