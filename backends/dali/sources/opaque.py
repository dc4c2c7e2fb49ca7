"""Any other dataset: its own code loads its images, in torch's workers, and a graph does the rest.

    dataset[i] ──user's code──> image ──chain──> sample          as it is
                                  │
    a copy     ──user's code──> image ──Recorder──> sample with a Placeholder
                                  └──> pixels ─────────────────> graph

What stands in front of the chain and is not known (somebody's own functions, ToPILImage) runs in
the workers too. Code of the dataset's that draws random numbers before the chain moves the
streams from which the chain draws: where they have come to is handed on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch.utils.data import IterableDataset

from dataloaders.cache.build.study import same_samples
from dataloaders.cache.sample.cut import Path, equal_state, put, sample_of
from dataloaders.errors import BackendUnavailable
from dataloaders.transforms.find import (
    Copies,
    Found,
    NotCopyable,
    find_chains,
    open_files_of,
)
from dataloaders.transforms.operators.table import operator_of
from dataloaders.transforms.read import Member, Run

from .proof import as_read, attempts, generators_kept, spread, words_of
from .recorder import ManyRecording, Recorder, Recording
from .recordings import Placeholder, Recorded, Recordings
from .streams import all_states, put_back, same_states

__all__ = [
    "Opaque",
    "Placeholder",
    "Recordable",
    "Recorded",
    "Recordings",
    "opaque_for",
    "recorded_as",
]

_PROVED = 4
_MAKES_ONE_SORT = ("RGB", "ToPILImage")
"""What may stand first and is done where the image is loaded: a graph takes one sort of image."""


@dataclass(frozen=True)
class Recordable:
    """What a few samples told about a dataset whose own code loads its images.

    Attributes:
        known: members of the chain that run where the image is loaded.
        many: whether the dataset gives several samples at once.
        path, form, channels, wraps: as `Opaque` has them; None: no sample could be read.
    """

    known: int
    many: bool
    path: Path | None
    form: Literal["pil", "bytes"] | None
    channels: int
    wraps: bool


class Opaque:
    """A dataset whose own code loads its images.

    Attributes:
        dataset: gives a `Recorded` for each index, in workers or here; map-style.
        head: what runs on an image there, in front of the rest.
        transform: the rest of the chain: what each recorded image is to go through.
        path: the keys to the image in a sample.
        form: what the rest of the chain is given: a PIL image ("pil"), or a uint8 tensor ("bytes").
        wraps: whether that tensor is one of torchvision's ``tv_tensors.Image``.
        channels: of each image.
        user_code: False: what there is has run when a sample is recorded.
        why: its images are not read without its code, and what to do about it; in words.
        recordable: what it was made by.
    """

    user_code = False
    why = ""
    recordable: Recordable

    def __init__(self, dataset: Recording, head: Run, transform: Run, copies: Copies) -> None:
        self.dataset = dataset
        self.head = head
        self.transform = transform
        self._copies = copies

    @property
    def path(self) -> Path:
        """See above."""
        return self.dataset.path or ()

    @property
    def form(self) -> Literal["pil", "bytes"]:
        """See above."""
        return self.dataset.recorder.form or "pil"

    @property
    def wraps(self) -> bool:
        """See above."""
        return self.dataset.recorder.wraps

    @property
    def channels(self) -> int:
        """See above."""
        return self.dataset.recorder.channels

    def refresh(self) -> None:
        """What was assigned on the user's dataset since comes over: its epoch, for instance."""
        self._copies.refresh()

    def sample(self, recorded: Any, image: Any) -> Any:
        """``recorded``, a sample with a `Placeholder`, with ``image`` in its place."""
        return put(recorded, self.path, lambda _: image)


def opaque_for(dataset: Any) -> Opaque | str:
    """How images of ``dataset`` are recorded; or what stands in the way and what to do, in words.

    Reads up to four samples and as many of a copy, on this thread, for a process that ends soon.
    """
    name = type(dataset).__name__
    if isinstance(dataset, IterableDataset):
        return f"{name} is iterable, and has no samples by index; give it __getitem__ and __len__"
    try:
        chains = find_chains(dataset)
        obstacle = _obstacle(name, chains)
        if obstacle is not None:
            return obstacle
        known = _known(chains[0].members)
        many = hasattr(dataset, "__getitems__")
        with generators_kept(dataset):
            open_files_of(dataset)
        trial = _opaque(dataset, chains, known, many)
        obstacle = _proved(dataset, trial)
        if trial.dataset.recorder.given_arrays and _makes_image(chains[0].members[known:]):
            known += 1
            trial = _opaque(dataset, chains, known, many)
            obstacle = _proved(dataset, trial)
        if obstacle is not None:
            return f"{name}: {obstacle}"
        recorder = trial.dataset.recorder
        return recorded_as(
            dataset,
            Recordable(
                known,
                many,
                trial.dataset.path,
                recorder.form,
                recorder.channels,
                recorder.wraps,
            ),
        )
    except NotCopyable as error:
        return str(error)
    except Exception as error:  # a dataset may be anything
        return f"{name} could not be copied and read ({type(error).__name__}: {error})"


def recorded_as(dataset: Any, recordable: Recordable) -> Opaque:
    """How ``dataset`` is recorded, by what was found out about it; reads nothing."""
    found = _opaque(dataset, find_chains(dataset), recordable.known, recordable.many)
    found.recordable = recordable
    found.dataset.path = recordable.path
    found.dataset.recorder.expect(recordable.form, recordable.channels, recordable.wraps)
    return found


def _obstacle(name: str, chains: list[Found]) -> str | None:
    if not chains:
        return (
            f"{name} holds no torchvision transform that could move; keep it as an attribute, such "
            "as self.transform, and call that on the image"
        )
    states = [equal_state([member.transform for member in found.members]) for found in chains]
    if len(chains) > 1 and (None in states or len(set(states)) > 1):
        places = ", ".join(found.where for found in chains)
        return (
            f"{name} holds {len(chains)} different chains ({places}), and a graph serves one; if "
            "one was left over from before, assign the new one there too"
        )
    if _known(chains[0].members) == len(chains[0].members):
        return f"nothing in {chains[0].where} is known, so that nothing of it could move"
    return None


def _known(members: Sequence[Member]) -> int:
    """How many members are in front of the first one that a graph may take."""
    return next(
        (
            number
            for number, member in enumerate(members)
            if member.torchvision not in _MAKES_ONE_SORT
            and not isinstance(operator_of(member), str)
        ),
        len(members),
    )


def _makes_image(members: Sequence[Member]) -> bool:
    """Whether they begin with v2's ToImage, which makes bytes of an array, and go on."""
    return len(members) > 1 and members[0].torchvision == "ToImage"


def _opaque(dataset: Any, chains: list[Found], known: int, many: bool) -> Opaque:
    members = chains[0].members
    head = Run([member.transform for member in members[:known]])
    recorder = Recorder(head)
    ids = {id(found.chain) for found in chains}
    copies = Copies(dataset, lambda chain: recorder if id(chain) in ids else chain)
    kind = ManyRecording if many else Recording
    rest = Run([member.transform for member in members[known:]])
    return Opaque(kind(copies.dataset, recorder), head, rest, copies)


def _proved(dataset: Any, opaque: Opaque) -> str | None:
    """Why its samples are not those of ``dataset``; None: those compared are."""
    recorder, transform = opaque.dataset.recorder, opaque.transform
    late = False

    def ours(index: int) -> Any:
        nonlocal late
        recorder.whole = ()
        found = opaque.dataset.record([index])[0]
        called = recorder.whole or all_states()
        late = not same_states(called, all_states())
        put_back(called)
        value = recorder.as_recorded(found.pixels)
        draws = Recordings.of([found]).draws([words_of(index)])
        return opaque.sample(found.sample, as_read(transform, value, draws, recorder.channels))

    with generators_kept(dataset) as restart:
        read = 0
        for index in spread(len(dataset), _PROVED):
            theirs, made = attempts(index, restart, lambda at: sample_of(dataset, at), ours)
            if isinstance(theirs, Exception):
                continue  # it is raised when that sample is asked for
            read += 1
            if isinstance(made, BackendUnavailable):
                return str(made)
            if isinstance(made, Exception):
                return (
                    f"without its transform sample {index} could not be made "
                    f"({type(made).__name__}: {made}); let nothing work on what the transform gives"
                )
            if not same_samples(theirs, made):
                if late:
                    return (
                        "its own code draws random numbers after its transform, which then would "
                        "be others; draw them before"
                    )
                return f"its own code changes what its transform gives (sample {index} is another)"
    return None if read or not len(dataset) else "none of the samples tried could be read"
