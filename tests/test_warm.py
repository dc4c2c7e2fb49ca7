"""What a program does in a fork of a warm process is what Python does with it."""

import os
import subprocess
import sys

import pytest

from helpers import warm
from helpers.processes import wait_until_gone

CODES = [
    "import sys; print(__name__, sys.argv, sys.path[:2], vars().get('__file__'))",
    "import sys; sys.exit('told')",
    "import os; os._exit(7)",
    "raise KeyboardInterrupt",
    "import atexit; atexit.register(print, 'last'); raise KeyError(1)",
    "import threading; e = threading.Event()\n"
    "threading.Thread(target=lambda: print(e.wait(9))).start(); e.set()",
    "import warnings; warnings.warn('hm')",
    "import os; print(os.getcwd(), os.environ['HELLO'], 'HOME' in os.environ)",
]


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("kind", ["script", "-c", "-m"])
@pytest.mark.thinned(5)
def test_it_is_what_python_does(kind, code, tmp_path):
    (tmp_path / "program.py").write_text(code)
    what = {"script": ["program.py"], "-c": ["-c", code], "-m": ["-m", "program"]}[kind]
    words = ["-W", "error", *what, "--word", "2"]
    env = {name: value for name, value in os.environ.items() if name != "HOME"} | {"HELLO": "you"}
    options = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL}
    theirs = subprocess.run([sys.executable, *words], cwd=tmp_path, env=env, **options)
    ours = warm.run(words, cwd=tmp_path, env=env)
    assert (ours.returncode, ours.stdout) == (theirs.returncode, theirs.stdout)
    assert ours.stderr == theirs.stderr


def test_one_that_hangs_is_ended():
    code = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        warm.run(["-c", code], timeout=0.5)
    assert wait_until_gone([int(caught.value.stdout)]) == []
