"""Make batches as torch's workers do, and say whether torch's default collation is unmodified."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import _DatasetKind
from torch.utils.data._utils import collate


def collates_as_torch() -> bool:
    """Whether ``default_collate`` treats everything as torch made it.

    Its table of functions is public and may be changed. The entry that DALI's plugin for torch adds
    when it is imported, for a class of its own, does not count.
    """
    return all(
        function.__module__ == collate.__name__
        or str(getattr(kind, "__module__", "")).startswith("nvidia.dali.")
        for kind, function in collate.default_collate_fn_map.items()
    )


def fetched(
    kind: int,
    dataset: Any,
    batched: bool,
    collate_fn: Callable[[Any], Any],
    keys: Any,
    drop_last: bool = False,
) -> list[Any]:
    """Return the batch of ``keys`` as torch's workers make it; none if an iterable dataset ends."""
    fetcher: Any = _DatasetKind.create_fetcher(  # type: ignore[no-untyped-call]
        kind, dataset, batched, collate_fn, drop_last
    )
    return list(map(fetcher.fetch, [keys]))
