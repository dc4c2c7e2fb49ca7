"""A batch made by several threads: the same batch, torch's own settings untouched, none left."""

import gc
import threading
from functools import partial

import pytest
import torch
from torchvision.transforms import v2

from backends.h5 import H5
from backends.h5.threads import Threads
from dataloaders import DataLoader
from helpers.compare import assert_same
from helpers.pictures import Opened, noise
from helpers.processes import is_true_in_a_fork

LARGE = 1 << 30


def running():
    return {each for each in threading.enumerate() if each.name.startswith("dataloaders-h5")}


def test_each_part_is_made_once_in_a_thread_that_torch_does_not_split():
    before, others, seen = torch.get_num_threads(), running(), []
    together = threading.Barrier(3, timeout=20)

    def part(begin, end):
        together.wait()
        seen.append((begin, end, torch.get_num_threads()))
        if begin == 0:
            raise ValueError("the first part")

    for most, size in ((1, LARGE), (3, 1000)):  # nothing is started where it does not pay
        Threads(most).split(10, size, lambda *ends: seen.append((*ends, threading.get_ident())))
    assert (seen, running()) == ([(0, 10, threading.get_ident())] * 2, others)
    threads = Threads(3)
    seen.clear()
    with pytest.raises(ValueError, match="the first part"):
        threads.split(10, LARGE, part)

    def is_split():
        done = []
        threads.split(3, LARGE, lambda begin, _: done.append(begin))
        return sorted(done) == [0, 1, 2]

    assert is_true_in_a_fork(is_split)  # by threads of its own
    threads.close()
    assert sorted(seen) == [(0, 3, 1), (3, 6, 1), (6, 10, 1)]
    assert (torch.get_num_threads(), running()) == (before, others)


CROP = [v2.RandomCrop(480), v2.RandomHorizontalFlip(), v2.ToImage()]
FLOATS = [v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.4], [0.3])]


@pytest.mark.parametrize("steps", [CROP, CROP + FLOATS])
def test_batches_are_the_same_and_no_thread_stays(steps, tmp_path):
    def loader(threads):
        backend = H5(tmp_path / "a.h5", threads=threads)
        return DataLoader(dataset, 20, seed=2, backend=backend)

    dataset = Opened(v2.Compose(steps), size=20, picture=partial(noise, 500, 500, 3))  # 14 MB
    others = running()
    wanted, by_three = list(loader(1)), loader(3)
    assert "batches are made at once" in str(by_three.explain())
    assert running() == others
    batches = list(by_three)
    started = running() - others
    assert 0 < len(started) <= 3  # an idle one takes the next part
    del by_three
    gc.collect()
    for thread in started:
        thread.join(timeout=20)
    assert_same(batches, wanted)
    assert running() <= others
