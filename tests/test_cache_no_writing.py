"""Reading takes no lock and writes nothing: as on NFS without locks, and on media of another."""

import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset
from torchvision.transforms import v2

from dataloaders.cache import precompute
from helpers import warm
from helpers.forbidding import KNOWN
from helpers.numbered import Made
from helpers.photos import picture

pytestmark = pytest.mark.skipif(not KNOWN, reason="the numbers of the system calls are not known")

ROOT = Path(__file__).resolve().parent.parent
START = f"""
import sys
sys.dont_write_bytecode = True
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
from pathlib import Path
from helpers.forbidding import forbid
folder = Path(sys.argv[1])
"""


class Pictures(Dataset[Any]):
    """Images of one size, and what is random behind them."""

    classes = ("even", "odd")

    def __init__(self):
        steps = [v2.Resize((20, 24)), v2.RandomCrop(16), v2.RandomHorizontalFlip()]
        self.transform = v2.Compose([*steps, v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return self.transform(picture(index)), index % 2


def ran(folder, code):
    """What a process does that this is the code of; skips where the kernel has no filters."""
    done = warm.run(["-c", START + code, folder], timeout=100)
    if "no seccomp filter" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    return done


def test_the_filter_sees_what_must_not_happen(tmp_path):
    (tmp_path / "a").write_text("a")
    for code in (
        "fcntl.flock(open(folder / 'a'), fcntl.LOCK_SH)",
        "fcntl.lockf(open(folder / 'a'), fcntl.LOCK_SH)",
        "open(folder / 'a', 'r+')",
        "(folder / 'a').rename(folder / 'new')",
        "import threading; threading.Thread(target=lambda: open(folder / 'new', 'w')).start()",
    ):
        done = ran(tmp_path, f"import fcntl\nforbid()\n{code}")
        assert done.returncode == -signal.SIGSYS, (done.returncode, done.stderr)


READ = """
import pickle, threading
import PIL.Image
from backends.h5 import H5
from dataloaders import DataLoader
from dataloaders.cache import CachedDataset, verify
from test_cache_no_writing import Pictures

forbid()
for path in sorted(folder.glob("*.h5")):
    cached = pickle.loads(pickle.dumps(CachedDataset(path)))
    rows = [cached[row] for row in range(len(cached))]
    assert len(rows) == len(cached[:]) == len(cached[::-1])
    assert len(cached.__getitems__([2, 0, 1])) == 3
    cached.will_read(0, len(cached))
    cached.about_to_read(range(len(cached)))
    threads = [threading.Thread(target=cached.__getitem__, args=(row,)) for row in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cached.failed == [] and cached.row_bytes > 0
    assert verify(path) == []
    assert len(list(DataLoader(cached, batch_size=None))) == len(cached)
    if path.name != "zstd.h5":
        assert cached.classes == ["even", "odd"]
        backend = H5(path, build="never")
        assert len(list(DataLoader(Pictures(), batch_size=3, seed=1, backend=backend))) == 4
    print(path.name)
"""


def test_rows_are_read_verified_and_made_batches(tmp_path):
    for name, options in (("raw", {}), ("png", {"images": "png"})):
        precompute(Pictures(), tmp_path / f"{name}.h5", num_workers=0, **options)
    for rank in range(3):
        options = {"num_workers": 0, "shard": (rank, 3), "wait": rank == 2}
        precompute(Pictures(), tmp_path / "joined.h5", **options)
    if all(map(find_spec, ("zstandard", "hdf5plugin"))):
        numbers = Made(lambda index: torch.arange(4000 + 100 * index) // (index + 1), 30)
        precompute(numbers, tmp_path / "zstd.h5", num_workers=0, compress="zstd")
    done = ran(tmp_path, READ)
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert done.stdout.split() == sorted(path.name for path in tmp_path.glob("*.h5"))
