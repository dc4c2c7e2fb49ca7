"""Read one row of a dataset as leaves; detect random draws; name the sample in errors.

in a worker     generators seeded ──read_row──> leaves ──DrawDetector──> drawn from, or not
                error ──Failure.of──> pickled, or its text
who builds      ──reraise──> the error, with the worker's traceback as its cause
"""

from __future__ import annotations

import pickle
import random
import threading
import traceback
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

from dataloaders.cache.sample.cut import Call, Cut
from dataloaders.cache.sample.leaf import Leaf
from dataloaders.cache.sample.sample import Structure, split
from dataloaders.errors import CacheError, add_note
from dataloaders.options import option
from dataloaders.seeding.states import states_now

BYTES_PER_LEAF = 200
"""What a leaf takes in memory besides its values, about."""

IN_THIS_PROCESS = threading.RLock()
"""Held while samples are read here: another thread's draws would be taken for theirs."""

STAY_LIVE = (
    "Take what is random out of the dataset (a torchvision Compose as transform= stays live from "
    f"its first random member on), or pass {option('allow_random', True)}"
)

_LONGEST_MESSAGE = 1000
_TURN = 1_000_003


class Failure(NamedTuple):
    """An exception on its way from a worker; one that cannot be pickled as a `CacheError`."""

    pickled: bytes
    trace: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Return ``error``, ready to be sent."""
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        try:
            pickled = pickle.dumps(error)
            again = pickle.loads(pickled)
            is_same = type(again) is type(error) and str(again) == str(error)
        except Exception:  # classes of functions, odd constructors: anything
            is_same = False
        return cls(pickled if is_same else pickle.dumps(CacheError(error_text(error))), trace)

    def reraise(self) -> NoReturn:
        """Raise it where it was sent to, the worker's traceback as its cause."""
        raise pickle.loads(self.pickled) from _InWorker(f"\n{self.trace}")


class _InWorker(Exception):
    """Shows a worker's traceback above the error itself."""


def not_interrupted(error: BaseException) -> BaseException:
    """Return ``error``, which may be a sample's own, as sys.exit() is; raise Ctrl-C again."""
    if isinstance(error, KeyboardInterrupt):
        raise error
    return error


def error_text(error: BaseException) -> str:
    """Return ``ValueError: its text``, of bounded length."""
    return f"{type(error).__name__}: {error}"[:_LONGEST_MESSAGE]


def read_row(
    cut: Cut, index: int, calls: Sequence[Call] | None = None
) -> tuple[Structure, list[Leaf]]:
    """Read row ``index`` and copy it into leaves: the dataset may use its memory again.

    Raises:
        CacheError: it went through the transforms in another way than ``calls`` say, or it cannot
            be kept; the message names it.
        Exception: what reading it raised, with a note that names the sample.
    """
    try:
        return split(cut.read(index, calls))
    except CacheError as error:
        raise CacheError(f"sample {index} cannot be kept: {error}") from error
    except BaseException as error:
        not_interrupted(error)
        note = f"dataloaders: raised by sample {index} of {cut.name} while its cache was built"
        if isinstance(error, Exception):
            note += f"; {option('on_error', 'skip')} leaves such samples out"
        add_note(error, note)
        raise


def draws_refused(name: str, index: int, generators: Sequence[str], why: str = "") -> CacheError:
    """Return the error for the row of this sample, which drew from these generators."""
    whose = f"generator{'s' * (len(generators) > 1)} of {' and '.join(generators)}"
    return CacheError(
        f"{name} draws random numbers: making the part of sample {index} that a cache keeps drew "
        f"from, or seeded, the {whose}{why}. A cache would keep one draw for ever; drawing or "
        f"seeding counts even if it has no effect on the sample. {STAY_LIVE} to keep one draw of "
        "each sample, with the generators seeded by the sample's number"
    )


def seed_for(index: int, turn: int = 0) -> int:
    """Seed torch's, NumPy's and ``random``'s generators for one reading of sample ``index``.

    A row that draws is then the same in every process and at any time. Returns the seed.
    """
    number = turn * _TURN + index + 1
    torch.default_generator.manual_seed(number)  # torch.manual_seed seeds every CUDA device too
    np.random.seed(number % 2**32)
    random.seed(number)
    return number


class DrawDetector:
    """Seeds the generators as `seed_for` does, and detects draws from them and seedings."""

    def __init__(self, index: int) -> None:
        seed_for(index)
        self._before = _states()

    def moved(self) -> tuple[str, ...]:
        """Return the names of the generators that were drawn from or seeded; empty: none was."""
        return tuple(name for name, now in _states().items() if now != self._before[name])


def _states() -> dict[str, Any]:
    torchs, (_, words, *rest), pythons = states_now()
    return {"torch": torchs, "NumPy": (words.tobytes(), rest), "Python's random": pythons}
