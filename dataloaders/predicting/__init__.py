"""What a change of the input would gain, from short measured runs of a loop and of its stages.

taking.py      seconds to take a batch from a worker, and to start a worker
caches.py      small caches of some samples: the share of the dataset's time that they take
sharing.py     how much slower workers and the step are where they share the cores
model.py       the queue between torch's workers and the step, batch by batch
stages.py      the measured stages of a loop; its seconds a batch after a change of them
candidates.py  the changes: predicted seconds and speed-ups with intervals, or why one is out
"""

from dataloaders.predicting.caches import SmallCache, build, small_caches
from dataloaders.predicting.candidates import (
    Candidate,
    backend_with,
    best_of,
    candidates,
    left_open,
    possible,
    settings_of,
    variant_of,
)
from dataloaders.predicting.model import seconds_per_batch
from dataloaders.predicting.sharing import Sharing
from dataloaders.predicting.stages import Stages, ratio
from dataloaders.predicting.taking import seconds_of_a_worker

__all__ = [
    "Candidate",
    "Sharing",
    "SmallCache",
    "Stages",
    "backend_with",
    "best_of",
    "build",
    "candidates",
    "left_open",
    "possible",
    "ratio",
    "seconds_of_a_worker",
    "seconds_per_batch",
    "settings_of",
    "small_caches",
    "variant_of",
]
