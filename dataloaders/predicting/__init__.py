"""What a change of the input would gain, computed from short measured runs of a loop's stages.

taking.py      seconds to take a batch from a worker, and to start a worker
alone.py       seconds of a batch without a step, from the dataset and from small caches
model.py       the queue between torch's workers and the step, batch by batch
stages.py      the measured stages of a loop; its seconds a batch after a change of them
candidates.py  the changes: predicted seconds and speed-ups with intervals, or why one is out
"""

from dataloaders.predicting.alone import build, seconds_alone
from dataloaders.predicting.candidates import (
    FORMATS,
    LONGEST_SAMPLE_S,
    Candidate,
    backend_with,
    best_of,
    candidates,
    settings_of,
    variant_of,
)
from dataloaders.predicting.model import Overhead, seconds_per_batch
from dataloaders.predicting.stages import Stages, plus, ratio
from dataloaders.predicting.taking import seconds_of_a_worker

__all__ = [
    "FORMATS",
    "LONGEST_SAMPLE_S",
    "Candidate",
    "Overhead",
    "Stages",
    "backend_with",
    "best_of",
    "build",
    "candidates",
    "plus",
    "ratio",
    "seconds_alone",
    "seconds_of_a_worker",
    "seconds_per_batch",
    "settings_of",
    "variant_of",
]
