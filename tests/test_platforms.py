"""What works without what Windows lacks, and what says so instead.

Simulated on Linux, in an interpreter of its own, which has none of what Windows lacks; macOS lacks
a part of that. torch and parts of Python choose their code by platform: they are imported
before, and stay as on Linux, as do files and torch's ways to start workers and to share memory.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import builtins
import concurrent.futures
import io
import logging.handlers
import mmap
import multiprocessing.popen_spawn_posix
import multiprocessing.resource_sharer
import multiprocessing.synchronize
import os
import signal
import sys
import types

import rich.console
import torch
from torch.utils.data import Dataset

MISSING = (
    "sysconf getloadavg sched_getaffinity sched_setaffinity posix_fadvise posix_fallocate "
    "register_at_fork fork pread preadv pwrite pwritev statvfs fstatvfs getuid geteuid uname "
    "O_CLOEXEC O_DIRECTORY O_NOFOLLOW O_NONBLOCK"
)


class Map(mmap.mmap):
    def __new__(cls, fileno, length, access=0, offset=0):
        return super().__new__(cls, fileno, length, access=access, offset=offset)

    @property
    def madvise(self):
        raise AttributeError("madvise")


def opened(file, *arguments, **options):
    if not isinstance(file, int) and os.fspath(file).startswith(("/proc", "/sys", "/dev/shm")):
        raise FileNotFoundError(2, "No such file or directory", file)
    return OPEN(file, *arguments, **options)


# Its way to send a semaphore to a spawned worker is this system's.
multiprocessing.synchronize.sys = types.SimpleNamespace(**vars(sys))
sys.platform = "win32"
for module in ("fcntl", "resource", "termios", "tty", "pty", "pwd", "grp"):
    sys.modules[module] = None  # importing it is an ImportError
for name in MISSING.split():
    delattr(os, name)
for name in [name for name in vars(mmap) if name.startswith(("MAP_", "MADV_", "PROT_"))]:
    delattr(mmap, name)
for name in ("SIGKILL", "SIGBUS", "SIGALRM", "SIGUSR1"):
    delattr(signal, name)
mmap.mmap = Map
OPEN = io.open
io.open = builtins.open = opened

from dataloaders import DataLoader
from dataloaders.errors import DataLoadersError


class Large(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.full((3, 300, 300), float(index))  # a batch's memory comes from the pool


if __name__ == "__main__":
    torch.multiprocessing.set_start_method("spawn")
    settings = [
        dict(num_workers=0),
        dict(num_workers=2, seed=1),
        dict(num_workers="auto", prefetch_factor="auto", pin_memory="auto"),
        dict(backend="prefetch"),
    ]
    for arguments in settings:
        loader = DataLoader(Large(), 4, **arguments)
        assert [float(batch[0, 0, 0, 0]) for batch in loader] == [0.0, 4.0, 8.0, 12.0]
        assert loader.explain().runs

    def said(make):
        try:
            make()
        except (DataLoadersError, OSError) as error:
            print(error)

    def pages():
        from dataloaders.machine.page_cache import resident_pages

        resident_pages(__file__)

    said(pages)
    said(lambda: __import__("dataloaders.cache"))
    said(lambda: DataLoader(Large(), 4, backend="h5").explain())
"""


@pytest.mark.nightly
def test_plain_loaders_work_and_the_rest_says_what_is_missing(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    root, cache = str(Path(__file__).parents[1]), str(tmp_path / "cache")
    run = subprocess.run(
        [sys.executable, program],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": root, "DATALOADERS_CACHE": cache},
    )
    assert run.returncode == 0, run.stderr
    pages, *caches = run.stdout.splitlines()
    assert pages.startswith("only Linux reports which pages of a file are in memory")
    assert "this is win32, which has no /proc/self/maps" in pages
    needs = "dataloaders.cache, and with it backend='h5' and 'dali', needs fcntl and os.pread"
    assert len(caches) == 2
    assert all(line.startswith(f"{needs}, which Windows lacks") for line in caches)
