"""``python -m bench [NAME ...] [--tiny] [--gpu] [--list] [--json FILE]``."""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.harness import RESULTS, Case, Scale, discover, machine_facts, record, save, show


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 if every bar that was measured is met, 1 if not, 2 for a wrong name."""
    options = _parser().parse_args(arguments)
    if options.gpu and not _has_cuda():
        print("bench --gpu: torch sees no CUDA device here; nothing was run")
        return 0
    cases = [case for case in discover() if case.gpu == options.gpu or options.list]
    if options.names:
        wanted = tuple(options.names)
        chosen = [case for case in cases if case.name.startswith(wanted)]
        unknown = [name for name in wanted if not any(case.name.startswith(name) for case in cases)]
        if unknown:
            known = ", ".join(case.name for case in cases)
            print(f"bench: no case is called {', '.join(unknown)}; the names are: {known}")
            return 2
        cases = chosen
    if options.list:
        for case in cases:
            print(f"{case.name}{' (gpu)' if case.gpu else ''}\n  {case.question}\n  {case.bar}")
        return 0
    entries = [_run(case, Scale(tiny=options.tiny)) for case in cases]
    document: dict[str, Any] = {"machine": machine_facts(), "cases": entries}
    target = options.json
    if options.gpu:
        document["tests"] = _gpu_tests()
        target = target or RESULTS / "gpu.json"
    if target is not None:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(document, indent=1) + "\n")
        print(f"written: {target}")
    failed = any(entry["met"] is False for entry in entries) and not options.tiny
    return int(failed or document.get("tests", {}).get("status", 0) != 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="cases, or what they start with")
    parser.add_argument("--tiny", action="store_true", help="toy sizes; results are not saved")
    parser.add_argument("--gpu", action="store_true", help="the tests and cases that need CUDA")
    parser.add_argument("--list", action="store_true", help="the cases, their questions and bars")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results here too")
    return parser


def _run(case: Case, scale: Scale) -> dict[str, Any]:
    started = time.perf_counter()
    result = case.run(scale)
    seconds = time.perf_counter() - started
    show(case, result)
    if not scale.tiny:
        print(f"saved: {save(case, result, seconds)}")
    return record(case, result, seconds)


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _gpu_tests() -> dict[str, Any]:
    """The tests marked gpu, in a process of their own: its exit status and last lines."""
    if importlib.util.find_spec("pytest") is None:
        return {"status": 1, "output": "pytest is not installed: pip install -e '.[dev]'"}
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-rs"]
    root = Path(__file__).resolve().parent.parent
    run = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    output = run.stdout + run.stderr
    print(output)
    # 5: no test carries the mark yet, which is no failure.
    return {"status": 0 if run.returncode == 5 else run.returncode, "output": output[-4000:]}


if __name__ == "__main__":
    sys.exit(main())
