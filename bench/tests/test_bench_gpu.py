"""The run of all that needs a GPU: jobs end alone, and one file has what became of each."""

import json
import re
import sys

import pytest
import torch

from bench.__main__ import main
from bench.gpu import ROOT, Job, jobs_of_cases, jobs_of_tests, run_jobs
from bench.harness import cases_of

TESTS = """
import os, pytest
def test_good(): pass
def test_bad(): assert [1, 2] == [1, 3]
def test_crashes(): os.abort()
@pytest.mark.skip("no reason")
def test_skipped(): pass
"""


def python(name, source, limit_s=60, *, alone=False):
    return Job(name, (sys.executable, "-c", source, "{out}"), limit_s, alone)


@pytest.mark.skipif(torch.cuda.is_available(), reason="would run all of it")
def test_without_a_gpu_nothing_runs(capsys, tmp_path):
    target = tmp_path / "gpu.json"
    assert main(["--gpu", "--tiny", f"--json={target}"]) == 0
    assert "no CUDA device here; nothing was run" in capsys.readouterr().out
    assert not target.exists()


def test_a_job_that_fails_crashes_or_hangs_ends_alone(tmp_path):
    case = "import sys; open(sys.argv[1], 'w').write('{\"cases\": [{\"met\": %s}]}')"
    target = tmp_path / "deep" / "gpu.json"
    look = f"import json; d = json.load(open({str(target)!r})); print(d['finished'])"
    jobs = [
        python("raises", "print('before'); raise RuntimeError('on purpose')"),
        python("crashes", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"),
        python("hangs", "import time; print('began'); time.sleep(600)", 1),
        python("good", case % "true", alone=True),
        python("not met", case % "false", alone=True),
        python("looks", look, alone=True),
    ]
    document = run_jobs(jobs, target, 100)
    assert json.loads(target.read_text()) == document
    assert document["finished"]
    found = {entry["name"]: entry for entry in document["jobs"]}
    statuses = {name: entry["status"] for name, entry in found.items()}
    assert statuses == {
        "raises": "failed, exit status 1",
        "crashes": "died of signal 11",
        "hangs": "stopped after 1 s",
        "good": "passed",
        "not met": "bar not met",
        "looks": "passed",
    }
    assert re.search("before\n.*RuntimeError: on purpose", found["raises"]["output"], re.DOTALL)
    assert "Segmentation fault" in found["crashes"]["output"]
    assert re.search("began\n.*Aborted.*File", found["hangs"]["output"], re.DOTALL)  # all stacks
    assert found["good"]["case"] == {"met": True}
    assert found["looks"]["output"] == "False\n"  # the file was there before the end


def test_a_job_without_time_is_not_run(tmp_path):
    document = run_jobs([python("late", "1")], tmp_path / "gpu.json", budget_s=1)
    assert [job["status"] for job in document["jobs"]] == ["not run: no time was left"]


@pytest.mark.nightly
def test_outcomes_of_tests_are_kept_when_one_crashes(tmp_path):
    pytest.importorskip("xdist")
    (tmp_path / "test_toy.py").write_text(f"# mark.gpu\n{TESTS}")
    (job,) = jobs_of_tests(tmp_path)
    assert "gpu" in job.command
    every = [word if word != "gpu" else "" for word in job.command]
    (entry,) = run_jobs([Job("toy", tuple(every), 100)], tmp_path / "gpu.json")["jobs"]
    outcomes = {test["name"].rpartition("::")[2]: test["outcome"] for test in entry["tests"]}
    assert outcomes.pop("test_crashes") in ("failure", "error")
    assert outcomes == {"test_good": "passed", "test_bad": "failure", "test_skipped": "skipped"}
    assert entry["status"].startswith("failed, exit status 1, ")
    assert "assert [1, 2] == [1, 3]" in "".join(test.get("why", "") for test in entry["tests"])


def test_every_file_with_tests_for_a_gpu_has_a_job():
    marked = {p.name for p in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in p.read_text()}
    assert marked <= {job.name for job in jobs_of_tests()}


@pytest.mark.nightly
def test_a_case_alone_writes_its_result(tmp_path):
    (case,) = cases_of("device_tail")
    (entry,) = run_jobs(jobs_of_cases([case], tiny=True), tmp_path / "gpu.json")["jobs"]
    assert entry["case"]["name"] == "device_tail_gpu"
    assert entry["status"] in ("passed", "bar not met")
