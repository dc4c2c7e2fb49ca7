"""Every bench case runs, tiny; the harness interleaves, computes ratios and writes its pages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench import transforms
from bench.harness import (
    RESULTS,
    Case,
    Result,
    Scale,
    Timings,
    discover,
    interleave,
    markdown,
    save,
)
from helpers import warm

CASES = discover()  # those for a GPU too: on the CPU, as far as that goes


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_every_case_runs_tiny(case: Case) -> None:
    result = case.run(Scale(tiny=True))
    assert result.rows
    assert all(len(row) == len(result.headings) for row in result.rows)
    assert markdown(case, result, {}).startswith(f"# {case.name}\n")


def test_names_are_unique_and_bars_are_told() -> None:
    names = [case.name for case in discover()]
    assert len(set(names)) == len(names)
    assert all(case.question.endswith("?") and case.bar for case in discover())


def test_ways_take_turns() -> None:
    order: list[str] = []
    timings = interleave(
        {"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=2, warmups=1
    )
    assert "".join(order) == "ba" + "ab" + "ba"
    assert {name: len(value.wall) for name, value in timings.items()} == {"a": 2, "b": 2}


def test_children_count_as_cpu() -> None:
    burn = [sys.executable, "-c", "sum(range(3_000_000))"]
    way = {"child": lambda: subprocess.run(burn, check=True)}
    alone = interleave(way, rounds=1, warmups=0)["child"]
    counted = interleave(way, rounds=1, warmups=0, children=True)["child"]
    assert counted.median("cpu") > alone.median("cpu")


def test_ratios_are_taken_round_by_round() -> None:
    ours, base = (
        Timings((2.0, 9.0, 3.0), (1.0, 1.0, 1.0)),
        Timings((1.0, 3.0, 3.0), (2.0, 2.0, 2.0)),
    )
    ratio = ours.ratio(base)
    assert (ratio.median, ratio.low, ratio.high) == (2.0, 1.0, 3.0)
    assert str(ours.ratio(base, "cpu")) == "0.500 (0.500 to 0.500)"
    assert (ours.median(), ours.low(), ours.high()) == (3.0, 2.0, 9.0)


def test_results_are_saved_as_json_and_markdown(tmp_path: Path) -> None:
    case = Case("toy", "Does it work?", "it does", lambda scale: result)
    result = Result(("way", "s"), (("a", 0.5), ("b", None)), met=False, notes=("only a toy",))
    page = save(case, result, 1.0, tmp_path)
    text = page.read_text()
    assert "| a | 0.5 |" in text
    assert "NOT met" in text
    assert "`python -m bench toy`" in text
    entry = json.loads((tmp_path / "toy.json").read_text())
    assert entry["rows"] == [["a", 0.5], ["b", None]]
    assert entry["machine"]["cores"] >= 1


def test_the_command_line() -> None:
    def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
        root = Path(__file__).resolve().parent.parent
        return warm.run(["-m", "bench", *arguments], cwd=root)

    listed = bench("--list")
    assert listed.returncode == 0
    assert "stock_gather" in listed.stdout
    wrong = bench("no_such_case", "--tiny")
    assert wrong.returncode == 2
    assert "no case is called no_such_case; the names are: " in wrong.stdout


def test_the_table_of_transforms_in_the_docs_is_the_kept_result() -> None:
    assert transforms.documented() == transforms.table()
    kept = transforms.table()
    assert all(f"| {name} | " in kept for name in transforms.NAMES)


def test_the_table_of_speed_in_the_docs_is_the_kept_result() -> None:
    text = (transforms.DOCUMENT.parent / "dali.md").read_text()
    table = text.split("<!-- bench/results/dali.md -->")[1].split("<!-- end -->")[0]
    kept = [row for row in rows_of((RESULTS / "dali.md").read_text()) if len(row) == 5]
    assert rows_of(table)[2:] == [[way, cpu, wall, ratio] for way, cpu, _, wall, ratio in kept][2:]


def rows_of(text: str) -> list[list[str]]:
    """The cells of a table's lines."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
