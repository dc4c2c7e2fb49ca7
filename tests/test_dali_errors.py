"""Under backend="dali" an error is the dataset's own, at its batch, and the epoch goes on."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import Sampler
from torchvision import transforms
from torchvision.datasets import ImageFolder

from dataloaders import DataLoader
from dataloaders.errors import BackendWarning
from helpers.compare import assert_same
from helpers.photos import SIZE, folder, write_folder

pytest.importorskip("nvidia.dali", reason="needs NVIDIA DALI")

from backends.dali import Dali

CHAIN = transforms.Compose(
    [transforms.RandomResizedCrop(16), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
)


def outcomes(loader: DataLoader[Any]) -> tuple[list[Any], list[BaseException]]:
    """What each ``next()`` gave, an error as its type and text; and the errors."""
    found: list[Any] = []
    errors: list[BaseException] = []
    batches = iter(loader)
    while True:
        try:
            found.append(next(batches))
        except StopIteration:
            return found, errors
        except Exception as error:
            found.append((type(error).__name__, str(error)))
            errors.append(error)


def compared(dataset: Any, **options: Any) -> list[BaseException]:
    """The errors of two epochs on dali, whose batches and errors are stock's."""
    options = {"batch_size": 3, "seed": 1, **options}
    theirs: DataLoader[Any] = DataLoader(dataset, **options)
    ours: DataLoader[Any] = DataLoader(dataset, backend=Dali(fast=()), device="cpu", **options)
    errors = []
    for _ in range(2):
        (expected, _), (got, raised) = outcomes(theirs), outcomes(ours)
        assert_same(got, expected)
        errors += raised
    return errors


def removed(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def text(path: Path) -> None:
    path.write_text("no image at all, but long enough to be looked at as one")


@pytest.mark.parametrize("damage", [removed, cut, emptied, text])
def test_a_broken_file_is_the_datasets_error_and_the_epoch_goes_on(
    damage: Callable[[Path], None], tmp_path: Path
) -> None:
    data = ImageFolder(write_folder(tmp_path), CHAIN)
    damage(Path(data.samples[4][0]))
    errors = compared(data)
    assert len(errors) == 2
    for error in errors:
        (note,) = error.__notes__
        assert note == f"dataloaders: sample 4 ({data.samples[4][0]}), in batch 2 of this epoch"


def chunk_at(data: bytes, name: bytes) -> int:
    return data.index(name) - 4


def wrong_inside(path: Path) -> None:
    """A PNG file whose compressed pixels end in nonsense, under a checksum that is right."""
    data = path.read_bytes()
    place = chunk_at(data, b"IDAT")
    length = int.from_bytes(data[place : place + 4], "big")
    pixels = data[place + 8 : place + 8 + length // 2] + b"\xff" * (length - length // 2)
    sealed = zlib.crc32(b"IDAT" + pixels).to_bytes(4, "big")
    path.write_bytes(data[: place + 8] + pixels + sealed + data[place + 12 + length :])


def without_its_end(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


@pytest.mark.parametrize(("damage", "raises"), [(wrong_inside, True), (without_its_end, False)])
def test_what_dali_alone_finds_broken_is_settled_by_pillow(
    damage: Callable[[Path], None], raises: bool, tmp_path: Path
) -> None:
    data = ImageFolder(write_folder(tmp_path, format="PNG"), CHAIN)
    damage(Path(data.samples[4][0]))
    assert len(compared(data)) == 2 * raises
    assert len(compared(data, shuffle=True)) == 2 * raises


def test_several_broken_files_and_a_broken_batch_by_batch_epoch(tmp_path: Path) -> None:
    data = ImageFolder(write_folder(tmp_path), CHAIN)
    for path, _ in data.samples[::3]:
        cut(Path(path))
    assert len(compared(data)) == 8


def test_an_image_too_small_for_its_crop_is_torchvisions_error() -> None:
    chain = transforms.Compose([transforms.RandomCrop(22), transforms.ToTensor()])
    errors = compared(folder(chain))
    assert errors
    for error in errors:
        assert "dataloaders: sample " in error.__notes__[0]
        assert error.__notes__[1] == "dataloaders: raised by RandomCrop at transform.transforms[0]"


def test_a_batch_that_only_dali_refuses_is_the_datasets_own_with_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuses(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("no graph today")

    monkeypatch.setattr("backends.dali.line.Graph", refuses)
    with pytest.warns(BackendWarning, match=r"could not make batch \d .*no graph today\); the d"):
        assert compared(folder(CHAIN), shuffle=True) == []


def test_a_normalize_of_other_channels_is_torchvisions_error() -> None:
    chain = transforms.Compose(
        [transforms.ToTensor(), transforms.Normalize([0.5, 0.5], [0.5, 0.5])]
    )
    assert len(compared(folder(chain), collate_fn=list)) == 8


def no_third(target: int) -> int:
    if target == 2:
        raise LookupError("no third class")
    return target


def test_an_error_of_a_target_transform_is_raised_at_its_batch() -> None:
    errors = compared(folder(CHAIN, target_transform=no_third))
    assert {type(error) for error in errors} == {LookupError}
    assert "sample 8 (" in errors[0].__notes__[0]


def refuses_all(samples: list[Any]) -> Any:
    raise LookupError(f"{len(samples)} samples")


def test_an_error_of_a_collate_fn_is_raised_at_its_batch() -> None:
    assert len(compared(folder(CHAIN), collate_fn=refuses_all)) == 8


class Breaks(Sampler[int]):
    def __iter__(self) -> Any:
        yield from range(5)
        raise LookupError("no sixth sample")

    def __len__(self) -> int:
        return SIZE


def test_an_error_of_a_sampler_is_raised_where_its_batch_would_have_come() -> None:
    assert len(compared(folder(CHAIN), sampler=Breaks())) == 2


class OutOfRange(Sampler[int]):
    def __iter__(self) -> Any:
        return iter([0, 1, 2, 3, 400, 5])

    def __len__(self) -> int:
        return 6


def test_an_index_that_is_none_is_the_datasets_error() -> None:
    errors = compared(folder(CHAIN), sampler=OutOfRange())
    assert {type(error) for error in errors} == {IndexError}
    assert "sample 400" in errors[0].__notes__[0]
