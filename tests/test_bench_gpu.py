"""The run of all that needs a GPU: whatever becomes of a step, others run and the file tells."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench.gpu_plan import ROOT, Step, run_steps, steps_of_cases, steps_of_tests
from bench.harness import discover
from helpers import warm

JUNIT = """
def test_good(): pass
def test_bad(): assert [1, 2] == [1, 3]
"""


def step(name: str, source: str, limit_s: float = 60, at_once: bool = False) -> Step:
    return Step(name, (sys.executable, "-c", source, "{out}"), limit_s, 1, at_once)


def by_name(document: dict) -> dict:
    return {entry["name"]: entry for entry in document["steps"]}


@pytest.mark.timeout(60)
def test_a_step_that_fails_crashes_or_hangs_ends_alone(tmp_path: Path) -> None:
    case = '{"cases": [{"name": "toy", "met": %s}]}'
    write = "import sys, pathlib; pathlib.Path(sys.argv[1]).write_text('%s')"
    steps = [
        step("raises", "print('before'); raise RuntimeError('on purpose')", at_once=True),
        step("crashes", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", at_once=True),
        step("hangs", "import time; print('began', flush=True); time.sleep(600)", 2, True),
        step("good", write % case % "true"),
        step("not met", write % case % "false"),
    ]
    document = run_steps(steps, tmp_path / "deep" / "gpu.json", budget_s=200)
    assert json.loads((tmp_path / "deep" / "gpu.json").read_text()) == document
    assert document["finished"]
    assert document["machine"]["cores"] >= 1
    found = by_name(document)
    assert found["raises"]["status"] == "failed, exit status 1"
    assert "before" in found["raises"]["output"]
    assert "RuntimeError: on purpose" in found["raises"]["output"]
    assert found["crashes"]["status"] == "died of signal 11 (SIGSEGV)"
    assert "Segmentation fault" in found["crashes"]["output"]
    assert found["hangs"]["status"] == "ended after 2 s"
    assert "began" in found["hangs"]["output"]
    assert "time.sleep" in found["hangs"]["output"] or "File" in found["hangs"]["output"]
    assert (found["good"]["status"], found["good"]["case"]["name"]) == ("passed", "toy")
    assert found["not met"]["status"] == "its bar is not met"


def test_what_there_is_no_time_for_is_told(tmp_path: Path) -> None:
    document = run_steps([step("late", "1")], tmp_path / "gpu.json", budget_s=1)
    assert by_name(document)["late"]["status"] == "not run: no time was left"


def test_results_are_on_disk_before_the_end(tmp_path: Path) -> None:
    target = tmp_path / "gpu.json"
    look = (
        f"import json; d = json.load(open({str(target)!r})); print(len(d['steps']), d['finished'])"
    )
    document = run_steps([step("one", "1"), step("two", look)], target)
    assert by_name(document)["two"]["output"] == "1 False\n"


def test_outcomes_and_tracebacks_of_tests_are_kept(tmp_path: Path) -> None:
    (tmp_path / "test_toy.py").write_text(JUNIT)
    command = (sys.executable, "-m", "pytest", str(tmp_path / "test_toy.py"), "--junit-xml={out}")
    document = run_steps([Step("toy", command, 60, 1)], tmp_path / "gpu.json")
    entry = by_name(document)["toy"]
    assert entry["status"] == "failed, exit status 1"
    good, bad = entry["tests"]
    assert (good["name"], good["outcome"]) == ("test_good", "passed")
    assert bad["outcome"] == "failed"
    assert "assert [1, 2] == [1, 3]" in bad["told"]
    assert entry["outcomes"] == {"passed": 1, "failed": 1}


def test_a_file_whose_tests_were_all_skipped_has_not_passed(tmp_path: Path) -> None:
    skips = "import pytest\n@pytest.mark.skip\ndef test_toy(): pass\n"
    (tmp_path / "test_toy.py").write_text(skips)
    command = (sys.executable, "-m", "pytest", str(tmp_path / "test_toy.py"), "--junit-xml={out}")
    document = run_steps([Step("toy", command, 60, 1)], tmp_path / "gpu.json")
    assert by_name(document)["toy"]["status"] == "every test was skipped"


def test_every_test_and_case_for_a_gpu_is_in_the_plan() -> None:
    cases = [case for case in discover() if case.gpu]
    steps = steps_of_cases(cases)
    assert {step.name for step in steps} == {case.name for case in cases}
    tests = steps_of_tests()
    files = {path.name for path in (ROOT / "tests").glob("test_*.py") if _is_marked(path)}
    assert files <= {step.name for step in tests}
    assert tests[0].name == "test_dali_graph.py"
    assert all(step.judged for step in steps)
    assert not any(step.judged for step in steps_of_cases(cases, tiny=True))
    # Four files of tests at once, then one case after the other.
    assert sum(one.expected_s for one in tests) / 4 + sum(one.expected_s for one in steps) < 480


def test_the_help_says_what_it_needs() -> None:
    told = warm.run(["-m", "bench", "--help"], cwd=ROOT).stdout
    assert "PYTHONPATH=FOLDER" in told
    assert "device_tail_gpu" in told


def test_a_case_alone_writes_its_result(tmp_path: Path) -> None:
    out = tmp_path / "case.json"
    name = "device_tail_cpu"
    done = warm.run(["-m", "bench", name, "--alone", "--tiny", f"--json={out}"], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert [case["name"] for case in json.loads(out.read_text())["cases"]] == [name]


def _is_marked(path: Path) -> bool:
    return "mark" + ".gpu" in path.read_text()
