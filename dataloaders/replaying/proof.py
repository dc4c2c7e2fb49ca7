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

from torch.utils.data import IterableDataset, MapDataPipe, _DatasetKind

from dataloaders.observing import Unobserved, observe
from dataloaders.recording.worker import equal, recorded
from dataloaders.seeding.states import restore, states_now
from dataloaders.transforms.find import find_generators

_SAMPLES = 4


class Proof(NamedTuple):
    """What was found.

    Attributes:
        samples: how many were made both ways.
        facts: of each recorded batch, what was asked for.
        looks: what needed values in the dataset's code, with file and line; or why nothing was
            recorded.
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

    Makes up to four samples both ways, in a process of their own.

    Args:
        loader: over a dataset with samples by index.
        upto: see `recording_changes`.
        finish: makes the batch of a recorded one; called in that process.
        facts: returns what is to be known of a recorded batch, in few bytes.
    """
    dataset: Any = loader.dataset
    name = type(dataset).__name__
    if isinstance(dataset, (IterableDataset, MapDataPipe)):
        return f"{name} has no samples by index on which it could be proved"
    try:
        count = len(dataset)
    except Exception:  # it is told below that there is no length
        count = 0
    if not count:
        return f"{name} has no len() or no samples, so that nothing could be proved on it"
    last = min(count, _SAMPLES) - 1
    keys = sorted({round(i * (count - 1) / max(1, last)) for i in range(last + 1)})
    batched = loader.batch_sampler is not None
    size = min(loader.batch_size or _SAMPLES, _SAMPLES) if batched else 1
    groups: list[Any] = [keys[begin : begin + size] for begin in range(0, len(keys), size)]
    if not batched:
        groups = keys
    try:
        both = partial(_compared, loader.collate_fn, batched, groups, upto, finish, facts)
        return observe(loader, both)
    except Unobserved as error:
        return str(error)
    except Exception as error:  # a loader may hold anything; without a proof it works as before
        last_line = str(error).strip().rpartition("\n")[2]
        return f"samples of {name} could not be recorded: {type(error).__name__}: {last_line[:200]}"


def _compared(
    collate_fn: Callable[[Any], Any],
    batched: bool,
    groups: list[Any],
    upto: str,
    finish: Callable[[Any], Any],
    facts: Callable[[Any], Any],
    dataset: Any,
) -> Proof | str:
    """Make the batches of ``groups`` both ways and compare them."""
    name = type(dataset).__name__
    taken, recording_collate_fn, state = recorded(dataset, collate_fn, upto)

    def fetched(dataset: Any, collate_fn: Any, keys: Any) -> Any:
        fetcher: Any = _DatasetKind.create_fetcher(  # type: ignore[no-untyped-call]
            _DatasetKind.Map, dataset, batched, collate_fn, False
        )
        return fetcher.fetch(keys)

    found = Proof(0, [], [])
    for keys in groups:
        generators = [(put, get()) for get, put in find_generators(dataset)]
        before = states_now()
        try:
            expected = fetched(dataset, collate_fn, keys)
        except Exception as error:
            text = " ".join(str(error).split())[:200]
            return f"reading samples {keys} of {name} failed: {type(error).__name__}: {text}"
        after = states_now()
        for put, own in generators:
            put(own)
        restore(before)
        sent = fetched(taken, recording_collate_fn, keys)
        now = states_now()
        if not equal(finish(sent), expected):
            return found._replace(differs=f"samples {keys} of {name} would have other values")
        if not equal(now, after):
            differs = f"with samples {keys} of {name} other random numbers would be drawn"
            return found._replace(differs=differs)
        found.facts.append(facts(sent))
    looks = [state.stopped] if state.stopped else state.looks
    count = sum(map(len, groups)) if batched else len(groups)
    return found._replace(samples=count, looks=looks)
