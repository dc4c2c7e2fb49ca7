"""backend="dali" on tensors that torchvision.io decodes: the dataset's own values, and strides."""

import io

import pytest
import torch
from torchvision.io import decode_jpeg
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms import functional as v1

pytest.importorskip("nvidia.dali")

from backends.dali import Dali
from dataloaders import DataLoader
from helpers.pictures import smooth

pytestmark = pytest.mark.filterwarnings("ignore:The image decoding:DeprecationWarning")
CALLS = {
    "whole": lambda x: x,
    "slice": lambda x: x[..., 1:3, 2:9],
    "flip": v1.hflip,
    "v1 resize": lambda x: v1.resize(x, [20, 30], antialias=True),
    "v1 resized crop": lambda x: v1.resized_crop(x, 3, 5, 40, 31, [17, 29], antialias=True),
    "v1 bicubic": lambda x: v1.resize(x, [20, 30], InterpolationMode.BICUBIC, antialias=True),
    "v2 resized crop": lambda x: v2.functional.resized_crop(x, 3, 5, 40, 31, [17, 29]),
    "v2 bicubic": lambda x: v2.functional.resize(x, [20, 30], InterpolationMode.BICUBIC),
    "cropped": lambda x: v1.crop(x, 3, 5, 40, 31),
}


class Decoded(torch.utils.data.Dataset):
    def __init__(self, call):
        self.call, self.files = call, []
        for number in range(2):
            file = io.BytesIO()
            smooth(number, 60 + number, 50).save(file, "JPEG")
            self.files.append(file.getvalue())

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        file = torch.frombuffer(bytearray(self.files[index]), dtype=torch.uint8)
        return self.call(decode_jpeg(file))


@pytest.mark.parametrize("name", CALLS)
def test_values_and_strides_are_the_datasets(name):
    """Cropped and resized ones may have other strides: under stock a crop is a view."""
    options = {"batch_size": 2, "collate_fn": list}
    theirs = next(iter(torch.utils.data.DataLoader(Decoded(CALLS[name]), **options)))
    loader = DataLoader(Decoded(CALLS[name]), backend=Dali(fast=()), device="cpu", **options)
    for mine, other in zip(next(iter(loader)), theirs, strict=True):
        assert torch.equal(mine, other)
        assert mine.stride() == other.stride() or name in ("cropped", "v2 bicubic")
