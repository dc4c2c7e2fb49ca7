"""The transforms of torchvision's weights, read as the steps that they consist of."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchvision")

from torchvision import models
from torchvision import transforms as v1
from torchvision.transforms import _presets as presets
from torchvision.transforms import v2

from dataloaders import DataLoader
from dataloaders.cache import CachedDataset, precompute
from dataloaders.replaying.tail import DeviceTail, device_tail
from dataloaders.transforms.find import find_chains
from dataloaders.transforms.operators import chain_of
from dataloaders.transforms.read import Run, is_chain, read
from helpers.compare import assert_same
from helpers.photos import folder, picture

STEPS = {"ImageClassification": 5, "SemanticSegmentation": 4, "ObjectDetection": 2}


def of_weights() -> dict[str, Any]:
    """Every preset of an image that comes with weights of torchvision's, each kind once."""
    found: dict[str, Any] = {}
    for name in models.list_models():
        for weights in models.get_model_weights(name):
            preset = weights.transforms()
            if type(preset).__name__ in STEPS:
                settings = {**vars(preset), "name": type(preset).__name__}
                found.setdefault(repr(settings), (str(weights), preset))
    return dict(found.values())


WEIGHTS = of_weights()


def classification(**options: Any) -> Any:
    return presets.ImageClassification(**{"crop_size": 24, "resize_size": 32, **options})


def changed(preset: Any, **settings: Any) -> Any:
    vars(preset).update(settings)
    return preset


ODD: dict[str, Callable[[], Any]] = {
    "not antialiased": lambda: classification(antialias=False),
    "two sides": lambda: changed(classification(), resize_size=[40, 30], crop_size=[20, 28]),
    "a side, not in a list": lambda: changed(classification(), resize_size=36),
    "a crop larger than the image": lambda: classification(crop_size=50, resize_size=40),
    "nearest": lambda: classification(interpolation=v1.InterpolationMode.NEAREST),
    "numbers that broadcast": lambda: classification(mean=(0.5,), std=(0.25,)),
    "segmentation": lambda: presets.SemanticSegmentation(resize_size=40),
    "segmentation, size as it is": lambda: presets.SemanticSegmentation(resize_size=None),
    "detection": lambda: presets.ObjectDetection(),
}


def outcome(made_by: Any, image: Any) -> Any:
    try:
        return made_by(image)
    except Exception as error:
        return type(error)


def assert_same_steps(preset: Any, *images: Any) -> None:
    steps = Run(member.transform for member in read(preset))
    for image in images:
        assert_same(outcome(steps, image), outcome(preset, image))


PHOTO = picture(1, 300, 411)
LEVELS = v1.PILToTensor()(PHOTO)
SMALL = picture(3, 45, 37)


@pytest.mark.parametrize("name", [*WEIGHTS, *ODD])
@pytest.mark.filterwarnings("ignore:Anti-alias option is always applied for PIL")
@pytest.mark.thinned(4)
def test_presets_are_their_steps_to_the_bit(name: str) -> None:
    preset = ODD[name]() if name in ODD else WEIGHTS[name]
    assert not chain_of(preset).rest
    assert name in ODD or len(read(preset)) == STEPS[type(preset).__name__]
    assert_same_steps(preset, PHOTO, SMALL, LEVELS)
    if name in ODD:
        pictures = [picture(4, 60, 1), PHOTO.convert("L"), PHOTO.convert("P")]
        assert_same_steps(preset, *pictures, LEVELS / 255, v2.ToImage()(PHOTO), LEVELS.numpy())


def test_where_a_step_stands_is_told() -> None:
    preset = classification()
    chain = v1.Compose([v1.RandomHorizontalFlip(), preset])
    assert [str(member) for member in read(chain)][:2] == [
        "RandomHorizontalFlip at transform.transforms[0]",
        "Resize at transform.transforms[1] (ImageClassification)",
    ]
    assert is_chain(preset)
    (found,) = find_chains(folder(preset))
    assert found.chain is preset
    assert len(found.members) == 5


class OwnPreset(presets.ImageClassification):  # type: ignore[misc]
    """Somebody's own: a subclass may do anything."""


def hooked() -> Any:
    preset = classification()
    preset.register_forward_hook(lambda module, given, made: made * 2)
    return preset


@pytest.mark.parametrize(
    "make",
    [
        lambda: OwnPreset(crop_size=24),
        hooked,
        lambda: changed(classification(), forward=v1.ToTensor()),
        lambda: changed(classification(), gamma=2.2),
        lambda: changed(classification(), resize_size=[1, 2, 3]),
        lambda: presets.OpticalFlow(),
        lambda: presets.VideoClassification(crop_size=(8, 8), resize_size=(9,)),
    ],
    ids=["subclass", "hook", "method", "another setting", "three sides", "flow", "video"],
)
def test_whatever_else_it_may_be_is_left_whole(make: Any) -> None:
    preset = make()
    (member,) = read(preset)
    assert member.transform is preset
    assert chain_of(preset).why


def test_the_steps_are_the_same_objects_until_a_setting_changes() -> None:
    preset = classification()
    first = [member.transform for member in read(preset)]
    assert all(a is b.transform for a, b in zip(first, read(preset), strict=True))
    preset.mean = [0.1, 0.2, 0.3]
    assert read(preset)[-1].transform.mean == [0.1, 0.2, 0.3]
    preset.mean[0] = 0.4
    assert read(preset)[-1].transform.mean == [0.4, 0.2, 0.3]
    assert first[-1].mean == [0.485, 0.456, 0.406]
    again = pickle.loads(pickle.dumps(preset))
    assert [repr(m.transform) for m in read(again)] == [repr(m.transform) for m in read(preset)]


def resnet18() -> Any:
    """224 pixels out of 256, as everybody has it; made smaller, to take less time."""
    preset = models.ResNet18_Weights.DEFAULT.transforms()
    assert (preset.crop_size, preset.resize_size) == ([224], [256])
    return changed(preset, crop_size=[24], resize_size=[28])


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.thinned(2)
def test_h5_makes_whole_batches_of_what_the_cache_has(
    flip: bool, num_workers: int, tmp_path: Path
) -> None:
    pytest.importorskip("h5py")
    from backends.h5 import H5

    chain = v1.Compose([v1.RandomHorizontalFlip(), resnet18()]) if flip else resnet18()
    dataset, path = folder(chain), tmp_path / "small.h5"
    precompute(dataset, path)
    options: Any = {"batch_size": 4, "shuffle": True, "seed": 3, "num_workers": num_workers}
    theirs: Any = DataLoader(dataset, **options)
    ours: Any = DataLoader(dataset, **options, backend=H5(path))
    assert "batches are made at once" in str(ours.explain())
    assert_same(list(ours), list(theirs))
    assert ours._session._collated is not None, "each sample was made by itself"
    if not flip:
        (image, _) = CachedDataset(path).columns
        assert (image.shape, image.dtype) == ((3, 24, 24), "|u1")  # resized, cut out, as bytes


def test_prefetch_moves_the_arithmetic_after_the_copy() -> None:
    loader: Any = DataLoader(folder(resnet18()), 4)
    assert isinstance(device_tail(loader), DeviceTail)
