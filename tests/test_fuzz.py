"""The fuzzer: it sees what it must see, and finds nothing in a moment of each target."""

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from random import Random

import pytest

from dataloaders.cache import CachedDataset
from fuzz.mutation import few_bytes
from fuzz.sealed import opened, refitted
from fuzz.targets import TARGETS

FUZZ = Path(__file__).parent / "fuzz"
TRIES = {
    "file": 60,
    "shown": 12,
    "batches": 40,
    "joined": 60,
    "build": 6,
}


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.thinned(3)
def test_a_moment_of_each_target(name, tmp_path):
    target, random = TARGETS[name], Random(name)

    def raw(part):
        return few_bytes(part, random)

    def run(data):
        (tmp_path / "one").mkdir()
        target.run(data, tmp_path / "one")
        shutil.rmtree(tmp_path / "one")

    inputs = list(target.seeds(tmp_path))
    for data in inputs:
        run(data)
    for _ in range(TRIES[name]):
        data = target.mutate(random.choice(inputs), random, raw)
        run(data)
        inputs.append(data)


def test_columns_of_another_shape_are_read_and_not_only_refused(tmp_path):
    refit = 0
    for number, data in enumerate(TARGETS["file"].seeds(tmp_path)):
        whole = opened(data)
        assert whole is not None
        assert whole.to_bytes() == data
        for column in whole.fields["columns"]:
            if column["shape"] is not None and column["variants"][0][0].startswith("tensor"):
                column["shape"] = [5, *column["shape"][1:]]
        path = tmp_path / f"{number}.h5"
        path.write_bytes(refitted(whole, Random(1)).to_bytes())
        shapes = [
            None if column["shape"] is None else tuple(column["shape"])
            for column in whole.fields["columns"]
        ]
        assert [column.shape for column in CachedDataset(path).columns] == shapes
        refit += any(shape and shape[0] == 5 for shape in shapes)
    assert refit >= 2


WATCHED = """
import json, sys
from collections import namedtuple
from pathlib import Path
import numpy as np
from dataloaders.errors import CacheError
from fuzz.guard import Guard, refusals_aside

folder = Path(sys.argv[1])
guard = Guard(folder)

def refused(text):
    with refusals_aside():
        raise CacheError(text)

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
    "refusal": lambda: refused("no"),
    "long refusal": lambda: refused("n" * 5000),
    "loud refusal": lambda: refused("\\x1b[2J"),
}
(folder / "link").symlink_to("/etc/hosts")
print(json.dumps({name: [each.what for each in guard.watch(call)] for name, call in calls.items()}))
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
    assert [name for name in seen if not seen[name]] == ["file", "namedtuple", "refusal"]
    assert seen["other file"] == ["open ('/etc/hosts',)"]
    assert seen["code"][0].startswith("compile")
    assert seen["program"] == ["os.system (b'true',)"]
    assert seen["memory"][0].startswith(("MemoryError", "_ArrayMemoryError"))
    assert seen["error"] == ["KeyError outside the package"]


@pytest.mark.skipif(find_spec("atheris") is None, reason="Atheris is not installed")
def test_a_few_seconds_of_fuzzing(tmp_path):
    command = [sys.executable, str(FUZZ), "file", "--seconds", "3", "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stdout
    assert int(done.stdout.split()[-1]) > 50
    assert list((tmp_path / "file" / "corpus").iterdir())
