"""Under backend="dali" an error is the dataset's own, at its batch, and the epoch goes on."""

import io
import zlib
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, Sampler
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder

from dataloaders import DataLoader
from dataloaders.errors import BackendUnavailable, BackendWarning
from helpers.compare import assert_same
from helpers.photos import SIZE, folder, write_folder
from helpers.pictures import image_files

pytest.importorskip("nvidia.dali", reason="needs NVIDIA DALI")

from backends.dali import Dali

CHAIN = v1.Compose([v1.RandomResizedCrop(16), v1.RandomHorizontalFlip(), v1.ToTensor()])
WHOLE = v1.Compose([v1.Resize((12, 14)), v1.ToTensor()])
WORKERS = pytest.mark.parametrize("num_workers", [0, 1])


def outcomes(loader):
    """What each ``next()`` gave, an error as its type and the end of its text; and the errors."""
    found, errors = [], []
    batches = iter(loader)
    while True:
        try:
            found.append(next(batches))
        except StopIteration:
            return found, errors
        except Exception as error:
            found.append((type(error).__name__, str(error).strip().rpartition(": ")[2]))
            errors.append(error)


def compared(dataset, **options):
    """The errors of two epochs on dali, whose batches and errors are stock's."""
    options = {"batch_size": 3, "seed": 1, **options}
    on_stock = DataLoader(dataset, **options)
    on_dali = DataLoader(dataset, backend=Dali(fast=()), device="cpu", **options)
    errors = []
    for epoch in range(2):
        torch.manual_seed(epoch)
        expected, _ = outcomes(on_stock)
        torch.manual_seed(epoch)
        got, raised = outcomes(on_dali)
        assert_same(got, expected)
        errors += raised
    return errors


# Files


def removed(path):
    path.unlink()


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def emptied(path):
    path.write_bytes(b"")


def text(path):
    path.write_text("no image at all, but long enough to be looked at as one")


def wrong_inside(path):
    """A PNG file whose compressed pixels end in nonsense, under a checksum that is right."""
    data = path.read_bytes()
    place = data.index(b"IDAT") - 4
    length = int.from_bytes(data[place : place + 4], "big")
    pixels = data[place + 8 : place + 8 + length // 2] + b"\xff" * (length - length // 2)
    sealed = zlib.crc32(b"IDAT" + pixels).to_bytes(4, "big")
    path.write_bytes(data[: place + 8] + pixels + sealed + data[place + 12 + length :])


def without_its_end(path):
    path.write_bytes(path.read_bytes()[:-2])


def damaged(folder, damages, kind=ImageFolder):
    """A dataset whose second, fourth, ... file is damaged in these ways."""
    data = kind(folder, CHAIN)
    for (path, _), damage in zip(data.samples[1::2], damages, strict=False):
        damage(Path(path))
    return data


@WORKERS
def test_a_broken_file_is_the_datasets_error_and_the_epoch_goes_on(num_workers, tmp_path):
    data = damaged(write_folder(tmp_path), [removed, cut, emptied, text])
    assert len(compared(data, batch_size=2, num_workers=num_workers)) == 8


@WORKERS
@pytest.mark.filterwarnings("ignore:dali could not make a batch")
def test_damage_inside_the_pixels_is_the_datasets_error_too(num_workers, tmp_path):
    data = damaged(write_folder(tmp_path, format="PNG"), [wrong_inside, without_its_end, cut])
    assert len(compared(data, batch_size=2, num_workers=num_workers, shuffle=True)) >= 2


class Skips(ImageFolder):
    """Takes the next file for one that cannot be read, as many datasets do."""

    def __getitem__(self, index):
        try:
            return super().__getitem__(index)
        except Exception:
            return super().__getitem__((index + 1) % len(self))


@pytest.mark.filterwarnings("ignore:dali could not make a batch")
def test_a_dataset_that_catches_the_error_of_a_broken_file(tmp_path):
    data = damaged(write_folder(tmp_path, format="PNG"), [cut, wrong_inside], Skips)
    assert compared(data, num_workers=1) == []


class Zeros(ImageFolder):
    """Gives no image for one that cannot be read."""

    def __getitem__(self, index):
        try:
            return super().__getitem__(index)
        except OSError:
            return torch.zeros(3, 16, 16), -1


@pytest.mark.parametrize("bad", [2, 3])
def test_several_batches_in_a_row_that_only_the_dataset_can_make(bad, tmp_path):
    data = Zeros(write_folder(tmp_path, format="PNG"), CHAIN)
    for path, _ in data.samples[4 : 4 + bad]:
        wrong_inside(Path(path))
    backend = Dali(dtype=torch.bfloat16)
    on_dali = iter(DataLoader(data, num_workers=1, backend=backend, device="cpu"))
    good = [next(on_dali) for _ in range(4)]
    with pytest.warns(BackendWarning, match="the dataset itself made it"):
        good += [next(on_dali) for _ in range(2)]
    if bad == 3:
        with pytest.raises(BackendUnavailable, match="3 batches in a row"):
            next(on_dali)
    good += on_dali
    assert {images.dtype for images, _ in good} == {torch.bfloat16}
    assert [int(label) for _, label in good].count(-1) == 2


class Packed(Dataset):
    """PNG images in one file, which is opened when the first of them is read."""

    file = None

    def __init__(self, folder, images):
        self.place = folder / "images"
        self.place.write_bytes(b"".join(images))
        self.ends = list(accumulate(map(len, images)))

    def __len__(self):
        return len(self.ends)

    def __getitem__(self, index):
        if self.file is None:
            self.file = open(self.place, "rb")  # noqa: SIM115
        begin = self.ends[index - 1] if index else 0
        self.file.seek(begin)
        image = Image.open(io.BytesIO(self.file.read(self.ends[index] - begin)))
        return CHAIN(image.convert("RGB")), index


def test_a_file_that_a_dataset_opens_late_is_not_opened_here(tmp_path):
    """Else workers that are forked later would share its offset, and read other samples."""
    files = sorted(write_folder(tmp_path / "png", 40, format="PNG").rglob("*.png"))
    wrong_inside(files[2])
    data = Packed(tmp_path, [file.read_bytes() for file in files])
    assert len(compared(data, batch_size=2, num_workers=2)) == 2
    assert data.file is None


@pytest.mark.filterwarnings("ignore:Palette images with Transparency:UserWarning")
def test_files_of_every_kind_through_a_loader(tmp_path):
    files = image_files()
    broken = {f"{name}, cut": data[: len(data) * 2 // 3] for name, data in files.items()}
    everything = {**files, **broken, "empty": b"", "text": b"no image" * 20}
    places = tmp_path / "class"
    places.mkdir()
    for number, data in enumerate(everything.values()):
        (places / f"{number:03}.jpg").write_bytes(data)
    data = ImageFolder(str(tmp_path), lambda image: (CHAIN(image), WHOLE(image)))
    assert len(data) == len(everything)
    errors = compared(data, batch_size=1)
    assert len(broken) // 4 < len(errors) // 2 < len(broken) + 10
    assert len(compared(data, batch_size=16, shuffle=True)) > 2


# Code


def no_third(target):
    if target == 2:
        raise LookupError("no third class")
    return target


def refuses_all(samples):
    raise LookupError(f"{len(samples)} samples")


class Breaks(Sampler[int]):
    def __iter__(self):
        yield from range(5)
        raise LookupError("no sixth sample")

    def __len__(self):
        return SIZE


SMALL = v1.Compose([v1.RandomCrop(22), v1.ToTensor()])
TWO_MEANS = v1.Compose([v1.ToTensor(), v1.Normalize([0.5] * 2, [0.5] * 2)])
ERRORS = {
    "too small for its crop": ((SMALL,), {}, ValueError),
    "other channels": ((TWO_MEANS,), {"collate_fn": list}, RuntimeError),
    "several sizes": ((v1.ToTensor(),), {}, RuntimeError),
    "target_transform": ((CHAIN, no_third), {}, LookupError),
    "collate_fn": ((CHAIN,), {"collate_fn": refuses_all}, LookupError),
    "sampler": ((CHAIN,), {"sampler": Breaks()}, LookupError),
    "an index": ((CHAIN,), {"sampler": [0, 1, 2, 3, 400, 5]}, IndexError),
}


@pytest.mark.parametrize(("transforms", "options", "error"), ERRORS.values(), ids=ERRORS)
def test_an_error_of_the_users_code_is_raised_at_its_batch(transforms, options, error):
    assert {type(raised) for raised in compared(folder(*transforms), **options)} == {error}
