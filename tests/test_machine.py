"""Cores and memory, of this machine and of machines made of files; background threads."""

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from dataloaders import DataLoader
from dataloaders.machine import facts, resources, threads
from helpers import warm
from helpers.processes import is_true_in_a_fork

MIB = 2**20
CORES = len(os.sched_getaffinity(0))


class Machine:
    """A folder that stands for ``/``, with the files of a machine."""

    def __init__(self, root):
        self.root = root
        self.write("proc", meminfo="MemTotal: 100 kB\nMemAvailable: 8388608 kB\n")

    def write(self, folder, **texts):
        """Write files by name; ``__`` stands for the first dot in it."""
        (self.root / folder).mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (self.root / folder / name.replace("__", ".")).write_text(f"{text}\n")

    def be_in(self, *lines):
        self.write("proc/self", cgroup="\n".join(("nonsense", *lines)))


@pytest.fixture
def machine(tmp_path, monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    return Machine(tmp_path)


def test_this_machine_and_one_without_any_files(tmp_path):
    assert 1 <= resources.usable_cores() <= CORES
    assert 0 < resources.available_memory() <= resources.total_memory()
    assert 10 * MIB < resources.python_heap_bytes() < resources.total_memory()
    assert resources.cpu_quota(tmp_path) is None
    assert resources.usable_cores(tmp_path) == CORES
    assert resources.available_memory(tmp_path) > 0
    assert resources.shm_room(tmp_path / "absent") is None
    assert resources.shm_shortage(8, 2, 10**12, tmp_path / "absent") is None


def test_a_system_that_says_little_has_all_its_cores_and_4_gib(monkeypatch, tmp_path):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.delattr(os, "sysconf")
    assert resources.total_memory(tmp_path) == 4 << 30
    monkeypatch.delattr(os, "sched_getaffinity")
    for count, cores in ((6, 6), (None, 1)):
        monkeypatch.setattr(os, "cpu_count", lambda count=count: count)
        assert resources.usable_cores(tmp_path) == cores


def test_an_affinity_mask_counts_and_ranks_share_the_launchers(monkeypatch, tmp_path):
    code = (
        "import os; os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])\n"
        "from dataloaders.machine import resources\n"
        "alone = resources.usable_cores()\n"
        "os.environ['LOCAL_WORLD_SIZE'] = '2'\n"
        "print(alone, resources.machine_cores(), resources.usable_cores())"
    )
    run = warm.run(["-c", code])
    assert run.stdout.split() == ["1", str(resources.machine_cores()), "1"], run.stderr
    alone = resources.machine_cores()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(os, "getppid", lambda: 2**22 + 1)  # which has ended
    assert resources.machine_cores() == alone
    monkeypatch.setattr(os, "getppid", os.getpid)
    monkeypatch.setattr(os, "sched_getaffinity", {0: {0}, os.getpid(): {1, 2}}.__getitem__)
    for ranks, cores in ((2, 3), (1, 1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        assert resources.machine_cores(tmp_path) == cores
    for shared, own, ranks, expected in (
        (64, 64, 8, 8),  # nobody narrowed the mask
        (64, 8, 8, 8),  # each rank has a mask of its own
        (64, 32, 8, 8),  # one mask for each half of the ranks
        (16, 16, 8, 2),  # the launcher itself has 16
        (2, 2, 8, 1),
    ):
        monkeypatch.setattr(resources, "machine_cores", lambda root, shared=shared: shared)
        masks = {0: set(range(own))}
        monkeypatch.setattr(os, "sched_getaffinity", masks.__getitem__)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        assert resources.usable_cores() == expected


def test_quotas_of_cgroups(machine):
    """The tightest quota of all ancestors counts, in either version; malformed ones do not."""
    machine.be_in("1:cpuset:/elsewhere", "0::/pod/container")
    machine.write("sys/fs/cgroup/elsewhere", cpu__max="100000 100000")
    machine.write("sys/fs/cgroup", cpu__max="800000 100000")
    machine.write("sys/fs/cgroup/pod", cpu__max="150000 100000")
    machine.write("sys/fs/cgroup/pod/container", cpu__max="max 100000")
    assert resources.cpu_quota(machine.root) == 1.5
    assert resources.usable_cores(machine.root) == min(2, CORES)
    machine.be_in("0::/docker/abc")  # a container that sees the host's path
    assert resources.cpu_quota(machine.root) == 8.0
    machine.write("sys/fs/cgroup", cpu__max="1 100000")
    assert resources.cpu_quota(machine.root) == 1e-5
    for text in ("", "max", "max 100000", "-1 100000", "0 100000", "x y", "5", "7 0"):
        machine.write("sys/fs/cgroup", cpu__max=text)
        assert resources.cpu_quota(machine.root) is None, text
    machine.be_in("5:cpu,cpuacct:/a/b")
    for group, quota in (("a/b", -1), ("a", 25000)):
        folder = f"sys/fs/cgroup/cpu/{group}"
        machine.write(folder, cpu__cfs_quota_us=quota, cpu__cfs_period_us=100000)
    assert resources.cpu_quota(machine.root) == 0.25
    assert resources.usable_cores(machine.root) == 1


def test_ranks_share_what_their_container_has(machine, monkeypatch):
    machine.be_in("0::/")
    limits = {"memory__max": 1000 * MIB, "memory__current": 200 * MIB}
    machine.write("sys/fs/cgroup", cpu__max=f"{CORES}00000 100000", **limits)
    for words, ranks in (("", 1), ("0", 1), ("3", 3), ("-2", 1), ("many", 1), (str(CORES), CORES)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", words)
        assert resources.ranks_here() == ranks
        assert resources.usable_cores(machine.root) == max(1, CORES // ranks)
        assert resources.available_memory(machine.root) == 800 * MIB // ranks
        assert resources.total_memory(machine.root) == 1000 * MIB // ranks
    assert resources.machine_cores(machine.root) == CORES
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(resources.machine_cores()))
    assert facts.machine_facts()["cores"].endswith(", 1 of them for this rank")


def test_the_memory_of_a_cgroup_is_its_limit_less_use_plus_idle_cache(machine):
    """In version 2 and in version 1; it binds those below it."""
    assert resources.available_memory(machine.root) == 8 * 2**30  # what the kernel says
    machine.be_in("0::/pod/c")
    machine.write("sys/fs/cgroup/pod/c", memory__max="max", memory__current=0)
    assert resources.total_memory(machine.root) == resources.total_memory()
    machine.write("sys/fs/cgroup/pod", memory__max=1000 * MIB)
    assert resources.available_memory(machine.root) == 1000 * MIB
    limits = {"memory__max": 1000 * MIB, "memory__current": 700 * MIB}
    machine.write("sys/fs/cgroup/pod", memory__stat=f"anon 1\ninactive_file {200 * MIB}", **limits)
    assert resources.available_memory(machine.root) == 500 * MIB
    assert resources.total_memory(machine.root) == 1000 * MIB
    machine.be_in("4:memory:/a")
    machine.write("sys/fs/cgroup/memory/a", memory__limit_in_bytes=100 * MIB)
    # The last has more idle cache than is used: all is free.
    for used, idle, free in ((130, 0, 0), (70, 20, 50), (70, 90, 100)):
        stat = f"inactive_file 1\ntotal_inactive_file {idle * MIB}"
        texts = {"memory__usage_in_bytes": used * MIB, "memory__stat": stat}
        machine.write("sys/fs/cgroup/memory/a", **texts)
        assert resources.available_memory(machine.root) == free * MIB


def test_the_text_of_a_shortage(monkeypatch, tmp_path):
    nbytes = 3 << 29
    monkeypatch.setattr(resources, "shm_room", lambda path: nbytes * 9)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    for ranks, shared, remedy in (("1", "", "23g"), ("2", " for each of 2 ranks", "45g")):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        text = resources.shm_shortage(2, 4, nbytes, tmp_path)
        assert (
            f"2 workers with prefetch_factor=4 can have 10 batches of 1,536.0 MiB in {tmp_path} "
            in text
        )
        assert f"13,824.0 MiB are free there{shared}: " in text
        assert f"--shm-size={remedy}," in text
    assert resources.shm_shortage(2, 4, 0, tmp_path) is None
    assert resources.shm_shortage(0, 4, 10**12, tmp_path) is None  # nothing is sent
    for room in (nbytes * 10, None):
        monkeypatch.setattr(resources, "shm_room", lambda path, room=room: room)
        assert resources.shm_shortage(2, 4, nbytes, tmp_path) is None


def test_the_room_of_a_real_file_system_is_shared_by_ranks(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    whole = os.statvfs("/dev/shm")
    room = resources.shm_room()
    assert room == pytest.approx(whole.f_bavail * whole.f_frsize, rel=0.2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert resources.shm_room() == pytest.approx(room / 4, rel=0.2)


def test_facts_name_cores_and_versions_and_processors_by_the_systems_files(monkeypatch, machine):
    for text, model in (
        ("processor : 0\nmodel name\t: AMD EPYC 7B13\nmodel name : other\n", "AMD EPYC 7B13"),
        ("processor : 0\nModel : Raspberry Pi 5: Rev 1\n", "Raspberry Pi 5: Rev 1"),
        ("processor : 0\n", "unknown"),
    ):
        machine.write("proc", cpuinfo=text)
        assert resources.cpu_model(machine.root) == model
    assert resources.cpu_model(machine.root / "nowhere") == "unknown"
    known = facts.machine_facts()
    assert known["cores"] == f"{resources.machine_cores()} cores"
    assert known["torch"] == f"torch {torch.__version__}"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)  # other tests may use it
    assert facts.gpu_name(machine.root) is None
    model = "Model: \t\t NVIDIA H200\nIRQ:   \t\t 29"
    machine.write("proc/driver/nvidia/gpus/0000:01:00.0", information=model)
    assert facts.gpu_name(machine.root) == "NVIDIA H200"


def test_tests_of_the_cpu_see_no_device():
    """Else backends that deliver on a device would, and batches would not equal torch's."""
    program = "import torch; print(torch.cuda.device_count())"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (os.environ["CUDA_VISIBLE_DEVICES"], found.stdout) == ("", "0\n")


@pytest.mark.gpu
def test_facts_do_not_initialise_cuda():
    source = (
        "import torch; from dataloaders.machine.facts import machine_facts\n"
        "machine_facts(); assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", source], check=True)


def in_a_thread(work):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def test_limiting_one_thread_leaves_others_unchanged():
    before, together = torch.get_num_threads(), threading.Barrier(8)
    torch.set_num_threads(3)

    def own(count):
        together.wait()
        threads.limit_torch_threads(count)
        return torch.get_num_threads()

    try:
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(own, range(1, 9))) == list(range(1, 9))
        assert in_a_thread(torch.get_num_threads) == torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_setting_the_capture_mode_does_not_initialise_cuda():
    threads.use_thread_local_capture()
    assert torch.cuda.is_available() or not torch.cuda.is_initialized()


@pytest.mark.gpu
def test_the_driver_knows_the_mode_of_each_thread():
    torch.zeros(1, device="cuda")
    driver = threads._driver()

    def mode():
        swapped = ctypes.c_int(0)
        assert driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(swapped)) == 0
        return swapped.value

    def exempt():
        torch.cuda.set_device(0)
        threads.use_thread_local_capture()
        return mode()

    assert in_a_thread(exempt) == 1
    assert in_a_thread(mode) == 0


def test_ctrl_c_delivered_to_another_thread_ends_a_wait_for_a_batch():
    ready = multiprocessing.get_context("fork").Event()

    def late(samples):
        assert ready.wait(20)
        return samples

    batches = iter(DataLoader([1], num_workers=1, collate_fn=late, backend="prefetch"))
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    # The kernel now gives the signal to the other thread: nothing wakes a wait of this one.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        with pytest.raises(KeyboardInterrupt):
            next(batches)
    finally:
        timer.cancel()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    ready.set()
    assert next(batches) == [1]


def test_a_child_forked_while_a_thread_is_limited_can_limit_its_own():
    ended = threading.Event()

    def tell():
        while not ended.is_set():
            threads.limit_torch_threads(1)

    thread = threading.Thread(target=tell)
    thread.start()
    try:
        for _ in range(20):
            assert is_true_in_a_fork(lambda: threads.limit_torch_threads(1) is None)
    finally:
        ended.set()
        thread.join()
