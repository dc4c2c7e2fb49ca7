"""The suite's own tools: `make mutants`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from mutants.points import mutants
from mutants.run import changed, read, versions
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
