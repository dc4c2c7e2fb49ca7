"""What a cache was made of, so that one made of something else is noticed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from torch.utils.data import IterableDataset, MapDataPipe

from dataloaders.cache.build.study import Findings, Study, studied
from dataloaders.cache.sample.cut import Cut
from dataloaders.cache.sample.images import Choice, Images
from dataloaders.errors import OptionError
from dataloaders.observing import worker_of

__all__ = [
    "PACKAGES",
    "fingerprint",
    "fingerprint_of",
    "length_of",
    "package_versions",
    "static_fingerprint",
]

PACKAGES = {"torch": "torch", "torchvision": "torchvision", "PIL": "pillow", "numpy": "numpy"}
"""By the name of a fingerprint's entry, the package whose version it is."""


def fingerprint(dataset: Any, images: Choice = None, *, loader: Any = None) -> dict[str, Any]:
    """What a cache of ``dataset`` depends on, by name; all of it JSON.

    ``dataset`` (its class), ``length``, ``head`` (the transforms whose output is kept), ``images``
    (how they are kept, given as `precompute` takes it), the versions of torch, torchvision, PIL and
    numpy (None: not installed) and ``sample 17``, a digest of what this sample gives, before it is
    encoded, for a few of them. The live tail is not in it: the same rows serve another
    augmentation. These samples are read in a process of its own.

    Raises:
        CacheError: that process cannot read them.
    """
    samples = length_of(dataset)
    study = Study(dataset, samples, skip=True, images=Images.of(images), encode=False)
    found = studied(worker_of(dataset) if loader is None else loader, study)
    return fingerprint_of(study, found, dataset, samples)


def fingerprint_of(study: Study, found: Findings, dataset: Any, samples: int) -> dict[str, Any]:
    """The same, from what a study has found already."""
    return {
        **static_fingerprint(dataset, study.cuts[found.choice]),
        "length": samples,
        "images": str(study.images),
        **package_versions(),
        **{f"sample {index}": digest for index, digest in sorted(found.digests.items())},
    }


def static_fingerprint(dataset: Any, cut: Cut) -> dict[str, Any]:
    """Return what is known of ``dataset`` without reading it: its class, length and head."""
    return {
        "dataset": _class_of(dataset),
        "length": length_of(dataset),
        "head": list(cut.head),
    }


def package_versions() -> dict[str, str | None]:
    """Return the version of each of `PACKAGES`; None: not installed."""
    return {name: _version(package) for name, package in PACKAGES.items()}


def length_of(dataset: Any) -> int:
    """How many samples there are.

    Raises:
        OptionError: it has no samples by index, or no length.
    """
    name, why, length = type(dataset).__name__, "", 0
    try:
        if isinstance(dataset, (IterableDataset, MapDataPipe)):
            why = "has no samples by index"
        else:
            length = len(dataset)
    except (TypeError, NotImplementedError, ValueError, OverflowError) as error:
        why = f"has no len() ({error})"
    if not why and not hasattr(type(dataset), "__getitem__"):
        why = "has no __getitem__"
    if why:
        raise OptionError(
            f"{name} {why}, and a cache is built of samples by index; give a map-style dataset, "
            "with __len__ and __getitem__"
        )
    return length


def _class_of(dataset: Any) -> str:
    kind = type(dataset)
    module = "" if kind.__module__ in ("__main__", "__mp_main__") else f"{kind.__module__}."
    return f"{module}{kind.__qualname__}"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
