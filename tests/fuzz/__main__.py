"""Every target in turn, each for its share of the time; or one input again.

python tests/fuzz [TARGET ...] [--seconds 300] [--folder build/fuzz]
python tests/fuzz TARGET --input build/fuzz/file/findings/file-1a2b
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[0] = str(TESTS)

from fuzz.guard import Guard  # noqa: E402
from fuzz.targets import TARGETS  # noqa: E402


def main() -> int:
    """0: nothing found; 1: findings; 2: Atheris is not there."""
    parser = argparse.ArgumentParser(prog="python tests/fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--seconds", type=float, default=300.0, help="in all (300)")
    parser.add_argument(
        "--folder", type=Path, default=Path("build/fuzz"), help="of corpus and findings"
    )
    parser.add_argument("--seed", type=int, default=int(time.time()) % 2**31)
    parser.add_argument("--input", type=Path, help="run this input only, and show what it does")
    parsed = parser.parse_args()
    names = parsed.targets or list(TARGETS)
    for name in names:
        if name not in TARGETS:
            parser.error(f"no target is called {name!r}; there are {', '.join(TARGETS)}")
    if parsed.input is not None:
        return max(_once(name, parsed.input) for name in names)
    if find_spec("atheris") is None:
        print("the fuzzer needs Atheris: pip install 'gpu-dataloaders[fuzz]' (Linux, macOS)")
        return 2
    found = 0
    print(f"{'target':<10}{'runs':>10}{'edges':>8}{'corpus':>8}{'findings':>10}", flush=True)
    for name in names:
        found += _fuzzed(name, parsed.folder / name, parsed.seconds / len(names), parsed.seed)
    return 1 if found else 0


def _once(name: str, path: Path) -> int:
    """Run one input; 1 if it does what it must not."""
    target = TARGETS[name]
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        work = Path(folder)
        guard = Guard(work)
        for _ in target.seeds(work):
            pass
        data, empty = path.read_bytes(), work / "one"
        for _ in range(2):  # what is loaded at first use is no finding
            empty.mkdir()
            findings = guard.watch(lambda: target.run(data, empty), audited=target.audited)
            shutil.rmtree(empty)
    for finding in findings:
        print(f"{finding.what}\n{finding.trace}")
    print(f"{name}: {len(findings)} findings")
    return 1 if findings else 0


def _fuzzed(name: str, folder: Path, seconds: float, seed: int) -> int:
    """How many sorts of findings ``name`` has; a line is printed for each, and one for all."""
    folder.mkdir(parents=True, exist_ok=True)
    findings = 0
    with open(folder / "log", "w", encoding="utf-8") as log:
        command = [
            sys.executable,
            "-W",
            "ignore",
            str(TESTS / "fuzz" / "one.py"),
            name,
            str(folder),
        ]
        ended = subprocess.run(
            [*command, str(seconds), str(seed)], stdout=log, stderr=subprocess.STDOUT, check=False
        )
    text = (folder / "log").read_text(encoding="utf-8", errors="replace")
    for line in text.splitlines():
        if line.startswith("FINDING"):
            print(line)
            findings += 1
    runs = re.findall(r"number_of_executed_units: (\d+)", text)
    edges, corpus = re.findall(r"cov: (\d+) .*corp: (\d+)/", text)[-1:][0] if runs else ("?", "?")
    if ended.returncode:  # a hang, a crash, or too much memory: libFuzzer wrote the input
        findings += 1
        print(f"FINDING {name}: it ended with {ended.returncode}; see {folder / 'log'}")
    print(
        f"{name:<10}{runs[-1] if runs else '?':>10}{edges:>8}{corpus:>8}{findings:>10}", flush=True
    )
    return findings


if __name__ == "__main__":
    sys.exit(main())
