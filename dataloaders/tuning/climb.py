"""One option's numbers in order, from the present one to the one that serves best.

1  2  3  4  6  8  12  16     from 4: 12 and 1 (three places on), then 6 and 3, then done
^        ^        ^
`────────o────────'   steps halve as soon as neither end of one is better
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar

__all__ = ["climb"]

Y = TypeVar("Y")


def climb(
    places: int, start: int, better: Callable[[int, int], Generator[Y, None, bool]], *, reach: int
) -> Generator[Y, None, int]:
    """The place, 0 to ``places - 1``, from which no step leads to a better one.

    Each place is asked about once, upwards first, so that this ends whatever is answered. What
    ``better`` yields is yielded.

    Args:
        places: how many there are.
        start: where to begin.
        better: from (now, then), whether to move from ``now`` to ``then``.
        reach: the first step, in places.
    """
    now, asked = start, {start}
    while reach:
        for then in (now + reach, now - reach):
            if 0 <= then < places and then not in asked:
                asked.add(then)
                if (yield from better(now, then)):
                    now = then
                    break
        else:
            reach //= 2
    return now
