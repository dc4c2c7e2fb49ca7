"""Worker processes of a build end however it ends."""

from __future__ import annotations

import multiprocessing.queues
import sys
import threading
from typing import Any

import pytest

from dataloaders.cache import crew
from helpers.processes import children, wait_until_gone


@pytest.mark.timeout(30)
def test_an_error_raised_where_a_queue_has_just_been_locked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As torch's SIGCHLD handler may raise when a worker is killed."""
    monkeypatch.setattr(crew, "_PUT_S", 0.2)
    monkeypatch.setattr(threading.Condition, "__enter__", _interrupted(at=10))
    before = children()
    seen = []
    with (  # noqa: PT012 - the samples before the error are looked at
        pytest.raises(RuntimeError, match="killed by signal"),
        crew.results(Numbers(), list(range(50)), num_workers=2) as samples,
    ):
        started = list(children() - before)
        seen.extend(samples)
    assert len(started) == 2
    assert wait_until_gone(started) == []


class Numbers:
    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> int:
        return index


def _interrupted(at: int) -> Any:
    enter = threading.Condition.__enter__
    puts = iter(range(1, 1000))

    def entered(condition: threading.Condition) -> bool:
        locked = enter(condition)
        caller = sys._getframe(1).f_code
        if caller is multiprocessing.queues.Queue.put.__code__ and next(puts) == at:
            raise RuntimeError("DataLoader worker is killed by signal: Killed")
        return locked

    return entered
