"""What a few samples of a dataset tell, read in a process of its own and once for each question."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dataloaders.cache.build.failure import Failure, not_interrupted
from dataloaders.cache.build.findings import Findings
from dataloaders.cache.build.study import Study, obstacle_to_packing
from dataloaders.errors import CacheError
from dataloaders.observing import Unobserved, observe, worker_of

__all__ = ["Observed"]


class Observed:
    """The findings about one dataset.

    Args:
        loader: of the dataset; the process starts as one of its workers.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._known: dict[tuple[str, bool], Findings] = {}

    @classmethod
    def of(
        cls,
        dataset: Any,
        multiprocessing_context: Any = None,
        worker_init_fn: Callable[[int], None] | None = None,
    ) -> Observed:
        """Those about ``dataset``, of which there is no loader."""
        loader = worker_of(dataset, multiprocessing_context)
        loader.worker_init_fn = worker_init_fn
        return cls(loader)

    def findings(self, study: Study, *, encode: bool = False) -> Findings:
        """What ``study`` finds.

        Raises:
            CacheError: the dataset cannot be read in another process; says why.
            Exception: a sample's own.
        """
        key = study.images.rows, encode
        if key not in self._known:
            try:
                found = observe(self.loader, _Studying(study))
            except Unobserved as error:
                name = type(self.loader.dataset).__name__
                raise CacheError(f"{name} could not be studied: {error}") from error
            if isinstance(found, Failure):
                found.reraise()
            assert isinstance(found, Findings)
            self._known[key] = found
        return self._known[key]

    def obstacle_to_packing(self) -> str | None:
        """Why the first sample's images cannot be packed; None if they can, or nothing tells."""
        try:
            found: str | None = observe(self.loader, obstacle_to_packing)
        except Unobserved:
            return None
        return found


@dataclass(frozen=True)
class _Studying:
    study: Study

    def __call__(self, dataset: Any) -> Findings | Failure:
        try:
            return self.study()
        except BaseException as error:  # a sample may call sys.exit()
            return Failure.of(not_interrupted(error))
