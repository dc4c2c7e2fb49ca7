"""Chains of transforms that hypothesis makes up, recorded and replayed: equal to the bit."""

import pytest
import torch
import torchvision.transforms as v1
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision.transforms import v2

from helpers.recorded import Code, as_recorded, equal, path

OF_BOTH = [
    v1.RandomResizedCrop(24), v1.RandomCrop(20, 3, pad_if_needed=True), v1.CenterCrop(30),
    v1.Resize((33, 21)), v1.Resize(26), v1.RandomHorizontalFlip(), v1.RandomVerticalFlip(),
    v1.Pad((1, 2, 3, 4), padding_mode="edge"), v1.Pad(2, 5), v1.ColorJitter(0.4, 0.4, 0.4, 0.2),
    v1.RandomGrayscale(0.5), v1.Grayscale(3), v1.GaussianBlur(3), v1.RandomRotation(30),
    v1.RandomAffine(20, (0.1, 0.2), (0.8, 1.3), 9), v1.RandomPerspective(0.4, 0.9),
    v1.RandomInvert(), v1.RandomPosterize(3), v1.RandomSolarize(99), v1.RandomEqualize(),
    v1.RandomAutocontrast(), v1.RandomAdjustSharpness(1.7),
]  # fmt: skip
OF_V2 = [
    v2.RandomResizedCrop(24), v2.RandomCrop(20, 3, pad_if_needed=True), v2.CenterCrop(30),
    v2.Resize((33, 21)), v2.RandomShortestSize(20, 30), v2.ScaleJitter((28, 28)),
    v2.RandomHorizontalFlip(), v2.RandomZoomOut(7, (1, 2)), v2.RandomPhotometricDistort(),
    v2.ColorJitter(0.4, 0.4, 0.4, 0.2), v2.RandomGrayscale(0.5), v2.GaussianBlur(3),
    v2.RandomRotation(30), v2.RandomAffine(20, (0.1, 0.2), (0.8, 1.3), 9), v2.ElasticTransform(9.0),
    v2.RandomPerspective(0.4, 0.9), v2.RandomPosterize(3), v2.RandomSolarize(99),
    v2.RandomEqualize(), v2.RandomAutocontrast(), v2.RandomAdjustSharpness(1.7), v2.RandomInvert(),
    v2.RandomChannelPermutation(), v2.TrivialAugmentWide(), v2.RandAugment(), v2.AutoAugment(),
]  # fmt: skip
FILES = [("JPEG", "RGB"), ("JPEG", "L"), *(("PNG", mode) for mode in ("RGB", "L", "P"))]
FILES.append(("WEBP", "RGB"))
MEAN, STD = [0.4, 0.5, 0.3], [0.2, 0.3, 0.2]


@st.composite
def chains(draw):
    """Steps on an image, the step that makes it a tensor at any place among them, and an end."""
    second = draw(st.booleans())
    steps = draw(st.lists(st.sampled_from(OF_V2 if second else OF_BOTH), max_size=4))
    place = draw(st.integers(0, len(steps)))
    if second:
        turn = [v2.ToImage(), *draw(st.sampled_from([[], [v2.ToDtype(torch.float32, scale=True)]]))]
        end = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    else:
        turn = [draw(st.sampled_from([v1.ToTensor(), v1.PILToTensor()]))]
        end = [v1.ConvertImageDtype(torch.float32), v1.Normalize(MEAN, STD), v1.RandomErasing(0.5)]
    return [*steps[:place], *turn, *steps[place:], *draw(st.sampled_from([[], end]))]


def check(steps, kind, seed):
    def sample(index):
        made = Image.open(path(index, *kind)).convert("RGB")
        torch.manual_seed(seed)
        for step in steps:
            made = step(made)
        return made

    dataset = Code(sample, 1)
    made, _ = as_recorded(dataset)
    assert equal(made[0], dataset[0])


@given(chains(), st.sampled_from(FILES), st.integers(0, 999))
@settings(max_examples=25)
def test_chains(steps, kind, seed):
    check(steps, kind, seed)


@pytest.mark.nightly
@given(chains(), st.sampled_from(FILES), st.integers(0, 999))
@settings(max_examples=3000)
def test_many_chains(steps, kind, seed):
    check(steps, kind, seed)
