"""Reading takes no lock and writes nothing: as on NFS without locks, and on media of another.

The kernel's own filter (seccomp) ends the process at the first call of any thread that does.
"""

import ctypes
import os
import platform
import signal
import struct
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset
from torchvision.transforms import v2

from dataloaders.cache import precompute
from helpers import warm
from helpers.numbered import Made
from helpers.photos import picture

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_LOCKS = (6, 7, 37, 38, 1024)  # F_SETLK, F_SETLKW, F_OFD_SETLK, F_OFD_SETLKW, F_SETLEASE
_NUMBERS = {
    "x86_64": {
        "seccomp": 317, "flock": 73, "fcntl": 72, "open": 2, "openat": 257,
        "rest": (85, 437, 76, 77, 82, 264, 316, 87, 263, 83, 258, 84, 86, 265, 88, 266, 90, 91, 268,
                 280, 18, 285, 296, 328),
    },
    "aarch64": {
        "seccomp": 277, "flock": 32, "fcntl": 25, "open": None, "openat": 56,
        "rest": (437, 45, 46, 38, 276, 35, 34, 37, 36, 52, 53, 88, 68, 47, 70, 287),
    },
}  # fmt: skip
"""Of system calls; the rest: creat, openat2, truncate, rename, unlink, mkdir, link, chmod, utimes,
pwrite, pwritev, fallocate, and what these are called today."""

_KNOWN = sys.platform == "linux" and platform.machine() in _NUMBERS

pytestmark = pytest.mark.skipif(not _KNOWN, reason="the numbers of the system calls are not known")

_KILL, _ALLOW = 0x80000000, 0x7FFF0000  # the whole process, with SIGSYS
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06


def forbid():
    """End this process where it would lock or write a file; what is open can be written to.

    Raises:
        OSError: the kernel has no such filter.
    """
    numbers = _NUMBERS[platform.machine()]
    program = [(_LOAD, 0, 0, 0)]  # first, which call it is
    for number in (numbers["flock"], *numbers["rest"]):
        program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _KILL)]
    program += _looked_at(numbers["fcntl"], 1, [(_EQUAL, lock) for lock in _LOCKS])
    program += _looked_at(numbers["openat"], 2, [(_ANY_BIT, _WRITES)])
    if numbers["open"] is not None:
        program += _looked_at(numbers["open"], 1, [(_ANY_BIT, _WRITES)])
    program.append((_RETURN, 0, 0, _ALLOW))
    code = b"".join(struct.pack("<HBBI", *each) for each in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    head = struct.pack("<HxxxxxxQ", len(program), ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.prctl(38, 1, 0, 0, 0))  # PR_SET_NO_NEW_PRIVS
    # SECCOMP_SET_MODE_FILTER, for all threads that there are.
    _check(libc.syscall(numbers["seccomp"], 1, 1, ctypes.create_string_buffer(head, len(head))))


def _looked_at(number, argument, tests):
    """Killed where a test of this argument is true."""
    body = [(_LOAD, 0, 0, 16 + 8 * argument)]
    for code, value in tests:
        body += [(code, 0, 1, value), (_RETURN, 0, 0, _KILL)]
    body.append((_RETURN, 0, 0, _ALLOW))
    return [(_EQUAL, 0, len(body), number), *body]


def _check(result):
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"no seccomp filter: {os.strerror(number)}")


ROOT = Path(__file__).resolve().parent.parent
START = f"""
import sys
sys.dont_write_bytecode = True
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
from pathlib import Path
from test_cache_no_writing import Pictures, forbid
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
