"""What ``dataloaders run`` runs sees what it would see under ``python``, and ends as there."""

import json
import subprocess
import sys

import pytest

from dataloaders.cli import main

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
def own_main(monkeypatch, tmp_path):
    """Put back what a program's run replaces."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DATALOADERS_BACKEND", "stock")
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("package", "pkg"):
            del sys.modules[name]


def run(*words):
    return main(["run", "--backend", "stock", *words])


@pytest.mark.parametrize("dashes", [[], ["--"]])
@pytest.mark.parametrize("words", [["program.py"], ["-m", "package.program"], ["-m", "package"]])
@pytest.mark.covering
def test_a_program_sees_what_python_shows_it(words, dashes, tmp_path, capsys):
    (tmp_path / "package").mkdir()
    for file in ("program.py", "package/program.py", "package/__main__.py"):
        (tmp_path / file).write_text(LOOK)
    assert run(*words, *dashes, "-x", "1") == 0
    ours = json.loads(capsys.readouterr().out)
    assert ours == json.loads(subprocess.check_output([sys.executable, *words, "-x", "1"]))


@pytest.mark.parametrize(
    "text",
    [
        "pass",
        "import sys; sys.exit()",
        "import sys; sys.exit(3)",
        "import sys; sys.exit('no data')",
        "raise ValueError('bad')",
    ],
)
def test_endings_have_pythons_status_and_last_words(text, tmp_path, capsys):
    program = tmp_path / "program.py"
    program.write_text(text + "\n")
    theirs = subprocess.run([sys.executable, program], capture_output=True, text=True)
    assert run(str(program)) == theirs.returncode
    assert capsys.readouterr().err == theirs.stderr


STOP = "from dataloaders.scripts.stopping import StopScript\ndef stop():\n raise StopScript\n"


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("raise KeyboardInterrupt", 130),
        # As Lightning does: catches Ctrl-C, tears down, calls sys.exit(1).
        ("try:\n raise KeyboardInterrupt\nexcept KeyboardInterrupt:\n raise SystemExit(1)", 130),
        (STOP + "stop()", 0),
        (STOP + "try:\n stop()\nexcept Exception:\n raise AssertionError", 0),
        (STOP + "import sys\ntry:\n stop()\nexcept BaseException:\n sys.exit(1)", 0),
        (STOP + "import threading\nt = threading.Thread(target=stop)\nt.start()\nt.join()\n"
         "stop()", 0),
    ],
)  # fmt: skip
def test_an_interrupt_and_what_stops_a_program_are_told_from_a_failure(
    text, status, tmp_path, capsys
):
    (tmp_path / "program.py").write_text(text + "\n")
    assert run("program.py") == status
    assert status or capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["missing.py"], "does not exist; give the path of a Python file, or -m"),
        (["."], "is a folder"),
        (["broken.py"], "does not compile"),
        (["-m", "pkg.nothing"], "no module 'pkg.nothing' on the import path"),
        (["-m", "no_such_pkg.x"], "run this from the folder that holds the package"),
        (["-m", "pkg"], "no module 'pkg.__main__'"),
    ],
)
def test_what_cannot_be_started_is_said(words, says, tmp_path, capsys):
    (tmp_path / "broken.py").write_text("def (")
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").touch()
    assert run(*words) == 2
    assert says in capsys.readouterr().err
