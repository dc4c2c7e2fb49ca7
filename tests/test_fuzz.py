"""The fuzzer: it sees what it must see, and finds nothing in each target.

A seed and the number of the try, which are printed, give the same input again.
"""

import os
import shutil
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path
from random import Random

import pytest

from fuzz.damage import damaged
from fuzz.targets import TARGETS, sound_files

MANY = int(os.environ.get("FUZZ_TRIES", "500"))
OF_CORES = ("/proc/self/", "/sys/fs/cgroup/")
FORBIDDEN = (
    *("import", "pickle.", "marshal.", "ctypes.", "subprocess.", "socket."),
    *("os.exec", "os.fork", "os.kill", "os.posix_spawn", "os.system"),
)
HOOKS = []  # an audit hook stays to the end of the process
ALLOWED = []  # where files may be opened now; if empty, nothing is watched


def audit(event, arguments):
    if not ALLOWED or not (event == "open" or event.startswith(FORBIDDEN)):
        return
    if event != "open":
        raise AssertionError(f"{event} {arguments[:1]!r:.150}")
    if isinstance(arguments[0], (str, bytes, os.PathLike)):
        path = os.fsdecode(arguments[0])
        folder, ALLOWED[:] = ALLOWED[0], []  # what follows opens files itself
        is_inside = Path(os.path.realpath(path)).is_relative_to(folder)
        ALLOWED[:] = [folder]
        assert is_inside or path.startswith(OF_CORES), path


@contextmanager
def watched(folder):
    """Let nothing be imported, started, unpickled or opened elsewhere."""
    if audit not in HOOKS:
        HOOKS.append(audit)
        sys.addaudithook(audit)
    ALLOWED[:] = [folder.resolve()]
    try:
        yield
    finally:
        ALLOWED.clear()


def test_what_a_file_must_not_do_is_seen(tmp_path):
    (tmp_path / "link").symlink_to("/etc/hosts")
    for call in (
        lambda: Path("/etc/hosts").read_text(),
        lambda: (tmp_path / "link").read_text(),
        lambda: os.system("true"),
        lambda: __import__("this_is_no_module"),
    ):
        with pytest.raises(AssertionError), watched(tmp_path):
            call()
    with watched(tmp_path):
        (tmp_path / "a").write_text("a")


def fuzz(name, tries, seed, folder):
    def run(data, watching=nullcontext):
        one = folder / "one"
        one.mkdir()
        with watching(folder):
            found = TARGETS[name](data, one)
        shutil.rmtree(one)
        return found

    files = list(sound_files(folder))
    inputs = [data for data in files if run(data)]  # imports at first use are no finding
    assert inputs if name == "batches" else inputs == files
    random, sound = Random(seed), len(inputs)
    for number in range(tries):
        print(f"{name}, seed {seed}, try {number}")
        data = damaged(random.choice(inputs), random)
        if run(data, watched):
            inputs.append(data)
    assert len(inputs) > sound + tries // 10, "values are read too, and not only indexes refused"


@pytest.mark.parametrize(("name", "tries"), [("file", 70), ("shown", 8), ("batches", 40)])
def test_a_moment_of_each_target(name, tries, tmp_path):
    fuzz(name, tries, 1, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("name", TARGETS)
def test_many_tries_of_each_target(name, tmp_path):
    fuzz(name, MANY, 2, tmp_path)
