"""``dataloaders check`` on whole scripts: does it work, what does it say, what is true?

    check   python -m dataloaders check [--budget S] SCRIPT
    truth   the script's own steps a second, with its input as it is and with input that is free

Ours are the shapes of `bench.loop_shapes`, whose load can be set to nothing. Scripts of others are
run where they are: ``BENCH_SCRIPTS`` names a JSON file, a list of ``{"name": ..., "command":
["train.py", "--", "--epochs", "3"], "folder": ..., "path": [...]}`` (`bench.third_party` makes
one); their truth is the rate of their own loop on its
loader's batches and on eight of these, over and over (``python -m bench.scripts``).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness import Case, Cell, Result, Scale
from bench.loop_shapes import SHAPES

_MARGIN = 1.05
_INPUT_BOUND = ("input-bound", "transfer-bound", "contention-bound")


@dataclass(frozen=True)
class Script:
    """A script and how its truth is found.

    Attributes:
        name: in the table.
        command: what follows ``dataloaders check``.
        folder: where it runs.
        rate: its steps a second, with input as it is (True) or free (False).
        path: folders that it imports from.
    """

    name: str
    command: tuple[str, ...]
    folder: Path
    rate: Callable[[bool], float]
    path: tuple[str, ...] = ()


def run(scale: Scale) -> Result:
    shapes = scale.pick(full=list(SHAPES), tiny=["plain"])
    loads = scale.pick(
        full=[(1.0, 20.0, 0), (20.0, 20.0, 0), (20.0, 20.0, 2)], tiny=[(5.0, 5.0, 0)]
    )
    scripts = [_of_ours(name, *load, scale) for name in shapes for load in loads]
    scripts += [] if scale.tiny else _of_others()
    budget_s = scale.pick(full=20.0, tiny=1.0)
    rows: list[tuple[Cell, ...]] = []
    wrong = undecided = 0
    for script in scripts:
        took = time.perf_counter()
        report, status = _checked(script, budget_s)
        took = time.perf_counter() - took
        truth = script.rate(False) / script.rate(True)
        verdict = "none" if report is None else str(report["verdict"])
        undecided += verdict in ("inconclusive", "none")
        wrong += _wrong(verdict, truth)
        bound = None if report is None else report["speedup_bound"]
        said = "" if bound is None else "{estimate:.2f} ({low:.2f} to {high:.2f})".format(**bound)
        rows.append((script.name, "yes" if status == 0 else f"status {status}", verdict, said,
                     round(truth, 2), round(took, 1)))  # fmt: skip
    return Result(
        headings=("script", "works", "verdict", "real / synthetic", "truth", "s"),
        rows=tuple(rows),
        met=wrong == 0 and undecided <= len(scripts) / 10,
        notes=(
            f"{len(scripts)} scripts: {wrong} wrong, {undecided} inconclusive. Truth: steps a "
            "second with free input / as it is, each run once.",
        ),
    )


def _wrong(verdict: str, truth: float) -> bool:
    if verdict in _INPUT_BOUND:
        return truth < _MARGIN / 1.02
    return verdict == "step-bound" and truth > 1.08 * 1.02


def _checked(script: Script, budget_s: float) -> tuple[dict[str, Any] | None, int]:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "report.json")
        words = ["-m", "dataloaders", "check", "--quiet", "--no-predict"]
        words += ["--budget", f"{budget_s:g}"]
        done = _python([*words, "--json", str(result), *script.command], script.folder, budget_s,
                       script.path)  # fmt: skip
        if not result.is_file():
            print(f"{script.name}: {done.stderr[-400:]}", file=sys.stderr)
            return None, done.returncode
        return json.loads(result.read_text()), done.returncode


def _of_ours(name: str, load: float, step: float, workers: int, scale: Scale) -> Script:
    steps = scale.pick(full=40 if name == "one_epoch" else 300, tiny=10)

    def words(load: float) -> list[str]:
        given = f"--load {load} --step {step} --workers {workers}"
        return ["-m", "bench.loop_shapes", name, *given.split()]

    def rate(real: bool) -> float:
        done = _python([*words(load if real else 0), "--steps", str(steps)], Path.cwd(), 60)
        return float(done.stdout.rpartition("steps a second: ")[2])

    title = f"{name}, load {load:g} ms, step {step:g} ms, {workers} workers"
    return Script(title, tuple(words(load)), Path.cwd(), rate)


def _of_others() -> list[Script]:
    listed = os.environ.get("BENCH_SCRIPTS")
    if listed is None:
        return []
    scripts = []
    for one in json.loads(Path(listed).read_text()):
        folder, path = Path(one.get("folder", ".")), tuple(one.get("path", ()))

        def rate(
            real: bool, one: Any = one, folder: Path = folder, path: tuple[str, ...] = path
        ) -> float:
            words = ["-m", "bench.scripts", *([] if real else ["--resident"]), *one["command"]]
            try:
                done = _python(words, folder, 30, path)
            except subprocess.TimeoutExpired:
                return math.nan  # its truth is not known: it trains in a process of its own
            _, told, rate = done.stdout.rpartition("steps a second: ")
            return float(rate) if told else math.nan

        scripts.append(Script(one["name"], tuple(one["command"]), folder, rate, path))
    return scripts


def _python(
    words: list[str], folder: Path, seconds: float, imports: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    here = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join([*imports, here, *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, *words], cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": path}, timeout=120 + 10 * seconds,
    )  # fmt: skip


def _brute_force(arguments: list[str]) -> None:
    """Run a script of others' and print the rate of its loop, on real batches or on held ones."""
    from dataloaders.scripts.scratch import Scratch
    from dataloaders.scripts.takeover import Takeover
    from dataloaders.scripts.target import Target

    parser = argparse.ArgumentParser()
    parser.add_argument("--resident", action="store_true")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    rates: list[float] = []

    def batches(iterate: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        while True:
            yield from iterate()

    def measure(loader: Any, iterate: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        real = batches(iterate)
        held = [next(real) for _ in range(8)] if options.resident else []
        done, began = 0, time.perf_counter()
        while time.perf_counter() - began < options.seconds:
            yield held[done % 8] if held else next(real)
            done += 1
            if time.perf_counter() - began < options.seconds / 5:
                counted, since = done, time.perf_counter()
        rates.append((done - counted) / (time.perf_counter() - since))

    takeover = Takeover(measure)
    words = [word for word in options.command if word != "--"]
    target = Target(words[1], "module") if words[0] == "-m" else Target(words[0], "file")
    with Scratch(lambda: takeover.optimizers.steps > 0), takeover:
        target.run(words[2:] if words[0] == "-m" else words[1:])
    print(f"\nsteps a second: {rates[0]:.4f}")


CASES = [
    Case(
        "scripts",
        "Does the check work on whole training scripts, and is it right?",
        "no wrong verdict, at most one in ten inconclusive",
        run,
    )
]

if __name__ == "__main__":
    _brute_force(sys.argv[1:])
