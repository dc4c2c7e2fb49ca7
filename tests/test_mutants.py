"""What `make mutants` stands on: its tables fit the tree, and a change is known by its text."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mutants.broken import ROOT, changed, read, versions
from mutants.points import mutants
from mutants.run import main

BEFORE = b"""
def first(rows, size):
    if size < 0 and not rows:
        raise ValueError(size)
    return rows[size - 1] if rows else None
"""


def test_each_broken_version_replaces_a_text_that_is_there() -> None:
    for version in versions().values():
        changed(version)


def test_a_version_whose_text_is_gone_says_so() -> None:
    version = {"name": "a slot is lost", "file": "setup.py", "before": "free()", "after": ""}
    with pytest.raises(ValueError, match=r"'a slot is lost': setup.py is no file. Write"):
        changed(version)
    with pytest.raises(ValueError, match=r"README.md holds its text 0 times, not once"):
        changed(version | {"file": "README.md"})


def test_the_tables_name_what_exists() -> None:
    modules = read("modules.toml")["modules"]
    for module in modules:
        assert (ROOT / f"{module}.py").is_file(), module
    for tests in [*modules.values(), *(version["tests"] for version in versions().values())]:
        for file in (words for words in tests if not words.startswith("-")):
            name, _, function = file.partition("::")
            assert f"def {function}" in (ROOT / name).read_text(), file
    assert json.loads((ROOT / "tests/mutants/baseline.json").read_text()).keys() <= modules.keys()


def test_the_mutants_of_a_function() -> None:
    assert [f"{mutant.before} -> {mutant.after}" for mutant in mutants(BEFORE)] == [
        "if size < 0 and not rows: -> if size <= 0 and not rows:",
        "if size < 0 and not rows: -> if size < 1 and not rows:",
        "if size < 0 and not rows: -> if size < 0 or not rows:",
        "if size < 0 and not rows: -> if size < 0 and rows:",
        "raise ValueError(size) -> pass",
        "return rows[size - 1] if rows else None -> return None",
        "return rows[size - 1] if rows else None -> return rows[size + 1] if rows else None",
        "return rows[size - 1] if rows else None -> return rows[size - 2] if rows else None",
        "return rows[size - 1] if rows else None -> return rows[size - 1] if not (rows) else None",
    ]


def test_a_mutant_keeps_its_key_where_other_lines_change() -> None:
    after = b"import os\n" + BEFORE.replace(b"raise ValueError(size)", b"raise KeyError")
    after = after.replace(b" not rows:", b" not rows:  # and why")
    one, other = ({each.key for each in mutants(text)} for text in (BEFORE, after))
    assert len(one - other) == 1
    twice = mutants(
        BEFORE.replace(b"    return", b"    return rows[0] if rows else None\n    return")
    )
    assert len({each.key for each in twice}) == len(twice)


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_each_broken_version_fails_its_tests() -> None:
    command = [sys.executable, str(Path("tests", "mutants")), "--broken"]
    ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert ended.returncode == 0, ended.stdout


class Played:
    """In place of a tree: its tests notice all changes of lines that hold a word."""

    def __init__(self, word: str) -> None:
        self.word = word

    def check(self, tests: list[str]) -> float:
        return 0.0

    def outcome(self, file: str, source: bytes, tests: list[str], usual: float) -> str:
        lines = zip(
            (ROOT / file).read_text().splitlines(), source.decode().splitlines(), strict=False
        )
        first = next(line for line, now in lines if line != now)
        return "failed" if self.word in first else "passed"


def test_a_change_that_was_noticed_before_and_survives_fails_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["dataloaders/measuring/intervals", "--against", str(tmp_path / "baseline.json")]
    assert main(Played("values"), words) == 0  # nothing is known yet
    assert main(Played("values"), [*words, "--renew"]) == 0
    known = (tmp_path / "baseline.json").read_text()
    assert main(Played("r"), words) == 0  # more than before
    capsys.readouterr()
    assert main(Played("values["), words) == 1
    lost = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  LOST ")]
    assert lost
    assert all(" picked: " in line for line in lost)
    # Survivors, or a sample, renew what they tried, and keep the rest.
    assert main(Played("values"), [*words, "--survivors", "--renew"]) == 0
    assert main(Played("values"), [*words, "--sample", "5", "--renew"]) == 0
    assert (tmp_path / "baseline.json").read_text() == known
