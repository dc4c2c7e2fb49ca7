"""Crops, flips and resizes drawn for a batch: torchvision's own pixels for the same seeds."""

import re
import warnings
from contextlib import suppress

import numpy as np
import PIL.Image
import pytest
import torch
import torchvision.transforms as v1
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode as Mode
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from dataloaders.seeding.philox import words
from dataloaders.seeding.seeded import seed_generators
from dataloaders.transforms.actions import SampleError, Sizes, applied, drawn
from dataloaders.transforms.draws import Draws
from dataloaders.transforms.operators import chain_of
from helpers.compare import assert_same
from helpers.pictures import noise

LIBRARIES = {"v1": v1, "v2": v2}
KINDS = ("RGB", "L", "bytes", "floats")
SHAPES = ((1, 1), (5, 7), (13, 13), (20, 9), (9, 31), (40, 33), (2, 37), (37, 1))


def images(kind, shapes=SHAPES):
    """Images of these heights and widths; ``kind``: a PIL mode, "bytes", "floats" or "tv"."""
    mode = "RGB" if kind in ("bytes", "floats", "tv") else kind
    channels = len(PIL.Image.new(mode, (1, 1)).getbands())
    made = [noise(*shape, channels, n).convert(mode) for n, shape in enumerate(shapes)]
    if mode != kind:
        made = [functional.pil_to_tensor(image) for image in made]
    if kind == "floats":
        made = [image / 255 for image in made]
    return [tv_tensors.Image(image) for image in made] if kind == "tv" else made


def sizes_of(batch):
    _, heights, widths = np.array([functional.get_dimensions(one) for one in batch]).T
    return Sizes(heights, widths)


def by_torchvision(transform, image, row):
    """What torchvision makes of one image, or its exception; and what is drawn after it."""
    seed_generators(tuple(row.tolist()))
    try:
        made = transform(image.clone() if isinstance(image, torch.Tensor) else image.copy())
    except Exception as error:
        return error, 0.0
    return made, torch.rand(1).item()


def check(transform, given, *, repeats=3, seed=0):
    """Compare pixels, predicted sizes and the next number drawn; return how many samples."""
    chain = chain_of(transform)
    assert chain.why is None, chain.why
    batch = []
    for image in given:  # one that may have no pixels at some place is left to torchvision
        with suppress(SampleError):
            drawn(chain.operators, Draws([[1, 2, 3, 4]]), sizes_of([image]))
            batch += [image] * repeats
    if not batch:
        return 0
    rows = words(seed, 0, np.arange(len(batch)))
    draws, sizes = Draws(rows), sizes_of(batch)
    try:
        actions = drawn(chain.operators, draws, sizes)
    except SampleError:  # for other seeds than above
        return 0
    after = draws.rand()
    done = 0
    for sample, (image, row) in enumerate(zip(batch, rows, strict=True)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wanted, following = by_torchvision(transform, image, row)
            if isinstance(wanted, Exception):
                with pytest.raises(type(wanted)):
                    applied(actions, sample, image)
                continue
            found = applied(actions, sample, image)
        assert_same(found, wanted, f"sample {sample}", strides=False)
        assert after[sample] == following, "the stream is elsewhere"
        size = functional.get_dimensions(wanted)[1:]
        assert [sizes.height[sample], sizes.width[sample]] == size
        done += 1
    return done


CHAINS = {
    "resize to the shorter side": lambda t: t.Resize(8),
    "resize to a pair": lambda t: t.Resize((11, 6)),
    "resize at most": lambda t: t.Resize(8, max_size=14),
    "resize nearest": lambda t: t.Resize(8, interpolation=Mode.NEAREST),
    "resize bicubic": lambda t: t.Resize((4, 30), interpolation=Mode.BICUBIC),
    "resize by Pillow's number": lambda t: t.Resize((4, 30), interpolation=3),
    "resize not antialiased": lambda t: t.Resize((4, 5), antialias=False),
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
    "resized crop": lambda t: t.RandomResizedCrop(8),
    "resized crop bicubic": lambda t: t.RandomResizedCrop(8, interpolation=Mode.BICUBIC),
    "resized crop never fits": lambda t: t.RandomResizedCrop(8, scale=(2.0, 3.0)),
    "resized crop tall": lambda t: t.RandomResizedCrop(8, ratio=(0.1, 0.2)),
    "resized crop wide": lambda t: t.RandomResizedCrop(8, ratio=(5, 9)),
    "resized crop whole": lambda t: t.RandomResizedCrop(8, scale=(1.0, 1.0), ratio=(1.0, 1.0)),
    "resized crop narrow": lambda t: t.RandomResizedCrop(8, scale=(0.95, 0.951), ratio=(1, 1.01)),
    "resized crop tiny": lambda t: t.RandomResizedCrop(8, scale=(0.0, 0.01)),
    "resized crop of ints": lambda t: t.RandomResizedCrop(8, scale=(0, 1), ratio=(1, 2)),
    "flip": lambda t: t.RandomHorizontalFlip(),
    "flip never": lambda t: t.RandomVerticalFlip(0.0),
    "flip over": lambda t: t.RandomVerticalFlip(0.3),
    "usual": lambda t: t.Compose(
        [t.RandomResizedCrop(9), t.RandomHorizontalFlip(), t.PILToTensor(),
         t.ConvertImageDtype(torch.float32), t.Normalize([0.5], [0.3]), t.RandomCrop(8)]
    ),
    "grey": lambda t: t.Compose([t.Grayscale(3), t.RandomCrop(9, 4, True), t.CenterCrop((20, 5))]),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.thinned(6)
def test_what_is_drawn_and_done_is_torchvisions(library, name, kind):
    tensors = kind in ("bytes", "floats")
    made = check(CHAINS[name](LIBRARIES[library]), images(kind))
    assert made >= 6 or (name == "usual" and tensors and library == "v1")


@pytest.mark.parametrize("kind", ["RGB", "bytes", "tv"])
def test_what_only_v2_has_is_too(kind):
    assert check(v2.Resize(None, max_size=9), images(kind)) >= 6
    last = [v2.RGB(), v2.Identity(), v2.ToImage(), v2.ToDtype(torch.float32, True)]
    chain = v2.Compose([v2.RandomCrop(4, padding=3), *last, v2.ToPureTensor()])
    assert check(chain, images(kind)) >= 6


@pytest.mark.parametrize("t", LIBRARIES.values(), ids=LIBRARIES)
def test_images_of_other_modes_are_too(t):
    crop = t.RandomCrop(9, padding=4, pad_if_needed=True)
    for mode in ("P", "RGBA", "LA", "CMYK", "F", "1"):
        given = [one.convert(mode) for one in images("RGB", ((13, 13), (20, 9), (3, 5)))]
        assert check(t.Compose([crop, t.CenterCrop((20, 5))]), given) == 9


@settings(max_examples=30, deadline=None)
@given(data=st.data(), t=st.sampled_from([v1, v2]), kind=st.sampled_from(KINDS))
def test_any_chain_is_drawn_as_torchvision_draws_it(data, t, kind):
    side = st.integers(1, 24)
    pair = st.tuples(side, side)
    bounds = st.tuples(st.floats(0.01, 2), st.floats(0.01, 2)).map(sorted)
    padding = {"padding": st.none() | st.just(0), "pad_if_needed": st.booleans()}
    member = st.one_of(
        st.builds(t.Resize, side | pair),
        st.builds(t.CenterCrop, pair),
        st.builds(t.RandomCrop, pair, **padding),
        st.builds(t.RandomResizedCrop, pair, scale=bounds, ratio=bounds),
        st.builds(t.RandomHorizontalFlip, st.floats(0, 1)),
        st.builds(t.RandomVerticalFlip, st.floats(0, 1)),
    )
    chain = t.Compose(data.draw(st.lists(member, min_size=1, max_size=4)))
    shapes = data.draw(st.lists(pair, min_size=1, max_size=4))
    check(chain, images(kind, shapes), repeats=2, seed=data.draw(st.integers(0, 2**32)))


@pytest.mark.parametrize(
    "transform",
    [
        v2.RandomResizedCrop(224), v2.RandomResizedCrop(224, (0.3, 0.35), (0.9, 1.3)),
        v2.RandomCrop(9, padding=8),
    ],
    ids=["usual", "narrow", "padded"],
)  # fmt: skip
def test_windows_of_large_images_are_those_of_make_params(transform):
    """No pixels: hundreds of draws, each number compared, and the stream after them."""
    odd = [(1, 40000), (6001, 37), (1, 1), (2, 3)] * isinstance(transform, v2.RandomResizedCrop)
    shapes = [(375, 500), (2448, 3264), (719, 1281), (1001, 600), *odd] * 60
    border = 8 * isinstance(transform, v2.RandomCrop)
    rows = words(7, 0, np.arange(len(shapes)))
    (operator,) = chain_of(transform).operators
    draws = Draws(rows)
    window = operator.draw(draws, Sizes(*zip(*shapes, strict=True)))[0].numbers
    after = draws.rand()
    for sample, shape in enumerate(shapes):
        seed_generators(tuple(rows[sample].tolist()))
        told = transform.make_params([torch.zeros(1).expand(3, *shape)])
        assert torch.rand(1).item() == after[sample]
        for name in ("top", "left", "height", "width"):
            assert window[name][sample] == told[name] - border * (name in ("top", "left"))


@pytest.mark.parametrize(
    ("transform", "why"),
    [
        (v2.Resize((4, 4), interpolation="cubic"), "not with its options"),
        (v1.CenterCrop((4, 0)), "at least 1 x 1"),
        (v1.RandomCrop((4.5, 4)), "not with its options"),
        (v1.RandomCrop(4, padding=2, fill=(1, 2, 3)), "only borders of zeros"),
        (v2.RandomCrop(4, padding=2, fill={"others": 3}), "only borders of zeros"),
        (v2.RandomCrop(4, pad_if_needed=True, padding_mode="reflect"), "only borders of zeros"),
        (v1.RandomCrop(3, padding=9), "from 0 to below size"),
        (v1.RandomResizedCrop(4, ratio=(0.0, 1.0)), "above 0"),
        (v1.RandomResizedCrop(4, scale=(0.3, 0.4, 1)), "not with its options"),
        (v2.ColorJitter(0.3), "crops, flips, resizes and conversions"),
        (v1.FiveCrop(3), "crops, flips, resizes and conversions"),
        (len, "code of your own"),
    ],
)
def test_what_is_not_read_exactly_is_not_read_and_says_why(transform, why):
    chain = chain_of(transform)
    assert not chain.operators
    assert re.search(why, str(chain.why))


def test_numbers_that_are_not_those_that_are_read():
    with pytest.warns(UserWarning, match="should be of kind"):
        downwards = v1.RandomResizedCrop(4, scale=(1.0, 0.1))
    assert "only ranges" in str(chain_of(downwards).why)
    flip, resize = v1.RandomHorizontalFlip(), v1.Resize(4)
    try:
        torch.set_default_dtype(torch.float64)
        assert "set_default_dtype(torch.float64)" in str(chain_of(flip).why)
        assert chain_of(resize).why is None
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        assert "set_default_device('meta')" in str(chain_of(flip).why)
    assert chain_of(flip).why is None
