"""Every target in turn, each for its share of the time; or one input again.

python tests/fuzz [TARGET ...] [--seconds 300] [--folder build/fuzz]
python tests/fuzz TARGET --input build/fuzz/file/findings/file-1a2b
"""

from __future__ import annotations

import argparse
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
    if unknown := set(names) - set(TARGETS):
        parser.error(f"no target is called {unknown}; there are {', '.join(TARGETS)}")
    if parsed.input is not None:
        return max(_once(name, parsed.input) for name in names)
    if find_spec("atheris") is None:
        print("the fuzzer needs Atheris: pip install 'gpu-dataloaders[fuzz]' (Linux, macOS)")
        return 2
    seconds = parsed.seconds / len(names)
    return max(_fuzzed(name, parsed.folder / name, seconds, parsed.seed) for name in names)


def _once(name: str, path: Path) -> int:
    """Run one input; 1 if it does what it must not."""
    target = TARGETS[name]
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        work = Path(folder)
        guard = Guard(work)
        list(target.seeds(work))
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
    """Fuzz ``name`` in a process of its own; print its findings and libFuzzer's last words."""
    folder.mkdir(parents=True, exist_ok=True)
    words = [str(TESTS / "fuzz" / "one.py"), name, str(folder), str(seconds), str(seed)]
    with open(folder / "log", "w", encoding="utf-8") as log:
        command = [sys.executable, "-W", "ignore", *words]
        ended = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False)
    lines = (folder / "log").read_text(encoding="utf-8", errors="replace").splitlines()
    told = [line for line in lines if line.startswith("FINDING")]
    if ended.returncode:  # a hang, a crash, or too much memory: libFuzzer wrote the input
        told.append(f"FINDING {name}: it ended with {ended.returncode}; see {folder / 'log'}")
    runs = [line for line in lines if "number_of_executed_units" in line or " cov: " in line]
    print(*told, f"{name}: {len(told)} findings", *runs[-2:], sep="\n", flush=True)
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(main())
