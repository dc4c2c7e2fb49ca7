"""What a remedy would gain, computed from short measured runs of a loop's stages.

model.py       torch's queue between workers and the step, batch by batch
candidates.py  what if: each remedy's speed-up with an interval, or why it is out
"""

from dataloaders.predicting.candidates import (
    Candidate,
    Stages,
    backend_of,
    best_of,
    candidates,
    variant_of,
)
from dataloaders.predicting.model import Overhead, seconds_per_batch

__all__ = [
    "Candidate",
    "Overhead",
    "Stages",
    "backend_of",
    "best_of",
    "candidates",
    "seconds_per_batch",
    "variant_of",
]
