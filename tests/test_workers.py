"""Cores, memory and shared memory, read from real files: this machine's and made-up machines'."""

from __future__ import annotations

import math
import multiprocessing
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataloaders.machine import resources
from helpers import warm

MIB = 2**20
CORES = len(os.sched_getaffinity(0))


class Machine:
    """A folder that stands for ``/``, with the files of a machine that is made up."""

    def __init__(self, root):
        self.root = root
        self.write({"proc/meminfo": "MemTotal: 100 kB\nMemAvailable: 8388608 kB\n"})

    def write(self, files):
        for path, text in files.items():
            file = self.root / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)

    def version_2(self, path, mount_root="/", **texts):
        """In cgroup ``path``; ``texts`` by file, which is that of the root."""
        mounts = (
            "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
            f"30 23 0:26 {mount_root} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n"
        )
        self.write({"proc/self/cgroup": f"0::{path}\n", "proc/self/mountinfo": mounts})
        self.write({f"sys/fs/cgroup/{n.replace('_', '.', 1)}": t for n, t in texts.items()})

    def version_1(self, path):
        mounts = (
            "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup c rw,cpu,cpuacct\n"
            "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup c rw,memory\n"
        )
        groups = f"5:cpu,cpuacct:{path}\n4:memory:{path}\n0::/\n"
        self.write({"proc/self/cgroup": groups, "proc/self/mountinfo": mounts})


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_this_machine():
    assert 1 <= resources.usable_cores() <= CORES
    assert 0 < resources.available_memory() <= resources.total_memory()


def test_a_machine_without_any_files(tmp_path):
    assert resources.cpu_quota(tmp_path) is None
    assert resources.usable_cores(tmp_path) == CORES
    assert resources.available_memory(tmp_path) > 0
    assert resources.shm_room(tmp_path / "absent") is None
    assert resources.shm_shortage(8, 2, 10**12, tmp_path / "absent") is None


class TestCores:
    def test_an_affinity_mask_counts_and_ranks_share_the_launchers(self):
        code = (
            "import os; os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])\n"
            "from dataloaders.machine import resources\n"
            "alone = resources.usable_cores()\n"
            "os.environ['LOCAL_WORLD_SIZE'] = '2'\n"
            "print(alone, resources.machine_cores(), resources.usable_cores())"
        )
        run = warm.run(["-c", code])
        assert run.stdout.split() == ["1", str(resources.machine_cores()), "1"], run.stderr

    def test_version_2_quota_of_the_tightest_ancestor(self, machine):
        machine.version_2("/pod/container", cpu_max="800000 100000\n")
        machine.write(
            {
                "sys/fs/cgroup/pod/container/cpu.max": "max 100000\n",
                "sys/fs/cgroup/pod/cpu.max": "150000 100000\n",
            }
        )
        assert resources.cpu_quota(machine.root) == 1.5
        assert resources.usable_cores(machine.root) == min(2, CORES)

    def test_version_1_quota(self, machine):
        machine.version_1("/a/b")
        for group, quota in (("a/b", -1), ("a", 25000)):
            folder = f"sys/fs/cgroup/cpu,cpuacct/{group}/cpu.cfs_"
            machine.write({folder + "quota_us": f"{quota}\n", folder + "period_us": "100000\n"})
        assert resources.cpu_quota(machine.root) == 0.25
        assert resources.usable_cores(machine.root) == 1

    @pytest.mark.parametrize("mount_root", ["/", "/docker/abc"])
    def test_a_container_that_sees_the_hosts_path(self, machine, mount_root):
        machine.version_2("/docker/abc", mount_root, cpu_max="200000 100000\n")
        assert resources.cpu_quota(machine.root) == 2.0

    def test_a_malformed_or_absent_quota_is_none(self, machine):
        for text in ("", "max", "max 100000", "-1 100000", "x y", "5", "7 0"):
            machine.version_2("/", cpu_max=text)
            assert resources.cpu_quota(machine.root) is None, text

    def test_ranks_share_the_quota_of_their_container(self, machine, monkeypatch):
        machine.version_2("/", cpu_max=f"{CORES}00000 100000\n")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(CORES))
        assert resources.usable_cores(machine.root) == 1
        assert resources.machine_cores(machine.root) == CORES
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "many")
        assert resources.usable_cores(machine.root) == CORES

    def test_a_mask_of_ones_own_is_not_divided_again(self):
        for shared, own, ranks, expected in (
            (64, 64, 8, 8),  # nobody narrowed the mask
            (64, 8, 8, 8),  # each rank has a mask of its own
            (64, 32, 8, 8),  # one mask for each half of the ranks
            (16, 16, 8, 2),  # the launcher itself has 16
            (2, 2, 8, 1),
        ):
            assert resources._share(shared, own, ranks) == expected

    @given(text=st.text(max_size=200))
    def test_any_mountinfo_is_survived(self, tmp_path_factory, text):
        machine = Machine(tmp_path_factory.mktemp("any"))
        machine.write({"proc/self/cgroup": "0::/a\n5:cpu:/b\nnonsense\n"})
        (machine.root / "proc/self/mountinfo").write_text(text, errors="replace")
        assert resources.usable_cores(machine.root) >= 1


class TestMemory:
    def test_version_2_limit_less_use_plus_idle_cache(self, machine):
        assert resources.available_memory(machine.root) == 8 * 2**30  # what the kernel says
        machine.version_2("/pod/c")
        folder = "sys/fs/cgroup/pod/"
        machine.write({folder + "c/memory.max": "max\n", folder + "c/memory.current": "0\n"})
        assert resources.total_memory(machine.root) == resources.total_memory()
        machine.write(
            {
                folder + "memory.max": f"{1000 * MIB}\n",
                folder + "memory.current": f"{700 * MIB}\n",
                folder + "memory.stat": f"anon 1\ninactive_file {200 * MIB}\n",
            }
        )
        assert resources.available_memory(machine.root) == 500 * MIB
        assert resources.total_memory(machine.root) == 1000 * MIB

    def test_version_1_limit(self, machine):
        machine.version_1("/a")
        folder = "sys/fs/cgroup/memory/a/memory."
        machine.write({folder + "limit_in_bytes": f"{100 * MIB}\n"})
        machine.write({folder + "usage_in_bytes": f"{130 * MIB}\n"})
        assert resources.available_memory(machine.root) == 0
        machine.write(
            {
                folder + "usage_in_bytes": f"{70 * MIB}\n",
                folder + "stat": f"inactive_file 1\ntotal_inactive_file {20 * MIB}\n",
            }
        )
        assert resources.available_memory(machine.root) == 50 * MIB

    def test_ranks_share_it(self, machine, monkeypatch):
        limits = {"memory_max": f"{1000 * MIB}\n", "memory_current": f"{200 * MIB}\n"}
        machine.version_2("/", **limits)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
        assert resources.available_memory(machine.root) == 100 * MIB
        assert resources.total_memory(machine.root) == 125 * MIB


@pytest.fixture
def small_tmpfs(tmp_path):
    """A real tmpfs of 1 MiB, as a container's /dev/shm would be."""
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], capture_output=True
    )
    if mount.returncode != 0:
        pytest.skip("mounting a tmpfs needs root: " + mount.stderr.decode().strip())
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


class TestSharedMemory:
    def test_a_small_one_is_told_with_numbers_and_remedy(self, small_tmpfs, monkeypatch):
        room = resources.shm_room(small_tmpfs)
        assert room is not None
        assert room <= MIB
        text = resources.shm_shortage(4, 2, 200 * 1024, small_tmpfs) or ""
        assert "4 workers with prefetch_factor=2 can have 10 batches of 200.0 KiB" in text
        assert "1.0 MiB are free" in text
        assert "--shm-size=1g" in text
        assert resources.shm_shortage(1, 2, 200 * 1024, small_tmpfs) is None
        (small_tmpfs / "used").write_bytes(bytes(512 * 1024))
        assert resources.shm_room(small_tmpfs) == room - 512 * 1024
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
        assert resources.shm_room(small_tmpfs) == (room - 512 * 1024) // 4
        text = resources.shm_shortage(1, 2, room // 10, small_tmpfs) or ""
        assert "are free there for each of 4 ranks: " in text

    @given(count=st.integers(0, 64), prefetch=st.integers(1, 16), size=st.integers(1, 10**9))
    def test_what_fits_and_what_falls_short_never_contradict(self, count, prefetch, size):
        fit = resources.batches_that_fit(size, resources.shm_room())
        short = resources.shm_shortage(count, prefetch, size) is not None
        assert fit is not None
        assert short == (resources.batches_in_flight(count, prefetch) > fit)


class TestMemoryOfAProcess:
    def test_a_process_that_is_gone_is_none_and_private_is_part_of_proportional(self):
        gone = subprocess.Popen([sys.executable, "-c", ""])
        gone.wait()
        assert resources.process_memory(gone.pid) is None
        own = resources.process_memory(os.getpid())
        assert own is not None
        assert 0 < own.private <= own.proportional

    def test_counting_references_copies_a_list_and_the_estimate_covers_it(self):
        """What a forked worker comes to own by touching each object of a big Python list."""
        before = resources.python_heap_bytes()
        objects = [f"images/{number:012d}.jpeg" for number in range(1_000_000)]
        estimate = resources.python_heap_bytes() - before
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        child = context.Process(target=_touch_when_told, args=(objects, theirs))
        child.start()
        assert child.pid is not None
        try:
            ours.recv()
            start = resources.process_memory(child.pid)
            ours.send("touch")
            ours.recv()
            end = resources.process_memory(child.pid)
        finally:
            ours.send("end")
            child.join()
        assert start is not None
        assert end is not None
        growth = end.private - start.private
        assert growth > 40 * MIB  # a million strings of 76 bytes
        assert growth <= start.shared_anonymous
        assert 0.5 * growth <= estimate <= 2 * growth
        assert math.isclose(start.shared_anonymous - end.shared_anonymous, growth, rel_tol=0.2)


def _touch_when_told(objects, pipe):
    pipe.send("ready")
    pipe.recv()
    for one in objects:
        len(one)
    pipe.send("touched")
    pipe.recv()
