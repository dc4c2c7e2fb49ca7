"""Return what this machine can give a loader's workers: cores, memory and shared memory.

    usable_cores()        affinity and every cgroup quota above this process    ┐
    available_memory()    MemAvailable and every cgroup limit above it          │ divided by
    total_memory()        main memory and every cgroup limit above it           │ ranks_here()
    shm_room()            free in /dev/shm, where torch's workers put batches   ┘
    python_heap_bytes()   what every forked worker may come to copy by counting references

The ranks that torchrun starts on one machine share its cores and its memory. Only this module
divides by their number: its results are for this rank. It ignores the load average, which also
counts the processes of other containers and jobs.

``root`` is the folder that stands for ``/``, so that tests can present any machine. A missing or
malformed file counts as no limit.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path

SHM = Path("/dev/shm")
_ROOT = Path("/")
# Batches beyond workers * prefetch_factor that can be alive: the one that the training step holds
# while it asks for the next, and the next one.
_HELD_BY_CONSUMER = 2
# A Python object takes 16 to 512 bytes, 66 on average over the objects of a process that has
# imported torch (sys.getsizeof); 80 with the unused ends of pools and arenas.
_BYTES_PER_PYTHON_BLOCK = 80
_ASSUMED_MEMORY = 4 << 30  # for a machine that does not say


def ranks_here() -> int:
    """Return how many ranks torchrun has started on this machine, this one included.

    1 without LOCAL_WORLD_SIZE in the environment, or if it is not a number.
    """
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(text)) if text.isdecimal() else 1


def usable_cores(root: Path = _ROOT) -> int:
    """Return how many cores this rank can keep busy: at least 1.

    The cores that all ranks here share, divided by their number, and no more than this process's
    affinity mask holds.
    """
    return max(1, min(len(_affinity(0)), machine_cores(root) // ranks_here()))


def machine_cores(root: Path = _ROOT) -> int:
    """Return how many cores all ranks on this machine may use together: at least 1.

    The smaller of the affinity mask and the cgroup CPU quota. The quota is rounded up (1.5 cores
    are used in full only by two processes). Ranks in one container share its quota.

    A launcher may narrow the mask of each rank (numactl, `torchrun --numa-binding`): dividing that
    mask by the number of ranks would divide twice. With several ranks, the mask is therefore that
    of the parent process, which is the launcher, together with this process's own.
    """
    cores = _affinity(0)
    if ranks_here() > 1:
        cores = cores | _affinity(os.getppid())
    quota = cpu_quota(root)
    return max(1, len(cores) if quota is None else min(len(cores), math.ceil(quota)))


def _affinity(pid: int) -> set[int]:
    try:
        return os.sched_getaffinity(pid)
    except AttributeError:  # macOS, Windows
        return set(range(os.cpu_count() or 1))
    except OSError:  # a parent process that has ended, or is another user's
        return set()


def cpu_quota(root: Path = _ROOT) -> float | None:
    """Return the CPU time, in cores, that cgroups allow this process; None without a quota.

    The smallest quota of its own cgroup and of all above it (a parent's quota binds its children),
    in version 2 (``cpu.max``) and version 1 (``cpu.cfs_quota_us``) hierarchies.
    """
    quotas = []
    for folder in _cgroups("cpu", root):
        words = _text(folder / "cpu.max").split()
        words = words or [_text(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
        quota, period = _number(words, 0), _number(words, 1)
        if quota is not None and period and quota > 0:  # "max" and -1 mean no quota
            quotas.append(quota / period)
    return min(quotas, default=None)


def available_memory(root: Path = _ROOT) -> int:
    """Return the bytes that this rank's new processes can take before something is killed.

    The smallest of the kernel's MemAvailable (where there is none, of all memory) and, for this
    process's cgroup and all above it, the limit less what is used (file cache that is not in active
    use counts as free), divided by the ranks on this machine.
    """
    kilobytes = numbers_in(root / "proc/meminfo").get("MemAvailable:")
    rooms = [_machine_memory() if kilobytes is None else kilobytes * 1024]
    for folder, limit in _memory_limits(root):
        used = _first_number(folder, "memory.current", "memory.usage_in_bytes") or 0
        fields = numbers_in(folder / "memory.stat")  # in version 1 its totals count what is below
        idle = fields.get("total_inactive_file", fields.get("inactive_file", 0))
        rooms.append(max(0, limit - max(0, used - idle)))
    return min(rooms) // ranks_here()


def total_memory(root: Path = _ROOT) -> int:
    """Return this rank's bytes of main memory.

    The smallest of the machine's memory and of all cgroup limits above this process, divided by
    the ranks on this machine.
    """
    limits = (limit for _, limit in _memory_limits(root))
    return min([_machine_memory(), *limits]) // ranks_here()


def _machine_memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except AttributeError:  # Windows
        return _ASSUMED_MEMORY


def _memory_limits(root: Path) -> Iterator[tuple[Path, int]]:
    """Yield the cgroups of this process that limit memory, and the bytes that they allow."""
    for folder in _cgroups("memory", root):
        limit = _first_number(folder, "memory.max", "memory.limit_in_bytes")
        if limit is not None:
            yield folder, limit


def cpu_model(root: Path = _ROOT) -> str:
    """Return the processor's name, such as "AMD EPYC 7B13"; "unknown" if not given."""
    return field_of(root / "proc/cpuinfo", "model name", "Model") or "unknown"


def shm_room(path: Path = SHM) -> int | None:
    """Return how many bytes of shared memory this rank's batches may take.

    The free bytes divided by the ranks on this machine; None if there is no such folder.
    """
    try:
        room = os.statvfs(path)
    except (OSError, AttributeError):  # AttributeError: Windows
        return None
    return room.f_bavail * room.f_frsize // ranks_here()


def batches_in_flight(num_workers: int, prefetch_factor: int) -> int:
    """Return how many batches can be in shared memory at once; 0 without workers."""
    return num_workers * prefetch_factor + _HELD_BY_CONSUMER if num_workers else 0


def batches_that_fit(batch_bytes: int, room: int | None) -> int | None:
    """Return how many batches of ``batch_bytes`` fit into ``room`` bytes; None: any number."""
    return None if room is None or batch_bytes <= 0 else room // batch_bytes


def shm_shortage(
    num_workers: int, prefetch_factor: int, batch_bytes: int, path: Path = SHM
) -> str | None:
    """Say in one sentence what goes wrong with these settings and what to do; None if they fit.

    Torch's workers pass tensors through ``path`` under either sharing strategy. A worker that
    writes to it when it is full is killed by SIGBUS: "DataLoader worker (pid N) is killed by
    signal: Bus error", usually minutes into a run.
    """
    room = shm_room(path)
    fit = batches_that_fit(batch_bytes, room)
    needed = batches_in_flight(num_workers, prefetch_factor)
    if fit is None or room is None or needed <= fit:
        return None
    shared = f" for each of {ranks_here()} ranks" if ranks_here() > 1 else ""
    enough = math.ceil(1.5 * needed * batch_bytes * ranks_here() / 2**30)  # and half to spare
    return (
        f"{num_workers} workers with prefetch_factor={prefetch_factor} can have {needed} batches "
        f"of {batch_bytes / 2**20:,.1f} MiB in {path} at once, and {room / 2**20:,.1f} MiB are "
        f"free there{shared}: a worker that finds it full dies of a bus error. "
        f"Enlarge it (docker run --shm-size={max(1, enough)}g, or "
        "--ipc=host), or use fewer workers or smaller batches (the sharing strategy 'file_system' "
        "uses the same room)"
    )


def python_heap_bytes() -> int:
    """Estimate the bytes of this process's Python objects, which forked workers may copy.

    A worker that uses an object counts a reference to it, which writes to the object's page and so
    copies it. A dataset that is a list of a million strings costs every worker the whole list by
    the end of the first epoch; a tensor or an array costs it nothing.
    """
    return sys.getallocatedblocks() * _BYTES_PER_PYTHON_BLOCK


def _cgroups(controller: str, root: Path) -> Iterator[Path]:
    """Yield the folders of this process's cgroup and of all above it, for both versions.

    A container may see the host's path of its cgroup, while what is mounted is its own part: of
    folders that are not there, those above count.
    """
    for line in _text(root / "proc/self/cgroup").splitlines():
        names, _, path = line.partition(":")[2].partition(":")
        if names and controller not in names.split(","):  # version 2 has no names
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            folder = root.joinpath("sys/fs/cgroup", controller if names else "", *parts[:depth])
            if folder.is_dir():
                yield folder


def field_of(path: Path, *names: str) -> str:
    """Return the value in the first line "name: value" with one of ``names``; "" without one."""
    for line in _text(path).splitlines():
        name, _, value = line.partition(":")
        if name.strip() in names:
            return value.strip()
    return ""


def numbers_in(path: Path) -> dict[str, int]:
    """Read a file with lines of the form "name number ..."."""
    fields = {}
    for words in map(str.split, _text(path).splitlines()):
        value = _number(words, 1)
        if value is not None:
            fields[words[0]] = value
    return fields


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _first_number(folder: Path, *names: str) -> int | None:
    """Return the number in the first of these files that holds one; "max" is none."""
    found = (_number(_text(folder / name).split(), 0) for name in names)
    return next((number for number in found if number is not None), None)


def _number(words: list[str], position: int) -> int | None:
    try:
        return int(words[position])
    except (IndexError, ValueError):
        return None
