"""What would make a cache smaller that keeps images as large as they are decoded.

RandomResizedCrop, ToTensor     nothing is computed before the first random member: 2 MiB a row
Resize, RandomCrop, ToTensor    rows are as large as Resize makes them: nothing to say
"""

from __future__ import annotations

import statistics
from typing import Any

from dataloaders.cache.build.study import Findings
from dataloaders.cache.format.disk import size_of
from dataloaders.cache.sample.images import Images
from dataloaders.transforms.find import find_chains
from dataloaders.transforms.read import Kind, Member

__all__ = ["advice_for", "full_size"]

_LARGE = 1 << 18  # bytes of a row: an image of 256 x 256 and a little more
_SMALLER = (
    'Smaller are images="packed" (the files as they are), images="jpeg", or a Resize in front of it'
)
_FIXED_SIZE = ("CenterCrop", "FiveCrop", "Resize", "TenCrop")


def advice_for(dataset: Any, found: Findings, images: Images) -> str:
    """Which member makes rows large, how large they are, and what to do; "" if they are not.

    Args:
        dataset: the user's.
        found: what it was found to be.
        images: how they are kept.
    """
    raw = any(image and images.of_column(name) is None for name, image in found.columns.items())
    if images.packed or not raw or not found.calls or not found.bytes:
        return ""
    size = statistics.fmean(found.bytes)
    member = _first_live(dataset)
    if member is None or size < _LARGE:
        return ""
    return f"{_told(member)}, {size_of(size)} a row. {_SMALLER}"


def full_size(dataset: Any) -> str:
    """The same without reading a sample: of a dataset whose images are files."""
    member = _first_live(dataset)
    return "" if member is None else f"{_told(member)}. {_SMALLER}"


def _first_live(dataset: Any) -> Member | None:
    """The member that the rest of a chain is live for, if none before it says a size."""
    for chain in find_chains(dataset):
        for member in chain.members:
            if member.kind is not Kind.DETERMINISTIC:
                return member
            if member.torchvision in _FIXED_SIZE:
                break
    return None


def _told(member: Member) -> str:
    what = "random" if member.kind is Kind.RANDOM else "code of your own"
    return (
        f"{member} is {what}, and nothing before it makes images smaller: it and all after it "
        "stay live, and images are stored as large as they are decoded"
    )
