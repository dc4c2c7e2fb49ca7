"""Watch a few steps operator by operator, without changing what they compute.

    for batch in check:  step 1 │ step 2, watched │ step 3, watched │ step 4 …
                                   └── places, flops, modules ──┴─> Facts

A watched step is slow, and never part of a measured block. What only one watched step does, such as
logging every so many steps, does not count. If gradients are accumulated, the steps of two whole
cycles, up to the optimizer's step, are watched as well.
"""

from __future__ import annotations

import heapq
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from unittest import mock

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

from dataloaders.errors import last_line
from dataloaders.findings.facts import Facts, Place, environment
from dataloaders.findings.sites import Site, modules_running, site_here

_WATCHED = (2, 3)  # not the first, which makes lazy modules, compiles and chooses kernels
_LONGEST_CYCLE = 16  # batches; two longer cycles would take too long to watch
_LARGE = 1 << 16  # elements from which what a kernel reads and writes takes most of its time

_SYNCS = {
    "_local_scalar_dense": "reading a value (.item(), float(), bool())",
    "nonzero": "nonzero()",
    "masked_select": "masked_select()",
    "_unique2": "unique()",
    "unique_consecutive": "unique_consecutive()",
    "equal": "torch.equal()",
}
_CALLS = (
    (torch.cuda, "empty_cache", "empty_cache", "empty_cache()"),
    (torch.cuda.memory, "empty_cache", "empty_cache", "empty_cache()"),
    (torch.cuda, "synchronize", "sync", "torch.cuda.synchronize()"),
    (torch.accelerator, "synchronize", "sync", "torch.accelerator.synchronize()"),
    (torch.cuda.Event, "synchronize", "sync", "synchronize() of an event"),
    (torch.cuda.Stream, "synchronize", "sync", "synchronize() of a stream"),
    (torch._tensor_str, "_str", "sync", "printing a tensor"),  # switches all modes off
)
"""Calls that a dispatch mode does not see: owner and name; kind and words of the place."""
_WAITS = "called a synchronizing"
"""The beginning of torch's warning about an operator that waits for a CUDA device."""
_NOT_THE_USERS = ("torch/optim/", "torch/amp/", "torch/nn/parallel/", "torch/distributed/",
                  "torch/nn/utils/")  # fmt: skip
_TO_DEVICE = "a copy to the device without non_blocking=True"
_BATCH_NORMS = {
    "native_batch_norm": 5, "cudnn_batch_norm": 5, "miopen_batch_norm": 5,
    "_native_batch_norm_legit": 5, "_batch_norm_with_update": None, "batch_norm_stats": None,
}  # fmt: skip
"""Operator -> the argument that says whether it runs in training mode; None: it always does."""


@dataclass
class _Step:
    """Holds what one watched step did."""

    places: Counter[Place] = field(default_factory=Counter)
    flops: Counter[tuple[str, torch.dtype, str]] = field(default_factory=Counter)
    shapes: list[tuple[Any, ...]] = field(default_factory=list)
    sites: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)  # fields of `Facts`
    reduced: bool = False
    stepped: bool = False

    def note_site(self, what: str, site: Site) -> None:
        """Note where ``what`` was done first."""
        if site.where is not None:
            self.sites.setdefault(what, site.where)


_Chain: TypeAlias = tuple[str | None, frozenset[object]]  # where it begins; its calls


class Onlooker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that does not hinder torch.compile, and that only its own thread leaves.

    Each thread has a stack of modes. If a step never returns, another thread closes the check, and
    must leave its own stack alone.
    """

    _thread = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile compile the step, which it does not do under other modes."""
        return True

    def __enter__(self) -> Any:
        self._thread = threading.get_ident()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *exception: Any) -> None:
        """Leave the mode, if this is the thread that entered it."""
        if threading.get_ident() == self._thread:
            super().__exit__(*exception)  # type: ignore[no-untyped-call]


class Watch(Onlooker):  # type: ignore[no-untyped-call]
    """Watches a few early steps of a loop: put ``with watch.step(number)`` around each, from 1 on.

    ``facts()`` returns None until a watched step has ended.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # What a toggle may convert: of nested modules that convolve, the outermost.
        self.optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.convolving: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._steps: list[_Step] = []  # those that were watched
        self._ends: list[int] = []  # numbers of the first three in which an optimizer stepped
        self._now = _Step()
        self.failed = ""  # why steps are watched no more
        self._waiting: set[int] = set()  # threads that torch has warned during the current operator
        # For live tensors of the running step: whether they were made on the CPU from nothing; the
        # convolution with a bias, or the chain of pointwise operators, that made them.
        self._made: MutableMapping[torch.Tensor, bool] = WeakIdKeyDictionary()
        self._biased: MutableMapping[torch.Tensor, str] = WeakIdKeyDictionary()
        self._chains: MutableMapping[torch.Tensor, _Chain] = WeakIdKeyDictionary()

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Watch the step in the block, if its number is one to watch."""
        if self.failed:
            yield
            return
        self._now, watched = _Step(), self._is_wanted(number)
        with ExitStack() as stack:
            stack.callback(register_optimizer_step_post_hook(self._stepped).remove)
            if watched:
                for owner, name, kind, what in _CALLS:
                    noting = self._noting(getattr(owner, name), kind, what)
                    stack.enter_context(mock.patch.object(owner, name, noting))
                if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                    stack.enter_context(self._warned_of_waits())
                stack.enter_context(self)
            yield
        for known in (self._made, self._biased, self._chains):
            known.clear()
        if watched:
            self._steps.append(self._now)
        if self._now.stepped and len(self._ends) < 3:
            self._ends.append(number)

    def _is_wanted(self, number: int) -> bool:
        """Return whether a step is an early one, or in one of the first two short cycles."""
        in_cycle = 0 < len(self._ends) < 3 and number - self._ends[-1] <= _LONGEST_CYCLE
        return in_cycle or number in _WATCHED

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._now.stepped = True
        self.optimizers.add(optimizer)

    @contextmanager
    def _warned_of_waits(self) -> Iterator[None]:
        """Note operators that wait for CUDA, by torch's sync debug mode; hide its warnings."""
        with warnings.catch_warnings():
            show = warnings.showwarning

            def note(message: Any, *about: Any, **more: Any) -> None:
                if str(message).startswith(_WAITS):
                    self._waiting.add(threading.get_ident())
                else:
                    show(message, *about, **more)

            warnings.filterwarnings("always", _WAITS)
            warnings.filterwarnings("ignore", "Synchronization debug mode")
            warnings.showwarning = note
            before = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode(before)

    def facts(self, **more: Any) -> Facts | None:
        """Return what the watched steps have in common, and ``more`` fields."""
        steps = self._steps
        if not steps or self.failed:
            return None
        first, last = steps[0], steps[-1]
        by_device: Counter[str] = Counter()
        for (device, *_), flops in last.flops.items():
            by_device[device] += flops
        device = by_device.most_common(1)[0][0] if by_device else "cpu"
        repeated: Counter[Place] = Counter()
        for place in dict.fromkeys(place for step in steps for place in step.places):
            # The second largest amount: 0 if only one of several steps does it.
            repeated[place] = heapq.nlargest(2, (step.places[place] for step in steps))[-1]
        return Facts(
            device=device,
            places=+repeated,  # without zeros
            sites={**last.sites, **first.sites},
            convolutions=len(last.shapes),
            fixed_shapes=all(step.shapes == last.shapes for step in steps),
            reduces_early=any(step.reduced and not step.stepped for step in steps),
            flops=last.flops,
            **{**first.settings, **last.settings, **environment(device), **more},
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` unchanged and note what it did."""
        self._waiting.discard(threading.get_ident())
        out = func(*args, **(kwargs or {}))
        if not self.failed:
            try:
                self._note(func, args, kwargs or {}, out)
            except Exception as error:  # an unknown operator must not end the training
                self.failed = f"{func}: {last_line(error)}"
        return out

    def _note(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        if not isinstance(func, torch._ops.OpOverload) or func.namespace not in ("aten", "c10d"):
            return
        name = func._schema.name.partition("::")[2]
        if func.namespace == "c10d":
            site = site_here()  # a thread of autograd has no frame
            backwards = site.call is None or site.within("torch/autograd/")
            self._now.reduced |= backwards and name.startswith("allreduce")
            return
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        site = site_here()
        self._note_debugging(site)
        if site.within("torch/autograd/"):
            self._now.note_site("backward", site)
        copies = name in ("_to_copy", "copy_")
        moved = self._note_made(given, made, copies, site)
        device = given[-1].device.type if given else ""
        what = _SYNCS.get(name)
        if copies:
            waits = not (kwargs.get("non_blocking") or (name == "copy_" and any(args[2:])))
            to = made[0].device.type
            if waits and "cpu" in (device, to) and to not in (device, "meta"):
                what = ".cpu()" if to == "cpu" else _TO_DEVICE
            device = to if device == "cpu" else device
        elif name == "index" and any(leaf.dtype == torch.bool for leaf in given[1:]):
            what = "a boolean mask as index"
        if what is None and threading.get_ident() in self._waiting:
            what, device = f"{name}()", "cuda"
        if what is not None and not (moved or site.within(*_NOT_THE_USERS)):
            self._now.places[Place("sync", what, device, site.where)] += 1
        if name in ("zero_", "_foreach_zero_") and "zero_grad" in site.torch:
            place = Place("zeroed", "zero_grad", given[0].device.type, site.where)
            self._now.places[place] += sum(leaf.nbytes for leaf in given)
        if func.overloadpacket in flop_registry and made:
            self._note_work(func, args, kwargs, out, made[0], site)
        if name == "convolution":
            self._note_convolution(args, made[0])
        elif name in _BATCH_NORMS:
            module, training = self._biased.get(args[0]), _BATCH_NORMS[name]
            if module and (training is None or args[training]):
                self._now.places[Place("bias", module, "", site.where)] += 1
        if torch.Tag.pointwise in func.tags and made:
            self._note_chain(given, made[0], site)
        elif not func.is_view and any(leaf.numel() >= _LARGE for leaf in made):
            self._chains.clear()  # it ends the chain

    def _note_debugging(self, site: Site) -> None:
        on = {"gradcheck"} if site.within("torch/autograd/gradcheck.py") else set()
        if torch.is_anomaly_enabled():
            on.add("anomaly detection")
        if torch.autograd.profiler._is_profiler_enabled:
            on.add("a profiler")
        for what in on:
            self._now.places[Place("debugging", what, "", None)] += 1
            self._now.note_site(what, site)
        if site.within("torch/utils/checkpoint.py"):
            self._now.settings["checkpointed"] = True
        if site.within("torch/nn/parallel/data_parallel.py"):
            for module in modules_running():
                if isinstance(module, torch.nn.DataParallel):
                    self._now.settings["data_parallel"] = len(module.device_ids)
                    self._now.note_site("data-parallel", site)

    def _note_made(self, given: Any, made: Any, copies: bool, site: Site) -> bool:
        """Track tensors made on the CPU from nothing; return whether one is copied to a device."""
        from_nothing, moved = all(leaf in self._made for leaf in given), False
        for leaf in made:
            if leaf.device.type == "cpu":
                if from_nothing and not any(one is leaf for one in given):
                    self._made[leaf] = True
            elif copies and given[-1] in self._made and not site.within(*_NOT_THE_USERS):
                what, moved = "a tensor that is made on the CPU", True
                self._now.places[Place("moved", what, leaf.device.type, site.where)] += 1
        return moved

    def _note_work(
        self, func: Any, args: Any, kwargs: Any, out: Any, made: torch.Tensor, site: Site
    ) -> None:
        formula = flop_registry[func.overloadpacket]
        kind = "convolution" if "convolution" in func._schema.name else "product"
        count = int(formula(*args, **kwargs, out_val=out))
        self._now.flops[made.device.type, made.dtype, kind] += count
        self._now.note_site(kind, site)
        if made.dtype == torch.float32:
            self._now.settings["matmul_precision"] = "set by backend"  # by the newer settings
            with suppress(RuntimeError):
                precision = torch.get_float32_matmul_precision()
                self._now.settings["matmul_precision"] = precision

    def _note_convolution(self, args: Any, made: torch.Tensor) -> None:
        step, (image, weight, bias, *_) = self._now, args
        step.shapes.append((tuple(image.shape), tuple(weight.shape), image.dtype))
        cudnn: Any = torch.backends.cudnn
        step.settings["autotuner"] = cudnn.benchmark
        step.settings["deterministic"] = cudnn.deterministic
        step.settings["convolution_tf32"] = cudnn.conv.fp32_precision == "tf32"
        running = modules_running()
        if image.dim() == 4 and image.shape[1] > 1 and image.is_contiguous():
            planar = not image.is_contiguous(memory_format=torch.channels_last)
            step.settings["planar"] = step.settings.get("planar", 0) + planar
            self.convolving.update(running[-1:])
        if bias is not None:
            named = running[-1].named_modules() if running else ()
            names = (
                name or type(module).__name__ for name, module in named if module is running[0]
            )
            self._biased[made] = next(names, "a convolution")

    def _note_chain(self, given: Any, made: torch.Tensor, site: Site) -> None:
        if made.numel() < _LARGE or site.call is None:
            return
        if site.within("torch/autograd/", "torch/optim/", "torch/nn/utils/"):
            return
        known = [self._chains[leaf] for leaf in given if leaf in self._chains]
        begun, _ = max(known, key=lambda one: len(one[1]), default=(site.where, ()))
        chain = frozenset([site.call]).union(*(calls for _, calls in known))
        self._chains[made] = begun, chain
        place = Place("chain", "pointwise operators", made.device.type, begun)
        self._now.places[place] = max(self._now.places[place], len(chain))

    def _noting(self, call: Any, kind: str, what: str) -> Callable[..., Any]:
        """Return a wrapper of ``call`` that notes where it is called."""

        def noting(*given: Any, **options: Any) -> Any:
            if threading.get_ident() == self._thread:  # not a loader that copies ahead
                of = given[0] if given else None
                device = of.device.type if isinstance(of, torch.Tensor) else "cuda"
                self._now.places[Place(kind, what, device, site_here().where)] += 1
            return call(*given, **options)

        return noting
