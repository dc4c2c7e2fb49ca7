"""A cache keeps what a sample was when it was read, whatever the dataset does with its memory."""

import io

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import Compose, Resize
from torchvision.transforms.functional import pil_to_tensor

from dataloaders.cache import precompute
from helpers.compare import assert_same
from helpers.datasets import Made

SIZE = 60  # more than a study reads


def picture(index, mode="RGB"):
    image = Image.new("RGB", (12, 10), (index % 256, index // 256, 7))
    image.putpixel((index % 12, 3), (255, 255, 255))
    return image.convert(mode)


def one_memory():
    """All that a dataset may use again: canvases, a file, a list, a dict, arrays and tensors."""
    canvases = {mode: picture(0, mode) for mode in ("RGB", "L", "1", "I", "F", "LA")}
    words, data, single = ["", 0, {}], bytearray(8), np.zeros((), np.int16)
    tensor = torch.zeros((3, 4), dtype=torch.uint8)
    array = np.zeros((3, 4, 2), np.float32)
    file = io.BytesIO()

    def sample(index):
        for mode, canvas in canvases.items():
            canvas.paste(picture(index, mode))
        file.seek(0)
        file.truncate()
        picture(index).save(file, "PNG")
        words[:2] = [f"sample {index}", index]
        words[2]["n"] = index
        data[:] = index.to_bytes(8, "big")
        for each in (single, array, tensor.numpy()):
            each[...] = index
        views = {"tensors": [tensor, tensor.numpy(), tensor.mT], "views": (array[..., 0], array)}
        lazy = Image.open(file)  # decoded when it is read
        return {"image": canvases, "lazy": lazy, "words": words, "data": data, "n": single, **views}

    return sample


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("images", [None, {"image/RGB": "png", "image/L": "png", "lazy": "png"}])
@pytest.mark.covering
def test_what_is_changed_in_place_for_the_next_sample(images, num_workers, tmp_path):
    dataset = Made(one_memory(), SIZE)
    cached = precompute(dataset, tmp_path / "a.h5", images=images, num_workers=num_workers)
    for index, sample in enumerate(cached):
        for mode, image in {**sample["image"], "RGB": sample["lazy"]}.items():
            assert_same(image, picture(index, mode))
        assert_same(sample["image"]["RGB"], sample["lazy"])
        assert sample["words"] == [f"sample {index}", index, {"n": index}]
        assert sample["data"] == index.to_bytes(8, "big")
        values = sample["n"], *sample["tensors"], *sample["views"]
        assert all(np.unique(each).tolist() == [index] for each in values)


class Adds:
    """A transform whose results all have the same memory."""

    def __init__(self):
        self.number = 0
        self.result = torch.zeros(3, 5, 6)

    def __call__(self, image):
        return torch.add(pil_to_tensor(image).float(), self.number, out=self.result)


class SetsNumber(Made):
    """The transform adds what the dataset sets: it cannot run live."""

    size = SIZE

    def __init__(self):
        self.adds = Adds()
        self.transform = Compose([Resize((5, 6)), self.adds])

    def sample(self, index):
        self.adds.number = index
        try:
            return self.transform(picture(index))
        finally:
            self.adds.number = 0


def test_a_transform_whose_results_share_memory_is_compared_with_what_it_gave(tmp_path):
    dataset = SetsNumber()
    cached = precompute(dataset, tmp_path / "a.h5", num_workers=0)
    assert cached.index.tail == ()
    for index in (0, 1, 47, SIZE - 1):
        assert torch.equal(cached[index], dataset[index])
