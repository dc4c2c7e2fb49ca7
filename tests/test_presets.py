"""The transforms that come with torchvision's weights, read as the steps that they are."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("torchvision")

from torchvision import models
from torchvision import transforms as v1
from torchvision.transforms import _presets as presets
from torchvision.transforms import v2

from dataloaders import DataLoader
from dataloaders.cache import CachedDataset, precompute
from dataloaders.transforms.find import find_chains
from dataloaders.transforms.operators import chain_of
from dataloaders.transforms.read import is_chain, read
from helpers.compare import assert_same
from helpers.photos import Opened, folder, picture

IMAGES = ("ImageClassification", "SemanticSegmentation", "ObjectDetection")


def of_weights() -> dict[str, Any]:
    """Every preset of an image that comes with weights of torchvision's, each kind once."""
    found: dict[str, Any] = {}
    for name in models.list_models():
        for weights in models.get_model_weights(name):
            preset = weights.transforms()
            if type(preset).__name__ in IMAGES:
                settings = {**vars(preset), "name": type(preset).__name__}
                found.setdefault(repr(settings), (str(weights), preset))
    return dict(found.values())


WEIGHTS = of_weights()

ODD: dict[str, Callable[[], Any]] = {
    "not antialiased": lambda: classification(antialias=False),
    "antialias=None": lambda: classification(antialias=None),
    "two sides": lambda: changed(classification(), resize_size=[40, 30]),
    "a side, not in a list": lambda: changed(classification(), resize_size=36),
    "a crop of two sides": lambda: changed(classification(), crop_size=[20, 28]),
    "a crop larger than the image": lambda: classification(crop_size=50, resize_size=40),
    "nearest": lambda: classification(interpolation=v1.InterpolationMode.NEAREST),
    "bicubic": lambda: classification(interpolation=v1.InterpolationMode.BICUBIC),
    "numbers that broadcast": lambda: classification(mean=(0.5,), std=(0.25,)),
    "segmentation": lambda: presets.SemanticSegmentation(resize_size=40),
    "segmentation, size as it is": lambda: presets.SemanticSegmentation(resize_size=None),
    "detection": lambda: presets.ObjectDetection(),
}


def classification(**options: Any) -> Any:
    return presets.ImageClassification(**{"crop_size": 24, "resize_size": 32, **options})


def changed(preset: Any, **settings: Any) -> Any:
    vars(preset).update(settings)
    return preset


@functools.cache
def images() -> dict[str, Any]:
    """PIL images and tensors, smaller and larger than what presets ask for."""
    photo = picture(1, 300, 411)
    levels = v1.PILToTensor()(photo)
    return {
        "a photo": photo,
        "upright": picture(2, 290, 270),
        "small": picture(3, 45, 37),
        "grey": photo.convert("L"),
        "one pixel wide": picture(4, 60, 1),
        "bytes": levels,
        "floats": levels / 255,
        "tv_tensor": v2.ToImage()(photo),
        "alpha": photo.convert("RGBA"),
        "palette": photo.convert("P"),
    }


def outcome(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except Exception as error:
        return type(error).__name__, str(error)


def run(members: Any, image: Any) -> Any:
    for member in members:
        image = member.transform(image)
    return image


def assert_same_steps(preset: Any, image: Any) -> None:
    wanted = outcome(lambda: preset(image))
    assert_same(outcome(lambda: run(read(preset), image)), wanted)


@pytest.mark.parametrize("name", WEIGHTS)
def test_presets_of_all_weights_are_their_steps_to_the_bit(name: str) -> None:
    preset = WEIGHTS[name]
    assert len(read(preset)) == {"ObjectDetection": 2, "SemanticSegmentation": 4}.get(
        type(preset).__name__, 5
    )
    for key in ("a photo", "small", "bytes"):
        assert_same_steps(preset, images()[key])


@pytest.mark.parametrize("image", images())
@pytest.mark.parametrize("make", ODD.values(), ids=ODD)
@pytest.mark.filterwarnings("ignore:Anti-alias option is always applied for PIL")
def test_odd_presets_are_their_steps_to_the_bit(make: Any, image: str) -> None:
    preset = make()
    assert len(read(preset)) > 1
    assert_same_steps(preset, images()[image])


@pytest.mark.parametrize("make", ODD.values(), ids=ODD)
def test_an_array_is_refused_by_both(make: Any) -> None:
    array = images()["bytes"].numpy()
    for refuses in (make(), lambda image: run(read(make()), image)):
        with pytest.raises(TypeError):
            refuses(array)


@pytest.mark.parametrize("make", ODD.values(), ids=ODD)
def test_the_steps_are_operators(make: Any) -> None:
    chain = chain_of(make())
    assert not chain.rest, chain.why
    assert not chain.random


def test_where_a_step_stands_is_told() -> None:
    chain = v1.Compose([v1.RandomHorizontalFlip(), classification()])
    assert [str(member) for member in read(chain)] == [
        "RandomHorizontalFlip at transform.transforms[0]",
        "Resize at transform.transforms[1] (ImageClassification)",
        "CenterCrop at transform.transforms[1] (ImageClassification)",
        "PILToTensor at transform.transforms[1] (ImageClassification)",
        "ConvertImageDtype at transform.transforms[1] (ImageClassification)",
        "Normalize at transform.transforms[1] (ImageClassification)",
    ]


class OwnPreset(presets.ImageClassification):
    """Somebody's own: a subclass may do anything."""


def hooked() -> Any:
    preset = classification()
    preset.register_forward_hook(lambda module, given, made: made * 2)
    return preset


def replaced() -> Any:
    preset = classification()
    preset.forward = lambda image: v1.ToTensor()(image)
    return preset


@pytest.mark.parametrize(
    "make",
    [
        lambda: OwnPreset(crop_size=24),
        hooked,
        replaced,
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


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: presets.OpticalFlow(), "OpticalFlow takes two images"),
        (
            lambda: presets.VideoClassification(crop_size=(8, 8), resize_size=(9,)),
            "VideoClassification takes the frames of a video",
        ),
    ],
)
def test_presets_of_more_than_an_image_are_refused_with_a_reason(make: Any, why: str) -> None:
    assert why in str(chain_of(make()).why)


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


def test_they_are_found_in_datasets() -> None:
    preset = classification()
    assert is_chain(preset)
    (found,) = find_chains(folder(preset))
    assert found.chain is preset
    assert len(found.members) == 5


# What reads them


def resnet18() -> Any:
    """224 pixels out of 256, as everybody has it; made smaller, to take less time."""
    preset = models.ResNet18_Weights.DEFAULT.transforms()
    assert (preset.crop_size, preset.resize_size) == ([224], [256])
    return changed(preset, crop_size=[24], resize_size=[28])


def chain_with(preset: Any) -> Any:
    return v1.Compose([v1.RandomHorizontalFlip(), preset])


@pytest.mark.parametrize(
    "make",
    [
        resnet18,
        lambda: chain_with(resnet18()),
        lambda: classification(interpolation=v1.InterpolationMode.BICUBIC),
        lambda: changed(presets.SemanticSegmentation(resize_size=20), resize_size=[20, 20]),
    ],
    ids=["ResNet18", "behind a flip", "bicubic", "segmentation"],
)
@pytest.mark.parametrize("data", [folder, Opened], ids=["files", "own code"])
@pytest.mark.thinned(2)
def test_dali_makes_what_stock_makes_to_the_bit(make: Any, data: Any) -> None:
    pytest.importorskip("nvidia.dali", reason="needs NVIDIA DALI")
    from backends.dali import Dali

    dataset = data(make())
    theirs: Any = DataLoader(dataset, 4, shuffle=True, seed=3)
    ours: Any = DataLoader(dataset, 4, shuffle=True, seed=3, backend=Dali(fast=()), device="cpu")
    assert_same(list(ours), list(theirs))
    assert "Resize at" in str(ours.explain())


def test_dali_notices_a_setting_that_changes_between_epochs() -> None:
    pytest.importorskip("nvidia.dali", reason="needs NVIDIA DALI")
    from backends.dali import Dali

    preset = resnet18()
    dataset = folder(preset)
    theirs: Any = DataLoader(dataset, 4)
    ours: Any = DataLoader(dataset, 4, backend=Dali(fast=()), device="cpu")
    assert_same(list(ours), list(theirs))
    preset.std = [0.5, 0.5, 0.5]
    preset.crop_size = [20]
    assert_same(list(ours), list(theirs))


V2 = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.4], [0.3])]


@pytest.mark.parametrize(
    "make",
    [
        resnet18,
        lambda: chain_with(resnet18()),
        lambda: v2.Compose([v2.Resize(28), v2.CenterCrop(24), *V2, v2.ToPureTensor()]),
    ],
    ids=["alone", "flip", "v2 by hand"],
)
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.thinned(4)
def test_h5_makes_whole_batches_of_what_the_cache_has(
    make: Any, num_workers: int, tmp_path: Path
) -> None:
    pytest.importorskip("h5py")
    from backends.h5 import H5

    dataset, path = folder(make()), tmp_path / "small.h5"
    precompute(dataset, path)
    options: Any = {"batch_size": 4, "shuffle": True, "seed": 3, "num_workers": num_workers}
    theirs: Any = DataLoader(dataset, **options)
    ours: Any = DataLoader(dataset, **options, backend=H5(path))
    plan = str(ours.explain())
    assert "batches are made at once" in plan
    assert_same(list(ours), list(theirs))
    assert ours._session._collated is not None, "each sample was made by itself"
    if isinstance(dataset.transform, presets.ImageClassification):
        (image, _) = CachedDataset(path).columns
        assert (image.shape, image.dtype) == ((3, 24, 24), "|u1")  # resized, cut out, as bytes


def test_prefetch_moves_the_arithmetic_behind_the_copy() -> None:
    from dataloaders.transforms import Tail, device_tail

    loader: Any = DataLoader(folder(resnet18()), 4)
    tail = device_tail(loader)
    assert isinstance(tail, Tail), tail
