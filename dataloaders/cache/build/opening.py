"""Open a finished cache for its dataset: compare what both say, read no sample.

    file     class, length, head, package versions, where the heads' parts stand in a sample
    dataset  class, length, transforms ──> the same cut, whose tails stay live ──> CachedDataset

A file of an earlier version does not say where those parts stand; then a few samples have to tell.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dataloaders.cache.build.fingerprint import PACKAGES, package_versions, static_fingerprint
from dataloaders.cache.format.attributes import attributes_held
from dataloaders.cache.format.changes import changes
from dataloaders.cache.read.reader import CachedDataset
from dataloaders.cache.sample.cut import Call, Cut, cuts_of, whole
from dataloaders.cache.sample.images import Choice, Images
from dataloaders.cache.sample.packed import packed
from dataloaders.errors import CacheWarning

__all__ = ["calls_text", "open_unread"]


def open_unread(
    dataset: Any,
    path: Path,
    *,
    images: Choice = None,
    expect: Mapping[str, Any] | None = None,
) -> CachedDataset | None:
    """Return the cache at ``path`` with the live transforms of ``dataset``; reads no sample.

    Args:
        dataset: what the cache was built of.
        path: of the file.
        images: how images are kept, as `precompute` takes it; None: as the file has them.
        expect: entries of the fingerprint that must be as they were when the cache was built.

    Returns:
        The cache; None if only samples can tell how they go through the transforms.

    Warns:
        CacheWarning: it was built with other versions of torch, torchvision, Pillow or NumPy.

    Raises:
        CacheError: there is no cache, or it is of something else; says what differs.
    """
    wanted = dict(expect or {})
    if images is not None:
        wanted["images"] = str(Images.of(images))
    cached = CachedDataset(path, expect=wanted)
    says = cached.index.fingerprint
    calls = _calls_in(says.get("calls"))
    if calls is None:
        return None
    kept = Images.like(says.get("images"))
    cuts = [packed(dataset)] if kept.packed else _cuts(dataset, kept)
    cut = next((cut for cut in cuts if list(cut.head) == says.get("head")), None)
    cached.refuse_changed(static_fingerprint(dataset, cut or cuts[0]))
    if cut is None or not _fits(cut, calls):
        return None
    _warn_of_versions(path, says)
    cached.refuse_other_classes(attributes_held(dataset))
    return cached.with_tails([(keys, cut.tails[number]) for number, keys in calls])


def _cuts(dataset: Any, kept: Images) -> list[Cut]:
    found, _ = cuts_of(dataset, images=kept.rows == "images")
    return [*found, whole(dataset)]


def _fits(cut: Cut, calls: Sequence[Call]) -> bool:
    """Whether each tail of ``cut`` is called, and no other."""
    return {number for number, _ in calls} == set(range(len(cut.tails)))


def _warn_of_versions(path: Path, says: Mapping[str, Any]) -> None:
    built = {name: says[name] for name in PACKAGES if name in says}
    changed = changes(built, package_versions(), "when it was built")
    if changed:
        warnings.warn(
            f"the cache {path} holds what other versions computed ({'; '.join(changed)}). Its rows "
            "stay as they are; to have an error instead, give expect= the versions that you need, "
            "and to compute them again, build it with overwrite=True (--overwrite)",
            CacheWarning,
            stacklevel=2,
        )


def calls_text(calls: Sequence[Call]) -> list[list[Any]] | None:
    """Return ``calls`` as JSON keeps them; None if it does not."""
    if any(type(key) not in (int, str) for _, path in calls for key in path):
        return None
    return [[number, list(path)] for number, path in calls]


def _calls_in(found: Any) -> tuple[Call, ...] | None:
    """Return what `calls_text` wrote; None for anything else."""
    if type(found) is not list:
        return None
    calls = []
    for each in found:
        if type(each) is not list or len(each) != 2:
            return None
        number, path = each
        if type(number) is not int or type(path) is not list:
            return None
        if any(type(key) not in (int, str) for key in path):
            return None
        calls.append((number, tuple(path)))
    return tuple(calls)
