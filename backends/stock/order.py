"""The two usual orders of an epoch as index tensors, without torch's lists of Python ints.

shuffle=True, shuffle=False ──> index tensors
any other sampler ────────────> torch's own lists
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler


def index_batches(batches: BatchSampler) -> Iterator[Any]:
    """Yield the batches of ``batches``, which is torch's own class, as int64 tensors or its lists.

    The generators are called as in torch/utils/data/sampler.py, at the same moments: nothing is
    drawn before the first batch, and torch's second permutation when the first one is used up.
    """
    sampler: Any = batches.sampler
    shuffled = type(sampler) is RandomSampler and not sampler.replacement
    shuffled = shuffled and sampler.num_samples == len(sampler.data_source)
    if shuffled or type(sampler) is SequentialSampler:
        own = sampler.generator if shuffled else None
        yield from _whole_pass(batches, len(sampler.data_source), shuffled, own)
    else:
        yield from batches


def _whole_pass(
    batches: BatchSampler, length: int, shuffled: bool, own: torch.Generator | None
) -> Iterator[torch.Tensor]:
    if shuffled:
        generator = own
        if generator is None:
            seed = int(torch.empty((), dtype=torch.int64).random_().item())
            generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(length, generator=generator)
    size, begin = batches.batch_size, 0
    while True:
        if not batches.drop_last:
            size = batches.batch_size  # torch, too, reads it for each batch
        end = min(begin + size, length)
        short = begin + size > length
        if short and own is not None:
            torch.randperm(length, generator=own)  # torch draws it, and needs none of it
            own = None
        if end == begin or (short and batches.drop_last):
            return
        yield order[begin:end] if shuffled else torch.arange(begin, end, device="cpu")
        begin = end
