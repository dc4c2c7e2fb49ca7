"""``python -m bench [NAME ...] [--tiny] [--gpu] [--budget S] [--list] [--json FILE]``."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from bench import gpu_plan
from bench.harness import RESULTS, Case, Scale, discover, machine_facts, record, save, show


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 if every bar that was measured is met, 1 if not, 2 for a wrong name."""
    options = _parser().parse_args(arguments)
    if options.gpu and not options.list and not _has_cuda():
        print("bench --gpu: torch sees no CUDA device here; nothing was run")
        return 0
    every = options.list or options.alone
    cases = [case for case in discover() if case.gpu == options.gpu or every]
    if options.gpu and not every:
        return _all_on_gpu(cases, options)
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
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(document, indent=1) + "\n")
        print(f"written: {options.json}")
    failed = any(entry["met"] is False for entry in entries) and not options.tiny
    return int(failed and not options.alone)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description=__doc__,
        epilog=f"--gpu: {gpu_plan.NEEDS}{_gpu_cases()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="cases, or what they start with")
    parser.add_argument("--tiny", action="store_true", help="toy sizes; results are not saved")
    parser.add_argument(
        "--gpu", action="store_true", help="the tests and cases that need CUDA, see below"
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=gpu_plan.BUDGET_S,
        metavar="SECONDS",
        help="for all of --gpu (default %(default)s); what does not fit is not run",
    )
    parser.add_argument("--list", action="store_true", help="the cases, their questions and bars")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results here too")
    # One case, whatever it needs; its bar is for the caller to look at.
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    return parser


def _gpu_cases() -> str:
    lines = [
        f"  {step.name:<18}{step.expected_s:4.0f}   (at most {step.limit_s:.0f})"
        for step in gpu_plan.steps_of_cases([case for case in discover() if case.gpu])
    ]
    return "\n".join(lines)


def _all_on_gpu(cases: list[Case], options: argparse.Namespace) -> int:
    """Tests first, then the cases; 1 if anything failed or a bar was not met."""
    steps = [*gpu_plan.steps_of_tests(), *gpu_plan.steps_of_cases(cases, tiny=options.tiny)]
    if options.names:
        steps = [step for step in steps if step.name.startswith(tuple(options.names))]
        if not steps:
            print(f"bench --gpu: nothing begins with {', '.join(options.names)}")
            return 2
    target = options.json or RESULTS / "gpu.json"
    document = gpu_plan.run_steps(steps, target, options.budget)
    print(f"written: {target}, after {document['seconds_taken']:.0f} s")
    return int(any(step["status"] != "passed" for step in document["steps"]))


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


if __name__ == "__main__":
    sys.exit(main())
