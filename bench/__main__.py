"""``python -m bench [NAME ...] [--tiny] [--only START] [--gpu] [--list] [--json FILE]``."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from bench import gpu
from bench.harness import RESULTS, Case, Scale, discover, machine_facts, markdown, record, save


def main(arguments: list[str] | None = None) -> int:
    """Return 0 if all measured bars are met, 1 if not, 2 for a wrong name."""
    options = _parser().parse_args(arguments)
    every = options.list or options.alone
    if options.gpu and not every and not torch.cuda.is_available():
        print("bench --gpu: torch sees no CUDA device here; nothing was run")
        return 0
    cases = [case for case in discover() if case.gpu == options.gpu or every]
    matches = str.__eq__ if options.alone else str.startswith
    for name in options.names:
        if not any(matches(case.name, name) for case in cases):
            known = ", ".join(case.name for case in cases)
            print(f"bench: no case is called {name}; the names are: {known}")
            return 2
    if options.names:
        cases = [case for case in cases if any(matches(case.name, one) for one in options.names)]
    if options.gpu and not every:
        target = options.json or RESULTS / "gpu.json"
        return gpu.run(cases, target, options.budget, tiny=options.tiny, tests=not options.names)
    if options.list:
        for case in cases:
            print(f"{case.name}{' (gpu)' if case.gpu else ''}\n  {case.question}\n  {case.bar}")
        return 0
    entries = [_run(case, Scale(options.tiny, options.only)) for case in cases]
    document: dict[str, Any] = {"machine": machine_facts(), "cases": entries}
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(document, indent=1) + "\n")
        print(f"written: {options.json}")
    failed = any(entry["met"] is False for entry in entries) and not options.tiny
    return int(failed and not options.alone)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="cases, or how their names begin")
    parser.add_argument("--tiny", action="store_true", help="toy sizes; results are not saved")
    parser.add_argument(
        "--only", default="", metavar="START", help="workloads whose names begin so; not saved"
    )
    parser.add_argument("--gpu", action="store_true", help="the tests and cases that need CUDA")
    parser.add_argument(
        "--budget",
        type=float,
        default=gpu.BUDGET_S,
        metavar="SECONDS",
        help="for all of --gpu (default %(default)s); what does not fit is not run",
    )
    parser.add_argument("--list", action="store_true", help="the cases, their questions and bars")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results here too")
    # One case with or without a GPU; the caller looks at its bar.
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    return parser


def _run(case: Case, scale: Scale) -> dict[str, Any]:
    started = time.perf_counter()
    result = case.run(scale)
    entry = record(case, result, time.perf_counter() - started)
    print(markdown(entry))
    if not (scale.tiny or scale.only):
        print(f"saved: {save(entry)}")
    return entry


if __name__ == "__main__":
    sys.exit(main())
