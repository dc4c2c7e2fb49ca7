"""The transforms of torchvision's weights: one deterministic member each."""

import pytest

pytest.importorskip("torchvision")

from torchvision import models
from torchvision import transforms as v1

from backends.h5 import H5
from backends.prefetch import Prefetch
from dataloaders import DataLoader
from dataloaders.cache import CachedDataset, precompute
from helpers.compare import assert_same
from helpers.photos import folder


def resnet18():
    """224 pixels out of 256, as everybody has it; made smaller, to take less time."""
    preset = models.ResNet18_Weights.DEFAULT.transforms()
    preset.crop_size, preset.resize_size = [24], [28]
    return preset


@pytest.mark.parametrize("flip", [False, True])
def test_a_cache_has_what_they_give_or_the_image_before_them(flip, tmp_path):
    chain = v1.Compose([v1.RandomHorizontalFlip(), resnet18()]) if flip else resnet18()
    dataset, path = folder(chain), tmp_path / "small.h5"
    precompute(dataset, path)
    options = {"batch_size": 4, "shuffle": True, "seed": 3}
    ours = DataLoader(dataset, **options, backend=H5(path))
    assert ("batches are made at once" in str(ours.explain())) != flip
    assert_same(list(ours), list(DataLoader(dataset, **options)))
    image = CachedDataset(path).columns[0]
    assert [kind for kind, _ in image.variants] == ["image:RGB" if flip else "tensor:float32"]


def test_prefetch_moves_the_arithmetic_after_the_copy():
    loader = DataLoader(folder(resnet18()), 4, backend=Prefetch(tail=True))
    assert "normalise" in [stage.name for stage in loader.explain().stages]
