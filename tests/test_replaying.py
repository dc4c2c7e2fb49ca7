"""Batches replayed in threads of the CPU equal those of the dataset's own code."""

import random
from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import functional as F
from torchvision.transforms import v2

pytest.importorskip("nvidia.nvimgcodec", reason="needs nvImageCodec, which comes with DALI")

from backends.dali.decode import WindowDecoder
from dataloaders.recording.program import unpack
from dataloaders.replaying import ReplayError
from dataloaders.replaying.host import HostReplay
from dataloaders.replaying.plan import plan
from helpers.recorded import equal
from helpers.replayed import Photos, both, picture, written

SIDES = [(61, 83), (48, 50), (90, 40), (70, 71), (52, 97)]
PHOTOS = [picture(*sides, seed) for seed, sides in enumerate(SIDES)]
FILES = [
    *(written(photo, quality=80 + seed) for seed, photo in enumerate(PHOTOS)),
    written(PHOTOS[0], subsampling=0),
    written(PHOTOS[1], progressive=True),
    written(PHOTOS[2].convert("L")),
    written(PHOTOS[3], "PNG"),
    written(PHOTOS[4].convert("CMYK")),
    written(PHOTOS[0].convert("P"), "PNG"),
]
NORMAL = [v1.ToTensor(), v1.Normalize((0.5, 0.4, 0.3), (0.2, 0.3, 0.25))]
V2 = [v2.ToDtype(torch.float32, scale=True), v2.Normalize((0.5, 0.4, 0.3), (0.2, 0.3, 0.25))]


def two_views(image):
    view = v1.Compose([v1.RandomResizedCrop(24), *NORMAL])
    return view(image), view(image)


def by_hand(image):
    if random.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    image = ImageEnhance.Color(image.resize((31, 33), Image.Resampling.LANCZOS)).enhance(0.7)
    return {"x": (v1.functional.to_tensor(image) - 0.5) / 0.3, "size": image.size}


def five(image):
    crops = v1.FiveCrop(16)(v1.Resize(24)(image))
    return torch.stack([F.to_tensor(crop) for crop in crops])


def pair(image):
    top, left, height, width = v1.RandomCrop.get_params(image, (20, 22))
    return F.to_tensor(F.crop(image, top, left, height, width)), image.size


def wrapped(image):
    return v2.Compose([v2.ToImage(), v2.RandomCrop(24), *V2])(image)


MAKES = {
    "imagenet": v1.Compose([v1.RandomResizedCrop(32), v1.RandomHorizontalFlip(), *NORMAL]),
    "validation": v1.Compose([v1.Resize(36), v1.CenterCrop(32), *NORMAL]),
    "bicubic": v1.Compose(
        [v1.RandomResizedCrop(32, interpolation=F.InterpolationMode.BICUBIC), *NORMAL]
    ),
    "colours": v1.Compose([v1.RandomResizedCrop(32), v1.ColorJitter(0.4, 0.4, 0.4, 0.1), *NORMAL]),
    "policy": v1.Compose([v1.RandAugment(), v1.RandomCrop(32, pad_if_needed=True), *NORMAL]),
    "erasing": v1.Compose([v1.RandomResizedCrop(32), *NORMAL, v1.RandomErasing(0.7)]),
    "bytes": v1.Compose([v1.RandomCrop(32), v1.PILToTensor()]),
    "v2 image": v2.Compose([v2.RandomResizedCrop(32), v2.RandomVerticalFlip(), v2.ToImage(), *V2]),
    "v2 guide": v2.Compose([v2.ToImage(), v2.ToDtype(torch.uint8), v2.RandomResizedCrop(32), *V2]),
    "v2 tensor": v2.Compose(
        [v2.ToImage(), v2.RandomResizedCrop(32), v2.RandomHorizontalFlip(), *V2]
    ),
    "v2 colours": v2.Compose(
        [v2.ToImage(), v2.RandomCrop(32), v2.ColorJitter(0.4, 0.4, 0.4, 0.1), *V2]
    ),
    "two views": two_views,
    "by hand": by_hand,
    "five crops": five,
    "pair": pair,
    "wrapped": wrapped,
    "grey": v1.Compose([v1.RandomCrop(32), v1.Grayscale(), v1.ToTensor()]),
}


@pytest.fixture(scope="module")
def exactly():
    replay = HostReplay(WindowDecoder(), 2)
    yield replay
    replay.close()


@pytest.mark.parametrize("name", MAKES)
def test_batches_equal_the_datasets_own(name, exactly):
    for seed in range(2):
        stock, recorded = both(Photos(FILES, MAKES[name]), seed=seed)
        assert equal(exactly.apply(recorded), stock)


def test_batches_of_other_shapes(exactly):
    def as_list(samples):
        return {"images": samples, "n": len(samples)}

    def mixed(samples):
        images = torch.stack(samples)
        return 0.3 * images + 0.7 * images.roll(1, 0)

    photos = Photos(FILES, v1.Compose([v1.RandomCrop(20), *NORMAL]))
    for collate_fn in (as_list, mixed):
        stock, recorded = both(photos, collate_fn)
        assert equal(exactly.apply(recorded), stock)
    stock, recorded = both(Photos(FILES, v1.RandomCrop(20)), as_list)
    assert any(image.info for image in stock["images"])
    assert equal(exactly.apply(recorded), stock)


@pytest.mark.filterwarnings("ignore:The image decoding and encoding:DeprecationWarning")
def test_files_that_torchvision_decodes(exactly):
    class Tensors(Photos):
        def __getitem__(self, key):
            data = torch.frombuffer(bytearray(self.files[key]), dtype=torch.uint8)
            return self.make(decode_image(data, ImageReadMode.RGB))

    make = v2.Compose([v2.RandomResizedCrop(32, antialias=True), v2.RandomHorizontalFlip(), *V2])
    stock, recorded = both(Tensors(FILES[:9], make))
    assert equal(exactly.apply(recorded), stock)


def test_masks_keep_their_flavour(exactly):
    def make(image):
        mask = tv_tensors.Mask(v2.functional.pil_to_tensor(image)[:1])
        both = v2.Compose([v2.RandomCrop(24), v2.RandomHorizontalFlip()])(v2.ToImage()(image), mask)
        return v2.functional.to_dtype(both[0], torch.float32, scale=True), both[1]

    stock, recorded = both(Photos(FILES, make))
    assert equal(exactly.apply(recorded), stock)


def test_a_resize_by_torch_is_one_level_off():
    stock, recorded = both(Photos(FILES, v1.Compose([v1.RandomResizedCrop(32), v1.PILToTensor()])))
    replay = HostReplay(WindowDecoder(), 2, exact=False)
    distance = (replay.apply(recorded).int() - stock.int()).abs()
    assert 0 < distance.max() <= 1
    replay.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtype_and_memory_order_of_the_last_pass(dtype):
    replay = HostReplay(WindowDecoder(), 2, True, dtype, torch.channels_last)
    for name in ("imagenet", "erasing", "v2 tensor", "bytes"):
        stock, recorded = both(Photos(FILES, MAKES[name]))
        made = replay.apply(recorded)
        assert made.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(made, stock.to(dtype) if stock.is_floating_point() else stock)
    replay.close()


def test_memory_is_used_again_only_when_nobody_refers_to_it():
    make = v1.Compose([v1.Resize((256, 256)), v1.ToTensor()])
    stock, recorded = both(Photos(FILES, make))
    replay = HostReplay(WindowDecoder(), 2)
    first = replay.apply(recorded)
    place, view = first.data_ptr(), first[3]
    second = replay.apply(recorded)
    assert second.data_ptr() != place
    del first
    assert replay.apply(recorded).data_ptr() != place
    assert torch.equal(view, stock[3])
    del view
    assert place in {replay.apply(recorded).data_ptr() for _ in range(2)}
    replay.close()


def test_only_windows_are_decoded_and_each_view_has_its_own():
    seen = []

    class Noting(WindowDecoder):
        def decode(self, files):
            made = super().decode(files)
            seen.extend(
                (window, None if a is None else a.shape)
                for (_, window), a in zip(files, made, strict=True)
            )
            return made

    stock, recorded = both(Photos(FILES[:5], two_views))
    replay = HostReplay(Noting(), 2)
    assert equal(replay.apply(recorded), stock)
    assert len(seen) == 10
    for (left, upper, right, lower), shape in seen:
        assert shape == (lower - upper, right - left, 3)
    nodes, _ = unpack(recorded)
    stacks, apart = plan([nodes[ref.number] for ref in recorded.rest])
    assert (len(stacks), apart) == (2, [])
    replay.close()


def test_a_file_that_fails_is_named_and_leaves_the_others_alone(exactly):
    stock, recorded = both(Photos(FILES, MAKES["imagenet"]))
    files = recorded.files.clone()
    for slot in (3, 8):
        begin, end = recorded.offsets[slot]
        files[begin + 40 : end] = 0  # after it was recorded: no headers any more
    with pytest.raises(ReplayError, match=r"\[3, 8\]") as caught:
        exactly.apply(recorded._replace(files=files))
    assert caught.value.samples == [3, 8]
    assert equal(exactly.apply(recorded), stock)


@pytest.mark.parametrize("subsampling", [0, 1, 2, "4:1:1"])
@pytest.mark.parametrize("progressive", [False, True])
def test_windows_of_files_are_pillows(subsampling, progressive):
    file = written(picture(61, 83), subsampling=subsampling, progressive=progressive)
    whole = np.asarray(Image.open(BytesIO(file)))
    rng = np.random.default_rng(0)
    boxes = []
    for _ in range(40):
        left, right = np.sort(rng.choice(84, 2, replace=False)).tolist()
        upper, lower = np.sort(rng.choice(62, 2, replace=False)).tolist()
        boxes.append((left, upper, right, lower))
    decoder = WindowDecoder()
    for (left, upper, right, lower), made in zip(
        boxes, decoder.decode([(file, b) for b in boxes]), strict=True
    ):
        if right - left == 1:
            assert made is None
        else:
            assert np.array_equal(made, whole[upper:lower, left:right])


def test_what_is_left_to_pillow():
    good = FILES[0]
    left = [
        written(PHOTOS[0], "PNG"),
        FILES[9],
        b"",
        b"no image",
        good[:200],
        good[: len(good) // 2],
    ]
    found = WindowDecoder().decode([(good, None), *((file, None) for file in left), (good, None)])
    assert [each is None for each in found] == [False, *[True] * len(left), False]
    assert WindowDecoder().decode([(good, (-1, 0, 20, 20)), (good, (0, 0, 84, 20))]) == [None, None]
