"""What every bench shares: cases, interleaved timing, machine facts, tables and saved results.

A bench is a module in this folder with a list ``CASES``. To add one, ``bench/my_bench.py``::

    from bench.harness import Case, Result, Scale, interleave

    def run(scale: Scale) -> Result:
        data = make_data(scale.pick(full=100_000, tiny=100))
        timings = interleave(
            {"torch": lambda: drain(a), "ours": lambda: drain(b)},   # A B A B A B, one process
            rounds=scale.pick(full=7, tiny=1),
        )
        ratio = timings["ours"].ratio(timings["torch"], "cpu")       # one ratio a round
        return Result(
            headings=("way", "CPU s", "ratio to torch"),
            rows=(
                ("torch", timings["torch"].median("cpu"), None),
                ("ours", timings["ours"].median("cpu"), str(ratio)),
            ),
            met=ratio.median <= 1.25,
        )

    CASES = [Case("my_bench", "Is ours as cheap as torch's?", "CPU ratio <= 1.25", run)]

`tests/test_bench.py` finds the module and runs each of its cases with ``Scale(tiny=True)``, where
``met`` is not looked at: a toy size says nothing about speed.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pkgutil
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

__all__ = [
    "RESULTS",
    "Case",
    "Clock",
    "Ratio",
    "Result",
    "Scale",
    "Timings",
    "device_here",
    "discover",
    "finished",
    "interleave",
    "machine_facts",
    "markdown",
    "on_one_thread",
    "save",
    "show",
    "version_of",
]

RESULTS = Path(__file__).resolve().parent / "results"
"""Where full-size results go: the table NAME.md is kept in git, the raw NAME.json is not."""

Cell: TypeAlias = "str | int | float | bool | None"
"""One entry of a result's table; None prints as nothing."""

Clock: TypeAlias = Literal["wall", "cpu"]

T = TypeVar("T")

_BESIDE_BENCHES = {"harness", "__main__"}


@dataclass(frozen=True)
class Scale:
    """How large a case runs: full size, or a toy size that only shows that the case works."""

    tiny: bool = False

    def pick(self, full: T, tiny: T) -> T:
        """``tiny`` at toy size, else ``full``."""
        return tiny if self.tiny else full


@dataclass(frozen=True)
class Result:
    """What a case found out.

    Attributes:
        headings: of the table's columns, with units.
        rows: of the table, each as long as ``headings``.
        met: whether the case's bar was met; None where the case has no bar or could not run.
        notes: a sentence each: what was measured and how, what the numbers do not say.
        data: anything more for the JSON file, such as every single timing.
    """

    headings: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    met: bool | None = None
    notes: tuple[str, ...] = ()
    data: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Case:
    """One question and how it is measured.

    Attributes:
        name: the name on the command line and of the result's files.
        question: what the numbers answer, as one question.
        bar: what would be good enough, in words with a number.
        run: measures at a scale.
        gpu: whether it needs a CUDA device; such a case runs only under ``--gpu``.
    """

    name: str
    question: str
    bar: str
    run: Callable[[Scale], Result]
    gpu: bool = False


@dataclass(frozen=True)
class Ratio:
    """A ratio measured once a round: its median, smallest and largest value."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


@dataclass(frozen=True)
class Timings:
    """Seconds of one way, a value a round, in the order of the rounds.

    Attributes:
        wall: seconds by the clock.
        cpu: seconds of CPU of this process and its children, user and system.
    """

    wall: tuple[float, ...]
    cpu: tuple[float, ...]

    def median(self, clock: Clock = "wall") -> float:
        """The middle value, in seconds."""
        return statistics.median(self._values(clock))

    def low(self, clock: Clock = "wall") -> float:
        """The smallest value, in seconds: the one that other processes disturbed least."""
        return min(self._values(clock))

    def high(self, clock: Clock = "wall") -> float:
        """The largest value, in seconds."""
        return max(self._values(clock))

    def ratio(self, base: Timings, clock: Clock = "wall") -> Ratio:
        """This way's time divided by ``base``'s, round by round."""
        pairs = zip(self._values(clock), base._values(clock), strict=True)
        ratios = [ours / max(theirs, 1e-9) for ours, theirs in pairs]
        return Ratio(statistics.median(ratios), min(ratios), max(ratios))

    def _values(self, clock: Clock) -> tuple[float, ...]:
        return self.wall if clock == "wall" else self.cpu


def interleave(
    ways: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warmups: int = 1,
    children: bool = False,
    again: bool = False,
) -> dict[str, Timings]:
    """Seconds of each way, measured in turns: A B C A B C ... in this one process.

    Turns make a slow minute of the machine hit every way alike; the order is reversed every
    other round, so that no way always follows the same one. ``warmups`` rounds come first and
    are not counted. With ``children`` the CPU seconds of child processes count too, those alive
    before and after a run included (their clock ticks are 10 ms: make runs long against that).
    With ``again`` each way runs twice in its turn, and the second run counts: what is meant to be
    in memory is in it then, also where the system takes away what was idle in the other turns.
    """
    walls: dict[str, list[float]] = {name: [] for name in ways}
    cpus: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(-warmups, rounds):
        names = list(ways) if turn % 2 == 0 else list(ways)[::-1]
        for name in names:
            if again:
                ways[name]()
            gc.collect()  # what an earlier way left behind is not this one's cost
            of_children = _children_cpu_seconds() if children else 0.0
            cpu, wall = time.process_time(), time.perf_counter()
            ways[name]()
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            if children:
                cpu += _children_cpu_seconds() - of_children
            if turn >= 0:
                walls[name].append(wall)
                cpus[name].append(cpu)
    return {name: Timings(tuple(walls[name]), tuple(cpus[name])) for name in ways}


def on_one_thread(measure: Callable[[Scale], Result], scale: Scale) -> Result:
    """What ``measure`` finds with one torch thread.

    Several that wait for each other burn CPU seconds which say nothing, the more so the busier
    the machine is.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return measure(scale)
    finally:
        torch.set_num_threads(threads)


def device_here() -> Any:
    """The CUDA device, as ``torch.device``; the CPU where there is none."""
    import torch

    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def finished(device: Any) -> None:
    """Waits until ``device`` has done all that was queued."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def machine_facts() -> dict[str, Any]:
    """What a reader needs to judge the numbers: processor, cores, memory, system, versions."""
    facts: dict[str, Any] = {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }
    for name in ("torch", "numpy", "torchvision", "lightning"):
        version = version_of(name)
        if version is not None:
            facts[name] = version
    import torch

    facts["torch_threads"] = torch.get_num_threads()
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    facts["load_average"] = round(os.getloadavg()[0], 2)
    facts["date"] = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    return facts


def discover() -> list[Case]:
    """Every case of every bench module in this folder, in the order of their modules' names."""
    package = importlib.import_module("bench")
    cases: list[Case] = []
    for module in sorted(info.name for info in pkgutil.iter_modules(package.__path__)):
        if module not in _BESIDE_BENCHES:
            cases.extend(getattr(importlib.import_module(f"bench.{module}"), "CASES", ()))
    return cases


def record(case: Case, result: Result, seconds: float) -> dict[str, Any]:
    """A case and its result as plain JSON values, with the machine and the command."""
    return {
        "name": case.name,
        "question": case.question,
        "bar": case.bar,
        "command": _command(case),
        "machine": machine_facts(),
        "seconds_taken": round(seconds, 1),
        **asdict(result),
    }


def markdown(case: Case, result: Result, facts: Mapping[str, Any]) -> str:
    """The result as a Markdown page: question, bar, table, machine, command."""
    head = "| " + " | ".join(result.headings) + " |"
    rule = "|" + "|".join(" --- " for _ in result.headings) + "|"
    body = ["| " + " | ".join(_cell(value) for value in row) + " |" for row in result.rows]
    machine = ", ".join(f"{name} {value}" for name, value in facts.items())
    lines = [f"# {case.name}", "", case.question, "", f"Bar: {case.bar}. {_verdict(result.met)}"]
    lines += ["", head, rule, *body, ""]
    lines += [f"- {note}" for note in result.notes]
    lines += [f"- Machine: {machine}.", f"- Command: `{_command(case)}`", ""]
    return "\n".join(lines)


def save(case: Case, result: Result, seconds: float, folder: Path = RESULTS) -> Path:
    """Writes ``NAME.json`` and ``NAME.md`` and returns the path of the latter."""
    folder.mkdir(parents=True, exist_ok=True)
    entry = record(case, result, seconds)
    (folder / f"{case.name}.json").write_text(json.dumps(entry, indent=1) + "\n")
    page = folder / f"{case.name}.md"
    page.write_text(markdown(case, result, entry["machine"]))
    return page


def show(case: Case, result: Result) -> None:
    """Prints the result as a table."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:  # a GPU machine on loan may have torch and nothing else
        print(markdown(case, result, machine_facts()))
        return
    table = Table(title=f"{case.name}: {case.question}", caption=f"bar: {case.bar}")
    for position, heading in enumerate(result.headings):
        table.add_column(heading, justify="left" if position == 0 else "right")
    for row in result.rows:
        table.add_row(*(_cell(value) for value in row))
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    for note in (_verdict(result.met), *result.notes):
        console.print(f"  {note}", markup=False)


def _command(case: Case) -> str:
    return f"python -m bench {'--gpu ' if case.gpu else ''}{case.name}"


def _children_cpu_seconds() -> float:
    """CPU seconds of every child so far: those that ended and were waited for, and live ones."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ended.ru_utime + ended.ru_stime + sum(_live_children_cpu_seconds())


def _live_children_cpu_seconds() -> Sequence[float]:
    try:
        import psutil
    except ImportError:  # see show()
        return ()
    seconds = []
    for child in psutil.Process().children(recursive=True):
        try:
            times = child.cpu_times()
        except psutil.NoSuchProcess:  # it ended between the listing and the question
            continue
        seconds.append(times.user + times.system)
    return seconds


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    named = {key.strip(): value.strip() for key, value in fields.items()}
    name = named.get("model name", platform.machine())
    if "model" in named and not any(character.isdigit() for character in name):
        name += f", family {named.get('cpu family', '?')} model {named['model']}"
    return name


def version_of(distribution: str) -> str | None:
    """Of what is installed; None if it is not."""
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _cell(value: Cell) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _verdict(met: bool | None) -> str:
    return {True: "Met.", False: "NOT met.", None: "No verdict."}[met]
