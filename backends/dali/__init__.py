"""Decode and augment with NVIDIA DALI; the dataset and its transforms stay as they are.

sampler ──> bytes ──> DALI: decode, crop, flip ──> behind: the rest ──> tail ──> collate
torch's     threads   GPU, or its CPU operators    exact, by batch      exact     torch's

job.py       what is made, decided at each iter()     describe.py   the same, as a plan
snapshot.py  the parts of a dataset that may change
numbers.py   threads and batches in flight
plan.py      the chain divided: graph, rest, tail     nodes.py      what DALI does, and how exactly
sorts.py     what an image is along the chain         (colour_nodes.py, turn_nodes.py: more of it)
sources/     the images of a dataset, by index        header, odd   files that Pillow decodes
graph.py     DALI's pipeline                          behind.py     what is done after it
line.py      both, on a thread: courier.py            task.py       a batch in flight
memory.py    what batches take on a device
session.py   what lives across epochs                 epoch.py      what a loop iterates
collate.py   batches of images, targets and the rest
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from dataloaders.backend import Backend, Session, Specification, Tunable
from dataloaders.errors import BackendUnavailable, DataLoadersError, OptionError
from dataloaders.plan import Plan

from .needed import check_dali

check_dali()

from .describe import described  # noqa: E402 - whoever lacks DALI is told so first
from .job import Job, job_of  # noqa: E402
from .nodes import FAST  # noqa: E402
from .numbers import candidates  # noqa: E402
from .session import DaliSession  # noqa: E402
from .sources.opaque import Opaque  # noqa: E402

__all__ = ["Dali"]


@dataclass(frozen=True)
class Dali(Backend):
    """Batches of torchvision datasets, decoded and augmented by DALI.

    The samples and their order equal torch's, and with ``seed=`` the crops equal stock's. On the
    CPU the pixels equal torchvision's to the bit, except after bilinear resizing, which rounds
    differently (1 level of 256, rarely 2); with ``fast=()`` also then. On a CUDA device each
    operator has a known difference (see `explain`). What DALI does differently from torchvision is
    done after it, exactly. A chain or a dataset that is not supported is refused with the reason.

    Batches are delivered on the loader's ``device``, else on the current CUDA device if there is
    one, else on the CPU. Threads of this process make them ahead of the loop: ``num_workers`` is
    not used. A batch may be kept for ever.

    Attributes:
        threads: DALI's own threads, and as many for the work after it on the CPU; "auto": what
            `dataloaders.tune` learned for this dataset on this machine, else the cores that this
            process may use, at most 32.
        depth: batches between the sampler and the loop; "auto": what was learned, else 3.
        fast: names of operators that may differ from torchvision's because they are faster: see
            `backends.dali.nodes.FAST`. (): none.

    Raises:
        OptionError: an option has a value that it cannot take.
    """

    threads: int | Literal["auto"] = "auto"
    depth: int | Literal["auto"] = "auto"
    fast: Collection[str] = ("resize",)

    name: ClassVar[str] = "dali"
    delivers: ClassVar[Literal["host", "device"]] = "device"

    def __post_init__(self) -> None:
        for option in ("threads", "depth"):
            value = getattr(self, option)
            if value == "auto":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise OptionError(
                    f"Dali({option}={value!r}): must be an int of at least 1, or 'auto'"
                )
        if isinstance(self.fast, str) or not set(self.fast) <= set(FAST):
            raise OptionError(
                f"Dali(fast={self.fast!r}): must be names out of {', '.join(map(repr, FAST))}, as "
                f"in fast=({next(iter(FAST))!r},)"
            )
        object.__setattr__(self, "fast", tuple(self.fast))  # must be comparable and hashable

    def explain(self, loader: Specification) -> Plan:
        """Return each transform and where it runs, or what stands in the way.

        Reads up to four samples of a dataset on the first call.
        """
        try:
            job = self.job(loader)
            if isinstance(job, str):
                return Plan(self.name, obstacle=job)
            return described(self.name, job, loader)
        except DataLoadersError as error:
            return Plan(self.name, obstacle=str(error))
        except Exception as error:  # a loader may hold anything; explaining it must not fail
            return Plan(self.name, obstacle=f"this loader could not be read: {error!r}")

    def tunable(self, loader: Specification) -> Tunable | None:
        """Return ``threads`` and ``depth``; and workers, if they run the dataset's own code."""
        try:
            job = self.job(loader)
        except Exception:  # iter() will raise it
            return None
        if isinstance(job, str):
            return None
        now = replace(self, threads=job.threads, depth=job.depth)
        return Tunable(now, candidates(job.numbers), isinstance(job.source, Opaque))

    def open(self, loader: Specification) -> Session:
        """Open a session; its first epoch makes the graph and the threads."""
        plan = self.explain(loader)
        if plan.obstacle is not None:
            raise BackendUnavailable(str(plan))
        return DaliSession(self, loader)

    def job(self, loader: Specification) -> Job | str:
        """Return what is to be made of ``loader``, or what stands in the way."""
        return job_of(self, loader)
