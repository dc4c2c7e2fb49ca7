"""Decoding and augmentation by NVIDIA DALI, of the dataset and transforms as they stand.

sampler ──> bytes ──> DALI: decode, crop, flip ──> behind: the rest ──> tail ──> collate
torch's     threads   GPU, or its CPU operators    exact, by batch      exact     torch's

job.py       what is made, settled at each iter()     describe.py   the same, as a plan
snapshot.py  what its owner may have changed
numbers.py   threads and batches on their way
plan.py      the chain cut up: graph, behind, tail    nodes.py      what DALI does, and how exactly
sorts.py     what an image is along the chain         (colour_nodes.py, turn_nodes.py: more of it)
sources/     the images of a dataset, by index        header, odd   files that Pillow decodes
graph.py     DALI's pipeline                          behind.py     what is done behind it
line.py      both, on a thread: courier.py            task.py       a batch on its way
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

    Same samples in the same order as torch's, and with ``seed=`` the same crops as stock. On the
    CPU the pixels are torchvision's to the bit, but for bilinear resizing, which rounds otherwise
    (1 level of 256, rarely 2); with ``fast=()`` that too. On a CUDA device what each operator is
    off by is known (`explain` says it). What DALI does not do as torchvision does is done behind
    it, exactly. A chain or a dataset that cannot be served is refused, with the reason.

    Batches are delivered on the loader's ``device``, else on the current CUDA device if there is
    one, else on the CPU. They are made ahead of the loop by threads of this process:
    ``num_workers`` is not used. A batch may be kept for ever.

    Attributes:
        threads: of DALI's own, and as many for what is done behind it on the CPU; "auto": what
            `dataloaders.tune` learned for this dataset on this machine, else the cores that this
            process may use, at most 32.
        depth: batches between the sampler and the loop; "auto": what was learned, else 3.
        fast: names of operators that may compute something else than torchvision's, because they
            are quicker: see `backends.dali.nodes.FAST`. (): none.

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
        object.__setattr__(self, "fast", tuple(self.fast))  # it is compared and hashed

    def explain(self, loader: Specification) -> Plan:
        """Each transform and where it runs, or what stands in the way.

        Reads up to four samples of a dataset when asked of it for the first time.
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
        """``threads`` and ``depth``; and torch's workers, where they run the dataset's own code."""
        try:
            job = self.job(loader)
        except Exception:  # iter() will say so
            return None
        if isinstance(job, str):
            return None
        now = replace(self, threads=job.threads, depth=job.depth)
        return Tunable(now, candidates(job.numbers), isinstance(job.source, Opaque))

    def open(self, loader: Specification) -> Session:
        """A session whose graph and threads are made at the first epoch."""
        plan = self.explain(loader)
        if plan.obstacle is not None:
            raise BackendUnavailable(str(plan))
        return DaliSession(self, loader)

    def job(self, loader: Specification) -> Job | str:
        """What is to be made of ``loader``, or what stands in the way."""
        return job_of(self, loader)
