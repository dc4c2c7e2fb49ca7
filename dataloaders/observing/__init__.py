"""Find facts about a dataset in a separate process.

    this process                        a worker process, started as torch starts the loader's
    observe(loader, look) ── look ────> worker_init_fn, seeds ──> look(dataset) reads samples
                          <── facts ──  and the process ends

Code that only inspects (``explain``, ``tune``, a proof, a study) never runs a dataset's own
``__getitem__``, collation or transforms in this process. A file that a dataset opens on its first
read would stay open here. Each worker forked later would inherit it, all of them would share one
offset, and samples would be wrong without an error.

process.py      start, ask and end the process
own_files.py    reopen the files that a fork inherits
attributes.py   read attributes of a dataset here, without running its code
opened.py       note the files that samples are read from, to notice when they change
"""

from dataloaders.observing.attributes import held
from dataloaders.observing.own_files import open_files_anew
from dataloaders.observing.process import (
    Start,
    Unobserved,
    observe,
    started_quietly,
    worker_of,
)

__all__ = [
    "Start",
    "Unobserved",
    "held",
    "observe",
    "open_files_anew",
    "started_quietly",
    "worker_of",
]
