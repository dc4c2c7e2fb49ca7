"""Batches made in threads of the CPU: memory, errors, windows; test_dali has their pixels."""

from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms as v1
from torchvision.io import decode_jpeg, read_file
from torchvision.transforms import functional as F
from torchvision.transforms.v2 import functional as F2

pytest.importorskip("nvidia.nvimgcodec", reason="needs nvImageCodec, which comes with DALI")

from backends.dali.decode import WindowDecoder
from dataloaders.replaying import ReplayError, plan
from dataloaders.replaying.host import HostReplay
from helpers.compare import assert_same
from helpers.pictures import saved, smooth
from helpers.recorded import Photos, both, path, program

SIDES = [(61, 83), (48, 50), (90, 40), (70, 71), (52, 97)]
FILES = [saved(smooth(seed, *sides), quality=80 + seed) for seed, sides in enumerate(SIDES)]


class Noting(WindowDecoder):
    """Keeps the shape of what is decoded, and of the window that is asked for."""

    def __init__(self):
        super().__init__()
        self.shapes, self.windows = [], []

    def decode(self, file, window):
        made = super().decode(file, window)
        left, upper, right, lower = window
        self.shapes.append(None if made is None else made.shape)
        self.windows.append((lower - upper, right - left, 3))
        return made


@pytest.fixture
def replay():
    replay = HostReplay(Noting(), 2)
    yield replay
    replay.close()


def test_memory_is_used_again_only_when_nobody_refers_to_it(replay):
    stock, recorded = both(Photos(FILES, v1.Compose([v1.Resize((256, 256)), v1.ToTensor()])))
    first = replay.apply(recorded)
    place, view = first.data_ptr(), first[3]
    second = replay.apply(recorded)
    assert second.data_ptr() != place
    del first
    assert replay.apply(recorded).data_ptr() != place
    assert torch.equal(view, stock[3])
    del view
    kept = [replay.apply(recorded) for _ in range(2)]
    assert place in [batch.data_ptr() for batch in kept]


@pytest.mark.parametrize(
    "joined",
    [
        lambda views: torch.cat(views * 2),  # each of them twice
        lambda views: tuple(F.crop(view, 1, 2, 9, 9) for view in views),  # of the floats
        lambda views: (*views, F.to_tensor(Image.open(path(0, "PNG", "L")))),
    ],
    ids=["cat", "crop", "grey"],
)
def test_only_windows_are_decoded_and_each_view_has_its_own(replay, joined):
    view = v1.Compose([v1.RandomResizedCrop(24), v1.RandomHorizontalFlip(), v1.ToTensor()])
    stock, recorded = both(Photos(FILES, lambda image: joined((view(image), view(image)))))
    assert_same(replay.apply(recorded), stock)
    assert len(replay.decoder.shapes) == 2 * len(FILES)
    assert replay.decoder.shapes == replay.decoder.windows
    assert not {shape[:2] for shape in replay.decoder.shapes} & set(SIDES)


PART, ALL, NOT = (5, 3, 36, 43), (0, 0, 83, 61), (False, False)
BICUBIC, NEAREST = F.InterpolationMode.BICUBIC, F.InterpolationMode.NEAREST


def crop(image):
    return F.crop(image, 3, 5, 40, 31)


def resized(image, *by, **options):
    """As a tensor, by torch."""
    return F2.resize(F2.to_image(image), [60, 50], *by, **options)


def flipped_too(image):
    return torch.cat([image, F.hflip(image)])


@pytest.mark.filterwarnings("ignore:The image decoding:DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "head"),
    [
        (crop, (PART, None, None, (False, False))),
        (lambda image: F.crop(crop(image), 1, 2, 20, 10), ((7, 4, 17, 24), None, None)),
        (lambda image: F.crop(image, -1, 0, 9, 9), (ALL, None)),  # with a border
        (lambda image: F.resize(crop(image), [17, 29]), (PART, (29, 17), None)),
        (lambda image: crop(F.resize(image, [50, 60])), (ALL, (60, 50), PART)),
        (lambda image: F.resize(F.resize(image, [50, 60]), [9, 9]), (ALL, (60, 50))),
        (lambda image: image.resize((60, 50), box=(1, 1, 9, 9)), (ALL, None)),
        (lambda image: image.resize((60, 50), reducing_gap=2.0), (ALL, None)),
        (lambda image: F.hflip(F.vflip(crop(image))), (PART, None, None, (True, True))),
        (lambda image: F.hflip(F.hflip(crop(image))), (PART, None, None, (False, False))),
        (lambda image: crop(image).transpose(3), (PART, None, None, (True, True))),
        (lambda image: crop(F.hflip(image)), (ALL, None, None, (True, False))),
        (lambda image: F.hflip(crop(image).convert("L").convert("RGB")), (PART, None, None)),
        (lambda image: crop(image).crop((0, 0, 32, 40)), (PART, None)),  # beyond it
        (lambda image: crop(image).crop((0, 0, 31, 41)), (PART, None)),
        (lambda image: crop(image).crop((9, 9, 9, 20)), (PART, None)),  # of no pixels
        (lambda image: crop(image).crop((9, 9, 20, 9)), (PART, None)),
        (
            lambda image: crop(image).convert("RGB").resize((9, 8)),
            (PART, (9, 8), None, NOT, 3, True),
        ),
        (lambda image: crop(F.pil_to_tensor(image)), (PART, None)),
        (lambda _: crop(decode_jpeg(read_file(path(0)))), (PART, None)),
        (lambda image: F.vflip(F.pil_to_tensor(image)), (ALL, None, None, (False, True))),
        (lambda image: F2.horizontal_flip(F2.to_image(image)), (ALL, None, None, (True, False))),
        (lambda image: F2.vertical_flip(F2.to_image(image)), (ALL, None, None, (False, True))),
        (lambda image: resized(image), (ALL, (50, 60), None, NOT, 2, False)),
        (lambda image: resized(image, BICUBIC), (ALL, (50, 60), None, NOT, 3, False)),
        (lambda image: resized(image, antialias=False), (ALL, None)),
        (lambda image: resized(image, NEAREST), (ALL, None)),
        (lambda image: flipped_too(F.pil_to_tensor(crop(image))), (PART, None, None, NOT)),
    ],
)
def test_the_first_steps_of_an_image_are_one_window_size_and_flip(replay, make, head):
    def made(image):  # a tensor: images are opened by Pillow, for their ``info``
        image = make(image)
        return F.pil_to_tensor(image) if isinstance(image, Image.Image) else image

    stock, recorded = both(Photos(FILES[:1], made), list)
    assert_same(replay.apply(recorded), stock, strides=False)
    images = []
    program.filled(recorded, lambda wanted: images.extend(wanted) or wanted)
    found, *_ = plan.heads_of(*images)
    resize = head[4:] or (2, found.size is not None)
    steps = (found.window, found.size, found.crop, found.flips)
    assert (*steps[: len(head)], found.by, found.by_pillow) == (*head[:4], *resize)


@pytest.mark.parametrize(("files", "steps"), [(4, 1), (5, 5)])  # four may be of one sample
def test_images_that_are_concatenated_are_made_one_by_one(replay, files, steps):
    """Else one thread would make the batch."""
    photos = Photos(FILES[:files], v1.Compose([v1.RandomCrop(32), v1.ToTensor()]))
    stock, recorded = both(photos, lambda images: torch.cat([x[None] for x in images] * 2) * 2)
    assert_same(replay.apply(recorded), stock)
    apart = []
    program.filled(recorded, lambda wanted: apart.extend(plan.plan(wanted)[1]) or wanted)
    assert len(apart) == steps


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (MemoryError(), MemoryError),
        (torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError),
        (torch.AcceleratorError("CUDA error: an illegal memory access"), torch.AcceleratorError),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 3 TB"), RuntimeError),
        (RuntimeError("shapes do not fit"), ReplayError),
        (OSError("CUDA.png is truncated"), ReplayError),
    ],
    ids=repr,
)
def test_only_errors_of_a_sample_are_left_to_its_dataset(replay, error, raised):
    def decode(file, window):
        raise error

    _, recorded = both(Photos(FILES, v1.Compose([v1.RandomCrop(32), v1.ToTensor()])))
    replay.decoder.decode = decode
    with pytest.raises(raised) as caught:
        replay.apply(recorded)
    assert caught.type is raised


def test_windows_of_files_are_pillows():
    decoder, rng = WindowDecoder(), np.random.default_rng(0)
    for subsampling, progressive in ((0, False), (1, True), (2, True), ("4:1:1", False)):
        file = saved(smooth(1, 61, 83), subsampling=subsampling, progressive=progressive)
        whole = np.asarray(Image.open(BytesIO(file)))
        boxes = []
        for _ in range(40):
            left, right = np.sort(rng.choice(84, 2, replace=False)).tolist()
            upper, lower = np.sort(rng.choice(62, 2, replace=False)).tolist()
            boxes.append((left, upper, right, lower))
        found = [decoder.decode(file, box) for box in boxes]
        for (left, upper, right, lower), made in zip(boxes, found, strict=True):
            if right - left == 1:
                assert made is None
            else:
                assert np.array_equal(made, whole[upper:lower, left:right])
