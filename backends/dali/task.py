"""Define a batch in flight: the sampler's keys, what was read, and the result.

Task ──line──> Made        the images, where the batch is delivered
               Redo        something went wrong: the dataset itself is asked, sample by sample
               Failed      what is raised in place of the batch
               Ended       the epoch is over
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from dataloaders.transforms.actions import Action
from dataloaders.transforms.draws import Draws

if TYPE_CHECKING:
    from .behind import Images

__all__ = ["Ended", "Failed", "Item", "Made", "Redo", "Task"]


@dataclass(eq=False)
class Task:
    """One batch of n samples.

    Attributes:
        number: the number of the batch in its epoch, from 1.
        keys: what the sampler yielded.
        words: for each sample, the words that seed its random numbers; uint32 [n, 4].
        reading: what the source has of each sample, once it is read; None when it was taken.
        collation: under ``seed=``, what seeds the generators around a collate_fn.
        parts: what a dataset's own code has recorded of each sample; None: the keys are enough.
        names: the names of the files, once they are read.
        actions: the actions of the whole chain, one for each of its primitives.
        draws: the streams of its samples, for the chain's own numbers.
        graph: the graph that works on it.
        item: its result, once it is known.
        broken: what the dataset's own code raised for the last of ``keys``, which has no part.
    """

    number: int
    keys: Sequence[Any]
    words: npt.NDArray[np.uint32]
    reading: Future[Any] | None
    collation: tuple[int, int, int, int] | None = None
    parts: list[Any] | None = None
    names: list[str] = field(default_factory=list)
    actions: list[Action] = field(default_factory=list)
    draws: Draws | None = None
    graph: Any = None
    item: Item | None = None
    broken: BaseException | None = None


class Ended:
    """The epoch is over."""


@dataclass(eq=False)
class Made:
    """The images of a batch.

    Attributes:
        images: one tensor or a list of them.
        ready: an event after the work on them on a CUDA device; None elsewhere.
    """

    task: Task
    images: Images
    ready: Any = None


@dataclass(eq=False)
class Redo:
    """A batch that could not be made, with the reason.

    Attributes:
        sample: the place of the sample in the batch; None if that is not known.
        where: the transform that refused it, as messages name it; "" if it was none.
        own: whether the reason is the dataset's own error for that sample: an earlier sample may
            have one too, which then comes first.
    """

    task: Task
    cause: BaseException
    sample: int | None = None
    where: str = ""
    own: bool = False


@dataclass(eq=False)
class Failed:
    """An error in place of a batch whose samples are not known: the sampler's."""

    error: BaseException


Item: TypeAlias = "Made | Redo | Failed | Ended"
