"""The transforms of torchvision's weights, read as the steps that they consist of."""

import pickle

import pytest

pytest.importorskip("torchvision")

from torchvision import models
from torchvision import transforms as v1
from torchvision.transforms import _presets as presets
from torchvision.transforms import v2

from backends.h5 import H5
from backends.prefetch import Prefetch
from dataloaders import DataLoader
from dataloaders.cache import CachedDataset, precompute
from dataloaders.transforms.read import Run, is_chain, read
from helpers.compare import assert_same
from helpers.photos import folder, picture

STEPS = {"ImageClassification": 5, "SemanticSegmentation": 4, "ObjectDetection": 2}


def of_weights():
    """Every preset of an image that comes with weights of torchvision's, each kind once."""
    found = {}
    for name in models.list_models():
        for weights in models.get_model_weights(name):
            preset = weights.transforms()
            if type(preset).__name__ in STEPS:
                found.setdefault(repr({**vars(preset), "name": type(preset).__name__}), preset)
    return list(found.values())


def classification(**options):
    return presets.ImageClassification(**{"crop_size": 24, "resize_size": 32, **options})


def changed(preset, **settings):
    vars(preset).update(settings)
    return preset


ODD = {
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


def outcome(made_by, image):
    try:
        return made_by(image)
    except Exception as error:
        return type(error)


def assert_same_steps(preset, *images):
    steps = Run(member.transform for member in read(preset))
    for image in images:
        assert_same(outcome(steps, image), outcome(preset, image))


PHOTO = picture(1, 300, 411)
LEVELS = v1.PILToTensor()(PHOTO)
SMALL = picture(3, 45, 37)


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.nightly)])
def test_the_presets_of_weights_are_their_steps_to_the_bit(every):
    for preset in of_weights()[::every]:
        assert len(read(preset)) == STEPS[type(preset).__name__]
        assert_same_steps(preset, PHOTO, SMALL, LEVELS)


@pytest.mark.parametrize("name", ODD)
@pytest.mark.filterwarnings("ignore:Anti-alias option is always applied for PIL")
def test_odd_presets_are_their_steps_on_any_image(name):
    preset = ODD[name]()
    pictures = [PHOTO, SMALL, picture(4, 60, 1), PHOTO.convert("L"), PHOTO.convert("P")]
    arrays = [LEVELS, LEVELS / 255, v2.ToImage()(PHOTO), LEVELS.numpy()]
    assert len(read(preset)) > 1
    assert_same_steps(preset, *pictures, *arrays)


def test_the_steps_have_their_places_and_are_the_same_objects_until_a_setting_changes():
    preset = classification()
    assert is_chain(preset)
    chain = v1.Compose([v1.RandomHorizontalFlip(), preset])
    assert [str(member) for member in read(chain)][:2] == [
        "RandomHorizontalFlip at transform.transforms[0]",
        "Resize at transform.transforms[1] (ImageClassification)",
    ]
    first = [member.transform for member in read(preset)]
    assert all(a is b.transform for a, b in zip(first, read(preset), strict=True))
    preset.mean = [0.1, 0.2, 0.3]
    assert read(preset)[-1].transform.mean == [0.1, 0.2, 0.3]
    preset.mean[0] = 0.4
    assert read(preset)[-1].transform.mean == [0.4, 0.2, 0.3]
    assert first[-1].mean == [0.485, 0.456, 0.406]
    again = pickle.loads(pickle.dumps(preset))
    assert [repr(m.transform) for m in read(again)] == [repr(m.transform) for m in read(preset)]


def resnet18():
    """224 pixels out of 256, as everybody has it; made smaller, to take less time."""
    preset = models.ResNet18_Weights.DEFAULT.transforms()
    assert (preset.crop_size, preset.resize_size) == ([224], [256])
    return changed(preset, crop_size=[24], resize_size=[28])


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.thinned(2)
def test_h5_makes_whole_batches_of_what_the_cache_has(flip, num_workers, tmp_path):
    chain = v1.Compose([v1.RandomHorizontalFlip(), resnet18()]) if flip else resnet18()
    dataset, path = folder(chain), tmp_path / "small.h5"
    precompute(dataset, path)
    options = {"batch_size": 4, "shuffle": True, "seed": 3, "num_workers": num_workers}
    theirs = DataLoader(dataset, **options)
    ours = DataLoader(dataset, **options, backend=H5(path))
    assert "batches are made at once" in str(ours.explain())
    assert_same(list(ours), list(theirs))
    assert ours._session._collated is not None, "each sample was made by itself"
    if not flip:
        (image, _) = CachedDataset(path).columns
        assert (image.shape, image.dtype) == ((3, 24, 24), "|u1")  # resized, cut out, as bytes


def test_prefetch_moves_the_arithmetic_after_the_copy():
    loader = DataLoader(folder(resnet18()), 4, backend=Prefetch(tail=True))
    assert "normalise" in [stage.name for stage in loader.explain().stages]
