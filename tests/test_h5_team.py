"""A batch made by several threads: the same batch, torch's own settings untouched, none left."""

import gc
import threading
import time

import numpy as np
import pytest
import torch

pytest.importorskip("h5py")
pytest.importorskip("torchvision")

from PIL import Image
from torchvision.transforms import v2

from backends.h5 import H5
from backends.h5.team import Team
from dataloaders import DataLoader
from helpers.compare import assert_same, same
from helpers.processes import is_true_in_a_fork

LARGE = 1 << 30


@pytest.fixture
def team():
    made = Team(3)
    yield made
    made.close()


def ours():
    return [each.name for each in threading.enumerate() if each.name.startswith("dataloaders-h5")]


def test_each_part_is_made_once_in_a_thread_that_torch_does_not_split(team):
    before = torch.get_num_threads()
    seen = []
    together = threading.Barrier(3, timeout=20)

    def part(begin, end):
        together.wait()
        seen.append((begin, end, threading.current_thread().name, torch.get_num_threads()))

    Team(1).split(10, LARGE, lambda *ends: seen.append((*ends, threading.get_ident())))
    Team(3).split(10, 1000, lambda *ends: seen.append((*ends, threading.get_ident())))
    assert seen == [(0, 10, threading.get_ident())] * 2
    assert ours() == [], "nothing is started where it does not pay"
    seen.clear()
    team.split(10, LARGE, part)
    assert sorted(each[:2] for each in seen) == [(0, 3), (3, 6), (6, 10)]
    assert len({name for _, _, name, _ in seen}) == 3
    assert {threads for _, _, _, threads in seen} == {1}
    assert torch.get_num_threads() == before


def test_an_error_comes_when_nobody_writes_any_more(team):
    ended = []

    def part(begin, end):
        if begin == 0:
            raise ValueError("the first part")
        ended.append(begin)

    with pytest.raises(ValueError, match="the first part"):
        team.split(9, LARGE, part)
    assert sorted(ended) == [3, 6]


class Photos:
    """Twenty images: a batch of them is 14 MB as bytes."""

    def __init__(self, floats):
        last = [v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.4], [0.3])]
        steps = [v2.RandomCrop(480), v2.RandomHorizontalFlip(), v2.ToImage()]
        self.transform = v2.Compose([*steps, *(last if floats else [])])

    def __len__(self):
        return 20

    def __getitem__(self, index):
        pixels = np.random.default_rng(index).integers(0, 256, (500, 500, 3), np.uint8)
        return self.transform(Image.fromarray(pixels)), index


@pytest.mark.parametrize(("floats", "images"), [(True, None), (False, "jpeg")])
def test_batches_are_the_same_in_a_fork_too_and_no_thread_stays(floats, images, tmp_path):
    def loader(threads):
        backend = H5(tmp_path / "a.h5", threads=threads)
        return DataLoader(Photos(floats), 20, seed=2, backend=backend)

    by_three = loader(3)
    batches = list(by_three)
    assert len(ours()) == 3
    by_one = loader(1)
    assert_same(batches, list(by_one))
    loaders = [by_three, by_one]
    assert is_true_in_a_fork(lambda: same(*map(list, loaders)))  # the next epoch
    loaders.clear()
    del by_three
    gc.collect()
    for _ in range(1000):
        if not ours():
            break
        time.sleep(0.01)
    assert ours() == []
