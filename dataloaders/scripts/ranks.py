"""Keep the ranks of a distributed run on one schedule, and gather one report.

    rank 0   agree([...])  ──> its numbers, written to the store of the process group
    others   agree([...])  ──> rank 0's, once they are there

Numbers go through the key-value store of torch's rendezvous, not through collectives. So no rank
hangs if another one ends or never gets here, and the script's own collectives keep their order.
Calls are numbered, so all ranks have to make the same calls.
"""

from __future__ import annotations

import json
import os
import statistics
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from dataloaders.scripts.stopping import StopScript, stop

_GRACE_S = 5.0
_FOR_REPORTS_S = 4 * _GRACE_S
_PAUSE_S = 0.05


class Ranks:
    """Exchanges numbers with the other ranks; waits for rank 0 for at most ``patience_s``."""

    def __init__(self, patience_s: float) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._patience = timedelta(seconds=patience_s)
        self._calls = 0
        self._reported = threading.Event()
        self._watcher: threading.Thread | None = None
        self._store = _store()

    @classmethod
    def here(cls, patience_s: float) -> Ranks | None:
        """Return the ranks of this run; None if there is only this process."""
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() < 2:
            return None
        ranks = cls(patience_s)
        if ranks.rank:
            ranks._watcher = threading.Thread(
                target=ranks._end_with_rank_0, name="dataloaders-ranks", daemon=True
            )
            ranks._watcher.start()
        return ranks

    def all_watched(self) -> bool:
        """Return whether a check watches every rank; only rank 0 finds out that one is not.

        Such a rank waits for its own input at each step, and all ranks with it.
        """
        announce()
        try:
            for rank in range(1, 1 if self.rank else self.size):
                self._wait_for(f"watched/{rank}", _FOR_REPORTS_S)
        except StopScript:
            return False
        return True

    @property
    def rank_0_ended(self) -> bool:
        """Whether rank 0 has ended, so that a collective may have failed here."""
        try:
            return bool(self._store.check(["end/0"]))
        except RuntimeError:
            return True  # and the store with it

    def agree(self, numbers: list[float]) -> list[float]:
        """Return rank 0's ``numbers`` of this call.

        Raises:
            StopScript: rank 0 has ended, or does not make this call in time.
        """
        key, self._calls = f"agree/{self._calls}", self._calls + 1
        if self.rank == 0:
            self._store.set(key, json.dumps(numbers))  # small; some thousands in a check
            return numbers
        try:
            # wait() wakes at once; pauses of polling would count as steps of a measured block.
            self._store.wait([key], self._patience)
            agreed: list[float] | None = json.loads(self._store.get(key))
        except RuntimeError as error:  # or the process with the store has ended
            raise StopScript("another rank does not answer") from error
        if agreed is None:
            raise StopScript("another rank has ended")
        return agreed

    def gather(self, own: dict[str, Any]) -> list[dict[str, Any]]:
        """Return on rank 0 what each rank gave, and an empty list on the others.

        Ranks that do not answer in time are missing. Call it once, at the end.
        """
        self._reported.set()
        if self._watcher is not None:
            # A thread that is in the store's code when the interpreter ends would abort it.
            self._watcher.join(_GRACE_S)
        with suppress(RuntimeError, StopScript):  # rank 0 has ended
            self._store.set(f"end/{self.rank}", json.dumps(own))
            if self.rank == 0:
                self._store.set(f"agree/{self._calls}", json.dumps(None))
            else:
                self._wait_for("over", _FOR_REPORTS_S)  # a launcher may end all ranks with one
        if self.rank:
            return []
        found = [own]
        for rank in range(1, self.size):
            with suppress(StopScript):
                found.append(json.loads(self._wait_for(f"end/{rank}", _FOR_REPORTS_S)))
        self._store.set("over", "1")
        return found

    def _end_with_rank_0(self) -> None:
        """End this rank after rank 0, since a collective may block it for ever."""
        while not self.rank_0_ended:
            if self._reported.wait(1.0):
                return
        if self._reported.wait(_GRACE_S):
            return
        with suppress(StopScript):
            stop()
        if not self._reported.wait(_GRACE_S):
            os._exit(0)  # it waits in a library, where no exception reaches it

    def _wait_for(self, key: str, most_s: float) -> str:
        """Return the value of ``key`` once it is set; raise `StopScript` after ``most_s``."""
        deadline = time.monotonic() + most_s
        try:
            # store.wait() would fill stderr with warnings when it times out.
            while not self._store.check([key]):
                if time.monotonic() > deadline:
                    raise StopScript("another rank does not answer")
                time.sleep(_PAUSE_S)
            return str(self._store.get(key), "utf8")
        except RuntimeError as error:  # the process that holds the store has ended
            raise StopScript("another rank has ended") from error


def announce() -> None:
    """Tell rank 0 that a check watches this rank, too. Ranks without a loader also step."""
    if dist.is_available() and dist.is_initialized() and dist.get_rank():
        _store().set(f"watched/{dist.get_rank()}", "1")


def _store() -> Any:
    store = dist.distributed_c10d._get_default_store()
    return dist.PrefixStore("dataloaders-check", store)  # type: ignore[attr-defined]


def straggler(ranks: list[dict[str, float]], size: int) -> list[str]:
    """Return sentences that name the rank with the slowest input, and what it costs the others.

    ``ranks`` has "rank" and "wait_s", the mean seconds of waiting for a batch, of each rank that
    reported.
    """
    if len(ranks) < 2:
        return []
    slowest = max(ranks, key=lambda one: one["wait_s"])
    others = statistics.median(one["wait_s"] for one in ranks if one is not slowest)
    sentences = [
        f"rank {slowest['rank']} of {size} waits longest for its batches: "
        f"{1e3 * slowest['wait_s']:.1f} ms for each, the median of the others "
        f"{1e3 * others:.1f} ms; every rank waits for the slowest one, which costs "
        f"{1e3 * (slowest['wait_s'] - others):.1f} ms a batch"
    ]
    if len(ranks) < size:
        sentences.append(f"{size - len(ranks)} of {size} ranks ended without a report")
    return sentences
