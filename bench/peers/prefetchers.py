"""Other prefetchers: batches on a CUDA device, copied ahead of the step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch


def plain(loader: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """Copy in the loop, as most scripts do."""
    for batch in loader:
        yield [leaf.to(device, non_blocking=True) for leaf in batch]


def textbook(loader: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """Copy one batch ahead on a side stream, as the tuning guides show."""
    stream, iterator = torch.cuda.Stream(), iter(loader)

    def load() -> Any:
        batch = next(iterator, None)
        if batch is None:
            return None
        with torch.cuda.stream(stream):
            return [leaf.to(device, non_blocking=True) for leaf in batch]

    following = load()
    while following is not None:
        torch.cuda.current_stream().wait_stream(stream)
        batch = following
        for leaf in batch:
            leaf.record_stream(torch.cuda.current_stream())
        following = load()
        yield batch
