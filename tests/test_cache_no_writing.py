"""Reading takes no lock and writes nothing: as on NFS without locks, and on read-only media.

Python's audit hooks tell; what they cannot see, HDF5's own library, is not loaded.
"""

from pathlib import Path

import torch
from torchvision.transforms import v2

from dataloaders.cache import precompute
from helpers import warm
from helpers.datasets import Made
from helpers.pictures import smooth

ROOT = Path(__file__).resolve().parent.parent
START = f"""
import os, sys
sys.dont_write_bytecode = True
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
from pathlib import Path
from test_cache_no_writing import Pictures
folder = Path(sys.argv[1])

def note(event, args):
    of_files = ("fcntl.", "os.", "shutil.", "tempfile.")
    reads = ("os.listdir", "os.scandir", "os.walk", "os.fwalk", "os.putenv", "os.unsetenv")
    writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    if event == "open" and args[2] & writes or event.startswith(of_files) and event not in reads:
        print("forbidden:", event, args, file=sys.stderr, flush=True)
        os._exit(9)

def forbid():
    sys.addaudithook(note)
"""


class Pictures(Made):
    """Images of one size, and what is random behind them."""

    classes, size = ("even", "odd"), 12

    def __init__(self):
        steps = [v2.Resize((20, 24)), v2.RandomCrop(16), v2.RandomHorizontalFlip()]
        floats = v2.ToImage(), v2.ToDtype(torch.float32, scale=True)
        super().__init__(transform=v2.Compose([*steps, *floats]))

    def sample(self, index):
        return self.transform(smooth(index)), index % 2


READ = """
import pickle
from concurrent.futures import ThreadPoolExecutor
import PIL.Image
from backends.h5 import H5
from dataloaders import DataLoader
from dataloaders.cache import CachedDataset, verify

forbid()
for path in sorted(folder.glob("*.h5")):
    cached = pickle.loads(pickle.dumps(CachedDataset(path)))
    rows = [cached[row] for row in range(len(cached))]
    assert len(rows) == len(cached[:]) == len(cached[::-1])
    assert len(cached.__getitems__([2, 0, 1])) == 3
    cached.will_read(0, len(cached))
    cached.located(range(len(cached)))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(cached.__getitem__, range(4)))
    assert cached.failed == [] and cached.row_bytes > 0
    assert verify(path) == []
    assert len(list(DataLoader(cached, batch_size=None))) == len(cached)
    if path.name != "zstd.h5":
        assert cached.classes == ["even", "odd"]
        backend = H5(path, build="never")
        assert len(list(DataLoader(Pictures(), batch_size=3, seed=1, backend=backend))) == 4
    print(path.name)
assert "h5py" not in sys.modules
"""


def test_rows_are_read_verified_and_made_batches(tmp_path):
    for name, options in (("raw", {}), ("png", {"images": "png"})):
        precompute(Pictures(), tmp_path / f"{name}.h5", num_workers=0, **options)
    for rank in range(3):
        options = {"num_workers": 0, "shard": (rank, 3), "wait": rank == 2}
        precompute(Pictures(), tmp_path / "joined.h5", **options)
    numbers = Made(lambda index: torch.arange(4000 + 100 * index) // (index + 1), 30)
    precompute(numbers, tmp_path / "zstd.h5", num_workers=0, compress="zstd")
    done = warm.run(["-c", START + READ, tmp_path], timeout=100)
    assert done.stdout.split() == sorted(path.name for path in tmp_path.glob("*.h5"))
