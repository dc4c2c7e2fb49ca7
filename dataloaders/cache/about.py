"""What a cache says of itself besides its rows: `About`, and the samples that were left out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from dataloaders.cache.compress import Compressed
from dataloaders.errors import CacheError

__all__ = ["About", "check_failed", "failures_of"]


@dataclass(frozen=True)
class About:
    """What a file says besides its rows.

    Attributes:
        samples: length of the dataset.
        failed: number and message of each sample that was left out, in order.
        fingerprint: of the dataset and what it stands on, as JSON has it.
        head: the transforms whose result the rows are.
        tail: those that are still to be applied.
        compress: how columns are compressed that are worth it; None: not at all.
        attributes: of the dataset, as `attributes.attributes_of` gives them.
    """

    samples: int
    failed: Sequence[tuple[int, str]] = ()
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    head: Sequence[str] = ()
    tail: Sequence[str] = ()
    compress: Compressed | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict)


def failures_of(about: About) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """The numbers of the samples that were left out, and their messages as JSON."""
    numbers = np.array([row for row, _ in about.failed], "<u8")
    text = json.dumps([text for _, text in about.failed]).encode("ascii")
    return numbers, np.frombuffer(text, "|u1")


def check_failed(about: About, rows: int) -> None:
    """Nothing if the failed samples and so many rows can be those of the dataset.

    Raises:
        CacheError: they cannot.
    """
    failed, samples = about.failed, about.samples
    numbers = [-1, *(row for row, _ in failed), samples]
    if any(one >= next_one for one, next_one in pairwise(numbers)) or rows + len(failed) > samples:
        raise CacheError(
            f"{rows} rows and {len(failed)} failed samples cannot be those of {samples} samples: "
            "failed samples are given in order, each once"
        )
