"""A dataset that draws random numbers for what is kept is refused, in whichever sample it draws."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset
from torchvision.transforms import Compose, RandomCrop, Resize, ToTensor

from backends.h5 import H5
from dataloaders import DataLoader
from dataloaders.cache import precompute
from dataloaders.errors import CacheError

SIZE = 400
UNSTUDIED = 377  # neither among the samples that the study reads of so many, nor near them


def seed_and_restore(index: int) -> None:
    """Draw, and leave the generators as they were."""
    state = random.getstate()
    random.seed(index)
    random.random()
    random.setstate(state)


DRAWS: dict[str, tuple[Callable[[], object], str]] = {
    "torch": (lambda: float(torch.rand(())), "torch"),
    "torch, normal": (lambda: float(torch.randn(())), "torch"),
    "torch, seeded": (lambda: float(torch.manual_seed(5).initial_seed()), "torch"),
    "NumPy": (lambda: float(np.random.random_sample()), "NumPy"),
    "NumPy, normal": (lambda: float(np.random.randn()), "NumPy"),
    "NumPy, two normals": (lambda: np.random.randn(2), "NumPy"),
    "NumPy, seeded": (lambda: np.random.seed(5), "NumPy"),
    "random": (random.random, "Python's random"),
    "random, one bit": (lambda: random.getrandbits(1), "Python's random"),
    "random, normal": (lambda: random.gauss(0, 1), "Python's random"),
    "random, seeded": (lambda: random.seed(5), "Python's random"),
}


class Draws(Dataset[Any]):
    """Some samples draw; what they draw is not in them unless they are told to."""

    def __init__(self, draw: Callable[[], object], at: range | list[int], *, shown: bool = False):
        self.draw = draw
        self.at = at
        self.shown = shown

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        drawn = self.draw() if index in self.at else None
        return index, torch.full((4,), index), drawn if self.shown else None


@pytest.mark.parametrize("name", DRAWS)
def test_one_draw_without_effect_anywhere_in_the_build(name: str, tmp_path: Path) -> None:
    draw, generator = DRAWS[name]
    message = (
        f"^Draws draws random numbers: .* sample {UNSTUDIED} .* drew from, or seeded, the "
        f"generator of {generator}. A cache would keep one draw for ever; drawing or seeding "
        r"counts even if it has no effect on the sample\. .*transform= stays live.*"
        "allow_random=True"
    )
    with pytest.raises(CacheError, match=message):
        precompute(Draws(draw, [UNSTUDIED]), tmp_path / "a.h5", num_workers=0)
    assert not (tmp_path / "a.h5").exists()


@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("at", [[0], [133], [UNSTUDIED]])
def test_draws_in_workers_and_where_samples_may_be_left_out(
    at: list[int], num_workers: int, on_error: Any, tmp_path: Path
) -> None:
    dataset = Draws(lambda: (torch.rand(()), random.random()), at)
    with pytest.raises(CacheError, match=f"sample {at[0]} .*of torch and Python's random"):
        precompute(dataset, tmp_path / "a.h5", num_workers=num_workers, on_error=on_error)


class Class(Draws):
    """Adds noise to the samples of one class only."""

    def __init__(self) -> None:
        super().__init__(np.random.rand, range(3, SIZE, 7))

    def __getitem__(self, index: int) -> Any:
        noise = np.random.rand(8, 8) if index % 7 == 3 else 0.0
        return np.full((8, 8), index) + noise


class Flips(Draws):
    """Every sample draws, one in fifty is changed by that."""

    def __init__(self) -> None:
        super().__init__(random.random, range(SIZE))

    def __getitem__(self, index: int) -> Any:
        values = np.arange(8, dtype=np.float32) + index
        return (values[::-1].copy() if random.random() < 0.02 else values), index


class Noise(Draws):
    """Every sample is nothing but noise."""

    def __init__(self) -> None:
        super().__init__(lambda: torch.rand(2), range(SIZE))

    def __getitem__(self, index: int) -> Any:
        return self.draw()


class Fails(Draws):
    """One sample fails by chance, so that it depends on a draw whether it is left out."""

    def __init__(self) -> None:
        super().__init__(random.random, [UNSTUDIED])

    def __getitem__(self, index: int) -> Any:
        if index in self.at and random.random() < 2:
            raise ValueError("not today")
        return index


class Seeds(Draws):
    """Deterministic, by a seed of its own for each sample."""

    def __init__(self) -> None:
        super().__init__(random.random, range(SIZE))

    def __getitem__(self, index: int) -> Any:
        torch.manual_seed(index)
        return torch.rand(3)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", [Class, Flips, Fails, Seeds])
def test_datasets_that_draw(kind: Callable[[], Draws], num_workers: int, tmp_path: Path) -> None:
    generator = {Class: "NumPy", Seeds: "torch"}.get(kind, "Python's random")  # type: ignore[call-overload]
    with pytest.raises(CacheError, match=f"drew from, or seeded, the generator of {generator}"):
        precompute(kind(), tmp_path / "a.h5", num_workers=num_workers, on_error="skip")


def contents(path: Path, dataset: Dataset[Any], **options: Any) -> bytes:
    precompute(dataset, path, allow_random=True, **options)
    return path.read_bytes()


@pytest.mark.parametrize("kind", [Class, Flips, Seeds])
@pytest.mark.nightly
def test_one_draw_of_each_is_the_same_for_any_number_of_workers(
    kind: Callable[[], Draws], tmp_path: Path
) -> None:
    builds = [(0, None), (2, None), (0, 1), (2, 7)]
    files = {
        contents(tmp_path / f"{workers}-{rows}.h5", kind(), num_workers=workers, rows=rows)
        for workers, rows in builds
    }
    assert len(files) == 1


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_is_drawn_is_a_function_of_the_samples_number(
    num_workers: int, tmp_path: Path
) -> None:
    rare = Draws(random.random, [UNSTUDIED], shown=True)
    every = Draws(random.random, range(SIZE), shown=True)
    found = [
        precompute(dataset, tmp_path / name, num_workers=num_workers, allow_random=True)
        for name, dataset in (("rare.h5", rare), ("every.h5", every))
    ]
    assert found[0][UNSTUDIED][2] == found[1][UNSTUDIED][2]
    assert found[0][UNSTUDIED - 1][2] is None
    assert len({found[1][index][2] for index in range(SIZE)}) == SIZE


def test_a_refused_build_goes_on_with_allow_random(tmp_path: Path) -> None:
    dataset = Draws(random.random, [UNSTUDIED], shown=True)
    with pytest.raises(CacheError, match=f"sample {UNSTUDIED}"):
        precompute(dataset, tmp_path / "a.h5", num_workers=0, rows=10)
    again = contents(tmp_path / "a.h5", dataset, num_workers=0, rows=10)
    assert again == contents(tmp_path / "b.h5", dataset, num_workers=0)


@pytest.mark.parametrize("kind", [Flips, Noise, Seeds])
def test_a_finished_cache_is_opened_whatever_its_dataset_draws(
    kind: Callable[[], Draws], tmp_path: Path
) -> None:
    path = tmp_path / "a.h5"
    contents(path, kind(), num_workers=0)
    for allow_random in (False, True):
        cached = precompute(kind(), path, num_workers=0, allow_random=allow_random)
        assert len(cached) == SIZE
    loader = DataLoader(kind(), 50, backend=H5(path, build="never"))
    assert sum(1 for _ in loader) == SIZE // 50


class Pictures(Dataset[Any]):
    def __init__(self) -> None:
        self.transform = Compose([Resize((9, 9)), RandomCrop(8), ToTensor()])

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        return self.transform(Image.new("RGB", (20, 30), (index % 256, index // 256, 7))), index


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_stays_live_may_draw(num_workers: int, tmp_path: Path) -> None:
    cached = precompute(Pictures(), tmp_path / "a.h5", num_workers=num_workers)
    assert [line.partition("(")[0] for line in cached.index.tail] == ["RandomCrop", "ToTensor"]
    loader = DataLoader(cached, batch_size=50)
    assert torch.cat([labels for _, labels in loader]).tolist() == list(range(SIZE))


class Files(Dataset[Any]):
    """Has files of its own, and a target that is drawn for one of them."""

    def __init__(self) -> None:
        file = io.BytesIO()
        Image.new("RGB", (8, 8)).save(file, "PNG")
        self.file = file.getvalue()

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        target = random.random() if index == UNSTUDIED else 0.5
        return Image.open(io.BytesIO(self.file)).convert("RGB"), target


def test_the_targets_of_packed_files_may_not_be_drawn(tmp_path: Path) -> None:
    with pytest.raises(CacheError, match=f"^Files draws .* sample {UNSTUDIED} "):
        precompute(Files(), tmp_path / "a.h5", images="packed", num_workers=0)


def test_a_seeded_draw_that_puts_the_state_back_is_no_draw(tmp_path: Path) -> None:
    class Restores(Draws):
        def __getitem__(self, index: int) -> Any:
            seed_and_restore(index)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(index)
                return torch.rand(2)

    dataset = Restores(random.random, [])
    cached = precompute(dataset, tmp_path / "a.h5", num_workers=0)
    assert all(torch.equal(cached[index], dataset[index]) for index in range(SIZE))
