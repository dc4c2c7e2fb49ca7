"""Which crops and flips are done to a whole batch, and why others are not."""

import re

import pytest
import torch
import torchvision.transforms as v1
from torchvision.transforms import v2

from backends.h5.images import obstacle_in

TENSOR = v2.ToImage()
FLOATS = v2.ToDtype(torch.float32, scale=True)
NORMAL = v2.Normalize([0.5], [0.5])


@pytest.mark.parametrize(
    ("members", "why"),
    [
        ([v1.CenterCrop((4, 0)), TENSOR], "at least 1 x 1"),
        ([v1.RandomCrop((4.5, 4)), TENSOR], "not with its options"),
        ([v1.RandomCrop(4, padding=2, fill=(1, 2, 3)), TENSOR], "only borders of zeros"),
        ([v2.RandomCrop(4, padding=2, fill={"others": 3}), TENSOR], "only borders of zeros"),
        ([v2.RandomCrop(4, pad_if_needed=True, padding_mode="reflect"), TENSOR], "only borders"),
        ([v1.RandomCrop(3, padding=9), TENSOR], "from 0 to below size"),
        ([v2.Resize(9), TENSOR], "only CenterCrop, RandomCrop, RandomHor"),
        ([v2.RandomResizedCrop(9), TENSOR], "RandomResizedCrop .* only CenterCrop, RandomCrop"),
        ([len, TENSOR], "code of your own"),
        ([NORMAL, v2.RandomCrop(9), TENSOR], "Normalize .* only CenterCrop, Rand"),
        ([TENSOR, FLOATS, NORMAL, v2.RandomCrop(9, 2)], "RandomCrop comes after Normalize"),
        ([v2.RandomCrop(9)], "makes no tensors"),
        ([TENSOR, FLOATS, v2.RandomCrop(9, 2), NORMAL, v2.RandomHorizontalFlip()], None),
        ([v2.RandomCrop(9), TENSOR, v2.RandomHorizontalFlip()], None),
        ([v2.RandomCrop(9), FLOATS], None),
    ],
)
def test_what_is_not_done_to_a_batch_says_why(members, why):
    found = obstacle_in(v1.Compose(members))
    assert found is None if why is None else re.search(why, str(found))


def test_numbers_that_are_not_those_that_are_read():
    chain = v1.Compose([v1.RandomHorizontalFlip(), v1.PILToTensor()])
    try:
        torch.set_default_dtype(torch.float64)
        assert "set_default_dtype()" in str(obstacle_in(chain))
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        assert "set_default_device()" in str(obstacle_in(chain))
    assert obstacle_in(chain) is None
