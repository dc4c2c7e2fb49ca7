"""A check around a loop as it stands, as in a notebook."""

import sys
import types

from torch.utils.data import DataLoader

from bench.played import HostOn, VirtualTime
from dataloaders import bottleneck_check
from helpers.waits import Waiting


def test_a_notebook_shows_progress_in_one_line_and_the_report_stays(monkeypatch, capsys):
    notebook = types.ModuleType("IPython")
    notebook.get_ipython = lambda: types.SimpleNamespace(kernel=None)
    monkeypatch.setitem(sys.modules, "IPython", notebook)
    time = VirtualTime()
    loader = DataLoader(Waiting(1000, 0.03, time.sleep), batch_size=None)
    with bottleneck_check(loader, budget_s=10, clock=HostOn(time)) as check:
        for _ in check:
            time.sleep(0.01)
    shown = capsys.readouterr().out
    assert "\rcheck  " in shown
    assert "\n" not in shown
    assert shown.endswith("\r")
    report = check.report()
    assert report.verdict == "input-bound"
    assert 3.8 < report.speedup_bound.estimate < 4.2
    page = report._repr_html_()
    assert page.startswith("<pre")
    assert "INPUT-BOUND" in page
