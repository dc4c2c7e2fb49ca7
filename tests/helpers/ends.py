"""Scripts that end in various ways while their iterators live."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dataloaders import Backend

from .processes import run_script, wait_until_gone

__all__ = ["EVERYDAY", "SOURCES", "Alive", "assert_ends_cleanly"]

SOURCES = {
    "module level": """
kept = begin()
""",
    "main guard, until modules are cleared": """
if __name__ == "__main__":
    threading.script = sys.modules["__main__"]  # any module that Python clears late would do
    kept = begin()
""",
    "Ctrl-C": """
kept = begin()
os.killpg(0, signal.SIGINT)  # as a terminal does: to the whole group
time.sleep(100)
""",
    "SIGTERM": """
kept = begin()
os.kill(os.getpid(), signal.SIGTERM)  # as a batch system does, to the main process
time.sleep(100)
""",
    "killed workers": """
kept = begin()
for worker in multiprocessing.active_children():
    try:
        os.kill(worker.pid, signal.SIGKILL)
        worker.join()
    except RuntimeError:
        pass  # torch raises out of its handler of the signal, wherever that runs
for (*_, workers), iterator in zip(WANTED, kept[1]):
    if workers:
        try:
            list(iterator)
        except (RuntimeError, OSError, EOFError):  # the last two: what it had sent is gone
            print("died")
""",
    "forked child": """
# Without workers: multiprocessing's own exit handler fails in a child of who started some.
kept = begin([each for each in WANTED if not each[3]])
if (pid := os.fork()) == 0:
    sys.exit(4)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 4
assert len(list(kept[1][0])) == len(kept[0][0]) - 1
""",
}
EVERYDAY = ("module level", "Ctrl-C", "killed workers")

_STATUS = {"Ctrl-C": -2, "SIGTERM": -15}

_BEGIN = f"""
import multiprocessing, os, pickle, signal, sys, threading, time
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from dataloaders import DataLoader
from helpers.datasets import CASES

with open("wanted", "rb") as file:
    WANTED = pickle.load(file)
signal.alarm(100)  # it ends too if nobody asks it to any more

def begin(wanted=WANTED):
    loaders = [
        DataLoader(**{{**CASES[case](), **options}}, backend=backend)
        for backend, case, options, _ in wanted
    ]
    iterators = [iter(loader) for loader in loaders]
    batches = [next(iterator) for iterator in iterators]
    print(*[worker.pid for worker in multiprocessing.active_children()], flush=True)
    return loaders, iterators, batches
"""


class Alive(NamedTuple):
    """A loader whose iterator lives when its script ends.

    Attributes:
        case: its dataset and first options, by their name in `datasets.CASES`.
        options: more of them.
        workers: how many processes the iterator has.
    """

    backend: Backend
    case: str
    options: dict[str, Any]
    workers: int


def assert_ends_cleanly(
    folder: Path, alive: Sequence[Alive], way: str, *, python: Path | None = None
) -> None:
    """Assert that a script with these iterators ends as it should: in silence, nothing left over.

    Args:
        folder: where the script runs.
        alive: what lives.
        way: how it ends, of `SOURCES`.
        python: an interpreter that knows its own packages only; None: this one.
    """
    (folder / "wanted").write_bytes(pickle.dumps([tuple(each) for each in alive]))
    env = {} if python is None else {"PYTHONPATH": ""}
    source, status = _BEGIN + SOURCES[way], _STATUS.get(way, 0)
    done = run_script(folder, source, env=env, python=python, status=status)
    errors = "" if way == "SIGTERM" else done.stderr  # workers may complain that a parent is gone
    last = ["KeyboardInterrupt"] if way == "Ctrl-C" else []
    assert errors.splitlines()[-1:] == last, errors
    assert errors.count("Traceback") == len(last), errors
    pids, *lines = done.stdout.splitlines()
    workers_of = [each.workers for each in alive if each.workers]
    assert lines == ["died"] * (len(workers_of) * (way == "killed workers"))
    assert way == "forked child" or len(pids.split()) == sum(workers_of)
    assert wait_until_gone([int(pid) for pid in pids.split()]) == []
