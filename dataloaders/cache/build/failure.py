"""An exception on its way from a worker to who builds.

in the worker   error ──Failure.of──> pickled, or its text
who builds      ──reraise──> the error, with the worker's traceback as its cause
"""

from __future__ import annotations

import pickle
import traceback
from dataclasses import dataclass

from dataloaders.errors import CacheError

__all__ = ["Failure", "not_interrupted", "told"]

_LONGEST_MESSAGE = 1000


@dataclass(frozen=True)
class Failure:
    """An exception on its way from a worker.

    Attributes:
        error: pickled; None if it does not come back from that as it was.
        text: one line: its type and text.
        trace: where it came from.
    """

    error: bytes | None
    text: str
    trace: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """``error``, ready to be sent."""
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        pickled: bytes | None
        try:
            pickled = pickle.dumps(error)
            again = pickle.loads(pickled)
            if type(again) is not type(error) or str(again) != str(error):
                pickled = None
        except Exception:  # classes of functions, odd constructors: anything; its text is sent
            pickled = None
        return cls(pickled, told(error), trace)

    def reraise(self) -> None:
        """Raise it where it was sent to, the worker's traceback as its cause."""
        pickled = self.error
        error: BaseException = CacheError(self.text) if pickled is None else pickle.loads(pickled)
        raise error from _InWorker(f"\n{self.trace}")


class _InWorker(Exception):
    """Shows a worker's traceback above the error itself."""


def not_interrupted(error: BaseException) -> BaseException:
    """``error``, which may be a sample's own, as sys.exit() is; Ctrl-C is none: it goes on."""
    if isinstance(error, KeyboardInterrupt):
        raise error
    return error


def told(error: BaseException) -> str:
    """``ValueError: its text``, of bounded length."""
    try:
        text = str(error)
    except Exception:  # somebody else's code: the type is told, and the error itself goes on
        text = "(its text cannot be shown)"
    return f"{type(error).__name__}: {text}"[:_LONGEST_MESSAGE]
