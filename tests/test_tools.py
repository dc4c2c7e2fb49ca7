"""The suite's own tools: `make mutants`, and programs run in forks of a warm process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import warm
from helpers.processes import wait_until_gone
from mutants.points import mutants
from mutants.run import changed, main, read, versions
from mutants.tree import ROOT

BEFORE = """
def first(rows, size):
    if size < 0 and not rows:
        raise ValueError(size)
    return rows[size - 1] if rows else None
"""


def test_the_tables_fit_the_tree() -> None:
    modules = read("modules.toml")["modules"]
    for module in modules:
        assert (ROOT / f"{module}.py").is_file(), module
    for version in versions().values():
        changed(version)
    for tests in [*modules.values(), *(version["tests"] for version in versions().values())]:
        for file in (words for words in tests if not words.startswith("-")):
            name, _, function = file.partition("::")
            text = (ROOT / name).read_text()
            assert re.search(rf"^\s*(def|class) {function}", text, re.MULTILINE), file
    version = {"name": "a slot is lost", "file": "README.md", "before": "free()", "after": ""}
    with pytest.raises(ValueError, match=r"README.md holds its text 0 times, not once. Write"):
        changed(version)


def test_the_mutants_of_a_function_and_their_keys() -> None:
    assert sorted(each.after for each in mutants(BEFORE)) == [
        "if size < 0 and rows:",
        "if size < 0 or not rows:",
        "if size < 1 and (not rows):",
        "if size <= 0 and (not rows):",
        "pass",
        "return None",
        "return rows[size + 1] if rows else None",
        "return rows[size - 1] if not rows else None",
        "return rows[size - 2] if rows else None",
    ]
    other = BEFORE.replace("raise ValueError(size)", "raise KeyError").replace(" not", "  not")
    keys = [{each.key for each in mutants(text)} for text in (BEFORE, f"import os\n{other}")]
    assert len(keys[0] - keys[1]) == 1
    twice = mutants(
        BEFORE.replace("    return", "    return rows[0] if rows else None\n    return")
    )
    assert len({each.key for each in twice}) == len(twice)


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_each_broken_version_fails_its_tests() -> None:
    command = [sys.executable, str(Path("tests", "mutants")), "--broken"]
    ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert ended.returncode == 0, ended.stdout


class Played:
    """A tree whose tests notice every change but those that hold a word."""

    unchanged = "passed"

    def __init__(self, word: str) -> None:
        self.word = word

    def tests(self, names: list[str], file: str) -> Played:
        return self

    def of(self, source: str) -> str:
        return "passed" if self.word in source else "failed"


def test_a_change_that_no_test_notices_fails_the_run_until_it_is_written_down(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, table = ["dataloaders/measuring/intervals"], tmp_path / "survivors.json"
    assert main(Played("no such text"), words, table) == 0
    assert main(Played("return None"), words, table) == 1
    assert "NEW survivor" in capsys.readouterr().out
    assert main(Played("return None"), [*words, "--renew"], table) == 0
    known = table.read_text()
    assert main(Played("return None"), words, table) == 0
    # A sample renews what it tried, and keeps the rest.
    assert main(Played("return None"), [*words, "--sample", "5", "--renew"], table) == 0
    assert table.read_text() == known


# Forks of a warm process


CODE = """
import os, sys, threading, warnings
print(__name__, sys.argv, sys.path[:2], vars().get("__file__"))
print(os.getcwd(), os.environ["HELLO"], "HOME" in os.environ)
"""
ENDS = [
    "sys.exit('told')",
    "os._exit(7)",
    "raise KeyboardInterrupt",
    "import atexit; atexit.register(print, 'last'); raise KeyError(1)",
    "e = threading.Event()\nthreading.Thread(target=lambda: print(e.wait(9))).start(); e.set()",
    "warnings.warn('hm')",
    "kept = type('Kept', (), {'__del__': lambda self: print('cleared')})()",
]
KINDS = {"script": ["program.py"], "-c": ["-c"], "-m": ["-m", "program"]}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.thinned(5)
def test_it_is_what_python_does(kind, end, tmp_path):
    (tmp_path / "program.py").write_text(CODE + end)
    code = [CODE + end] if kind == "-c" else []
    words = ["-W", "error", *KINDS[kind], *code, "--word", "2"]
    env = {name: value for name, value in os.environ.items() if name != "HOME"} | {"HELLO": "you"}
    options = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL}
    theirs = subprocess.run([sys.executable, *words], cwd=tmp_path, env=env, **options)
    ours = warm.run(words, cwd=tmp_path, env=env, status=None)
    assert (ours.returncode, ours.stdout) == (theirs.returncode, theirs.stdout)
    assert ours.stderr == theirs.stderr


def test_one_that_hangs_is_ended():
    code = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        warm.run(["-c", code], timeout=0.5)
    assert wait_until_gone([int(caught.value.stdout)]) == []
