"""What does a look at a dataset in a process of its own cost, besides the samples that it reads?"""

from __future__ import annotations

from functools import partial
from operator import itemgetter
from pathlib import Path

from torch.utils.data import DataLoader

from bench.harness import Result, Samples, Scale, case, interleave
from dataloaders.observing import observe

BAR_FORK_S = 0.1


@case(f"median of a forked look <= {BAR_FORK_S} s")
def observing(scale: Scale, folder: Path) -> Result:
    """What does it cost to observe a dataset in a process of its own?"""
    contexts = scale.pick(full=("fork", "forkserver", "spawn"), tiny=("fork",))
    looks = {
        context: partial(
            observe,
            DataLoader(Samples(int, 1), num_workers=1, multiprocessing_context=context),
            itemgetter(0),
        )
        for context in contexts
    }
    found = interleave(looks, rounds=scale.pick(full=9, tiny=1), warmups=0)
    return Result(
        ("context", "seconds a look, median", "least", "most"),
        tuple((name, s.median(), min(s.wall), max(s.wall)) for name, s in found.items()),
        found["fork"].median() <= BAR_FORK_S,
        ("The look reads one sample, a Python int. The first look starts the fork server.",),
    )
