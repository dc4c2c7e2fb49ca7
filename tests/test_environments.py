"""What works with torch and numpy alone, and without what Windows lacks; what says so instead."""

import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from backends.h5 import H5
from backends.prefetch import Prefetch
from backends.stock import Stock
from dataloaders.cache import precompute
from helpers import base_environment, ends
from helpers.contract import WORKERS
from helpers.processes import run_script

pytestmark = pytest.mark.nightly
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The interpreter of an environment without any extra."""
    return base_environment.make(tmp_path_factory.mktemp("base"))


def run(folder, source, python, **env):
    return run_script(folder, source, env={"PYTHONPATH": "", **env}, python=python)


def test_commands_without_rich_and_psutil(python, tmp_path):
    precompute(TensorDataset(torch.zeros(32, 3).byte()), tmp_path / "train.h5", num_workers=0)
    script = "for batch in torch.utils.data.DataLoader(range(400)): pass\n"
    (tmp_path / "train.py").write_text(f"import torch\n{script}")
    done = run(
        tmp_path,
        """
        from dataloaders.cli import main

        print("status", main(["check", "train.py"]))
        print("status", main(["tune", "--budget", "0.5", "--quiet", "train.py"]), flush=True)
        assert main(["cache", "info", "train.h5"]) == 0
        assert main(["cache", "verify", "train.h5", "--quiet"]) == 0
        assert main(["backends"]) == 0
        """,
        python,
        DATALOADERS_CACHE=str(tmp_path),
    )
    lines = done.stdout.splitlines()
    assert [one for one in lines if one.startswith("status")] == ["status 2", "status 0"]
    assert done.stderr.startswith("dataloaders check: the bottleneck check needs psutil and rich, ")
    assert done.stderr.endswith("; install them with: pip install 'gpu-dataloaders[check]'\n")
    assert "tensor:uint8" in done.stdout
    assert "train.h5 is whole" in done.stdout
    assert "nvidia-dali-cuda130" in done.stdout


BUILD = """
from dataloaders.cli import main
assert main(["cache", "build", "data.py:train", "x.h5", "--workers", "0"]) == 0
"""


def test_a_script_ends_cleanly_while_its_iterators_live(python, tmp_path):
    # Built without torchvision, as it is read. Only building needs h5py.
    (tmp_path / "data.py").write_text("from helpers.datasets import large\ntrain = large()\n")
    builder = base_environment.make(tmp_path / "with h5py", "h5")
    built = run(tmp_path, BUILD, builder, PYTHONPATH=str(ROOT / "tests"))
    assert built.stderr.startswith("build  256 samples, about ")
    assert built.stdout.startswith("x.h5: 256 samples, ")
    alive = [
        ends.Alive(backend, "large tensors", workers, len(workers) > 0)
        for backend in (Stock(), Prefetch(), H5(tmp_path / "x.h5", build="never"))
        for workers in WORKERS.values()
    ]
    for way in ends.SOURCES:
        ends.assert_ends_cleanly(tmp_path, alive, way, python=python)


def test_a_forked_child_that_exits_does_not_wait_for_threads_of_its_parent(tmp_path):
    alive = [ends.Alive(Prefetch(), "large tensors", {"device": "cpu"}, 0)] * 20
    ends.assert_ends_cleanly(tmp_path, alive, "forked child")


# Windows


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

MISSING = {
    os: "sysconf getloadavg sched_getaffinity sched_setaffinity posix_fadvise posix_fallocate "
    "register_at_fork fork pread preadv pwrite pwritev statvfs fstatvfs getuid geteuid uname "
    "O_CLOEXEC O_DIRECTORY O_NOFOLLOW O_NONBLOCK",
    signal: "SIGKILL SIGBUS SIGALRM SIGUSR1",
    mmap: " ".join(name for name in vars(mmap) if name.startswith(("MAP_", "MADV_", "PROT_"))),
}


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
for module, names in MISSING.items():
    for name in names.split():
        delattr(module, name)
mmap.mmap = Map
OPEN = io.open
io.open = builtins.open = opened

from dataloaders import DataLoader
from dataloaders.errors import DataLoadersError
from dataloaders.machine.page_cache import resident_pages

if __name__ == "__main__":
    torch.multiprocessing.set_start_method("spawn")
    large = [torch.full((3, 300, 300), float(index)) for index in range(16)]
    settings = [
        dict(num_workers=0),
        dict(num_workers=2, seed=1),
        dict(num_workers="auto", prefetch_factor="auto", pin_memory="auto"),
        dict(backend="prefetch"),
    ]
    for arguments in settings:
        loader = DataLoader(large, 4, **arguments)
        assert [float(batch[0, 0, 0, 0]) for batch in loader] == [0.0, 4.0, 8.0, 12.0]
        assert loader.explain().runs

    def said(make):
        try:
            make()
        except (DataLoadersError, OSError) as error:
            print(error)

    said(lambda: resident_pages(__file__))
    said(lambda: __import__("dataloaders.cache"))
    said(lambda: DataLoader(large, 4, backend="h5").explain())
"""


def test_plain_loaders_work_and_the_rest_says_what_is_missing(tmp_path):
    env = {"PYTHONPATH": str(ROOT), "DATALOADERS_CACHE": str(tmp_path / "cache")}
    done = run(tmp_path, PROGRAM, sys.executable, **env)
    pages, *caches = done.stdout.splitlines()
    assert pages.startswith("only Linux reports which pages of a file are in memory")
    assert "this is win32, which has no /proc/self/maps" in pages
    needs = "dataloaders.cache, and with it backend='h5' and 'dali', needs fcntl and os.pread"
    assert len(caches) == 2
    assert all(line.startswith(f"{needs}, which Windows lacks") for line in caches)
