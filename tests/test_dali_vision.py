"""Each of torchvision's kinds of datasets under backend="dali": stock's batches.

The real classes, over tiny files of the right layout; those with files are cached as they are, too.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torchvision import datasets
from torchvision.transforms import v2

from dataloaders import DataLoader
from helpers.compare import bits
from helpers.vision_datasets import ARRAYS, FILES, OWN_CODE

pytest.importorskip("nvidia.dali", reason="DALI is not installed")

from backends.dali import Dali

pytestmark = [
    # torchvision's: an image that is opened and not read, as a mask, stays open.
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:Palette images with Transparency"),
]

NAMES = (*FILES, *ARRAYS, *OWN_CODE)


@pytest.fixture(autouse=True)
def _scipy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caltech101 imports SciPy, for annotations that are not asked for here."""
    if "scipy" not in sys.modules:
        for name in ("scipy", "scipy.io"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))


def chain(name: str) -> Any:
    first = [v2.ToPILImage()] if name.startswith("photo_tour") else []
    random = [v2.RandomCrop(5), v2.RandomHorizontalFlip()]
    return v2.Compose([*first, *random, v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])


def made(name: str, root: Path) -> Any:
    makers = {**FILES, **{name: maker for name, (maker, _) in {**ARRAYS, **OWN_CODE}.items()}}
    return makers[name](root, transform=chain(name))


def as_list(samples: list[Any]) -> list[Any]:
    return samples


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.thinned(8)
def test_its_batches_are_those_of_stock(name: str, tmp_path: Path) -> None:
    dataset = made(name, tmp_path)
    loaders = [
        DataLoader(dataset, 3, shuffle=True, seed=5, collate_fn=as_list, backend=backend)
        for backend in (Dali(fast=()), "stock")
    ]
    ours, theirs = map(list, loaders)
    assert len(ours) == len(loaders[1])
    assert bits(ours) == bits(theirs)


@pytest.mark.parametrize("wrapped", [False, True])
def test_joint_transforms_of_image_and_mask(wrapped: bool, tmp_path: Path) -> None:
    dataset = FILES["voc_segmentation"](tmp_path, transforms=chain("voc_segmentation"))
    if wrapped:
        dataset = datasets.wrap_dataset_for_transforms_v2(dataset)
    loaders = [
        DataLoader(dataset, 2, seed=5, collate_fn=as_list, backend=backend)
        for backend in (Dali(fast=()), "stock")
    ]
    assert bits(list(loaders[0])) == bits(list(loaders[1]))
