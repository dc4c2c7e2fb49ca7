"""Switch settings around blocks of steps on synthetic input, to measure their gain.

round     plain │ autocast │ matmul-precision …     blocks, interleaved, as those of the check

A toggle is a context around a block. It yields a function that makes the context of each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeAlias

import torch

from dataloaders.findings.facts import Facts
from dataloaders.findings.watch import Watch

Around: TypeAlias = Callable[[], AbstractContextManager[Any]]
Toggle: TypeAlias = Callable[[Facts, Watch], AbstractContextManager[Around]]


@contextmanager
def _autocast(facts: Facts, watch: Watch) -> Iterator[Around]:
    if facts.half == torch.float16:
        raise RuntimeError("in float16 the loss has to be scaled, too")
    # A context for each step: autocast's cache of casted weights ends with it.
    yield lambda: torch.autocast(facts.device, dtype=facts.half)


def _setting(read: Callable[[], Any], write: Callable[[Any], Any], value: Any) -> Toggle:
    @contextmanager
    def toggle(facts: Facts, watch: Watch) -> Iterator[Around]:
        before = read()
        write(value)
        try:
            yield nullcontext
        finally:
            write(before)

    return toggle


_CUDNN: Any = torch.backends.cudnn  # its annotations lack some of its settings


def _attribute(owner: Any, name: str, value: Any) -> Toggle:
    return _setting(partial(getattr, owner, name), partial(setattr, owner, name), value)


@contextmanager
def _channels_last(facts: Facts, watch: Watch) -> Iterator[Around]:
    """Rearrange weights, buffers and the optimizers' state in place; restore them afterwards.

    Images are left alone: the first convolution rearranges them, as in training.
    """
    models = list(watch.convolving)
    weights = {weight for model in models for weight in model.parameters() if weight.dim() == 4}
    states = [
        value
        for optimizer in list(watch.optimizers)
        for weight, state in optimizer.state.items()
        if weight in weights
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.shape == weight.shape
    ]
    buffers = {buffer for model in models for buffer in model.buffers() if buffer.dim() == 4}
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    try:
        for tensor in (*weights, *buffers, *states):
            kept.append((tensor, tensor.data))
            tensor.data = tensor.data.to(memory_format=torch.channels_last)
        _arrange_gradients(weights)
        yield nullcontext
    finally:
        for tensor, data in kept:
            tensor.data = data.copy_(tensor.data)  # into the old memory, which may be shared
        _arrange_gradients(weights)


def _arrange_gradients(weights: set[torch.nn.Parameter]) -> None:
    """Give gradients the memory format of their weights."""
    for weight in weights:
        if weight.grad is not None:
            weight.grad.data = torch.empty_like(weight.data).copy_(weight.grad.data)


TOGGLES: dict[str, Toggle] = {
    "matmul-precision": _setting(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high"
    ),
    "convolution-precision": _attribute(_CUDNN.conv, "fp32_precision", "tf32"),
    "autotuner": _attribute(_CUDNN, "benchmark", True),
    "channels-last": _channels_last,
    "autocast": _autocast,  # last: a step that fails under it may end the loop
}
"""Toggles by the name of their finding, in the order in which they are tried."""
