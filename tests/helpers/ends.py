"""Ways in which a script ends while its iterators live, for fresh interpreters.

The sources call ``begin()``, which the script has defined before: it prints one line, and returns
what is to live, first of all a list of loaders.
"""

from __future__ import annotations

import subprocess

SOURCES = {
    "module level": """
kept = begin()
""",
    "main guard, until modules are cleared": """
import sys, threading

if __name__ == "__main__":
    threading.script = sys.modules["__main__"]  # any module that Python clears late would do
    kept = begin()
""",
    "sys.exit in the loop": """
import sys

def train():
    global kept
    kept = begin()
    for batches in zip(*kept[0]):
        sys.exit(3)

train()
""",
    "error in the loop": """
import sys, traceback

def train():
    kept = begin()
    for batches in zip(*kept[0]):
        raise ValueError("the step failed")

try:
    train()
except ValueError:
    traceback.print_exc(file=sys.stdout)
    raise
""",
}
_STATUS = {"sys.exit in the loop": 3, "error in the loop": 1}


def words_of(done: subprocess.CompletedProcess[str], end: str) -> list[str]:
    """What ``begin()`` printed, in words; asserts the exit status, and nothing else on stderr."""
    words, _, trace = done.stdout.partition("\n")
    assert (done.returncode, done.stderr) == (_STATUS.get(end, 0), trace)
    assert trace.count("Traceback") == (end == "error in the loop")
    return words.split()
