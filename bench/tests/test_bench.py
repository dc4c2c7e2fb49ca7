"""Benches run, tiny; the harness takes turns, computes ratios and writes its pages."""

import gc
import gzip
import json
import subprocess
import sys

import pytest

from bench.__main__ import main
from bench.harness import (
    RESULTS,
    Case,
    Result,
    Scale,
    Timings,
    cases_of,
    discover,
    interleave,
    markdown,
    modules,
    save,
    with_table,
)
from bench.scripts.third_party import scripts


@pytest.fixture
def imported_is_frozen():
    """Freeze what this test imports, as conftest.py does at collection."""
    discover()
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.nightly
@pytest.mark.usefixtures("imported_is_frozen")
@pytest.mark.parametrize("module", modules())
def test_every_case_runs_tiny(module):
    for case in cases_of(module):  # one that needs a GPU runs on the CPU, as far as that goes
        result = case.run(Scale(tiny=True))
        assert result.rows
        assert all(len(row) == len(result.headings) for row in result.rows)
        assert markdown(case, result, {}).startswith(f"# {case.name}\n\n{case.question}\n\nBar: ")


def test_ways_take_turns():
    timings = interleave({"a": "a", "b": "b"}, (order := []).append, rounds=2, warmups=1)
    assert "".join(order) == "ba" + "ab" + "ba"
    assert {name: len(value.wall) for name, value in timings.items()} == {"a": 2, "b": 2}


def test_children_count_as_cpu():
    burn = [sys.executable, "-c", "sum(range(3_000_000))"]
    way = {"child": lambda: subprocess.run(burn, check=True)}
    alone = interleave(way, rounds=1, warmups=0)["child"]
    counted = interleave(way, rounds=1, warmups=0, children=True)["child"]
    assert counted.median("cpu") > alone.median("cpu")


def test_ratios_are_taken_round_by_round():
    ours = Timings((2.0, 9.0, 3.0), (1.0, 1.0, 1.0))
    base = Timings((1.0, 3.0, 3.0), (2.0, 2.0, 2.0))
    ratio = ours.ratio(base, "wall")
    assert (ratio.median, ratio.low, ratio.high) == (2.0, 1.0, 3.0)
    assert str(ours.ratio(base, "cpu")) == "0.500 (0.500 to 0.500)"
    assert (ours.median(), ours.low(), ours.high()) == (3.0, 2.0, 9.0)


def test_results_are_saved_as_json_and_markdown(tmp_path):
    result = Result(("way", "s"), (("a", 0.5), ("b", None)), met=False, notes=("only a toy",))
    case = Case("toy", "Does it work?", "it does", lambda scale: result)
    text = save(case, result, 1.0, tmp_path).read_text()
    assert "NOT met.\n\n| way | s |\n| --- | --- |\n| a | 0.5 |\n| b |  |\n\n- only a toy" in text
    entry = json.loads((tmp_path / "toy.json").read_text())
    assert (entry["rows"], entry["command"]) == ([["a", 0.5], ["b", None]], "python -m bench toy")
    assert "cores" in entry["machine"]


@pytest.mark.nightly
def test_the_command_line(capsys):
    assert len({case.name for case in discover()}) == len(discover())
    assert all(case.question.endswith("?") and case.bar for case in discover())
    assert main(["--list"]) == 0
    assert "stock_gather\n  What does" in capsys.readouterr().out
    assert main(["no_such_case", "--tiny"]) == 2
    assert "no case is called no_such_case; the names are: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("page", "name"),
    [("dali", "dali"), ("transforms", "calls"), ("how-the-check-works", "third_party")],
)
def test_a_table_in_the_docs_is_the_kept_result(page, name):
    text = (RESULTS.parents[1] / "docs" / f"{page}.md").read_text()
    kept = RESULTS / f"{name}.md"
    assert f"<!-- bench/results/{name}.md -->" in text
    if kept.exists():  # a bench that was never run in full has its headings only
        assert with_table(text, name, kept.read_text()) == text


def test_a_saved_result_goes_into_the_docs_in_the_columns_that_are_there():
    shown = "A\n<!-- bench/results/toy.md -->\n| s | way |\n| old | row |\n<!-- end -->\nB"
    kept = "| way | n | s |\n| --- | --- | --- |\n| a | 3 | 0.5 |\n\n- note"
    table = "| s | way |\n| --- | --- |\n| 0.5 | a |\n"
    assert with_table(shown, "toy", kept) == (
        f"A\n<!-- bench/results/toy.md -->\n{table}<!-- end -->\nB"
    )
    assert with_table("no table", "toy", kept) == "no table"


def test_scripts_of_others_are_listed_with_data_made_for_them(tmp_path):
    data, code = tmp_path / "data", tmp_path / "code"
    (data / "photos" / "cat").mkdir(parents=True)
    (data / "photos" / "cat" / "1.jpg").write_bytes(b"")
    (data / "mnist").mkdir()
    for kind in ("images-idx3", "labels-idx1"):
        (data / "mnist" / f"t10k-{kind}-ubyte.gz").write_bytes(gzip.compress(bytes(100)))
    script = code / "examples" / "vae" / "main.py"
    script.parent.mkdir(parents=True)
    script.write_text("")
    (one,) = scripts(data, code)
    assert one.name == "vae"
    assert one.command == (str(script), "--", "--epochs", "20")
    assert (one.folder.parent / "data" / "MNIST" / "raw").is_dir()
    assert len(list((code / "run" / "photos" / "train" / "cat").iterdir())) == 8
