"""Crops and flips drawn for a batch: torchvision's own pixels for the same seeds."""

import re
from contextlib import suppress

import numpy as np
import PIL.Image
import pytest
import torch
import torchvision.transforms as v1
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from backends.h5.draws import Draws
from backends.h5.images import _fill, obstacle_in
from backends.h5.windows import NotThisBatch, Windows, steps_of
from dataloaders.seeding.philox import words
from dataloaders.seeding.seeded import seed_generators
from dataloaders.transforms.read import read
from helpers.pictures import noise

SHAPES = ((1, 1), (5, 7), (13, 13), (20, 9), (9, 31), (40, 33), (2, 37), (37, 1))


def images(kind, shapes=SHAPES):
    """Images of these heights and widths; ``kind``: a PIL mode, or "bytes"."""
    mode = "RGB" if kind == "bytes" else kind
    channels = len(PIL.Image.new(mode, (1, 1)).getbands())
    made = [noise(*shape, channels, n).convert(mode) for n, shape in enumerate(shapes)]
    return [functional.pil_to_tensor(image) for image in made] if kind == "bytes" else made


def planes(image):
    made = image if isinstance(image, torch.Tensor) else functional.pil_to_tensor(image)
    return made.numpy()


def drawn(steps, batch, draws):
    _, heights, widths = np.array([functional.get_dimensions(one) for one in batch]).T
    windows = Windows(heights, widths)
    for step in steps:
        step(draws, windows)
    return windows


def by_torchvision(transform, image, row):
    """What torchvision makes of one image, and what is drawn after it."""
    seed_generators(tuple(row.tolist()))
    return transform(
        image.clone() if isinstance(image, torch.Tensor) else image.copy()
    ), torch.rand(1)


def check(transform, given, *, repeats=3, seed=0):
    """Compare pixels and the next number drawn; return how many samples."""
    steps = steps_of(read(transform))
    assert not isinstance(steps, str), steps
    batch = []
    for image in given:  # those that torchvision refuses are left to it
        with suppress(NotThisBatch):
            drawn(steps, [image], Draws([[1, 2, 3, 4]]))
            batch += [image] * repeats
    if not batch:
        return 0
    rows = words(seed, 0, np.arange(len(batch)))
    draws = Draws(rows)
    try:
        windows = drawn(steps, batch, draws)
    except NotThisBatch:  # some image of it: a border around a part
        return 0
    after = draws.rand()
    for n, (image, row) in enumerate(zip(batch, rows, strict=True)):
        wanted, following = by_torchvision(transform, image, row)
        shape = (1, len(planes(image)), int(windows.height[n]), int(windows.width[n]))
        found = torch.empty(shape, dtype=torch.uint8)
        place = int(windows.top[n]), int(windows.left[n])
        _fill(found, [(planes(image), *place, windows.upside_down[n], windows.mirrored[n])], None)
        assert np.array_equal(found[0].numpy(), planes(wanted)), f"sample {n}"
        assert after[n] == following.item(), "the stream is elsewhere"
    return len(batch)


CHAINS = {
    "centre": lambda t: t.CenterCrop(10),
    "centre of one pixel": lambda t: t.CenterCrop([1]),
    "crop": lambda t: t.RandomCrop(7),
    "crop padded": lambda t: t.RandomCrop(8, padding=4),
    "crop padded by two": lambda t: t.RandomCrop((8, 6), padding=(1, 4)),
    "crop padded by four": lambda t: t.RandomCrop((8, 6), padding=[5, 1, 3, 2]),
    "crop of the padded image": lambda t: t.RandomCrop(17, padding=2),
    "crop if needed": lambda t: t.RandomCrop(12, pad_if_needed=True),
    "crop both": lambda t: t.RandomCrop((12, 20), padding=2, pad_if_needed=True),
    "crop unused fill": lambda t: t.RandomCrop(5, fill=9, padding_mode="edge"),
    "flip": lambda t: t.RandomHorizontalFlip(),
    "flip never": lambda t: t.RandomVerticalFlip(0.0),
    "flip over": lambda t: t.RandomVerticalFlip(0.3),
    "flipped border": lambda t: t.Compose(
        [t.RandomHorizontalFlip(), t.RandomCrop(9, padding=4), t.RandomVerticalFlip()]
    ),
    "crops": lambda t: t.Compose(
        [t.RandomCrop(9, 4, True), t.RandomVerticalFlip(), t.RandomCrop(4)]
    ),
}


@pytest.mark.parametrize("kind", ["RGB", "L", "bytes"])
@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("t", [v1, v2], ids=["v1", "v2"])
def test_what_is_drawn_and_done_is_torchvisions(t, name, kind):
    assert check(CHAINS[name](t), images(kind)) >= 6


@settings(max_examples=30, deadline=None)
@given(data=st.data(), t=st.sampled_from([v1, v2]), kind=st.sampled_from(["RGB", "bytes"]))
def test_any_chain_is_drawn_as_torchvision_draws_it(data, t, kind):
    pair = st.tuples(st.integers(1, 24), st.integers(1, 24))
    padding = {"padding": st.none() | st.just(0), "pad_if_needed": st.booleans()}
    member = st.one_of(
        st.builds(t.CenterCrop, pair),
        st.builds(t.RandomCrop, pair, **padding),
        st.builds(t.RandomHorizontalFlip, st.floats(0, 1)),
        st.builds(t.RandomVerticalFlip, st.floats(0, 1)),
    )
    chain = t.Compose(data.draw(st.lists(member, min_size=1, max_size=4)))
    shapes = data.draw(st.lists(pair, min_size=1, max_size=4))
    check(chain, images(kind, shapes), repeats=2, seed=data.draw(st.integers(0, 2**32)))


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
        ([v2.Resize(9), TENSOR], "only torchvision's crops and flips"),
        ([len, TENSOR], "code of your own"),
        ([NORMAL, v2.RandomCrop(9), TENSOR], "Normalize .* only torchvision's crops and flips"),
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
