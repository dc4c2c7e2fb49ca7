"""Indices drawn on one thread and taken on another.

    sampler ──supply(), draw() on the consumer's thread──> a deque ──take() on any one thread──>

A sampler is the user's code and may draw from the process-wide generators: it never runs on a
thread of ours. One thread draws and one takes, so that atomic operations of a deque are enough.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

__all__ = ["Dry", "Indices"]


class Dry(Exception):
    """Nothing is drawn that could be taken; `Indices.supply` will draw more."""


class Indices:
    """One epoch's indices.

    Attributes:
        exhausted: whether the sampler came to its end; what it gave may still wait to be taken.
    """

    __slots__ = ("_drawn", "_failed", "_news", "_source", "exhausted")

    def __init__(self, source: Iterator[Any]) -> None:
        self._source = source
        self._drawn: deque[Any] = deque()
        self._failed = False
        self._news = threading.Event()
        self.exhausted = False

    def supply(self, count: int) -> None:
        """Have ``count`` indices ready to be taken; fewer at the sampler's end.

        An error of the sampler waits in its place and is raised by `take`; nothing is drawn
        behind it before that.
        """
        self.supply_more(count - len(self._drawn))

    def supply_more(self, count: int) -> None:
        """Draw ``count`` more, as `supply` does, however many wait to be taken."""
        for _ in range(count):
            if self.exhausted or self._failed:
                break
            try:
                self._drawn.append(next(self._source))
            except StopIteration:
                self.exhausted = True
            except Exception as error:
                self._failed = True
                self._drawn.append(_Failure(error))
        self._news.set()

    def supply_now(self, count: int) -> None:
        """Draw ``count`` more; an error of the sampler is raised here, on the thread that draws."""
        try:
            for _ in range(count):
                if self.exhausted:
                    break
                try:
                    self._drawn.append(next(self._source))
                except StopIteration:
                    self.exhausted = True
        finally:
            self._news.set()

    def draw(self) -> Any:
        """The next index, whether drawn before or now; on the thread that draws.

        Raises:
            StopIteration: there is none.
        """
        if not self._drawn:
            self.supply(1)
        return self.take()

    def take(self) -> Any:
        """The next index that was drawn.

        Raises:
            StopIteration: there is none.
            Dry: there may be one, but it is not drawn yet.
        """
        # Read before looking: an index drawn after the look would be lost behind the end.
        exhausted = self.exhausted
        try:
            index = self._drawn.popleft()
        except IndexError:
            raise (StopIteration if exhausted else Dry) from None
        if type(index) is not _Failure:
            return index
        self._failed = False
        error = index.error
        try:
            raise error
        finally:
            del error, index  # its traceback holds this frame, which must not hold it

    def wait(self, seconds: float) -> None:
        """Return when something was supplied, or after ``seconds``."""
        self._news.clear()
        if not self._drawn and not self.exhausted:
            self._news.wait(seconds)

    def waiting(self) -> list[Any]:
        """What was drawn and not taken, in order; an error as something that equals no index."""
        return list(self._drawn)

    def clear(self) -> None:
        """Drop what was drawn and not taken."""
        self._drawn.clear()


class _Failure:
    __slots__ = ("error",)

    def __init__(self, error: Exception) -> None:
        self.error = error
