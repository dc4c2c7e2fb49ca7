"""A batch made by several threads: the same batch, torch's own settings untouched, none left."""

import gc
import os
import pickle
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
from backends.h5.threads import Threads
from dataloaders import DataLoader
from helpers.compare import assert_same

LARGE = 1 << 30


@pytest.fixture
def threads():
    made = Threads(3)
    yield made
    made.close()


def ours():
    return [each.name for each in threading.enumerate() if each.name.startswith("dataloaders-h5")]


def test_each_part_is_made_once_in_a_thread_that_torch_does_not_split(threads):
    before = torch.get_num_threads()
    seen = []
    together = threading.Barrier(3, timeout=20)

    def part(begin, end):
        together.wait()
        seen.append((begin, end, threading.current_thread().name, torch.get_num_threads()))

    Threads(1).split(10, LARGE, lambda *ends: seen.append((*ends, threading.get_ident())))
    Threads(3).split(10, 1000, lambda *ends: seen.append((*ends, threading.get_ident())))
    assert seen == [(0, 10, threading.get_ident())] * 2
    assert ours() == [], "nothing is started where it does not pay"
    seen.clear()
    threads.split(10, LARGE, part)
    assert sorted(each[:2] for each in seen) == [(0, 3), (3, 6), (6, 10)]
    assert len({name for _, _, name, _ in seen}) == 3
    assert {threads for _, _, _, threads in seen} == {1}
    assert torch.get_num_threads() == before
    found = []
    later = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert found == [before]


def test_an_error_comes_when_nobody_writes_any_more(threads):
    ended = []

    def part(begin, end):
        if begin == 0:
            raise ValueError("the first part")
        ended.append(begin)

    with pytest.raises(ValueError, match="the first part"):
        threads.split(9, LARGE, part)
    assert sorted(ended) == [3, 6]


def test_in_a_child_and_in_a_copy_there_are_threads_of_its_own(threads):
    threads.split(3, LARGE, lambda begin, end: None)
    copied = pickle.loads(pickle.dumps(threads))
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            done = []
            for each in (threads, copied):
                each.split(3, LARGE, lambda begin, _: done.append(begin))
            os.write(write, str(sorted(done)).encode())
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert os.read(read, 100) == b"[0, 0, 1, 1, 2, 2]"
    os.close(read)
    os.close(write)


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


@pytest.mark.parametrize("floats", [True, False])
def test_batches_are_the_same_and_no_thread_stays(floats, tmp_path):
    def loader(threads):
        backend = H5(tmp_path / "a.h5", threads=threads)
        return DataLoader(Photos(floats), 20, seed=2, backend=backend)

    by_three = loader(3)
    batches = list(by_three)
    assert len(ours()) == 3
    del by_three
    gc.collect()
    for _ in range(1000):
        if not ours():
            break
        time.sleep(0.01)
    assert ours() == []
    by_one = loader(1)
    assert_same(batches, list(by_one))
    assert ours() == []
