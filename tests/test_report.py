"""What a report is written as: JSON and back, Markdown, a trace, a comparison."""

import itertools
import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from bench.check.played import HostOn, VirtualTime
from dataloaders.bottleneck import Interval, Report, Step, check_bottleneck
from dataloaders.errors import OptionError
from dataloaders.predicting import Candidate
from helpers.datasets import Waiting
from helpers.reports import a_report, about

seconds = st.floats(0, 1e6)
texts = st.text(max_size=8)
intervals = st.builds(
    Interval,
    seconds | st.just(-math.inf),
    seconds,
    seconds | st.just(math.inf),
)
reports = st.builds(
    a_report,
    speedup_bound=st.none() | intervals,
    seconds_per_batch=st.dictionaries(st.sampled_from(["real", "synthetic"]), intervals),
    smallest_gap=st.none() | seconds,
    loader=texts,
    advice=st.lists(texts, max_size=3).map(tuple),
    seconds=seconds,
    machine=st.dictionaries(texts, texts, max_size=3),
    timeline=st.builds(lambda *step: {"real": (Step(*step),)}, *[seconds] * 4),
)


@pytest.fixture(scope="module")
def measured():
    """A report of a real check, on played time."""
    time = VirtualTime()
    loader = DataLoader(Waiting(4000, 0.004, time.sleep))
    return check_bottleneck(
        loader, lambda _: time.sleep(0.001), budget_s=4, device="cpu", clock=HostOn(time)
    )


@given(report=reports)
def test_a_report_comes_back_from_its_json(tmp_path_factory, report):
    path = tmp_path_factory.getbasetemp() / "report.json"
    text = report.to_json(path)
    assert Report.from_json(path) == report
    standard = json.loads(text, parse_constant=pytest.fail)  # no Infinity, no NaN
    assert standard["format"] == 1


def test_fields_that_an_earlier_version_did_not_write_keep_their_defaults(tmp_path):
    path = tmp_path / "report.json"
    report = a_report()
    data = json.loads(report.to_json())
    del data["waits"]
    data["timeline"] = {"real": [[1.0, 2.0, 3.0]]}
    path.write_text(json.dumps(data))
    timeline = {"real": (Step(1.0, 2.0, 3.0, 0.0),)}
    assert Report.from_json(path) == replace(report, waits=None, timeline=timeline)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no report of a check"),
        ("not json", "no report of a check"),
        ("[1]", "no report of a check"),
        ("[" * 100_000, "no report of a check"),
        ('{"format": 2}', "format 2, and this version reads format 1; check again"),
        ('{"format": 1, "verdict": "step-bound"}', "damaged report: .*speedup_bound"),
        ('{"format": 1, "seconds_per_batch": {"real": 3}}', "damaged report"),
    ],
)
def test_a_file_that_is_no_report_says_so(tmp_path, text, message):
    path = tmp_path / "report.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(OptionError, match=f"report.json: .*{message}"):
        Report.from_json(path)


def test_the_timeline_has_the_measured_steps_of_each_arm_and_is_a_trace(measured, tmp_path):
    assert set(measured.timeline) == {"real", "synthetic"}
    real, alone = measured.timeline["real"], measured.timeline["synthetic"]
    assert 50 <= len(real) <= 100
    assert min(real[0].begin, alone[0].begin) == 0
    assert {(one.wait, one.step) for one in real} == {(0.004, 0.001)}
    assert {(one.wait, one.step) for one in alone} == {(0, 0.001)}
    measured.to_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    rows = {one["tid"]: one["args"]["name"] for one in events if one["name"] == "thread_name"}
    assert list(rows.values()) == list(measured.timeline)
    complete = [one for one in events if one["ph"] == "X"]
    for row, arm in rows.items():
        own = [one for one in complete if one["tid"] == row]
        assert {one["name"] for one in own} == ({"wait", "step"} if arm == "real" else {"step"})
        for one, after in itertools.pairwise(own):
            assert one["ts"] + one["dur"] <= after["ts"] + 1


def test_a_copy_is_drawn_at_the_beginning_of_the_steps_that_make_it():
    """On the host's clock: of 2 ms a step, those on resident batches take 1."""
    time = VirtualTime()

    def step(batch):
        time.sleep(0.001 if batch.device.type == "meta" else 0.002)

    loader = DataLoader(Waiting(4000, 0.004, time.sleep), 2)
    report = check_bottleneck(
        loader, step, budget_s=4, device="meta", clock=HostOn(time), predict=False
    )
    parts = {arm: steps[-1].parts for arm, steps in report.timeline.items()}
    assert parts["synthetic"] == {"wait": 0, "transfer": 0, "step": 0.001}
    assert parts["host"] == pytest.approx({"wait": 0, "transfer": 0.001, "step": 0.001})
    assert parts["real"] == pytest.approx({"wait": 0.008, "transfer": 0.001, "step": 0.001})
    events = json.loads(report.to_trace())["traceEvents"]
    real = [one for one in events if one["ph"] == "X" and one["tid"] == 1]
    assert [one["name"] for one in real[:4]] == ["wait", "transfer", "step", "wait"]
    assert real[1]["ts"] == pytest.approx(real[0]["ts"] + real[0]["dur"])
    assert ">transfer</text>" in report.to_html()


# Text ------------------------------------------------------------------------------------------


def test_the_last_lines_are_the_one_change_as_code():
    lines = str(a_report(notes=("n" * 300,), loader="a loader")).splitlines()
    assert lines[-2:] == [
        "   from dataloaders import DataLoader",
        '   DataLoader(..., backend="h5")',
    ]
    assert "h5       9.90 (8.91 to 10.9)  3.40 x (3.06 to 3.74)  3.10 x" in "\n".join(lines)
    assert "pays after 3 epochs):" in " ".join(lines[-4:-2])
    assert f"note: {'n' * 300}" in lines
    workers = a_report(candidates=a_report().candidates[:1])
    assert str(workers).splitlines()[-1] == "   DataLoader(..., num_workers=2)"


@pytest.mark.parametrize(
    ("options", "ours", "code"),
    [
        ({}, False, ""),
        ({"num_workers": 3, "backend": "h5"}, True, 'DataLoader(..., num_workers=3, backend="h5")'),
        (
            {"backend": "h5", "images": "jpeg"},
            True,
            'from backends.h5 import H5\nDataLoader(..., backend=H5(images="jpeg"))',
        ),
    ],
)
def test_a_change_is_code_that_can_be_pasted(options, ours, code):
    assert Candidate("a change", options, ours=ours).code == code
    compile(code, "pasted", "exec")


def test_where_the_step_is_the_limit_its_launches_are_shown():
    stalls = {"launch": about(0.003), "prep": about(0.0001)}
    shown = str(a_report(verdict="step-bound", stalls=stalls))
    assert "\nlaunch         3.00" in shown
    assert "\nprep" not in shown


# Two reports ------------------------------------------------------------------------------------


def test_a_ratio_has_the_intervals_of_both():
    then = a_report(verdict="step-bound", seconds_per_batch={"real": Interval(9.0, 10.0, 11.0)})
    now = a_report(seconds_per_batch={"real": Interval(4.0, 5.0, 6.0), "host": about(1.0)})
    comparison = now.against(then)
    assert set(comparison.arms) == {"real"}
    ratio = comparison.arms["real"][2]
    assert ratio.estimate == 2.0
    down = math.hypot(math.log(10 / 9), math.log(6 / 5))
    up = math.hypot(math.log(11 / 10), math.log(5 / 4))
    assert ratio.low == pytest.approx(2 * math.exp(-down))
    assert ratio.high == pytest.approx(2 * math.exp(up))
    assert "step-bound before, input-bound now; the loop is 2.00 x (1.6" in str(comparison)


def test_a_comparison_names_what_differs():
    report = a_report(machine={"torch": "torch 2.11"})
    assert report.against(report).differs == ()
    assert "still input-bound; no difference that the two show" in str(report.against(report))
    text = str(a_report(batch="[int64 8]").against(report))
    assert "note: torch: torch 2.11 before, torch 2.15 now" in text
    assert "note: batch: [float32 8x3x128x128, int64 8] before, [int64 8] now" in text
    assert "note: cores: ? before, 2 cores now" in text


def test_intervals_without_an_end_and_missing_figures_compare():
    open_ended = a_report(seconds_per_batch={"real": Interval(-math.inf, 1.0, math.inf)})
    ratio = a_report().against(open_ended).arms["real"][2]
    assert ratio.low == 0
    assert ratio.high > 1e300
    assert "no figure for the loop" in str(a_report().against(a_report(seconds_per_batch={})))


# Markdown ---------------------------------------------------------------------------------------


def test_markdown_has_the_verdict_the_change_and_whole_tables(tmp_path):
    text = a_report().to_markdown(tmp_path / "summary.md", against=a_report())
    assert (tmp_path / "summary.md").read_text() == text
    assert text.startswith("### input-bound: the step waits for batches to be prepared\n")
    assert 'DataLoader\nDataLoader(..., backend="h5")\n```' in text
    assert "still input-bound" in text
    for line in text.splitlines():
        if line.startswith("|"):  # nothing in a cell opens another one
            cells = line.replace(r"\|", "").count("|")
            assert cells in (4, 5, 6)
    assert "<b onclick" not in text.replace(r"\<b", "")
    assert "no GPU, and two cores are taken" in text


def test_markdown_of_a_report_with_few_figures(measured):
    nothing = replace(measured, speedup_bound=None, seconds_per_batch={}, stalls={}, advice=())
    assert nothing.to_markdown().startswith("### input-bound")
    assert "**Next:** let worker processes" in a_report(candidates=()).to_markdown()
