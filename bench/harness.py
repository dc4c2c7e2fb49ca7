"""Cases, interleaved timing, tables and saved results: what all benches share.

A bench is a module in a folder here. To add one, ``bench/cache/mine.py``::

    from bench.harness import Result, Scale, case, exhaust, interleave, timing_headings, timing_rows

    @case("CPU ratio <= 1.25")
    def my_bench(scale: Scale, folder: Path) -> Result:
        '''Is ours as cheap as torch's?'''
        samples = scale.pick(full=100_000, tiny=100)
        ways = {"torch": theirs(samples), "ours": ours(samples)}
        timings = interleave(ways, exhaust, rounds=scale.pick(full=7, tiny=1))  # A B B A A B
        ratio = timings["ours"].ratio(timings["torch"])  # one ratio a round
        rows = timing_rows(timings, 1000 / samples, base="torch")
        return Result(timing_headings("torch"), rows, met=ratio.median <= 1.25)

`bench/tests/` runs each case with ``Scale(tiny=True)`` and ignores ``met``: a toy size says nothing
about speed.
"""

from __future__ import annotations

import gc
import importlib
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch.utils.data import Dataset

from dataloaders.machine.facts import machine_facts as _facts_of_machine

RESULTS = Path(__file__).resolve().parent / "results"
"""The folder of full-size results: NAME.md of each case."""

Cell: TypeAlias = "str | int | float | bool | None"
Rows: TypeAlias = "tuple[tuple[Cell, ...], ...]"
Clock: TypeAlias = Literal["wall", "cpu"]
T = TypeVar("T")


@dataclass(frozen=True)
class Scale:
    """The size of a run: full, or a toy size that only shows that a case works.

    ``only``: how the names of what is measured begin.
    """

    tiny: bool = False
    only: str = ""

    def pick(self, full: T, tiny: T) -> T:
        return tiny if self.tiny else full

    def named(self, full: Iterable[str], tiny: Iterable[str]) -> list[str]:
        """Return the names, ``full`` or ``tiny``, that begin as ``only``."""
        return [name for name in self.pick(full, tiny) if name.startswith(self.only)]


class Samples(Dataset[Any]):
    """A dataset of ``count`` samples, each made by ``make(index)`` when it is read."""

    def __init__(self, make: Callable[[int], Any], count: int) -> None:
        self.make, self.count = make, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


@dataclass(frozen=True)
class Result:
    """What a case measured.

    Attributes:
        headings: the table's columns, with units.
        rows: the table's rows, each as long as ``headings``; None is an empty cell.
        met: whether the bar was met; None where the case has no bar or could not run.
        notes: one sentence each: what was measured and how, what the numbers do not say.
        data: more for the JSON file, such as every single timing.
    """

    headings: tuple[str, ...]
    rows: Rows
    met: bool | None = None
    notes: tuple[str, ...] = ()
    data: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Case:
    """One question and how it is measured.

    Attributes:
        name: the name on the command line and of the result files.
        question: what the numbers answer.
        bar: what is good enough, in words with a number.
        measure: measures at a scale, given a temporary folder for its files.
        gpu: whether it needs a CUDA device; such cases run only under ``--gpu``.
        limit_s: under ``--gpu``, the seconds after which it is stopped.
        one_thread: of torch: several that wait for each other burn CPU seconds that say nothing.
    """

    name: str
    question: str
    bar: str
    measure: Callable[[Scale, Path], Result]
    gpu: bool = False
    limit_s: float = 120
    one_thread: bool = False

    def run(self, scale: Scale) -> Result:
        threads = torch.get_num_threads()
        torch.set_num_threads(1 if self.one_thread else threads)
        try:
            with tempfile.TemporaryDirectory() as folder:
                return self.measure(scale, Path(folder))
        finally:
            torch.set_num_threads(threads)


def case(bar: str, **options: Any) -> Callable[[Callable[[Scale, Path], Result]], Case]:
    """Make a `Case` of the function that measures it, whose docstring is the question."""
    return lambda measure: Case(measure.__name__, measure.__doc__ or "", bar, measure, **options)


@dataclass(frozen=True)
class Ratio:
    """The median, smallest and largest of a ratio that is measured once a round."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


@dataclass(frozen=True)
class Timings:
    """The seconds of one way, one value a round.

    Attributes:
        wall: seconds by the clock.
        cpu: CPU seconds of this process (and its children, if asked), user and system.
    """

    wall: tuple[float, ...]
    cpu: tuple[float, ...]

    def median(self, clock: Clock = "wall") -> float:
        return statistics.median(getattr(self, clock))

    def ratio(self, base: Timings, clock: Clock = "cpu") -> Ratio:
        """Return this way's time divided by ``base``'s, round by round."""
        pairs = zip(getattr(self, clock), getattr(base, clock), strict=True)
        ratios = [time / max(base_time, 1e-9) for time, base_time in pairs]
        return Ratio(statistics.median(ratios), min(ratios), max(ratios))


def interleave(
    ways: Mapping[str, T],
    run: Callable[[T], object] = lambda way: way(),  # type: ignore[operator]
    *,
    rounds: int,
    warmups: int = 1,
    children: bool = False,
    again: bool = False,
) -> dict[str, Timings]:
    """Time ``run`` on each way in turns, A B C C B A A B C ..., in this process.

    A slow minute of the machine then hits every way alike, and no way always follows the same one.

    Args:
        ways: name -> what ``run`` takes.
        run: what is timed; by default each way is called.
        rounds: how many rounds count.
        warmups: how many rounds come first and do not count.
        children: add the CPU seconds of child processes, live and ended (their clock ticks are
            10 ms, so runs have to be long against that).
        again: run each way twice in its turn and count the second run, so that what should be in
            memory is there.
    """
    walls: dict[str, list[float]] = {name: [] for name in ways}
    cpus: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(-warmups, rounds):
        for name in list(ways)[:: 1 if turn % 2 == 0 else -1]:
            if again:
                run(ways[name])
            gc.collect()  # garbage of an earlier way is not this one's cost
            of_children = _children_cpu_seconds() if children else 0.0
            cpu, wall = time.process_time(), time.perf_counter()
            run(ways[name])
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            cpu += _children_cpu_seconds() - of_children if children else 0.0
            if turn >= 0:
                walls[name].append(wall)
                cpus[name].append(cpu)
    return {name: Timings(tuple(walls[name]), tuple(cpus[name])) for name in ways}


def timing_headings(base: str) -> tuple[str, ...]:
    """Return the headings of `timing_rows`, whose seconds are for 1,000 samples."""
    return ("way", "CPU s a 1,000", "smallest", "wall s a 1,000", f"CPU ratio to {base} (spread)")


def timing_rows(timings: Mapping[str, Timings], per: float, base: str, label: str = "") -> Rows:
    """Return a row for each way: seconds times ``per``, and the CPU ratio to the way ``base``."""
    return tuple(
        (
            label + name,
            times.median("cpu") * per,
            min(times.cpu) * per,
            times.median() * per,
            None if name == base or base not in timings else str(times.ratio(timings[base])),
        )
        for name, times in timings.items()
    )


def exhaust(batches: Iterable[Any]) -> None:
    """Iterate to the end, holding each batch while the next one is made, as training does."""
    for _batch in batches:
        pass


def device_here() -> torch.device:
    """Return the CUDA device, or the CPU where there is none."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def finished(device: torch.device) -> None:
    """Wait until ``device`` has done all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def machine_facts() -> dict[str, str]:
    """Return what a reader needs to judge the numbers: machine, versions, load, date."""
    installed = ((name, version_of(name)) for name in ("numpy", "torchvision", "pillow"))
    return {
        **_facts_of_machine(),
        **{name: f"{name} {version}" for name, version in installed if version},
        "load": f"load average {os.getloadavg()[0]:.2f}",
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }


def version_of(*distributions: str) -> str | None:
    """Return the version of the first of ``distributions`` that is installed."""
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def discover() -> list[Case]:
    """Return the cases of all modules, in the order of the modules' names."""
    return [case for module in modules() for case in cases_of(module)]


def modules() -> list[str]:
    """Return the names of the benches, such as "cache.read"."""
    files = Path(__file__).parent.glob("*/*.py")
    names = (f"{file.parent.name}.{file.stem}" for file in files if file.stem != "__init__")
    return sorted(name for name in names if not name.startswith(("peers.", "tests.")))


def cases_of(module: str) -> list[Case]:
    """Return the cases of one of `modules`."""
    found = vars(importlib.import_module(f"bench.{module}")).values()
    return [value for value in found if isinstance(value, Case)]


def record(case: Case, result: Result, seconds: float) -> dict[str, Any]:
    """Return a case and its result as JSON values, with the machine and the command."""
    return {
        "name": case.name,
        "question": case.question,
        "bar": case.bar,
        "command": f"python -m bench {'--gpu ' if case.gpu else ''}{case.name}",
        "machine": machine_facts(),
        "seconds_taken": round(seconds, 1),
        **asdict(result),
    }


def markdown(entry: Mapping[str, Any]) -> str:
    """Return a `record` as a Markdown page: question, bar, table, notes, machine, command."""
    met = {True: "Met.", False: "NOT met.", None: "No verdict."}[entry["met"]]
    notes = [*entry["notes"], f"Machine: {', '.join(entry['machine'].values())}."]
    lines = [
        *(f"# {entry['name']}", "", entry["question"], "", f"Bar: {entry['bar']}. {met}", ""),
        *(f"| {' | '.join(map(_cell, row))} |" for row in (entry["headings"], *entry["rows"])),
        "",
        *(f"- {note}" for note in notes),
        *(f"- Command: `{entry['command']}`", ""),
    ]
    lines.insert(7, "|" + " --- |" * len(entry["headings"]))
    return "\n".join(lines)


def save(entry: Mapping[str, Any], folder: Path = RESULTS) -> Path:
    """Write a `record` as ``NAME.md``, and its table into docs/; return the page's path."""
    page = folder / f"{entry['name']}.md"
    page.write_text(markdown(entry))
    if folder == RESULTS:
        for shown in (RESULTS.parents[1] / "docs").glob("*.md"):
            shown.write_text(with_table(shown.read_text(), entry["name"], page.read_text()))
    return page


def with_table(shown: str, name: str, kept: str) -> str:
    """Return the page ``shown`` with the columns it has filled from ``kept``.

    ``<!-- bench/results/NAME.md -->``, then a table, then ``<!-- end -->``.
    """
    before, marker, rest = shown.partition(f"<!-- bench/results/{name}.md -->\n")
    if not marker:
        return shown
    table, end, after = rest.partition("<!-- end -->")
    rows = _cells(kept)
    columns = [rows[0].index(heading) for heading in _cells(table)[0]]
    lines = ["| " + " | ".join(row[column] for column in columns) + " |\n" for row in rows]
    return before + marker + "".join(lines) + end + after


def _cells(text: str) -> list[list[str]]:
    """Return the cells of a table's lines."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def _children_cpu_seconds() -> float:
    """Return the CPU seconds of all children so far, ended and alive."""
    import psutil

    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds: float = ended.ru_utime + ended.ru_stime
    for child in psutil.Process().children(recursive=True):
        try:
            times = child.cpu_times()
        except psutil.NoSuchProcess:  # it ended after the listing
            continue
        seconds += times.user + times.system
    return seconds


def _cell(value: Cell) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
