"""The tuning guides' list: for each entry a decision on facts, and what to write instead.

    Facts ──RULES──> Finding, Finding, ...

A rule that speaks of arithmetic asks for a step that has enough of it (`_WORTH`): on a few thousand
operations no setting of it shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from dataloaders.findings.facts import Facts, Place
from dataloaders.findings.finding import Finding

__all__ = ["RULES", "Rule", "findings_of"]

_WORTH = 10**9
"""Floating-point operations of a step from which the way that they are done is worth a change."""
_SHORTEST_CHAIN = 3
_FULL = 0.9


@dataclass(frozen=True)
class Rule:
    """Decides on one entry of the list.

    Attributes:
        name, source, anyway: those of its `Finding`.
        find: returns the message, or "" where the rule has nothing to say. It takes the facts and,
            if ``kind`` is given, one place of that kind and how much of it there is.
        kind: of the places that it is asked for one by one; None asks once.
    """

    name: str
    source: str
    find: Callable[..., str]
    kind: str | None = None
    anyway: bool = False


def findings_of(facts: Facts | None) -> tuple[Finding, ...]:
    """Return what the rules find in ``facts``, in their order; nothing without facts."""
    if facts is None:
        return ()
    found = []
    for rule in RULES:
        gain = facts.contention if rule.name == "contention" else None
        places = [()] if rule.kind is None else facts.of_kind(rule.kind).items()
        for asked in places:
            message = rule.find(facts, *asked)
            where = asked[0].where if asked else None
            if message:
                found.append(Finding(rule.name, message, where, rule.source, gain, rule.anyway))
    return tuple(found)


def _debugging(facts: Facts, place: Place, times: int) -> str:
    return f"{place.what} is on: it slows each step down; switch it off for training"


def _synchronisation(facts: Facts, place: Place, times: int) -> str:
    if place.device == "cpu":
        return ""
    return (
        f"{place.what} waits for the device in each step, so that the host cannot run ahead: do it "
        "every so many steps, or keep the value on the device"
    )


def _made_on_cpu(facts: Facts, place: Place, times: int) -> str:
    return (
        f"{place.what} is copied to {place.device} in each step: make it there "
        f"(device={place.device!r}), or once before the loop"
    )


def _empty_cache(facts: Facts, place: Place, times: int) -> str:
    if facts.device != "cuda":
        return ""
    return (
        "empty_cache() in each step waits for the device and gives back memory for which the next "
        "step has to ask the driver again: leave it out"
    )


def _data_parallel(facts: Facts) -> str:
    if facts.data_parallel < 2:
        return ""
    return (
        f"DataParallel copies the model to {facts.data_parallel} devices in each step and runs all "
        "of them from one process: use DistributedDataParallel, one process a device (torchrun)"
    )


def _accumulation(facts: Facts) -> str:
    if not facts.reduces_early or facts.cycle == 1:
        return ""
    return (
        f"DDP reduces gradients in each backward pass, and the optimizer steps after "
        f"{facts.cycle}: run the first {facts.cycle - 1} in `with model.no_sync():`"
    )


def _zeroed(facts: Facts, place: Place, size: int) -> str:
    text = f"{size / 2**20:.1f} MiB" if size >= 2**19 else f"{size} bytes"
    return (
        f"zero_grad(set_to_none=False) writes zeros over {text} of gradients in each step, to "
        "which backward then adds: leave set_to_none at its default"
    )


def _bias(facts: Facts) -> str:
    names = [place.what for place in facts.of_kind("bias")]
    if not names:
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (
        f"{', '.join(names[:3])}{more}: the batch norm right after the convolution takes its bias "
        "away again: make it with bias=False"
    )


def _autocast(facts: Facts) -> str:
    single, half = facts.work(torch.float32), facts.work(torch.float16, torch.bfloat16)
    if facts.half is None or single < _WORTH or half > single / 3:
        return ""
    how = f"`with torch.autocast({facts.device!r}, dtype={facts.half}):`"
    if facts.device == "cpu":
        return (
            f"{_giga(single)} a step are in float32, and this CPU has instructions for bfloat16: "
            f"{how} around the forward pass may help; compare the loss"
        )
    scaled = " and a torch.amp.GradScaler" if facts.half == torch.float16 else ""
    return (
        f"{_giga(single)} a step are in float32, and tensor cores are faster in 16 bits: put the "
        f"forward pass into {how}{scaled}"
    )


def _matmul_precision(facts: Facts) -> str:
    products = facts.work(torch.float32, kinds=("product",))
    if not facts.tf32 or facts.matmul_precision != "highest" or products < _WORTH:
        return ""
    return (
        f"{_giga(products)} a step are products in full float32, without tensor cores: "
        'torch.set_float32_matmul_precision("high") allows TF32'
    )


def _autotuner(facts: Facts) -> str:
    varied = facts.varied or not facts.fixed_shapes
    if facts.device != "cuda" or varied or facts.autotuner or facts.deterministic:
        return ""
    if not facts.convolutions:
        return ""
    return (
        f"{facts.convolutions} convolutions of fixed shape run with algorithms that cuDNN chooses "
        "by rule: torch.backends.cudnn.benchmark = True times them once"
    )


def _channels_last(facts: Facts) -> str:
    work = facts.work(torch.float32, torch.float16, torch.bfloat16, kinds=("convolution",))
    if facts.device != "cuda" or not (facts.half and facts.planar) or work < _WORTH:
        return ""
    return (
        f"{facts.planar} convolutions read NCHW tensors, which tensor cores want rearranged: "
        "model.to(memory_format=torch.channels_last), and the images too, with autocast"
    )


def _pointwise(facts: Facts, place: Place, length: int) -> str:
    if length < _SHORTEST_CHAIN:
        return ""
    return (
        f"{length} pointwise operators in a row each read and write the whole tensor: "
        "torch.compile makes one kernel of them"
    )


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


def _contention(facts: Facts) -> str:
    if facts.contention is None or facts.device != "cpu" or not facts.workers:
        return ""
    several = "s" * (facts.threads != 1)
    shared = (
        f"{facts.workers} workers and the step's {facts.threads} thread{several} share "
        f"{facts.cores} cores"
    )
    left = max(1, facts.cores - facts.workers)
    if left >= facts.threads:
        return f"{shared}: fewer workers leave the step more of them"
    return f"{shared}: torch.set_num_threads({left}), or fewer workers"


def _checkpointing(facts: Facts) -> str:
    if facts.memory is None or facts.memory <= _FULL or facts.checkpointed:
        return ""
    return (
        f"the step takes {facts.memory:.0%} of the device's memory at its most: if that limits the "
        "batch, torch.utils.checkpoint computes activations again instead of keeping them"
    )


def _giga(flops: int) -> str:
    return f"{flops / 1e9:.0f} GFLOP"


_GUIDE = "PyTorch Performance Tuning Guide: "
_CUDA = "docs.pytorch.org/docs/stable/notes/cuda.html: "

RULES = (
    Rule("debugging", _GUIDE + "Disable debugging APIs", _debugging, "debugging", anyway=True),
    Rule(
        "synchronisation",
        _GUIDE + "Avoid unnecessary CPU-GPU synchronization",
        _synchronisation,
        "sync",
        anyway=True,
    ),
    Rule(
        "made-on-cpu",
        _GUIDE + "Create tensors directly on the target device",
        _made_on_cpu,
        "moved",
        anyway=True,
    ),
    Rule("empty-cache", _CUDA + "Memory management", _empty_cache, "empty_cache", anyway=True),
    Rule("data-parallel", _GUIDE + "Use efficient data-parallel backend", _data_parallel),
    Rule("accumulation", _GUIDE + "Skip unnecessary all-reduce", _accumulation),
    Rule("zero-grad", _GUIDE + "Use parameter.grad = None", _zeroed, "zeroed"),
    Rule("bias", _GUIDE + "Disable bias for convolutions before a batch norm", _bias),
    Rule("autocast", _GUIDE + "Use mixed precision and AMP", _autocast),
    Rule("matmul-precision", _CUDA + "TensorFloat-32", _matmul_precision),
    Rule("autotuner", _GUIDE + "Enable cuDNN auto-tuner", _autotuner),
    Rule("channels-last", _GUIDE + "Enable channels_last memory format", _channels_last),
    Rule("pointwise", _GUIDE + "Fuse operations", _pointwise, "chain"),
    Rule("threads", _GUIDE + "CPU specific optimizations", _threads),
    Rule("contention", _GUIDE + "CPU specific optimizations", _contention),
    Rule("checkpointing", _GUIDE + "Checkpoint intermediate buffers", _checkpointing),
)
