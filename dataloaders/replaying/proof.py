"""Prove on samples of the very dataset that a recorded batch becomes the dataset's own.

    dataset ──collate_fn──> batch ──────────────────────────┐
                                                            equal, generators too?
    recorded ─collate_fn──> sent ──finish──> batch ─────────┘

Both ways begin with equal random states, in the process in which the dataset is observed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch.utils.data import IterDataPipe, MapDataPipe, _DatasetKind

from dataloaders.observing import Unobserved, observe
from dataloaders.recording.worker import equal, fetched, recorded
from dataloaders.seeding.states import restore, states_now
from dataloaders.transforms.find import find_generators

from . import ReplayError

_SAMPLES = 4


class Proof(NamedTuple):
    """What was found.

    Attributes:
        samples: how many were made both ways.
        facts: of each recorded batch, what was asked for.
        looks: what needed values in the dataset's code, with file and line.
        differs: in what a recorded batch differs from the dataset's own; None: in nothing.
    """

    samples: int
    facts: list[Any]
    looks: list[str]
    differs: str | None = None


def prove(
    loader: Any, upto: str, finish: Callable[[Any], Any], facts: Callable[[Any], Any]
) -> Proof | str:
    """Return whether the loader's recorded batches are its own, or say why that is not known.

    Makes up to four samples both ways, in a process of their own: of a stream the first ones.
    Samples that cannot be read, or that a replay leaves to the dataset, prove nothing.

    Args:
        loader: any torch DataLoader.
        upto: see `recording_changes`. Of "files" the strides of tensors may differ.
        finish: makes the batch of a recorded one; called in that process.
        facts: returns what is to be known of a recorded batch, in few bytes.
    """
    dataset: Any = loader.dataset
    name = type(dataset).__name__
    batched = loader._auto_collation
    size = min(loader.batch_size or _SAMPLES, _SAMPLES)
    if isinstance(dataset, (IterDataPipe, MapDataPipe)):
        return f"{name} is a data pipe, and torch seeds these by their class"
    if loader._dataset_kind == _DatasetKind.Iterable:
        if upto == "tail":
            return f"{name} has no samples by index on which it could be proved"
        rounds: list[list[Any]] = [[[0] * size] if batched else [0] * size]
    else:
        listed = isinstance(loader.sampler, (list, tuple))  # perhaps of names
        try:
            known = loader.sampler if listed else range(len(dataset))
        except Exception:  # the reason below says so
            known = ()
        if not known:
            return f"{name} has no len() or no samples, so that nothing could be proved on it"
        last = min(len(known), _SAMPLES) - 1
        places = {round(i * (len(known) - 1) / max(1, last)) for i in range(last + 1)}
        keys = [known[place] for place in sorted(places)]
        step = size if batched else 1
        groups = [keys[begin : begin + step] for begin in range(0, len(keys), step)]
        rounds = [[group if batched else group[0]] for group in groups]
    ways = loader._dataset_kind, batched, loader.collate_fn, rounds, upto, finish, facts
    try:
        return observe(loader, partial(_compared, *ways))
    except Unobserved as error:
        return str(error)
    except Exception as error:  # a loader may hold anything; without a proof it works as before
        last_line = str(error).strip().rpartition("\n")[2]
        return f"samples of {name} could not be recorded: {last_line[:200]}"


def _compared(
    kind: int,
    batched: bool,
    collate_fn: Callable[[Any], Any],
    rounds: list[list[Any]],
    upto: str,
    finish: Callable[[Any], Any],
    facts: Callable[[Any], Any],
    dataset: Any,
) -> Proof | str:
    """Make the batches of each of ``rounds`` both ways and compare them."""
    name, streams = type(dataset).__name__, kind == _DatasetKind.Iterable
    taken, recording_collate_fn, state = recorded(dataset, collate_fn, upto, streams=streams)
    found, why = Proof(0, [], []), ""
    while rounds:
        groups = rounds.pop(0)
        which = name if streams else f"samples {groups[0]} of {name}"
        generators = [(put, get()) for get, put in find_generators(dataset)]
        before, expected = states_now(), None
        try:
            expected = fetched(kind, dataset, batched, collate_fn, groups)
            after = states_now()
            for put, own in generators:
                put(own)
            restore(before)
            sent = fetched(kind, taken, batched, recording_collate_fn, groups)
            now = states_now()
            made = [finish(each) for each in sent]
        except Exception as error:
            if expected is not None and not isinstance(error, ReplayError):
                raise
            text = " ".join(str(error).split())[:200]
            why = why or f"reading {which} failed: {type(error).__name__}: {text}"
            if batched and not streams and len(groups[0]) > 1:
                rounds += [[[key]] for key in groups[0]]
            continue
        if not equal(made, expected, strides=upto == "tail"):
            return found._replace(differs=f"{which} would have other values")
        if not equal(now, after):
            return found._replace(differs=f"with {which} other random numbers would be drawn")
        found.facts.extend(map(facts, sent))
        found.looks.extend(state.looks)
        read = sum(len(keys) if batched else 1 for keys in groups[: len(made)])
        found = found._replace(samples=found.samples + read)
    if not found.samples:
        return why or f"{name} has no samples"
    return f"recording stops: {state.stopped}" if state.stopped else found
