"""What a program does in a fork of a warm process is what Python does with it."""

import os
import subprocess
import sys

import pytest

from helpers import warm
from helpers.processes import wait_until_gone

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
