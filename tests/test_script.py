"""A program run by Target sees what it would see under ``python``."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dataloaders.scripts.target import Outcome, ScriptError, Target

LOOK = """
import json, os, pickle, sys

class Mine:
    def __init__(self, x: int = 3) -> None:
        self.x = x

print(json.dumps({
    "argv": sys.argv[1:],
    "argv0": os.path.abspath(sys.argv[0]),
    "path0": os.path.abspath(sys.path[0]),
    "name": __name__,
    "file": os.path.abspath(__file__),
    "package": __package__,
    "spec": None if __spec__ is None else __spec__.name,
    "main": sys.modules["__main__"].__dict__ is globals(),
    "annotation": str(type(Mine.__init__.__annotations__["x"])),
    "pickled": pickle.loads(pickle.dumps(Mine(7))).x,
}))
"""


@pytest.fixture(autouse=True)
def own_main(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put back what a program's run replaces."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("package", "pkg"):
            del sys.modules[name]


def program(folder: Path, text: str) -> Target:
    path = folder / "program.py"
    path.write_text(text)
    return Target(str(path), "file")


def test_a_file_sees_what_python_shows_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = program(tmp_path, LOOK)
    assert target.run(["--a", "b"]) == Outcome("finished", 0)
    ours = json.loads(capsys.readouterr().out)
    theirs = subprocess.check_output([sys.executable, target.name, "--a", "b"], text=True)
    assert ours == json.loads(theirs)


@pytest.mark.parametrize("name", ["package.program", "package"])
def test_a_module_sees_what_python_m_shows_it(
    name: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    for module in ("program", "__main__"):
        (package / f"{module}.py").write_text(LOOK)
    monkeypatch.chdir(tmp_path)
    assert Target(name, "module").run(["x"]).ending == "finished"
    ours = json.loads(capsys.readouterr().out)
    theirs = subprocess.check_output([sys.executable, "-m", name, "x"], text=True)
    assert ours == json.loads(theirs)


@pytest.mark.parametrize(
    ("text", "ending", "status"),
    [
        ("pass", "finished", 0),
        ("import sys; sys.exit()", "exited", 0),
        ("import sys; sys.exit(0)", "exited", 0),
        ("import sys; sys.exit(3)", "exited", 3),
        ("import sys; sys.exit('no data')", "exited", 1),
        ("raise ValueError('bad')", "raised", 1),
        ("import no_such_module_here", "raised", 1),
    ],
)
def test_endings_have_pythons_status_and_last_words(
    text: str, ending: str, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = program(tmp_path, text + "\n")
    outcome = target.run([])
    outcome.show_error()
    assert (outcome.ending, outcome.status) == (ending, status)
    theirs = subprocess.run([sys.executable, target.name], capture_output=True, text=True)
    assert outcome.status == theirs.returncode
    assert capsys.readouterr().err == theirs.stderr


@pytest.mark.parametrize(
    "text",
    [
        "raise KeyboardInterrupt",
        # As Lightning does: catches Ctrl-C, tears down, calls sys.exit(1).
        "try:\n raise KeyboardInterrupt\nexcept KeyboardInterrupt:\n raise SystemExit(1)",
    ],
)
def test_an_interrupt_is_told_from_a_failure(text: str, tmp_path: Path) -> None:
    outcome = program(tmp_path, text).run([])
    assert (outcome.ending, outcome.status) == ("interrupted", 130)


@pytest.mark.parametrize(
    "around",
    [
        "stop()",
        "try:\n stop()\nexcept Exception:\n raise AssertionError",
        "import sys\ntry:\n stop()\nexcept BaseException:\n sys.exit(1)",
        "import threading\nt = threading.Thread(target=stop)\nt.start()\nt.join()\nstop()",
    ],
)
def test_stopping_a_program_is_not_a_failure(
    around: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = "from dataloaders.scripts.stopping import StopScript\ndef stop():\n raise StopScript\n"
    assert program(tmp_path, head + around + "\n").run([]) == Outcome("stopped", 0)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("missing.py", "file", "does not exist; give the path of a Python file, or -m"),
        (".", "file", "is a folder"),
        ("broken.py", "file", "does not compile"),
        ("pkg.nothing", "module", "no module 'pkg.nothing' on the import path"),
        ("no_such_pkg.x", "module", "run this from the folder that holds the package"),
        ("pkg", "module", "no module 'pkg.__main__'"),
    ],
)
def test_what_cannot_be_started_is_said(
    name: str, kind: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.py").write_text("def (")
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ScriptError, match=says):
        Target(name, kind).run([])  # type: ignore[arg-type]
