"""What is read of a machine whose files are made up: numbers in, numbers out."""

from __future__ import annotations

import os

import pytest

from dataloaders.machine import resources
from dataloaders.machine.resources import ProcessMemory

MIB = 2**20


def write(root, path, text):
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("processor : 0\nmodel name\t: AMD EPYC 7B13\nmodel name : other\n", "AMD EPYC 7B13"),
        ("processor : 0\nModel : Raspberry Pi 5: Rev 1\n", "Raspberry Pi 5: Rev 1"),
        ("cpu model : MIPS\n", "MIPS"),
        ("processor : 0\n", "unknown"),
    ],
)
def test_the_processors_name(text, model, tmp_path):
    write(tmp_path, "proc/cpuinfo", text)
    assert resources.cpu_model(tmp_path) == model
    assert resources.cpu_model(tmp_path / "nowhere") == "unknown"


def test_a_system_without_affinity_masks_has_all_its_cores(monkeypatch, tmp_path):
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert resources.usable_cores(tmp_path) == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert resources.usable_cores(tmp_path) == 1


@pytest.mark.parametrize(
    ("ranks", "expected"), [("", 1), ("0", 1), ("3", 3), ("-2", 1), ("many", 1)]
)
def test_the_ranks_of_torchrun(ranks, expected, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert resources.ranks_here() == expected


def test_the_cache_that_nobody_uses_is_free_under_version_1_too(tmp_path):
    write(tmp_path, "proc/meminfo", "MemAvailable: 1048576 kB\n")
    write(tmp_path, "proc/self/cgroup", "4:memory:/a\n")
    write(
        tmp_path,
        "proc/self/mountinfo",
        "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup c rw,memory\n",
    )
    folder = "sys/fs/cgroup/memory/a"
    write(tmp_path, f"{folder}/memory.limit_in_bytes", f"{100 * MIB}\n")
    assert resources.available_memory(tmp_path) == 1024 * MIB  # what is used is not told
    write(tmp_path, f"{folder}/memory.usage_in_bytes", f"{70 * MIB}\n")
    write(tmp_path, f"{folder}/memory.stat", f"total_inactive_file {20 * MIB}\n")
    assert resources.available_memory(tmp_path) == 50 * MIB
    write(tmp_path, f"{folder}/memory.stat", f"total_inactive_file {90 * MIB}\n")
    assert resources.available_memory(tmp_path) == 100 * MIB  # more of it than is used: all free


@pytest.mark.parametrize(
    ("anonymous", "shared"), [(100, 70), (30, 0), (20, 0)], ids=["shared", "own", "less than dirty"]
)
def test_the_memory_of_a_process(anonymous, shared, tmp_path):
    write(
        tmp_path,
        "proc/7/smaps_rollup",
        f"Pss: 50 kB\nPrivate_Clean: 5 kB\nPrivate_Dirty: 30 kB\nAnonymous: {anonymous} kB\n",
    )
    assert resources.process_memory(7, tmp_path) == ProcessMemory(
        private=35 * 1024, proportional=50 * 1024, shared_anonymous=shared * 1024
    )
    write(tmp_path, "proc/8/smaps_rollup", "Rss: 50 kB\n")
    assert resources.process_memory(8, tmp_path) is None


def test_batches_in_shared_memory():
    assert resources.batches_in_flight(0, 4) == 0
    assert resources.batches_in_flight(1, 1) == 3
    assert resources.batches_in_flight(3, 4) == 14
    assert resources.batches_that_fit(300, 1000) == 3
    assert resources.batches_that_fit(1000, 1000) == 1
    assert resources.batches_that_fit(0, 1000) is None
    assert resources.batches_that_fit(300, None) is None


@pytest.mark.parametrize(
    ("nbytes", "words", "remedy"),
    [
        (1000, "1000 bytes in", "1g"),
        (1024, "1.0 KiB in", "1g"),
        (MIB - 1, "1024.0 KiB in", "1g"),
        (MIB, "1.0 MiB in", "1g"),
        (1 << 30, "1.0 GiB in", "15g"),
        (1536 * MIB, "1.5 GiB in", "23g"),
    ],
)
def test_a_shortage_in_words(nbytes, words, remedy, monkeypatch, tmp_path):
    monkeypatch.setattr(resources, "shm_room", lambda path: nbytes * 9)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    text = resources.shm_shortage(2, 4, nbytes, tmp_path)
    assert text is not None
    assert f"can have 10 batches of {words} {tmp_path} at once" in text
    assert f"--shm-size={remedy}," in text
    monkeypatch.setattr(resources, "shm_room", lambda path: nbytes * 10)
    assert resources.shm_shortage(2, 4, nbytes, tmp_path) is None


def test_a_cgroup_below_that_of_its_container(tmp_path):
    write(tmp_path, "proc/self/cgroup", "nonsense\n1:cpu:/elsewhere\n0::/docker/abc/sub\n")
    write(
        tmp_path,
        "proc/self/mountinfo",
        "30 23 0:26 /docker/abc /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n",
    )
    write(tmp_path, "sys/fs/cgroup/cpu.max", "900000 100000\n")
    write(tmp_path, "sys/fs/cgroup/sub/cpu.max", "150000 100000\n")
    write(tmp_path, "sys/fs/cgroup/elsewhere/cpu.max", "100000 100000\n")
    assert resources.cpu_quota(tmp_path) == 1.5
