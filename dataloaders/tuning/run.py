"""tune(): check the arguments, run the search, return its result.

tune(loader, step)      calls step(batch) on the batches of every trial
tuning_steps(loader)    yields them, to a loop that is there already: a script's
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.utils.data

from dataloaders.errors import MissingDependency, OptionError

try:
    import psutil  # noqa: F401
    import rich  # noqa: F401
except ImportError as error:
    raise MissingDependency(
        f"tuning needs psutil and rich, and {error.name} cannot be imported ({error}); "
        "install them with: pip install 'gpu-dataloaders[check]'"
    ) from error

from dataloaders.batches.tree import Batch, to_device
from dataloaders.seeding.states import random_states_kept
from dataloaders.tuning.result import Progress, Tuning
from dataloaders.tuning.trial import Step, Steps, driven
from dataloaders.tuning.tuner import Tuner

__all__ = ["tune", "tuning_steps"]


def tune(
    loader: torch.utils.data.DataLoader[Any],
    step: Step | None = None,
    *,
    budget_s: float = 30.0,
    max_workers: int | None = None,
    remember: bool = True,
    progress: Callable[[Progress], None] | None = None,
    rate_needed: float | None = None,
) -> Tuning:
    """Find a small ``num_workers``, ``prefetch_factor`` and ``pin_memory`` that suffice.

    To suffice is to reach what ``step`` (or ``rate_needed``) needs, less 3 % where a step was
    measured, or 97 % of the best rate. ``num_workers`` is doubled while that is 3 % faster; then a
    number between the last two is tried. Settings that are near each other are tried three times,
    in turns, and their medians compared. The smallest setting that was tried and suffices is
    chosen.

    Of a loader with ``backend="dali"``: the ``threads`` and ``depth`` of `Dali`, which make its
    batches in place of workers; where workers run the dataset's own code, first their number.

    Of a step that computes on the CPU with several of torch's threads, where the workers need the
    cores: also fewer threads (``Settings.step_threads``), if that is 3 % faster than any number of
    workers alone. The threads are put back after each trial.

    The given loader is not iterated, and its samplers and generator are copied. The states of
    torch's, NumPy's and random's generators are restored. The dataset is read in other processes
    only, workers or one like a worker, so that nothing of it is opened here: loading without
    workers is measured there (torch computes with one thread), the step here, and both are added.
    Where the dataset cannot be sent to a process, it is read here, and no workers are tried.
    ``step`` really runs: a step that trains, trains.

    Args:
        loader: any torch DataLoader. One over an iterable dataset is tried with more workers
            than it has now only if ``max_workers`` is given: a dataset that does not share its
            samples out among workers yields each of them several times.
        step: ``step(batch)``, run on every batch of every trial.
        budget_s: seconds after which no further trial starts.
        max_workers: the most to try; None: 4 a usable core and at least 8, fewer where memory
            or shared memory end before that. Either way, settings whose workers were measured
            to take more than half of available memory by the end of an epoch are ruled out.
        remember: keep the choice on disk, where ``num_workers="auto"`` looks it up, and
            ``Dali(threads="auto", depth="auto")``.
        progress: called before every trial. After a KeyboardInterrupt, ``so_far`` of its last
            argument is what was known.
        rate_needed: samples per second that the loader alone must deliver, if the step's rate
            is known otherwise. Without workers loading adds to the step's own time, which only
            ``step`` accounts for.

    Raises:
        TypeError: ``loader`` is not a torch DataLoader.
        OptionError: ``budget_s`` or ``rate_needed`` is not positive, ``max_workers`` negative,
            or both ``step`` and ``rate_needed`` are given.
        CheckError: the loader yields nothing, or its sampler cannot be copied.
        Exception: what the dataset, the collation or the step raises.

    Warns:
        CapacityWarning: before the first trial with workers, if the loader's own settings do not
            fit in shared memory; after the last one, if shared memory or memory has no room for
            more workers, which might be faster.
    """
    _check(loader, step, budget_s, max_workers, rate_needed)
    steps = tuning_steps(
        loader,
        stepping=step is not None,
        budget_s=budget_s,
        max_workers=max_workers,
        remember=remember,
        progress=progress,
        rate_needed=rate_needed,
    )
    return driven(steps, step or _copy_to_cuda)


def tuning_steps(
    loader: torch.utils.data.DataLoader[Any],
    *,
    stepping: bool = True,
    budget_s: float = 30.0,
    max_workers: int | None = None,
    remember: bool = True,
    progress: Callable[[Progress], None] | None = None,
    rate_needed: float | None = None,
) -> Steps[Tuning]:
    """Yield batches to a loop whose body is the step; return what `tune` returns.

    Everything runs on that loop's thread, when it asks for the next batch. Without ``stepping`` the
    batches are only to be copied to the device. If the loop ends first, close the generator: then
    the workers of the trial under way end, and the random states are put back.
    """
    with random_states_kept(loader.generator):
        tuner = Tuner(loader, stepping, budget_s, max_workers, progress, rate_needed)
        yield from tuner.steps()
    return tuner.result(remember=remember)


def _copy_to_cuda(batch: Batch) -> None:
    to_device(batch, torch.device("cuda"))


def _check(
    loader: object,
    step: object,
    budget_s: float,
    max_workers: int | None,
    rate_needed: float | None,
) -> None:
    if not isinstance(loader, torch.utils.data.DataLoader):
        raise TypeError(
            f"tune() takes a torch.utils.data.DataLoader and got {type(loader).__name__}; "
            "for other iterables make a DataLoader of their dataset"
        )
    if not budget_s > 0:
        raise OptionError(f"budget_s={budget_s!r}: must be a positive number of seconds")
    if max_workers is not None and max_workers < 0:
        raise OptionError(f"max_workers={max_workers!r}: must be 0 or more, or None")
    if rate_needed is not None and not rate_needed > 0:
        raise OptionError(f"rate_needed={rate_needed!r}: must be samples per second above 0")
    if step is not None and rate_needed is not None:
        raise OptionError(
            "step and rate_needed were both given: the step's rate is measured, so leave out "
            "rate_needed"
        )
    if step is not None and not callable(step):
        raise OptionError(f"step={step!r}: must be a function of one batch, or None")
