"""The fuzzer: it sees what it must see, and finds nothing in a moment of each target."""

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from random import Random

import pytest

from fuzz.damage import damaged, few_bytes
from fuzz.targets import TARGETS, sound_files

FUZZ = Path(__file__).parent / "fuzz"
NIGHT = pytest.mark.nightly


@pytest.mark.parametrize(
    ("name", "tries", "seed"),
    [
        ("file", 90, 1),
        ("shown", 8, 1),
        ("batches", 40, 1),
        *(pytest.param("file", 700, seed, marks=NIGHT) for seed in (2, 3)),
        *(pytest.param(name, 300, 2, marks=NIGHT) for name in ("shown", "batches")),
    ],
)
def test_a_moment_of_each_target(name, tries, seed, tmp_path):
    random, inputs = Random(seed), list(sound_files(tmp_path))

    def read(data):
        (tmp_path / "one").mkdir()
        found = TARGETS[name](data, tmp_path / "one")
        shutil.rmtree(tmp_path / "one")
        return found

    assert name == "batches" or all(map(read, inputs))
    unrefused = 0
    for _ in range(tries):
        data = damaged(random.choice(inputs), random, lambda part: few_bytes(part, random))
        unrefused += read(data)
        inputs.append(data)
    assert unrefused > tries // 10, "values are read too, and not only indexes refused"


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
    "error": lambda: {}["a"],
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
    script = f"import sys; sys.path.insert(0, {str(FUZZ.parent)!r})\n{WATCHED}"
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path],
        capture_output=True, text=True, check=True, timeout=100,
    )  # fmt: skip
    seen = json.loads(done.stdout)
    assert list(seen) == ["other file", "link", "code", "program", "module", "memory", "error"]
    for name, what in (("other file", "/etc/hosts"), ("code", "compile"), ("program", "os.system")):
        assert what in seen[name]
        assert seen[name].startswith("AssertionError")
    assert "MemoryError" in seen["memory"]


@pytest.mark.skipif(find_spec("atheris") is None, reason="Atheris is not installed")
def test_a_few_seconds_of_fuzzing(tmp_path):
    command = [sys.executable, str(FUZZ), "file", "-max_total_time=3"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=100, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "build" / "fuzz" / "file").iterdir())
