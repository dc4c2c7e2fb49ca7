"""Epochs that the prefetch thread takes, while samplers stay on the consumer's thread.

workers.py      torch's worker processes: results on the thread, tasks sent by the consumer
gather.py       datasets of tensors in memory, gathered on the thread itself
next_epoch.py   the next epoch's first tasks, guessed while this epoch ends
messages.py     what a running worker is told with a task
"""

from __future__ import annotations

from .gather import GatherEpoch
from .next_epoch import NextEpochGuess, epoch_of_dataset, no_guess
from .workers import AheadWorkers

__all__ = ["AheadWorkers", "GatherEpoch", "NextEpochGuess", "epoch_of_dataset", "no_guess"]
