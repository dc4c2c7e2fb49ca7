"""What reading a few samples tells about a dataset; found by several workers, and put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dataloaders.cache.cut import Call
from dataloaders.cache.failure import Failure
from dataloaders.cache.layout import Layouts
from dataloaders.errors import CacheError

__all__ = ["Findings", "merged"]


@dataclass
class Findings:
    """What `Study` found, or a part of it.

    Attributes:
        choice: which of its cuts holds; the last one stands for whole samples.
        calls: how its rows go through the transforms.
        at_leaves: whether each part that a tail is applied to is one leaf.
        reason: why it is not a better one; "" if it is the best.
        drawn: the first sample whose row drew from process-wide generators, and the names of these;
            None if none did.
        random: what differs between two readings of one row; "" if nothing does.
        digests: of the rows that were read, by sample; "random" where a digest means nothing, and
            "failed" where there is none.
        bytes: of each row that was read, its images encoded.
        cells: in a row.
        layouts: what the rows that were read have in common, encoded; None if nothing.
        columns: the names of all columns, and whether a PIL image was in it.
        seconds: that reading and encoding each row took.
        attributes: what the dataset says of its classes, as `attributes_of` gives it.
        failure: what reading a sample raised, if it was not to be skipped.
        failed_at: which of the readings that was; -1: one of those that every part does.
    """

    choice: int = -1
    calls: tuple[Call, ...] | None = None
    at_leaves: bool = True
    reason: str = ""
    drawn: tuple[int, tuple[str, ...]] | None = None
    random: str = ""
    digests: dict[int, str] = field(default_factory=dict)
    bytes: list[int] = field(default_factory=list)
    cells: int = 0
    layouts: Layouts | None = field(default_factory=Layouts)
    columns: dict[str, bool] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    attributes: dict[str, Any] = field(default_factory=dict)
    failure: Failure | None = None
    failed_at: int = -1


def merged(parts: Sequence[Findings]) -> Findings | None:
    """What all parts found together; None if they do not agree about the dataset.

    Of several failures it is the one that a single reader would have met first.
    """
    failed = [part for part in parts if part.failure is not None]
    if failed:
        return min(failed, key=lambda part: part.failed_at)
    first = parts[0]
    if any((part.choice, part.calls) != (first.choice, first.calls) for part in parts):
        return None
    whole = Findings(first.choice, first.calls, reason=first.reason, attributes=first.attributes)
    for part in parts:
        whole.at_leaves &= part.at_leaves
        whole.drawn = min(filter(None, (whole.drawn, part.drawn)), default=None)
        whole.random = whole.random or part.random
        whole.digests.update(part.digests)
        whole.bytes += part.bytes
        whole.cells = whole.cells or part.cells
        whole.layouts = _together(whole.layouts, part.layouts)
        for name, is_image in part.columns.items():
            whole.columns[name] = whole.columns.get(name, False) or is_image
        # A process's first reading also imports and opens things: it stays the first one.
        whole.seconds += part.seconds[bool(whole.seconds) :]
    return whole


def _together(one: Layouts | None, other: Layouts | None) -> Layouts | None:
    if one is None or other is None:
        return None
    try:
        one.merge(other)
    except CacheError:
        return None  # what is wrong with them is told where all rows are read
    return one
