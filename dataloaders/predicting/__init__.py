"""What a remedy would gain, computed from short measured runs of a loop's stages.

model.py       torch's queue between workers and the step, batch by batch
taking.py      what a worker costs the process that takes its batches
alone.py       a batch of the dataset and from a small cache, without a step
candidates.py  what if: each remedy's speed-up with an interval, or why it is out
"""

from dataloaders.predicting.alone import build, seconds_alone
from dataloaders.predicting.candidates import (
    LONGEST_SAMPLE_S,
    Candidate,
    Stages,
    backend_of,
    best_of,
    candidates,
    variant_of,
)
from dataloaders.predicting.model import Overhead, seconds_per_batch
from dataloaders.predicting.taking import seconds_of_a_worker

__all__ = [
    "LONGEST_SAMPLE_S",
    "Candidate",
    "Overhead",
    "Stages",
    "backend_of",
    "best_of",
    "build",
    "candidates",
    "seconds_alone",
    "seconds_of_a_worker",
    "seconds_per_batch",
    "variant_of",
]
