"""Decide on facts which entries of the tuning guides apply, and say what to write instead.

    Facts ──findings_of──> Finding, Finding, ...

Rules about arithmetic need a step with enough of it (`_WORTH`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from dataloaders.findings.facts import Facts
from dataloaders.measuring.intervals import Interval

_WORTH = 10**9
"""Floating-point operations in a step, from which on a faster way to do them matters."""
_SHORTEST_CHAIN = 3
_FULL = 0.9


def _guide(section: str) -> str:
    page = "https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html"
    return f"PyTorch Performance Tuning Guide: {section}, {page}"


def _cuda(section: str) -> str:
    return f"CUDA semantics: {section}, https://docs.pytorch.org/docs/stable/notes/cuda.html"


@dataclass(frozen=True)
class Finding:
    """Says what in the step costs time, why, and what to write instead.

    Attributes:
        name: of the entry, such as "synchronisation".
        message: what was found, why it costs time, and what to write instead.
        where: ``file:line`` in the user's code, or None.
        source: the guide that the advice comes from, its section, and ", " with its address.
        gain: seconds a batch that the change saves, as measured; None if it was not measured.
        anyway: whether it counts under every verdict: something was left on, or a wait keeps the
            host from running ahead of the device.
    """

    name: str
    message: str
    where: str | None
    source: str
    gain: Interval | None = None
    anyway: bool = False

    def __str__(self) -> str:
        where = "" if self.where is None else f"{self.where}: "
        gain = ""
        if self.gain is not None:
            low, high = 1e3 * self.gain.low, 1e3 * self.gain.high
            gain = f"; measured here: {1e3 * self.gain.estimate:.2f} ms a batch less "
            gain += f"({low:.2f} to {high:.2f})"
        title, _, _ = self.source.partition(", https://")
        return f"{where}{self.message}{gain} [{title}]"


def findings_of(facts: Facts | None) -> tuple[Finding, ...]:
    """Return the findings of all rules, in their order; none without facts."""
    if facts is None:
        return ()
    return (*_left_on(facts), *_processes(facts), *_model(facts), *_arithmetic(facts),
            *_around(facts))  # fmt: skip


def _left_on(facts: Facts) -> Iterator[Finding]:
    """Yield findings about what was left on, and about waits for the device."""

    def found(name: str, message: str, where: str | None, source: str) -> Finding:
        return Finding(name, message, where, source, anyway=True)

    for place in facts.of_kind("debugging"):
        message = f"{place.what} is on: it slows each step down; switch it off for training"
        yield found(
            "debugging", message, facts.sites.get(place.what), _guide("Disable debugging APIs")
        )
    guide = _guide("Avoid unnecessary CPU-GPU synchronization")
    waits = [place for place in facts.of_kind("sync") if place.device != "cpu"]
    copies = [place for place in waits if "non_blocking" in place.what]
    for place in waits:
        if place not in copies:
            message = (
                f"{place.what} waits for the device in each step, so that the host cannot run "
                "ahead: do it every so many steps, or keep the value on the device"
            )
            yield found("synchronisation", message, place.where, guide)
    if copies:  # nearly every script has some, so not `anyway`
        lines = ", ".join(str(place.where) for place in copies[1:])
        message = (
            f"{copies[0].what} waits for the device in each step{lines and f' (also {lines})'}: "
            "copy with it, from pinned memory (pin_memory=True)"
        )
        yield Finding("synchronisation", message, copies[0].where, guide)
    for place in facts.of_kind("moved"):
        message = (
            f"{place.what} is copied to {place.device} in each step: make it there "
            f"(device={place.device!r}), or once before the loop"
        )
        source = _guide("Create tensors directly on the target device")
        yield found("made-on-cpu", message, place.where, source)
    for place in facts.of_kind("empty_cache"):
        if facts.device == "cuda":
            message = (
                "empty_cache() in each step waits for the device and gives back memory for which "
                "the next step has to ask the driver again: leave it out"
            )
            yield found("empty-cache", message, place.where, _cuda("Memory management"))


def _processes(facts: Facts) -> Iterator[Finding]:
    if facts.data_parallel > 1:
        message = (
            f"DataParallel copies the model to {facts.data_parallel} devices in each step and runs "
            "all of them from one process: use DistributedDataParallel, one process a device "
            "(torchrun)"
        )
        source = _guide("Use efficient data-parallel backend")
        yield Finding("data-parallel", message, facts.sites.get("data-parallel"), source)
    if facts.reduces_early and facts.cycle > 1:
        message = (
            f"DDP reduces gradients in each backward pass, and the optimizer steps after "
            f"{facts.cycle}: run the first {facts.cycle - 1} in `with model.no_sync():`"
        )
        source = _guide("Skip unnecessary all-reduce")
        yield Finding("accumulation", message, facts.sites.get("backward"), source)


def _model(facts: Facts) -> Iterator[Finding]:
    for place, size in facts.of_kind("zeroed").items():
        text = f"{size / 2**20:.1f} MiB" if size >= 2**19 else f"{size} bytes"
        message = (
            f"zero_grad(set_to_none=False) writes zeros over {text} of gradients in each step, to "
            "which backward then adds: leave set_to_none at its default"
        )
        yield Finding("zero-grad", message, place.where, _guide("Use parameter.grad = None"))
    if places := list(facts.of_kind("bias")):
        names = [place.what for place in places]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        message = (
            f"{', '.join(names[:3])}{more}: the batch norm right after the convolution takes its "
            "bias away again: make it with bias=False"
        )
        source = _guide("Disable bias for convolutions directly followed by a batch norm")
        yield Finding("bias", message, places[0].where, source)


def _arithmetic(facts: Facts) -> Iterator[Finding]:
    convolved = facts.sites.get("convolution")
    single, half = facts.work(torch.float32), facts.work(torch.float16, torch.bfloat16)
    if facts.half is not None and single >= _WORTH and half <= single / 3:
        how = f"`with torch.autocast({facts.device!r}, dtype={facts.half}):`"
        scaled = " and a torch.amp.GradScaler" if facts.half == torch.float16 else ""
        message = f"{_giga(single)} a step are in float32, and " + (
            f"this CPU has instructions for bfloat16: {how} around the forward pass may help; "
            "compare the loss"
            if facts.device == "cpu"
            else f"tensor cores are faster in 16 bits: put the forward pass into {how}{scaled}"
        )
        where = convolved or facts.sites.get("product")
        yield Finding("autocast", message, where, _guide("Use mixed precision and AMP"))
    high = 'torch.set_float32_matmul_precision("high")'
    for name, kind, precise, how in (
        ("matmul-precision", "product", facts.matmul_precision == "highest", high),
        ("convolution-precision", "convolution", not facts.convolution_tf32,
         "torch.backends.cudnn.allow_tf32 = True, its default,"),
    ):  # fmt: skip
        work = facts.work(torch.float32, kinds=(kind,))
        if facts.tf32 and precise and work >= _WORTH:
            message = (
                f"{_giga(work)} a step are {kind}s in full float32, without tensor cores: "
                f"{how} allows TF32"
            )
            yield Finding(name, message, facts.sites.get(kind), _cuda("TensorFloat-32"))
    fixed = facts.fixed_shapes and not facts.varied
    chosen_by_rule = not (facts.autotuner or facts.deterministic)
    if facts.device == "cuda" and facts.convolutions and fixed and chosen_by_rule:
        message = (
            f"{facts.convolutions} convolutions of fixed shape run with algorithms that cuDNN "
            "chooses by rule: torch.backends.cudnn.benchmark = True times them once"
        )
        yield Finding("autotuner", message, convolved, _guide("Enable cuDNN auto-tuner"))
    work = facts.work(torch.float32, torch.float16, torch.bfloat16, kinds=("convolution",))
    if facts.device == "cuda" and facts.half and facts.planar and work >= _WORTH:
        message = (
            f"{facts.planar} convolutions read NCHW tensors, which tensor cores want rearranged: "
            "model.to(memory_format=torch.channels_last), and the images too, with autocast"
        )
        source = _guide("Enable channels_last memory format")
        yield Finding("channels-last", message, convolved, source)
    for place, length in facts.of_kind("chain").items():
        if length >= _SHORTEST_CHAIN:
            message = (
                f"{length} pointwise operators in a row each read and write the whole tensor: "
                "torch.compile makes one kernel of them"
            )
            yield Finding("pointwise", message, place.where, _guide("Fuse operations"))


def _around(facts: Facts) -> Iterator[Finding]:
    """Yield findings about cores and memory."""
    if threads := _threads(facts):
        yield Finding("threads", threads, None, _guide("CPU specific optimizations"))
    if facts.contention is not None and facts.workers:
        left = max(1, facts.cores - facts.workers)
        message = (
            f"{facts.workers} worker{'s' * (facts.workers != 1)} and the step share {facts.cores} "
            "cores: `dataloaders tune` measures how many workers are best"
        )
        if facts.device == "cpu" and facts.threads > left:
            message += (
                f"; torch.set_num_threads({left}) in place of {facts.threads} leaves them some, "
                "and OMP_WAIT_POLICY=passive in the environment keeps the step's threads from "
                "spinning while they wait for each other"
            )
        guide = _guide("CPU specific optimizations")
        yield Finding("contention", message, None, guide, facts.contention)
    if facts.memory is not None and facts.memory > _FULL and not facts.checkpointed:
        message = (
            f"the step takes {facts.memory:.0%} of the device's memory at its most: if that limits "
            "the batch, torch.utils.checkpoint computes activations again instead of keeping them"
        )
        yield Finding("checkpointing", message, None, _guide("Checkpoint intermediate buffers"))


def _threads(facts: Facts) -> str:
    if facts.device != "cpu" or facts.work(torch.float32, torch.bfloat16) < _WORTH:
        return ""
    threads, cores, free = facts.threads, facts.cores, facts.cores - facts.workers
    if threads > cores:
        return (
            f"the step has {threads} threads for {cores} cores, which wait for each other: "
            f"OMP_NUM_THREADS={cores}, or torch.set_num_threads({cores})"
        )
    if 2 * threads < free:
        return (
            f"the step computes on {threads} of {cores} cores: OMP_NUM_THREADS={free}, or "
            f"torch.set_num_threads({free}) (torchrun sets 1 where nothing is set)"
        )
    if facts.numa_nodes == 1 or threads == 1:
        return ""
    return (
        f"the step's threads are spread over {facts.numa_nodes} NUMA nodes: one process a node, "
        "each under `numactl --cpunodebind=N --membind=N`"
    )


def _giga(flops: int) -> str:
    return f"{flops / 1e9:.0f} GFLOP"
