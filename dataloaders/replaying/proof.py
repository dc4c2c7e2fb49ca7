"""Prove on samples of the very dataset that a recorded batch becomes the dataset's own.

    dataset ──collate_fn──> batch ──────────────────────────┐
                                                            equal, generators too?
    recorded ─collate_fn──> sent ──finish──> batch ─────────┘

Both ways begin with equal random states, in the process in which the dataset is observed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import IterDataPipe, MapDataPipe, _DatasetKind

from dataloaders.batches.collation import fetched
from dataloaders.errors import last_line, one_line
from dataloaders.observing import Unobserved, observe
from dataloaders.recording.worker import equal, recorded
from dataloaders.seeding.states import restore, states_now
from dataloaders.transforms.find import find_generators

from . import ReplayError

_SAMPLES = 4
_TRANSFORMS = ("transform", "transforms", "target_transform")


class Proof(NamedTuple):
    """What was found.

    Attributes:
        samples: how many were made both ways.
        facts: of each recorded batch, what was asked for.
        looks: what needed values in the dataset's code, with file and line.
        obstacle: why recording cannot be used; None if it can.
        differs: whether that is because a recorded batch differs from the dataset's own.
    """

    samples: int = 0
    facts: tuple[Any, ...] = ()
    looks: tuple[str, ...] = ()
    obstacle: str | None = None
    differs: bool = False


def prove(
    loader: Any, upto: str, finish: Callable[[Any], Any], facts: Callable[[Any], Any]
) -> Proof:
    """Return whether the loader's recorded batches are its own, as far as that is known.

    Makes up to four samples both ways, in a process of their own: of a stream the first ones.
    Samples that cannot be read, or that a replay leaves to the dataset, prove nothing. A result is
    kept until the dataset, one of its transforms or the collate_fn is another object.

    Args:
        loader: any torch DataLoader.
        upto: see `recording_changes`. Of "files" the strides of tensors may differ.
        finish: makes the batch of a recorded one; called in that process.
        facts: returns what is to be known of a recorded batch, in few bytes.
    """
    attributes = getattr(loader.dataset, "__dict__", {})
    parts = [loader.dataset, loader.collate_fn, *map(attributes.get, _TRANSFORMS)]
    key, known = tuple(map(id, parts)), _KNOWN.setdefault(loader, {})
    if upto not in known or known[upto][0] != key:
        known[upto] = key, _proof(loader, upto, finish, facts)
    return known[upto][1]


_KNOWN: weakref.WeakKeyDictionary[Any, dict[str, tuple[tuple[int, ...], Proof]]]
_KNOWN = weakref.WeakKeyDictionary()


def _proof(
    loader: Any, upto: str, finish: Callable[[Any], Any], facts: Callable[[Any], Any]
) -> Proof:
    dataset: Any = loader.dataset
    name = type(dataset).__name__
    batched = loader._auto_collation
    size = min(loader.batch_size or _SAMPLES, _SAMPLES) if batched else 1
    if isinstance(dataset, (IterDataPipe, MapDataPipe)):
        return Proof(obstacle=f"{name} is a data pipe, and torch seeds these by their class")
    if loader._dataset_kind == _DatasetKind.Iterable:
        if upto == "tail":
            why = "has no samples by index on which it could be proved"
            return Proof(obstacle=f"{name} {why}")
        groups = [[0] * size]
    else:
        listed = isinstance(loader.sampler, (list, tuple))  # perhaps of names
        try:
            known = loader.sampler if listed else range(len(dataset))
        except Exception:  # the reason below says so
            known = ()
        if not known:
            why = "has no len() or no samples, so that nothing could be proved on it"
            return Proof(obstacle=f"{name} {why}")
        places = np.linspace(0, len(known) - 1, min(len(known), _SAMPLES))
        keys = [known[round(place)] for place in places.tolist()]
        groups = [keys[begin : begin + size] for begin in range(0, len(keys), size)]
    ways = loader._dataset_kind, batched, loader.collate_fn, groups, upto, finish, facts
    try:
        return observe(loader, partial(_compared, *ways))
    except Unobserved as error:
        return Proof(obstacle=str(error))
    except Exception as error:  # a loader may hold anything; without a proof it works as before
        return Proof(obstacle=f"samples of {name} could not be recorded: {last_line(error)}")


def _compared(
    kind: int,
    batched: bool,
    collate_fn: Callable[[Any], Any],
    groups: list[list[Any]],
    upto: str,
    finish: Callable[[Any], Any],
    facts: Callable[[Any], Any],
    dataset: Any,
) -> Proof:
    """Make the batch of each of ``groups`` of keys both ways and compare them."""
    name, streams = type(dataset).__name__, kind == _DatasetKind.Iterable
    taken, recording_collate_fn, state = recorded(dataset, collate_fn, upto, streams=streams)
    found, why = Proof(), ""
    while groups:
        group = groups.pop(0)
        keys = group if batched else group[0]
        which = name if streams else f"samples {keys} of {name}"
        generators = [(put, get()) for get, put in find_generators(dataset)]
        before, expected = states_now(), None

        def begin_again(states: Any = before, generators: Any = generators) -> None:
            for put, own in generators:
                put(own)
            restore(states)

        try:
            expected = fetched(kind, dataset, batched, collate_fn, keys)
            after = states_now()
            begin_again()
            sent = fetched(kind, taken, batched, recording_collate_fn, keys)
            now = states_now()
            made = [finish(each) for each in sent]
        except Exception as error:
            if expected is not None and not isinstance(error, ReplayError):
                raise
            why = why or f"reading {which} failed: {one_line(error)}"
            if not streams and len(group) > 1:
                groups += [[key] for key in group]
            continue
        if not equal(made, expected, strides=upto == "tail"):
            begin_again()
            if not streams or equal(fetched(kind, dataset, batched, collate_fn, keys), expected):
                why = f"{which} would have other values"
                return found._replace(obstacle=why, differs=True)
            # A stream that never repeats itself, as one shuffled by the time: nothing to compare.
        elif not equal(now, after):
            why = f"with {which} other random numbers would be drawn"
            return found._replace(obstacle=why, differs=True)
        found = Proof(
            found.samples + len(group) * len(made),
            (*found.facts, *map(facts, sent)),
            (*found.looks, *state.looks),
        )
    if not found.samples:
        return found._replace(obstacle=why or f"{name} has no samples")
    stopped = f"recording stops: {state.stopped}" if state.stopped else None
    return found._replace(obstacle=stopped)
