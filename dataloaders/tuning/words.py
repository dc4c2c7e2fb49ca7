"""The sentences of a `Tuning`: why this choice, and what else is worth knowing."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils.data

from dataloaders.errors import OptionError
from dataloaders.loader import DataLoader
from dataloaders.tuning import auto, learned
from dataloaders.tuning.attempts import Attempts
from dataloaders.tuning.choice import Need
from dataloaders.tuning.model import WORTH, Model
from dataloaders.tuning.result import Settings

__all__ = [
    "closing_notes",
    "not_kept",
    "why",
    "why_no_workers",
    "why_options",
    "why_threads_stay",
]


def why_no_workers(samples_per_second: float, model: Model, cap: int) -> str:
    """Why the model sees no use in workers, at most ``cap`` of them."""
    rate = f"one process makes {samples_per_second:,.0f} samples/s"
    if cap == 0:
        return f"{rate}, and there is no room for a single worker (see the note)"
    if model.step_s and model.best_s(cap) == model.step_s:
        return f"{rate} with the step, which takes nearly all the time: workers will not help"
    if cap == 1 and not model.step_s:
        return f"{rate}, and one worker could only do the same"
    if model.cores == 1 and model.cpu_share > 1 - WORTH:
        return f"{rate} by CPU work on the one usable core: workers cannot add any"
    return (
        f"{rate}, {1e6 * model.batch_s:,.0f} us a batch: handing a batch over from a worker "
        "costs about as much"
    )


def why(choice: Settings, attempts: Attempts, needed: str | None, met: bool) -> str:
    """Why ``choice`` after trials with workers; ``needed`` is what is needed, as a clause."""
    rate, alone = attempts.rates.get(choice), attempts.rates.get(attempts.alone)
    if rate is None or alone is None:
        return "nothing is known yet"
    if choice.num_workers == 0:
        return f"nothing that was tried is 3 % faster than one process ({alone:,.0f} samples/s)"
    gain = f"{rate:,.0f} samples/s over an epoch, {rate / alone:.1f} x one process"
    if needed is None:
        return f"{gain}, and within 3 % of the best that was tried"
    if met:
        return f"{gain}; {needed}"
    return f"{gain}, within 3 % of the best that was tried; {needed}, which workers did not reach"


def why_options(choice: Settings, given: Settings, attempts: Attempts, need: Need) -> str:
    """Why ``choice``, of a backend's own options."""
    rate, now = attempts.rates.get(choice, 0.0), attempts.rates.get(given)
    gain = f"{rate:,.0f} samples/s"
    if now and choice != given:
        gain += f", {rate / now:.2f} x the loader as it is"
    if need.clause is None:
        return f"{gain}, and within 3 % of the best that was tried"
    if rate >= need.rate:
        return f"{gain}; {need.clause}"
    return f"{gain}, within 3 % of the best that was tried; {need.clause}, which was not reached"


def closing_notes(
    choice: Settings, loader: torch.utils.data.DataLoader[Any], attempts: Attempts, cores: int
) -> list[str]:
    """What else the user should know about the choice."""
    notes = []
    if attempts.out_of_time:
        notes.append("the budget ended before every useful trial was made: give budget_s more")
    seen, batches = attempts.seen.get(choice), attempts.batches_in_epoch
    if seen and batches and choice.num_workers and not loader.persistent_workers:
        share = seen.startup_s / (seen.startup_s + batches * seen.seconds_per_batch.estimate)
        if share > 0.1:
            notes.append(
                f"starting the workers takes {100 * share:.0f} % of each epoch; "
                "persistent_workers=True pays that once"
            )
    if choice.num_workers > cores:
        notes.append(
            f"these are more workers than the {cores} usable cores, of which torch may warn; they "
            "mostly wait, and were measured"
        )
    if not isinstance(loader, DataLoader) and auto.in_memory(loader.dataset):
        notes.append(
            "the dataset is in memory: dataloaders.DataLoader fetches a batch of it by one "
            "indexed gather, in one process"
        )
    return notes


def why_threads_stay(choice: Settings, others: Settings, attempts: Attempts) -> str:
    """What to do about ``choice``'s threads for the step; ``others`` is the best without."""
    before, after = (attempts.rates[one] for one in (others, choice))
    return (
        f"torch.set_num_threads({choice.step_threads}) is the process's: no loader changes it, and "
        f'"auto" keeps to {others.arguments}, the best with {torch.get_num_threads()} threads '
        f"({before:,.0f} samples/s; with both changes {after:,.0f}). Put it into the script, tune "
        'again, and that is what "auto" has'
    )


def not_kept() -> str:
    """That the choice could not be written."""
    try:
        return f"the choice could not be written under {learned.cache_folder()}"
    except OptionError as error:
        return f"the choice could not be written: {error}"
