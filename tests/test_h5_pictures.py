"""backend="h5" where rows are files: decoded, and changed one by one, in batches made at once."""

import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, Subset, default_collate
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from backends.h5 import H5
from dataloaders import DataLoader
from dataloaders.cache import CachedDataset, Encoded, precompute
from dataloaders.errors import CacheError
from helpers.cached import build_of_bytes, smooth, spoil
from helpers.compare import assert_same
from helpers.numbered import Made

pytestmark = pytest.mark.usefixtures("workers_end_fast")

COUNT = 10
SIZES = ((24, 30), (31, 25), (40, 26))
CROP = [v2.RandomCrop(16), v2.RandomHorizontalFlip()]
FLOATS = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.2] * 3)]
CHAINS = {
    "v1 bytes": lambda: [v1.RandomCrop(16), v1.RandomHorizontalFlip(), v1.PILToTensor()],
    "v2 floats": lambda: [*CROP, *FLOATS],
    "grey": lambda: [v2.RandomResizedCrop(16), v2.Grayscale(3), *FLOATS],
    "after": lambda: [v2.RandomCrop(16), *FLOATS, v2.RandomHorizontalFlip()],
    "tensors": lambda: [v2.RandomCrop(20), v2.ToImage(), v2.RandomResizedCrop(16)],
    "resized twice": lambda: [v2.RandomResizedCrop(20), v2.Resize(16), *FLOATS],
}
AT_ONCE = "batches are made at once"


class Pictures(Made):
    """Images of several sizes, of modes in turn, and labels."""

    def __init__(self, *members, modes=("RGB",), sizes=SIZES):
        super().__init__(None, COUNT, transform=v2.Compose(list(members)))
        self.modes, self.sizes, self.sample = modes, sizes, None

    def __getitem__(self, index):
        if not 0 <= index < COUNT:
            raise IndexError(index)
        mode, size = self.modes[index % len(self.modes)], self.sizes[index % len(self.sizes)]
        return {"image": self.transform(smooth(index, *size, mode)), "label": index}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache.h5"


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Files of all sorts in two classes: grey, with a palette, turned, with alpha, of 16 bits."""
    folder = tmp_path_factory.mktemp("photos")
    exif = Image.Exif()
    exif[0x0112] = 6
    sorts = [
        ("RGB", "jpg", {"quality": 85, "exif": exif}), ("L", "jpg", {}), ("CMYK", "jpg", {}),
        ("P", "png", {}), ("RGBA", "png", {}), ("RGB", "webp", {"lossless": True}),
        ("LA", "png", {}), ("RGB", "bmp", {}), ("RGB", "tiff", {"exif": exif}), ("1", "png", {}),
    ]  # fmt: skip
    for number, (mode, suffix, options) in enumerate(sorts):
        kind = folder / f"class{number % 2}"
        kind.mkdir(exist_ok=True)
        smooth(number, *SIZES[number % 3], mode).save(kind / f"{number}.{suffix}", **options)
    return folder


def collated(samples):
    return default_collate(samples)


@pytest.mark.parametrize("images", ["packed", "jpeg", "png", "webp", "raw"])
@pytest.mark.parametrize("chain", list(CHAINS))
@pytest.mark.thinned(12)
def test_with_a_seed_the_samples_are_those_of_the_same_cache_one_by_one(
    path, photos, chain, images
):
    dataset = ImageFolder(photos, v2.Compose([v2.Resize((24, 26)), *CHAINS[chain]()]))
    options = {"sampler": [3, 3, 0, 9, 5, 3, 7], "seed": 4}
    backend = H5(path, images=images)
    ours = DataLoader(dataset, 5, backend=backend, **options)
    plan = str(ours.explain())
    assert AT_ONCE in plan
    assert ("are decoded in this process" in plan) == (images != "raw")
    found = [list(ours), list(ours)]
    workers = DataLoader(dataset, 5, num_workers=1, backend=backend, **options)
    assert "are decoded in this process" not in str(workers.explain())
    assert_same(list(workers), found[0])
    # Of a lossy cache the samples are not the dataset's: one by one, for a collation of one's own.
    by_one = H5(path) if images == "jpeg" else "stock"
    single = DataLoader(dataset, 5, backend=by_one, collate_fn=collated, **options)
    assert_same(found, [list(single), list(single)])


def both(photos):
    chain = v2.Compose([v2.RandomResizedCrop(12), *FLOATS])
    parts = [ImageFolder(photos, chain) for _ in "ab"]
    return ConcatDataset([Subset(parts[0], [1, 4]), parts[1]])


class TwoImages(Pictures):
    def __getitem__(self, index):
        return {**super().__getitem__(index), "other": self.transform(smooth(index + 3, 30, 30))}


@pytest.mark.parametrize(
    ("make", "images"),
    [
        (both, "packed"),
        (lambda _: Pictures(v2.RandomCrop(16), v2.RGB(), v2.ToImage(), modes=("L", "RGB", "1")),
         "png"),
        (lambda _: TwoImages(*CHAINS["grey"]()), {"image": Encoded("png")}),
    ],
    ids=["parts of folders", "modes that the chain makes alike", "an encoded and a raw column"],
)  # fmt: skip
def test_batches_are_stocks(path, photos, make, images):
    dataset = make(photos)
    ours = DataLoader(dataset, 5, seed=6, backend=H5(path, images=images))
    assert_same(list(ours), list(DataLoader(dataset, 5, seed=6)))
    assert AT_ONCE in str(ours.explain())


# What goes wrong


def spoilt(path, row):
    """Zeros in the middle of this row's encoded image, in the file."""
    file = CachedDataset(path).readers[0].file(row)
    spoil(path, path.read_bytes().find(file) + len(file) // 4, bytes(len(file) // 2))


@pytest.mark.parametrize(
    ("chain", "seed", "num_workers", "row"),
    [("v1 bytes", None, 0, 5), ("v2 floats", 4, 1, 5), ("after", 4, 0, 0)],
)  # row 0 is among those of the proof
def test_a_damaged_image_is_the_error_of_its_own_row(path, chain, seed, num_workers, row):
    dataset = Pictures(*CHAINS[chain]())
    precompute(dataset, path, images="png", num_workers=0)
    spoilt(path, row)
    with pytest.raises(CacheError, match=f"row {row}:") as wanted:
        CachedDataset(path)[row]
    loader = DataLoader(dataset, 4, seed=seed, num_workers=num_workers, backend=H5(path))
    iterator = iter(loader)
    for batch in ([0, 1, 2, 3], [4, 5, 6, 7], [8, 9]):
        if row in batch:
            with pytest.raises(CacheError) as found:
                next(iterator)
            assert str(wanted.value) in str(found.value)
        else:
            assert next(iterator)["label"].tolist() == batch


def test_what_is_no_image_to_its_kind_is_left_to_the_rows_own_error(path, tmp_path):
    smooth(0).save(tmp_path / "a.png")
    cached = build_of_bytes(path, "encoded:JPEG:RGB", (tmp_path / "a.png").read_bytes())
    tails = [((), v2.Compose([v2.RandomCrop(9), v2.PILToTensor()]))]
    loader = DataLoader(CachedDataset(cached.path, tails=tails), 2)
    with pytest.raises(CacheError, match="no file of format JPEG"):
        list(loader)
