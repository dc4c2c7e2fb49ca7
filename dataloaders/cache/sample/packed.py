"""A dataset's own encoded files as the rows of a cache: all of its transforms stay live.

    dataset[i] ──recorded──> Image.open, convert("RGB") ──> a stand-in of an image
    a transform that gets it ──> Untouched: returned as it is
    the row                  ──> EncodedFile in place of the stand-in
    the reader ──decode──> RGB ──transform──> what the dataset itself would have given

What makes rows is the dataset's own code, so it may find its files wherever it likes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dataloaders.batches.tree import map_children
from dataloaders.cache.sample.cut import Cut, cut_at, sample_of
from dataloaders.cache.sample.decode import EncodedFile
from dataloaders.errors import CacheError
from dataloaders.options import option
from dataloaders.recording import hooks
from dataloaders.recording.context import Recorder, recording
from dataloaders.recording.program import is_image
from dataloaders.seeding.states import random_states_kept
from dataloaders.transforms.find import find_chains
from dataloaders.transforms.read import Run, read

_PACKED = option("images", "packed")
_INSTEAD = f"Keep what is decoded instead: {option('images', 'jpeg')}, 'png' or 'webp'"


def packed(dataset: Any) -> Cut:
    """Return the cut of ``dataset`` whose rows are its encoded files; nothing is read.

    Raises:
        CacheError: it cannot be copied.
    """
    chains = find_chains(dataset, opaque=True)
    try:
        cut = cut_at(dataset, chains, [0] * len(chains), _Untouched)
    except Exception as error:  # a __del__, or a user's own classes on the way
        name = type(dataset).__name__
        raise CacheError(f"{_PACKED}: {name} cannot be copied: {error}. {_INSTEAD}") from error
    rows = _Files(cut.dataset, cut.made, has_tails=bool(cut.tails))
    return replace(cut, dataset=rows, tails=cut.tails or (Run([]),))


class _Untouched:
    """What stands in a copy of the dataset for a transform: it leaves images that are files alone.

    Args:
        transform: the user's own, for anything else.
        number: of its tail.
        made: where each image goes.
    """

    def __init__(self, transform: Any, number: int, made: list[tuple[int, Any]]) -> None:
        self._transform = transform
        self._number = number
        self._made = made
        self._to_rgb = next((each.torchvision == "RGB" for each in read(transform)), False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the image, or what the transform makes of other things."""
        if len(args) != 1 or kwargs or not _is_stand_in(args[0]):
            return self._transform(*args, **kwargs)
        # A copy, so that its place in the sample is known where the image itself stands there, too.
        image = args[0].convert("RGB") if self._to_rgb else args[0].copy()
        self._made.append((self._number, image))
        return image


class _Files:
    """The rows: samples with an `EncodedFile` where an image would be that is a file in RGB.

    Args:
        dataset: a copy whose transforms are `_Untouched`.
        made: (number of its transform, image) of the row that was read; of all files, if the
            dataset has no transform.
    """

    def __init__(self, dataset: Any, made: list[tuple[int, Any]], *, has_tails: bool) -> None:
        self._dataset = dataset
        self._made = made
        self._has_tails = has_tails

    def __getitem__(self, index: int) -> Any:
        why = hooks.obstacle()
        if why is not None:
            raise CacheError(f"{_PACKED}: samples cannot be recorded here: {why}")
        hooks.install()
        own = Recorder(files=True)
        try:
            with recording(own):
                sample = sample_of(self._dataset, index)
                return self._row(sample, own)
        except CacheError:
            raise
        except Exception as error:
            if own.sources:
                with random_states_kept(cuda=False):
                    sample_of(self._dataset, index)  # raises the dataset's own error, if it is that
                raise CacheError(
                    f"its code does not run on recorded images ({type(error).__name__}: {error}). "
                    f"{_INSTEAD}"
                ) from error
            raise

    def _row(self, sample: Any, own: Recorder) -> Any:
        kept: dict[int, tuple[Any, Any]] = {}  # by id: an image, which lives as long, and its place

        def row_of(value: Any) -> Any:
            if not is_image(value):
                return map_children(value, row_of)
            if id(value) not in kept:
                kept[id(value)] = value, _kept(value, own)
            return kept[id(value)][1]

        row = row_of(sample)
        found = [each for _, each in kept.values() if isinstance(each, EncodedFile)]
        if not found:
            modes = sorted({image.mode for image, _ in kept.values()})
            raise _refused(own, f"its images are of mode {', '.join(modes)}" if modes else "")
        if not self._has_tails:
            self._made[:] = [(0, file) for file in found]
        else:
            self._made[:] = [(number, row_of(image)) for number, image in self._made]
        return row


def _kept(image: Any, own: Recorder) -> Any:
    """Return the file of an image; an image of another mode than RGB, as a mask has, as it is.

    Raises:
        CacheError: it is an image in RGB, and not a file as it is; or the file is damaged.
    """
    from dataloaders.recording.image import node_of

    node = node_of(image) if _is_stand_in(image) else None
    if image.mode != "RGB":
        return image
    if node is None:
        raise _refused(own)
    while node.inputs:  # a conversion to RGB
        (node,) = node.inputs
    file = EncodedFile(node.args[0])
    try:
        file.check()
    except ValueError as error:
        name = own.names.get(id(file.data), "")
        raise CacheError(f"{name or 'its file'}: {error}") from error
    return file


def _is_stand_in(value: Any) -> bool:
    if not is_image(value):
        return False
    from dataloaders.recording.image import Recorded

    return isinstance(value, Recorded)


def _refused(own: Recorder, why: str = "") -> CacheError:
    looks = "; ".join(own.looks[:3])
    why = why or "it has an image that Pillow did not open from a file" * (not looks)
    reasons = " and ".join(filter(None, (why, looks and f"its pixels were needed by {looks}")))
    return CacheError(
        f"{_PACKED} keeps image files as they are, in RGB and before the dataset's "
        f"transform, and {reasons}. {_INSTEAD}"
    )
