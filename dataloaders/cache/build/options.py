"""What a caller of `precompute` asks for, checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dataloaders.cache.build.estimation import Estimate
from dataloaders.cache.build.observed import Observed
from dataloaders.cache.build.progress import BuildProgress
from dataloaders.cache.format.compress import Compressed
from dataloaders.cache.sample.images import Choice
from dataloaders.errors import OptionError

__all__ = ["Options", "silent"]


def silent(told: object) -> None:
    """Report nothing."""


@dataclass(frozen=True)
class Options:
    """What `precompute` is told, checked.

    Raises:
        OptionError: a value that it cannot take.
    """

    num_workers: int | Literal["auto"]
    images: Choice = None
    rows: int | None = None
    allow_random: bool = False
    on_error: Literal["raise", "skip"] = "raise"
    report: Callable[[BuildProgress], None] = silent
    announce: Callable[[Estimate], None] = silent
    compress: Compressed | None = None
    context: Any = None
    worker_init_fn: Callable[[int], None] | None = None
    observed: Observed | None = None
    check: Literal["contents"] | None = None
    expect: Mapping[str, Any] | None = None
    one_file: bool | None = None
    resume: bool = True
    overwrite: bool = False
    wait: bool = True

    def __post_init__(self) -> None:
        workers, rows = self.num_workers, self.rows
        if self.on_error not in ("raise", "skip"):
            raise OptionError(f'on_error={self.on_error!r}: it must be "raise" or "skip"')
        if workers != "auto" and (type(workers) is not int or workers < 0):
            raise OptionError(f'num_workers={workers!r}: it must be "auto" or an int from 0 on')
        if rows is not None and (type(rows) is not int or rows < 1):
            raise OptionError(
                f"rows={rows!r}: it must be None or an int from 1 on, samples in a part"
            )
        if self.check not in (None, "contents"):
            raise OptionError(f'check={self.check!r}: it must be None or "contents"')

    @property
    def skip(self) -> bool:
        """Whether samples that fail are left out."""
        return self.on_error == "skip"
