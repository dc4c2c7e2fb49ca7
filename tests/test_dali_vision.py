"""Each of torchvision's datasets of image files under backend="dali": stock's batches.

The real classes, over tiny files of the right layout.
"""

import sys
import types

import pytest
import torch
from torchvision import datasets
from torchvision.transforms import v2

from dataloaders import DataLoader
from helpers.compare import bits
from helpers.vision_datasets import FILES

pytest.importorskip("nvidia.dali", reason="DALI is not installed")

from backends.dali import Dali

pytestmark = [
    # torchvision's: an image that is opened and not read, as a mask, stays open.
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:Palette images with Transparency"),
]


@pytest.fixture(autouse=True)
def _scipy(monkeypatch):
    """Caltech101 imports SciPy, for annotations that are not asked for here."""
    if "scipy" not in sys.modules:
        for name in ("scipy", "scipy.io"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))


CHAIN = v2.Compose(
    [
        v2.RandomCrop(5),
        v2.RandomHorizontalFlip(),
        v2.ToImage(),
        v2.ToDtype(torch.float32, scale=True),
    ]
)


def as_list(samples):
    return samples


@pytest.mark.parametrize("name", FILES)
@pytest.mark.thinned(8)
def test_its_batches_are_those_of_stock(name, tmp_path):
    dataset = FILES[name](tmp_path, transform=CHAIN)
    loaders = [
        DataLoader(dataset, 3, shuffle=True, seed=5, collate_fn=as_list, backend=backend)
        for backend in (Dali(fast=()), "stock")
    ]
    ours, theirs = map(list, loaders)
    assert len(ours) == len(loaders[1])
    assert bits(ours) == bits(theirs)


@pytest.mark.parametrize("wrapped", [False, True])
def test_joint_transforms_of_image_and_mask(wrapped, tmp_path):
    dataset = FILES["voc_segmentation"](tmp_path, transforms=CHAIN)
    if wrapped:
        dataset = datasets.wrap_dataset_for_transforms_v2(dataset)
    loaders = [
        DataLoader(dataset, 2, seed=5, collate_fn=as_list, backend=backend)
        for backend in (Dali(fast=()), "stock")
    ]
    assert bits(list(loaders[0])) == bits(list(loaders[1]))
