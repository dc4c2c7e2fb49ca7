"""What a remedy would gain, computed from short measured runs of a loop's stages.

model.py       torch's queue between workers and the step, batch by batch
taking.py      what a worker costs the process that takes its batches
alone.py       a batch of the dataset and from a small cache, without a step
stages.py      a loop's stages, and its seconds a batch after a change of them
candidates.py  what if: each remedy's seconds and speed-up with intervals, or why it is out
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
