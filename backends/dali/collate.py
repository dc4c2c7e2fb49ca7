"""Build batches from finished images and the rest of each sample.

    images [n, C, H, W] ──a view each──> Source.sample() ──> samples ──> collate_fn ──> batch
                                                                └─ torch's: the same images, unmoved

All of it runs on the loop's thread: targets, ``target_transform`` and ``collate_fn`` are user code.
"""

from __future__ import annotations

import operator
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import default_collate, default_convert
from torch.utils.data._utils import collate as torch_collate

from dataloaders.batches.tree import Batch
from dataloaders.errors import BackendUnavailable, BackendWarning, add_note
from dataloaders.seeding.seeded import seed_generators
from dataloaders.seeding.states import random_states_kept

from .behind import Images
from .sources import Source
from .sources.opaque import Opaque
from .task import Made, Redo, Task

__all__ = ["Assembly"]

_MOST_REDONE = 3
"""Batches in a row that the dataset makes itself before this counts as an error of the backend."""


class Assembly:
    """Make an epoch's batches; holds everything that it needs of the loader.

    Args:
        dataset: the user's dataset.
        source: the source of its images.
        collate_fn: the loader's.
        batched: whether it gets lists of samples (False: ``batch_size=None``).
        wraps: whether a sample's image is a torchvision ``tv_tensors.Image``.
    """

    def __init__(
        self,
        dataset: Any,
        source: Source | Opaque,
        collate_fn: Callable[[Any], Any],
        *,
        batched: bool,
        wraps: bool,
    ) -> None:
        self._dataset = dataset
        self._source = source
        self._collate_fn = collate_fn
        self._batched = batched
        self._wraps = wraps
        self._redone = 0  # batches in a row that the dataset had to make

    def batch(self, made: Made) -> Batch:
        """Return the batch of these images; raises what the user's code raises."""
        self._redone = 0
        task = made.task
        views = self._views(made.images)
        samples = self._samples(task, views)
        if task.broken is not None:
            raise noted(_taken(task), task, len(samples))
        if self._collate_fn is default_collate and self._batched:
            return _collated(samples, views, made.images)
        return self._collated(task, samples)

    def redone(self, redo: Redo) -> Batch:
        """Return the batch that the dataset itself makes, or raise its first bad sample's error.

        Raises:
            Exception: the dataset's own; or the reason why the batch could not be made, if the
                dataset cannot be asked.
            BackendUnavailable: the dataset also made the batches before this one, without an error
                of its own: so no sample is the cause, and each batch would be made twice.
        """
        task = redo.task
        if not _gives_samples(self._dataset):
            raise noted(_taken(redo), task, redo.sample)
        holder: Task | Redo | None = None if task.broken is None else task
        last = len(task.keys) - 1
        if redo.own and redo.sample is not None:
            last, holder = redo.sample, redo
        samples = []
        with random_states_kept(cuda=False):
            for place, key in enumerate(task.keys):
                if place == last and holder is not None:
                    raise noted(_taken(holder), task, place)
                seed_generators(_words(task, place))
                try:
                    samples.append(self._dataset[key])
                except Exception as error:
                    noted(error, task, place)
                    if redo.where and place == redo.sample:
                        add_note(error, f"dataloaders: raised by {redo.where}")
                    raise
        cause = f"{type(redo.cause).__name__}: {redo.cause}"[:300]
        self._redone += 1
        if self._redone >= _MOST_REDONE:
            raise BackendUnavailable(
                f"dali could not make {self._redone} batches in a row, up to batch {task.number} "
                f"of this epoch, and the dataset itself can ({cause}); use backend='prefetch', "
                "and report this error"
            ) from redo.cause
        warnings.warn(
            f"dali could not make batch {task.number} of this epoch ({cause}); the dataset itself "
            "made it, on this thread",
            BackendWarning,
            stacklevel=4,
        )
        if self._collate_fn is default_collate and self._batched:
            return default_collate(samples)
        return self._collated(task, samples)

    def _samples(self, task: Task, views: Sequence[torch.Tensor]) -> list[Any]:
        samples = []
        seeded = task.collation is not None and self._source.user_code
        parts = task.keys if task.parts is None else task.parts
        with _states_of(seeded):
            for place, (part, view) in enumerate(zip(parts, views, strict=True)):
                if seeded:
                    _seed_behind(task, place)
                try:
                    samples.append(self._source.sample(part, view))
                except Exception as error:
                    noted(error, task, place)
                    raise
        return samples

    def _views(self, images: Images) -> Sequence[torch.Tensor]:
        views: Sequence[torch.Tensor]
        views = images if isinstance(images, list) else images.unbind(0)
        if not self._wraps:
            return views
        from torchvision.tv_tensors import Image

        return [view.as_subclass(Image) for view in views]

    def _collated(self, task: Task, samples: list[Any]) -> Batch:
        given = samples if self._batched else samples[0]
        if self._collate_fn in (default_collate, default_convert) or task.collation is None:
            return self._collate_fn(given)
        with random_states_kept(cuda=False):
            seed_generators(task.collation)
            return self._collate_fn(given)


def _taken(holder: Task | Redo) -> BaseException:
    """Take the error out of what holds it.

    The traceback of an error that is raised holds these frames, so that an error held in them would
    live until it is collected, and with it the epoch, whose thread the loader's end waits for.
    """
    if isinstance(holder, Redo):
        error: BaseException | None = holder.cause
        holder.cause = RuntimeError("the cause was raised already")
    else:
        error, holder.broken = holder.broken, None
    assert error is not None
    return error


def noted(error: BaseException, task: Task, sample: int | None) -> BaseException:
    """Add a note to ``error`` that says which sample of which batch it is about."""
    if sample is None or sample >= len(task.keys):
        names = ", ".join(str(key) for key in task.keys[:_NAMED])
        more = ", ..." if len(task.keys) > _NAMED else ""
        add_note(error, f"dataloaders: batch {task.number} of this epoch, samples {names}{more}")
        return error
    note = f"dataloaders: sample {task.keys[sample]}"
    if sample < len(task.names) and task.names[sample]:
        note += f" ({task.names[sample]})"
    add_note(error, f"{note}, in batch {task.number} of this epoch")
    return error


_NAMED = 64
"""The most samples of a batch that an error names."""


def _collated(samples: list[Any], views: Sequence[torch.Tensor], images: Images) -> Batch:
    """Apply ``default_collate``, but use the images as they are where it would stack the views."""
    table = dict(torch_collate.default_collate_fn_map)
    torchs = table.get(torch.Tensor)
    if torchs is torch_collate.collate_tensor_fn and isinstance(images, torch.Tensor):
        table[torch.Tensor] = _Stack(views, images)
    return torch_collate.collate(samples, collate_fn_map=table)


class _Stack:
    """Torch's ``collate_tensor_fn``; for the views of one tensor, that tensor."""

    def __init__(self, views: Sequence[torch.Tensor], images: torch.Tensor) -> None:
        self._views = views
        self._images = images
        self._given = False

    def __call__(self, batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
        if len(batch) == len(self._views) and all(map(operator.is_, batch, self._views)):
            if not self._given:
                self._given = True
                return self._images
            return self._images.clone()  # an image that is in a sample twice
        return torch_collate.collate_tensor_fn(batch, collate_fn_map=collate_fn_map)  # type: ignore[no-any-return]


def _gives_samples(dataset: Any) -> bool:
    """Whether the dataset's class defines how to get a sample."""
    own = getattr(type(dataset), "__getitem__", None)
    return own is not None and own is not torch.utils.data.Dataset.__getitem__


@contextmanager
def _states_of(seeded: bool) -> Iterator[None]:
    if not seeded:
        yield
        return
    with random_states_kept(cuda=False):
        yield


def _seed_behind(task: Task, place: int) -> None:
    """Set the generators to their state after the chain, as the user's later code expects it."""
    seed_generators(_words(task, place))
    if task.draws is None:
        return
    with task.draws.generator(place) as generator:
        torch.default_generator.set_state(generator.get_state())
    random.setstate(task.draws.python(place).getstate())


def _words(task: Task, place: int) -> tuple[int, int, int, int]:
    one, two, three, four = (int(word) for word in task.words[place])
    return one, two, three, four
