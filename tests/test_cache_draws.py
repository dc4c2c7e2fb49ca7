"""A dataset that draws random numbers for what is kept is refused, in whichever sample it draws."""

import io
import random
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import Image

from backends.h5 import H5
from dataloaders import DataLoader
from dataloaders.cache import precompute
from dataloaders.errors import CacheError
from helpers.compare import assert_same, generator_states
from helpers.datasets import Made
from helpers.pictures import saved

SIZE = 400
UNSTUDIED = 377  # neither among the samples that the study reads of so many, nor near them

DRAWS = {
    "torch, normal": (lambda: float(torch.randn(())), "torch"),
    "torch, seeded": (lambda: float(torch.manual_seed(5).initial_seed()), "torch"),
    "NumPy, normal": (lambda: float(np.random.randn()), "NumPy"),
    "NumPy, two normals": (lambda: np.random.randn(2), "NumPy"),
    "NumPy, seeded": (lambda: np.random.seed(5), "NumPy"),
    "random, one bit": (lambda: random.getrandbits(1), "Python's random"),
    "random, normal": (lambda: random.gauss(0, 1), "Python's random"),
    "random, seeded": (lambda: random.seed(5), "Python's random"),
}


def drawing(draw, at, *, shown=False):
    """Some samples draw; what they draw is not in them unless they are told to."""

    def sample(index):
        drawn = draw() if index in at else None
        return index, torch.full((4,), index), drawn if shown else None

    return Made(sample, SIZE)


@pytest.mark.parametrize("name", DRAWS)
def test_one_draw_without_effect_anywhere_in_the_build(name, path):
    draw, generator = DRAWS[name]
    message = (
        f"^Made draws random numbers: .* sample {UNSTUDIED} .* drew from, or seeded, the "
        f"generator of {generator}. A cache would keep one draw for ever; drawing or seeding "
        r"counts even if it has no effect on the sample\. .*transform= stays live.*"
        "allow_random=True"
    )
    with pytest.raises(CacheError, match=message):
        precompute(drawing(draw, [UNSTUDIED]), path, num_workers=0)
    assert not path.exists()


@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("at", [0, 15, 16, UNSTUDIED, SIZE - 1])
@pytest.mark.covering
def test_draws_in_workers_and_where_samples_may_be_left_out(at, num_workers, on_error, path):
    dataset = drawing(lambda: (torch.rand(()), random.random()), [at])
    with pytest.raises(CacheError, match=f"sample {at} .*of torch and Python's random"):
        precompute(dataset, path, num_workers=num_workers, on_error=on_error)


def fails(index):
    """One sample fails by chance, so that it depends on a draw whether it is left out."""
    if index == UNSTUDIED and random.random() < 2:
        raise ValueError("not today")
    return index


def seeds(index):
    """Deterministic, by a seed of its own for each sample."""
    torch.manual_seed(index)
    return torch.rand(3)


def test_a_sample_that_drew_and_failed_is_not_left_out(path):
    with pytest.raises(CacheError, match="drew from, or seeded, the generator of Python's random"):
        precompute(Made(fails, SIZE), path, num_workers=0, on_error="skip")


def test_draws_are_the_reason_if_they_change_what_a_sample_consists_of(path):
    def sample(index):
        return [index] * (2 if index == UNSTUDIED and random.random() < 2 else 1)

    with pytest.raises(CacheError, match=f"draws random numbers: .* sample {UNSTUDIED} "):
        precompute(Made(sample, SIZE), path, num_workers=0)


def test_a_refused_build_goes_on_with_allow_random(path, tmp_path):
    def draws():
        return [float(torch.rand(())), np.random.rand(), random.random()]

    before, dataset = generator_states(), drawing(draws, [UNSTUDIED], shown=True)
    with pytest.raises(CacheError, match=f"sample {UNSTUDIED}"):
        precompute(dataset, path, num_workers=0, rows=10)
    rare = precompute(dataset, path, num_workers=0, rows=10, allow_random=True)
    again = precompute(dataset, tmp_path / "b.h5", num_workers=0, allow_random=True)
    assert path.read_bytes() == again.path.read_bytes()
    # What is drawn is a function of the sample's number, whether or not the others draw.
    all_draw, options = drawing(draws, range(SIZE), shown=True), {"allow_random": True}
    every = precompute(all_draw, tmp_path / "c.h5", num_workers=2, rows=30, **options)
    other = precompute(all_draw, tmp_path / "d.h5", num_workers=1, rows=70, **options)
    assert every.path.read_bytes() == other.path.read_bytes()
    assert rare[UNSTUDIED][2] == every[UNSTUDIED][2]
    assert all(len(set(drawn)) == SIZE for drawn in zip(*(row[2] for row in every), strict=True))
    assert_same(generator_states(), before)


def test_a_finished_cache_is_opened_whatever_its_dataset_draws(path):
    precompute(Made(seeds, SIZE), path, num_workers=0, allow_random=True)
    assert len(precompute(Made(seeds, SIZE), path, num_workers=0)) == SIZE
    loader = DataLoader(Made(seeds, SIZE), 50, backend=H5(path, build="never"))
    assert len(list(loader)) == SIZE // 50


def test_the_targets_of_packed_files_may_not_be_drawn(path):
    file = saved(Image.new("RGB", (8, 8)), "PNG")

    def sample(index):
        target = random.random() if index == UNSTUDIED else 0.5
        return Image.open(io.BytesIO(file)).convert("RGB"), target

    with pytest.raises(CacheError, match=f"^Made draws .* sample {UNSTUDIED} "):
        precompute(Made(sample, SIZE), path, images="packed", num_workers=0)


def test_a_seeded_draw_that_puts_the_state_back_is_no_draw(path):
    def sample(index):
        state = random.getstate()
        random.seed(index)
        random.random()
        random.setstate(state)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(index)
            return torch.rand(2)

    cached = precompute(Made(sample, 50), path, num_workers=0)
    assert all(torch.equal(cached[index], sample(index)) for index in range(50))


def test_builds_in_two_threads_do_not_see_each_others_draws(tmp_path):
    def sample(index):
        time.sleep(0.001)
        return index

    def built(name):
        return len(precompute(Made(sample, 100), tmp_path / name, num_workers=0))

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(built, ["a.h5", "b.h5"])) == [100, 100]
