"""Scripts that end in various ways while their iterators live.

    test ──> an interpreter ──fork──> one child for each way, which begins and then ends
                            <──────── its exit status, its output, which workers are left

A child is forked before it has made anything, and ends as any interpreter does: exit handlers run,
and modules are cleared. All ways run at once.
"""

from __future__ import annotations

import json
import pickle
import textwrap
from collections.abc import Iterable, Sequence
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
    "sys.exit in the loop": """
def train():
    global kept
    kept = begin()
    for batches in zip(*kept[0]):
        sys.exit(3)

train()
""",
    "error in the loop": """
def train():
    kept = begin()
    for batches in zip(*kept[0]):
        raise ValueError("the step failed")

train()
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

_STATUS = {"sys.exit in the loop": 3, "error in the loop": 1, "Ctrl-C": -2, "SIGTERM": -15}
_LAST_LINE = {"error in the loop": "ValueError: the step failed", "Ctrl-C": "KeyboardInterrupt"}

_SCRIPT = f"""
import json, multiprocessing, os, pickle, signal, sys, threading, time
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from dataloaders import DataLoader
from helpers.datasets import CASES

WANTED, SOURCES = pickle.loads(Path("wanted").read_bytes())

def begin(wanted=WANTED):
    loaders = [
        DataLoader(**{{**CASES[case](), **options}}, backend=backend)
        for backend, case, options, _ in wanted
    ]
    iterators = [iter(loader) for loader in loaders]
    batches = [next(iterator) for iterator in iterators]
    print(*[worker.pid for worker in multiprocessing.active_children()], flush=True)
    return loaders, iterators, batches

PIDS = {{}}
for END, SOURCE in SOURCES.items():
    if (PID := os.fork()) == 0:
        os.setpgid(0, 0)
        signal.alarm(100)  # it ends too if nobody asks it to any more
        os.dup2(os.open(END + ".out", os.O_WRONLY | os.O_CREAT), 1)
        os.dup2(os.open(END + ".err", os.O_WRONLY | os.O_CREAT), 2)
        break
    PIDS[END] = PID
else:
    ENDED = {{
        end: (os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]),
              Path(end + ".out").read_text(), Path(end + ".err").read_text())
        for end, pid in PIDS.items()
    }}
    Path("ended").write_text(json.dumps(ENDED))
    os._exit(0)
exec(compile(SOURCE, END, "exec"))
"""


class Alive(NamedTuple):
    """A loader whose iterator lives when its script ends: a `Case` by name, and more options.

    Attributes:
        workers: how many processes the iterator has.
    """

    backend: Backend
    case: str
    options: dict[str, Any]
    workers: int


def assert_ends_cleanly(
    folder: Path,
    alive: Sequence[Alive],
    ends: Iterable[str] = SOURCES,
    *,
    python: Path | None = None,
) -> None:
    """Assert that a script with these iterators ends as it should: in silence, nothing left over.

    Args:
        folder: where the scripts run.
        alive: what lives.
        ends: how it ends, of `SOURCES`.
        python: an interpreter that knows its own packages only; None: this one.
    """
    sources = {end: textwrap.dedent(SOURCES[end]) for end in ends}
    (folder / "wanted").write_bytes(pickle.dumps(([tuple(each) for each in alive], sources)))
    other = {} if python is None else {"python": python, "env": {"PYTHONPATH": ""}}
    done = run_script(folder, _SCRIPT, fresh=True, **other)
    assert done.returncode == 0, done.stderr
    assert (done.stdout, done.stderr) == ("", "")
    ended = json.loads((folder / "ended").read_text())
    assert list(ended) == list(sources)
    workers_of = [each.workers for each in alive if each.workers]
    for end, (status, output, errors) in ended.items():
        if end == "SIGTERM":
            errors = ""  # torch's workers may complain that their parent is gone
        last = _LAST_LINE.get(end)
        assert errors.splitlines()[-1:] == ([last] if last else []), f"{end}: {errors}"
        assert errors.count("Traceback") == bool(last), f"{end}: {errors}"
        assert status == _STATUS.get(end, 0), end
        workers, *lines = output.splitlines()
        died = end == "killed workers"
        assert lines == ["died"] * (len(workers_of) * died), f"{end}: {lines}"
        assert end == "forked child" or len(workers.split()) == sum(workers_of), end
        assert wait_until_gone([int(pid) for pid in workers.split()]) == [], end
