"""``tune --backends``: choose the best of the changes tried; keep it for ``backend="auto"``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from torch.utils.data import IterableDataset

from dataloaders.bottleneck import Report
from dataloaders.loader import DataLoader, wrap
from dataloaders.predicting import Candidate, backend_with, best_of, left_open, settings_of
from dataloaders.tuning import auto, learned

_AUTO = 'num_workers="auto", prefetch_factor="auto", pin_memory="auto", backend="auto"'


def without_auto(loader: Any, iterate: Any) -> tuple[Any, Any]:
    """Return the loader, as stock if it has ``backend="auto"``, and what makes its iterators."""
    if isinstance(loader, DataLoader) and loader._wanted_backend() == "auto":
        return wrap(loader, backend="stock", device=loader.device), None
    return loader, iterate


class BestWay:
    """Chooses the best way for a script's loader and remembers it; made while the script runs.

    The script's path is a part of the key and stands for the step.
    """

    def __init__(self, loader: Any, cache: str | None) -> None:
        self._loader, self._cache = loader, cache
        self._key = learned.key_of_loader(loader, "auto")

    def left_open(self, found: Sequence[Candidate]) -> list[Candidate]:
        """Return the changes to try: those that the predictions leave open and that can be kept."""
        usable = [one for one in self._kept(found) if self._cache is not None or not one.build_s]
        return left_open(usable)

    def _kept(self, found: Sequence[Candidate]) -> list[Candidate]:
        kept = [one for one in found if "persistent_workers" not in one.options]
        if isinstance(self._loader.dataset, IterableDataset):
            # More workers seem quicker where each of them yields all samples.
            most = max(1, self._loader.num_workers)
            kept = [one for one in kept if one.options.get("num_workers", 0) <= most]
        return kept

    def remember(self, report: Report) -> str:
        """Remember the best of the changes that were tried; return what to do, in sentences."""
        found = report.candidates
        tried = [one for one in found if one.measured is not None]
        if self.left_open(found) and not tried:
            return "nothing was tried, so nothing is remembered; give --budget more"
        best, best_of_all = best_of(tried), best_of(self._kept(found))
        options = {} if best is None else best.options
        gain = 1.0 if best is None or best.measured is None else best.measured.estimate
        settings = settings_of(self._loader, options)
        cache = None if best is None else best.cache_in(self._cache)
        choice = learned.Learned(
            **vars(settings),
            backend=auto.entry_of(backend_with(self._loader, options, cache)),
            gain=gain,
            day=time.strftime("%Y-%m-%d"),
        )
        lines = []
        if best_of_all is not None and best_of_all.build_s and self._cache is None:
            lines.append(f"{best_of_all.name} is left out: give --cache FILE to use a cache")
        if learned.remember(self._key, choice) is None:
            return "\n".join([*lines, "set DATALOADERS_CACHE to a folder to remember the best way"])
        name = "the loader as it is" if best is None else best.name
        lines.append(f"the best way for this script is {name}; it is remembered:")
        return "\n".join([*lines, f"    DataLoader(..., {_AUTO})"])
