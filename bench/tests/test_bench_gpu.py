"""The run of all that needs a GPU: a case ends alone, and one file has what became of each."""

import json
import subprocess
import time

import pytest
import torch

from bench.__main__ import main
from bench.gpu import ROOT, run_cases
from bench.gpu import pytest as pytest_on_gpu
from bench.harness import Case, cases_of


@pytest.mark.skipif(torch.cuda.is_available(), reason="would run all of it")
def test_without_a_gpu_nothing_runs(capsys, tmp_path):
    target = tmp_path / "gpu.json"
    assert main(["--gpu", "--tiny", f"--json={target}"]) == 0
    assert "no CUDA device here; nothing was run" in capsys.readouterr().out
    assert not target.exists()


def case(name, limit_s=60.0):
    return Case(name, "Does it run?", "it does", lambda scale: None, gpu=True, limit_s=limit_s)


@pytest.mark.nightly
def test_a_case_that_fails_hangs_or_has_no_time_is_told_and_the_next_one_runs(tmp_path):
    target = tmp_path / "gpu.json"
    cases = [case("no such case"), case("slow", limit_s=0.1)]
    assert not run_cases(cases, target, time.monotonic() + 60)
    found = {entry["name"]: entry["failed"] for entry in json.loads(target.read_text())["cases"]}
    assert found == {"no such case": "exit status 2", "slow": "stopped after 0 s"}
    assert not run_cases(cases[:1], target, time.monotonic())
    (entry,) = json.loads(target.read_text())["cases"]
    assert entry["failed"] == "not run: no time was left"


@pytest.mark.nightly
def test_a_case_alone_writes_its_result(tmp_path):
    (one,) = cases_of("loaders.device_tail")
    target = tmp_path / "gpu.json"
    run_cases([one], target, time.monotonic() + 60, tiny=True)
    (entry,) = json.loads(target.read_text())["cases"]
    assert entry["name"] == "device_tail_gpu"
    assert entry["rows"]


@pytest.mark.nightly
def test_the_command_selects_the_tests_marked_gpu(tmp_path):
    command = [*pytest_on_gpu(tmp_path / "gpu.xml", 60), "--collect-only", "-p", "no:xdist"]
    command = [word for word in command if word not in ("-n", "4", "--dist", "loadfile")]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    assert "test_prefetch_cuda.py" in listed
    assert "test_contract.py" in listed
