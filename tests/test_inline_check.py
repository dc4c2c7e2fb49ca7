"""A check around a loop as it stands, as in a notebook."""

import sys
import types

import torch
from torch.utils.data import DataLoader

from bench.played import HostOn, VirtualTime
from dataloaders import bottleneck_check
from helpers.waits import Waiting


def test_the_loop_ends_by_itself_and_the_report_stays():
    time = VirtualTime()
    loader = DataLoader(Waiting(1000, 0.03, time.sleep), batch_size=None)
    with bottleneck_check(loader, budget_s=10, clock=HostOn(time)) as check:
        for _ in check:
            time.sleep(0.01)
    report = check.report()
    assert report.verdict == "input-bound"
    assert report.speedup_bound is not None
    assert 3.8 < report.speedup_bound.estimate < 4.2
    page = report._repr_html_()
    assert page.startswith("<pre")
    assert "INPUT-BOUND" in page


def test_an_optimizers_step_tells_the_cycle_and_the_random_states_are_put_back():
    time = VirtualTime()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)
    loader = DataLoader(Waiting(1000, 0.001, time.sleep), batch_size=None, shuffle=True)
    before = torch.get_rng_state()
    with bottleneck_check(loader, budget_s=5, clock=HostOn(time)) as check:
        for index, _ in enumerate(check):
            time.sleep(0.01)
            torch.rand(3)
            if index % 3 == 2:
                optimizer.step()
                time.sleep(0.1)
    assert torch.equal(torch.get_rng_state(), before)
    assert any("every 3 batches" in note for note in check.report().notes)


def test_a_notebook_shows_progress_in_one_line(monkeypatch, capsys):
    notebook = types.ModuleType("IPython")
    notebook.get_ipython = lambda: types.SimpleNamespace(kernel=None)
    monkeypatch.setitem(sys.modules, "IPython", notebook)
    time = VirtualTime()
    loader = DataLoader(Waiting(1000, 0.01, time.sleep), batch_size=None)
    with bottleneck_check(loader, budget_s=3, clock=HostOn(time)) as check:
        for _ in check:
            time.sleep(0.01)
    shown = capsys.readouterr().out
    assert "\rcheck  " in shown
    assert "\n" not in shown
    assert shown.endswith("\r")
