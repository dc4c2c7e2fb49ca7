"""The fuzzer: it sees what it must see, and finds nothing in each target.

A seed and the number of the try, which are printed, give the same input again.
"""

import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from random import Random

import pytest

from fuzz.damage import damaged
from fuzz.guard import Guard
from fuzz.targets import TARGETS, sound_files

MANY = int(os.environ.get("FUZZ_TRIES", "500"))


def fuzz(name, tries, seed, folder, watch=lambda call: call()):
    def run(data, watch=lambda call: call()):
        one = folder / "one"
        one.mkdir()
        found = watch(partial(TARGETS[name], data, one))
        shutil.rmtree(one)
        return found

    files = list(sound_files(folder))
    inputs = [data for data in files if run(data)]  # imports at first use are no finding
    assert inputs if name == "batches" else inputs == files
    random, sound = Random(seed), len(inputs)
    for number in range(tries):
        print(f"{name}, seed {seed}, try {number}")
        data = damaged(random.choice(inputs), random)
        if run(data, watch):
            inputs.append(data)
    assert len(inputs) > sound + tries // 10, "values are read too, and not only indexes refused"


@pytest.mark.parametrize(("name", "tries"), [("file", 70), ("shown", 8), ("batches", 40)])
def test_a_moment_of_each_target(name, tries, tmp_path):
    fuzz(name, tries, 1, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("name", TARGETS)
def test_many_tries_of_each_target(name, tmp_path):
    fuzz(name, MANY, 2, tmp_path, Guard(tmp_path).watch)


WATCHED = """
import json, sys
from collections import namedtuple
from pathlib import Path
import numpy as np
from fuzz.guard import Guard

folder = Path(sys.argv[1])
guard = Guard(folder)
calls = {
    "file": lambda: (folder / "a").write_text("a"),
    "other file": lambda: open("/etc/hosts").read(),
    "link": lambda: open(folder / "link").read(),
    "namedtuple": lambda: namedtuple("T", "x y"),
    "code": lambda: eval("1 + 1"),
    "program": lambda: __import__("os").system("true"),
    "module": lambda: __import__("this_is_no_module"),
    "memory": lambda: np.ones(1 << 30, np.uint8),
}
(folder / "link").symlink_to("/etc/hosts")
seen = {}
for name, call in calls.items():
    try:
        guard.watch(call)
    except Exception as error:
        seen[name] = f"{type(error).__name__} {error}"
print(json.dumps(seen))
"""


@pytest.mark.nightly
def test_the_guard_sees_what_must_not_happen(tmp_path):
    # In a process of its own: an audit hook stays to the end.
    tests = str(Path(__file__).parent)
    script = f"import sys; sys.path.insert(0, {tests!r})\n{WATCHED}"
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path],
        capture_output=True, text=True, check=True, timeout=100,
    )  # fmt: skip
    seen = json.loads(done.stdout)
    assert list(seen) == ["other file", "link", "code", "program", "module", "memory"]
    for name, what in (("other file", "/etc/hosts"), ("code", "compile"), ("program", "os.system")):
        assert what in seen[name]
        assert seen[name].startswith("AssertionError")
    assert "MemoryError" in seen["memory"]
