"""Benches run, tiny; the harness takes turns, computes ratios and writes its pages."""

import gc
import gzip
import json
import mmap
import os
import subprocess
import sys
import time

import pytest
import torch

from bench import gpu
from bench.__main__ import main
from bench.cache.disk import POLL, SmallPageCache
from bench.check.played import Loop
from bench.check.verdicts import judge
from bench.check.workloads import WORKLOADS
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
    record,
    save,
    with_table,
)
from bench.scripts.third_party import scripts
from dataloaders.machine.page_cache import evict, resident_pages


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
        page = markdown(record(case, result, 1.0))
        assert page.startswith(f"# {case.name}\n\n{case.question}\n\nBar: ")


def test_ways_take_turns_and_ratios_are_taken_round_by_round():
    timings = interleave({"a": "a", "b": "b"}, (order := []).append, rounds=2, warmups=1)
    assert "".join(order) == "ba" + "ab" + "ba"
    assert {name: len(value.wall) for name, value in timings.items()} == {"a": 2, "b": 2}
    ours = Timings((2.0, 9.0, 3.0), (1.0, 1.0, 1.0))
    base = Timings((1.0, 3.0, 3.0), (2.0, 2.0, 2.0))
    ratio = ours.ratio(base, "wall")
    assert (ratio.median, ratio.low, ratio.high) == (2.0, 1.0, 3.0)
    assert str(ours.ratio(base, "cpu")) == "0.500 (0.500 to 0.500)"
    assert (ours.median(), ours.median("cpu")) == (3.0, 1.0)


def test_a_run_may_be_of_some_names_only():
    assert Scale().named(["ab", "b"], ["c"]) == ["ab", "b"]
    assert Scale(only="a").named(["ab", "b"], ["c"]) == ["ab"]
    assert Scale(tiny=True).named(["ab", "b"], ["c"]) == ["c"]


def test_children_count_as_cpu():
    burn = {"child": lambda: subprocess.run([sys.executable, "-c", "sum(range(3_000_000))"])}
    alone, counted = (
        interleave(burn, rounds=1, warmups=0, children=children)["child"].median("cpu")
        for children in (False, True)
    )
    assert counted > alone


def test_results_are_saved_as_markdown(tmp_path):
    result = Result(("way", "s"), (("a", 0.5), ("b", None)), met=False, notes=("only a toy",))
    case = Case("toy", "Does it work?", "it does", lambda scale, folder: result)
    text = save(record(case, result, 1.0), tmp_path).read_text()
    assert "NOT met.\n\n| way | s |\n| --- | --- |\n| a | 0.5 |\n| b |  |\n\n- only a toy" in text
    assert " cores, " in text
    assert text.endswith("\n- Command: `python -m bench toy`\n")


@pytest.mark.nightly
def test_the_command_line(capsys):
    assert len({case.name for case in discover()}) == len(discover())
    assert all(case.question.endswith("?") and case.bar for case in discover())
    assert main(["--list"]) == 0
    assert "h5\n  What does" in capsys.readouterr().out
    assert main(["no_such_case", "--tiny"]) == 2
    assert "no case is called no_such_case; the names are: " in capsys.readouterr().out
    assert main(["--list", "--alone", "h5"]) == 0
    assert len([line for line in capsys.readouterr().out.splitlines() if line[0] != " "]) == 1


def test_a_small_page_cache_keeps_the_newest_pages_of_a_file_and_drops_the_others(tmp_path):
    path, limit, step = tmp_path / "file", 4 << 20, 1 << 20
    with path.open("wb") as file:
        file.write(bytes(16 << 20))
        os.fsync(file.fileno())
    evict(path)
    if resident_pages(path).any():
        pytest.skip("files stay in memory here (tmpfs), and cannot be evicted")
    with SmallPageCache(path, limit), path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no reading ahead
        while file.read(step):
            time.sleep(5 * POLL)
    pages = resident_pages(path)
    assert pages.sum() * mmap.PAGESIZE <= limit + step
    assert pages[-(limit // 2) // mmap.PAGESIZE :].all()


# The truth of a verdict


@pytest.mark.parametrize(
    ("loop", "truth"),
    [
        (Loop((0.06,), (0.1,), host_s=0.015, queue=2), 1.0),
        (Loop((0.2,), (0.1,), host_s=0.015, queue=2), 2.15),
        (Loop((0.01,), (0.03,), item_every=1), 4 / 3),
        (Loop((0.004,), (0.0005,), launches=20, host_s=0.002), 1.1),
        (Loop((0.001,), (0.03,), nbytes=10**8), 4 / 3),
        (Loop((0.001,), (0.03,), nbytes=10**8, ahead=1), 1.0),
        (Loop((0.04,), (0.03,), nbytes=10**8, pinned=False), 5 / 3),
        (Loop((0.03,), (0.02,), side_s=0.04), 1.0),
        (Loop((0.07,), (0.02,), workers=2), 1.75),
        (Loop((0.06,), (0.01,), workers=2, host_s=0.02, slowed=1.5), 1.5),
    ],
)
def test_the_truth_of_a_simulated_device_follows_from_its_durations(loop, truth):
    assert loop.truth() == pytest.approx(truth, rel=1e-3)


def test_a_verdict_is_judged_by_the_gap():
    for workload in WORKLOADS.values():
        assert judge(workload, 1.10, "step-bound") == judge(workload, 1.0, "input-bound") == "wrong"
        assert judge(workload, 1.10, "inconclusive") == "inconclusive"
        assert {judge(workload, 1.2, cause) for cause in workload.causes} == {"right"}
    found = [judge(WORKLOADS["slower_5"], 1.05, f"{kind}-bound") for kind in ("step", "transfer")]
    assert found == ["right", "wrong"]


# Tables in the docs


@pytest.mark.parametrize(
    ("page", "name"),
    [("dali", "dali"), ("transforms", "calls"), ("how-the-check-works", "third_party")],
)
def test_a_table_in_the_docs_is_the_kept_result(page, name):
    text = (RESULTS.parents[1] / "docs" / f"{page}.md").read_text()
    kept = (RESULTS / f"{name}.md").read_text()
    assert f"<!-- bench/results/{name}.md -->" in text
    assert with_table(text, name, kept) == text


def test_a_saved_result_goes_into_the_docs_in_the_columns_that_are_there():
    shown = "A\n<!-- bench/results/toy.md -->\n| s | way |\n| old | row |\n<!-- end -->\nB"
    kept = "| way | n | s |\n| --- | --- | --- |\n| a | 3 | 0.5 |\n\n- note"
    table = "| s | way |\n| --- | --- |\n| 0.5 | a |\n"
    assert with_table(shown, "toy", kept) == (
        f"A\n<!-- bench/results/toy.md -->\n{table}<!-- end -->\nB"
    )
    assert with_table("no table", "toy", kept) == "no table"


# Scripts of others


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


# What needs a GPU


@pytest.mark.skipif(torch.cuda.is_available(), reason="would run all of it")
def test_without_a_gpu_nothing_runs(capsys, tmp_path):
    target = tmp_path / "gpu.json"
    assert main(["--gpu", "--tiny", f"--json={target}"]) == 0
    assert "no CUDA device here; nothing was run" in capsys.readouterr().out
    assert not target.exists()


@pytest.mark.nightly
def test_each_case_runs_alone_and_the_one_after_a_failed_one_runs(tmp_path):
    def unknown(name, limit_s=60.0):
        return Case(name, "Does it run?", "it does", lambda scale, folder: None, True, limit_s)

    target, (known,) = tmp_path / "gpu.json", cases_of("loaders.device_tail")
    cases = [unknown("a: not there"), unknown("b: slow", limit_s=0.1), known]
    assert not gpu.run_cases(cases, target, time.monotonic() + 100, tiny=True)
    *failed, done = json.loads(target.read_text())["cases"]
    assert [entry["failed"] for entry in failed] == ["exit status 2", "stopped after 0 s"]
    assert done["name"] == "device_tail_gpu"
    assert done["rows"]


def test_tests_that_hang_are_stopped_and_the_cases_are_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "pytest", lambda *_: [sys.executable, "-c", "while True: pass"])
    target, case = tmp_path / "gpu.json", Case("a", "Does it run?", "it does", lambda _: None, True)
    assert gpu.run([case], target, 0.0) == 1
    (entry,) = json.loads(target.read_text())["cases"]
    assert entry["failed"] == "not run: no time was left"


def test_scripts_of_the_tests_find_the_package_where_it_is_not_installed(tmp_path, monkeypatch):
    """They run in folders of their own."""
    program = "import os, sys; sys.exit(os.getcwd() not in os.environ['PYTHONPATH'].split(':'))"
    monkeypatch.setattr(gpu, "pytest", lambda *_: [sys.executable, "-c", program])
    for before in ("", "/elsewhere"):
        monkeypatch.setenv("PYTHONPATH", before)
        assert gpu.run([], tmp_path / "gpu.json", 60.0) == 0


@pytest.mark.nightly
def test_the_command_selects_the_tests_marked_gpu(tmp_path):
    command = [*gpu.pytest(tmp_path / "gpu.xml", 60), "--collect-only", "-p", "no:xdist"]
    command = [word for word in command if word not in ("-n", "4", "--dist", "loadfile")]
    listed = subprocess.run(command, cwd=gpu.ROOT, capture_output=True, text=True).stdout
    assert "test_prefetch_cuda.py" in listed
    assert "test_contract.py" in listed
