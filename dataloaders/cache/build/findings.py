"""What reading a few samples tells about a dataset."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dataloaders.cache.sample.cut import Call

__all__ = ["Findings"]


@dataclass
class Findings:
    """What `Study` found.

    Attributes:
        choice: which of its cuts holds; the last one stands for whole samples.
        calls: how its rows go through the transforms.
        at_leaves: whether each part that a tail is applied to is one leaf.
        has_files: whether its images could be packed.
        reason: why it is not a better one; "" if it is the best.
        drawn: the first sample whose row drew from process-wide generators, and the names of these;
            None if none did.
        random: what differs between two readings of one row; "" if nothing does.
        digests: of the rows that were read, by sample; "random" where a digest means nothing, and
            "failed" where there is none.
        bytes: of each row that was read, its images encoded.
        cells: in a row.
        proved: what each row takes in memory of those that are always read; the same each time.
        columns: the names of all columns, and whether a PIL image was in it.
        seconds: that reading and encoding each row took.
        attributes: what the dataset says of its classes, as `attributes_of` gives it.
    """

    choice: int = -1
    calls: tuple[Call, ...] | None = None
    at_leaves: bool = True
    has_files: bool = False
    reason: str = ""
    drawn: tuple[int, tuple[str, ...]] | None = None
    random: str = ""
    digests: dict[int, str] = field(default_factory=dict)
    bytes: list[int] = field(default_factory=list)
    cells: int = 0
    proved: list[int] = field(default_factory=list)
    columns: dict[str, bool] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    attributes: dict[str, Any] = field(default_factory=dict)
