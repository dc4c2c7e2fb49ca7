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
from dataloaders.errors import CacheError
from helpers import warm
from helpers.forbidding import KNOWN
from helpers.numbered import Made
from helpers.photos import picture

pytestmark = pytest.mark.skipif(not KNOWN, reason="the numbers of the system calls are not known")

ROOT = Path(__file__).resolve().parent.parent
ALONE = f"""
import sys
sys.dont_write_bytecode = True
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
from pathlib import Path
from helpers.forbidding import forbid, forbid_writing_in
folder = Path(sys.argv[1])
"""
START = f"""
{ALONE}
import pickle
import threading
import torch
import backends.h5
from dataloaders import DataLoader
from dataloaders.cache import CachedDataset, verify
from test_cache_no_writing import Pictures
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("caches")
    precompute(Pictures(), folder / "raw.h5", num_workers=0)
    precompute(Pictures(), folder / "jpeg.h5", num_workers=0, images="jpeg")
    for rank in range(3):
        precompute(Pictures(), folder / "joined.h5", num_workers=0, shard=(rank, 3), wait=rank == 2)
    if all(map(find_spec, ("zstandard", "hdf5plugin"))):
        precompute(numbers, folder / "zstd.h5", num_workers=0, compress="zstd")
    return folder


numbers = Made(lambda index: torch.arange(4000 + 100 * index) // (index + 1), 30)


def ran(folder, code):
    """What a process does that this is the code of; skips where the kernel has no filters."""
    done = warm.run(["-c", code, folder], timeout=100)
    if "no seccomp filter" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    return done


def test_the_filter_and_the_hook_see_what_must_not_happen(tmp_path):
    (tmp_path / "a").write_text("a")
    for code in (
        "fcntl.flock(open(folder / 'a'), fcntl.LOCK_SH)",
        "fcntl.lockf(open(folder / 'a'), fcntl.LOCK_SH)",
        "open(folder / 'a', 'r+')",
        "(folder / 'a').rename(folder / 'new')",
        "import threading; threading.Thread(target=lambda: open(folder / 'new', 'w')).start()",
    ):
        done = ran(tmp_path, f"{ALONE}\nimport fcntl\nforbid(writing=True)\n{code}")
        assert done.returncode == -signal.SIGSYS, (done.returncode, done.stderr)
    done = ran(tmp_path, f"{ALONE}\nforbid_writing_in(folder)\n(folder / 'new').open('w')")
    assert done.returncode == 99


ROWS = """
import PIL.Image
forbid(writing=True)
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
    assert path.name == "zstd.h5" or cached.classes == ["even", "odd"]
    if path.name == "raw.h5":
        assert cached.column("0").shape == (12, 3, 20, 24)
    assert verify(path) == []
    print(path.name)
"""


def test_rows_are_read_and_verified(folder):
    done = ran(folder, START + ROWS)
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert done.stdout.split() == sorted(path.name for path in folder.glob("*.h5"))


LOADERS = """
from backends.h5 import H5
forbid_writing_in(folder)
forbid(writing=False)
if __name__ == "__main__":
    for name in ("raw.h5", "jpeg.h5", "joined.h5"):
        for workers in (0, 2) if name == "raw.h5" else (2,):
            plain = DataLoader(CachedDataset(folder / name), batch_size=None, num_workers=workers)
            assert len(list(plain)) == 12
            loader = DataLoader(
                Pictures(), batch_size=3, num_workers=workers, seed=1,
                backend=H5(folder / name, build="never"),
                collate_fn=list if name == "jpeg.h5" else None,
            )
            for _ in range(2):
                assert len(list(loader)) == 4
        print(name)
"""


@pytest.mark.nightly
def test_through_loaders_and_the_backend(folder):
    # torch's workers make semaphores, which are files elsewhere: no lock, and nothing in here.
    done = ran(folder, START + LOADERS)
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert done.stdout.split() == ["raw.h5", "jpeg.h5", "joined.h5"]


def test_a_file_that_is_cut_short_under_a_reader(tmp_path):
    path = tmp_path / "a.h5"
    cached = precompute(numbers, path, num_workers=0)
    whole = path.read_bytes()
    with open(path, "r+b") as file:
        file.truncate(len(whole) // 2)
    with pytest.raises(
        CacheError, match=r"a\.h5 was cut short while it was open: it has \d+ bytes"
    ):
        cached.__getitems__([29])
    with pytest.raises(CacheError, match="cut short"):
        cached[20:]
    path.write_bytes(whole)  # somebody copied over it
    assert len(cached[20:]) == 10
    other = tmp_path / "b.h5"
    other.write_bytes(b"shorter")
    other.replace(path)  # another file of its name: the one that is open stays as it is
    assert len(cached[20:]) == 10
    path.unlink()
    assert len(cached[20:]) == 10
