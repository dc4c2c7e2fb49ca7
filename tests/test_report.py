"""What a report is written as: JSON and back, Markdown, a trace, a comparison, a page."""

import itertools
import json
import math
import re
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from bench import picture
from bench.check.played import HostOn, VirtualTime
from dataloaders.bottleneck import Interval, Report, Step, check_bottleneck
from dataloaders.bottleneck.causes.preparation import Call
from dataloaders.errors import MissingDependency, OptionError
from dataloaders.findings import Finding
from dataloaders.predicting import Candidate
from helpers.datasets import Waiting

HOSTILE = "</script><b onclick='x'>$a_b$ | `c` & \u6570"


def about(seconds, share=0.04):
    return Interval(seconds * (1 - share), seconds, seconds * (1 + share))


def a_report(**changes):
    """Return a full report of a loop of 33.7 ms a batch, 6.6 ms of it the step."""
    real = [Step(0.034 * k, 0.027 + 0.004 * (k % 3), 0.0061) for k in range(20)]
    alone = [Step(1 + 0.0066 * k, 0.0, 0.0066) for k in range(100)]
    given = {
        "verdict": "input-bound",
        "speedup_bound": Interval(4.9, 5.13, 5.37),
        "seconds_per_batch": {
            "real": about(0.0337),
            "synthetic": about(0.00657),
            "host": about(0.0072),
            "contended": about(0.0081),
            "cold": about(0.0377),
        },
        "stalls": {
            "fetch": about(0.004),
            "prep": about(0.025),
            "transfer": about(0.0006),
            "contention": about(0.0015),
        },
        "smallest_gap": 0.046,
        "loader": f"DataLoader over ImageFolder, {HOSTILE}",
        "batch": "[float32 8x3x128x128, int64 8]",
        "advice": ('let worker processes prepare batches: `num_workers="auto"`',),
        "notes": (f"measured in loader 1: {HOSTILE}",),
        "rounds": 5,
        "seconds": 7.0,
        "evidence": "blocks",
        "machine": {"cores": "2 cores", "cpu": "a processor", "torch": "torch 2.15"},
        "timeline": {"real": tuple(real), "synthetic": tuple(alone)},
        "waits": {
            "p50": 0.026,
            "p99": 0.04,
            "longest": 0.3,
            "slow": ((17, f"photos/{HOSTILE}/{'long' * 20}.jpg", 0.3), (4, "", 0.12)),
        },
        "preparation": (
            Call("read", 0.0004, 0.1),
            Call("seldom", 0.00001, 0.003),
            Call("decode", 0.0019, 0.48),
            Call("RandomResizedCrop(size=(128, 128), scale=(0.08, 1.0))", 0.0012, 0.31),
            Call(HOSTILE, 0.0004, 0.11),
        ),
        "candidates": (
            Candidate("workers", {"num_workers": 2}, about(1.9), about(1.8)),
            Candidate(
                *("h5", {"backend": "h5"}, about(3.4, 0.1), about(3.1), "", about(0.0099, 0.1)),
                *(12.0, 400 << 20, 3),
            ),
            Candidate("dali", reason="no GPU, and two cores are taken"),
        ),
        "findings": (
            Finding(
                "item",
                f"`loss.item()` waits for the device {HOSTILE}",
                f"{__file__}:1",
                "The guide: Syncs, https://docs.pytorch.org/tutorials/recipes/tuning_guide.html",
                about(0.0011),
                anyway=True,
            ),
            Finding("tf32", "matmul_precision is not set", None, "the guide, on TF32"),
        ),
    }
    return Report(**{**given, **changes})


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
        ("[" * 100_000, "no report of a check"),
        ('{"format": 2}', "format 2, and this version reads format 1; check again"),
        ('{"format": 1, "verdict": "step-bound"}', "damaged report: .*speedup_bound"),
    ],
)
def test_a_file_that_is_no_report_says_so(tmp_path, text, message):
    path = tmp_path / "report.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(OptionError, match=f"report.json: .*{message}"):
        Report.from_json(path)


def test_the_timeline_has_the_measured_steps_of_each_arm_and_is_a_trace(tmp_path):
    """The copy begins a step: of 2 ms, those on resident batches take 1."""
    time = VirtualTime()

    def step(batch):
        time.sleep(0.001 if batch.device.type == "meta" else 0.002)

    loader = DataLoader(Waiting(4000, 0.004, time.sleep))
    report = check_bottleneck(
        loader, step, budget_s=4, device="meta", clock=HostOn(time), predict=False
    )
    parts = {"synthetic": (0, 0, 0.001), "host": (0, 0.001, 0.001), "real": (0.004, 0.001, 0.001)}
    assert set(report.timeline) == set(parts)
    assert min(steps[0].begin for steps in report.timeline.values()) == 0
    for arm, steps in report.timeline.items():
        assert 50 <= len(steps) <= 100
        assert all(tuple(one.parts.values()) == pytest.approx(parts[arm]) for one in steps)
        ends = [after.begin - one.end for one, after in itertools.pairwise(steps)]
        assert sum(abs(end) < 1e-9 for end in ends) > len(ends) / 2  # the others end a block
    report.to_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    rows = {one["tid"]: one["args"]["name"] for one in events if one["name"] == "thread_name"}
    assert list(rows.values()) == list(report.timeline)
    for row, arm in rows.items():
        own = [one for one in events if one["ph"] == "X" and one["tid"] == row]
        names = [part for part, took in zip(Step(0, 0, 0).parts, parts[arm], strict=True) if took]
        assert [one["name"] for one in own] == names * len(report.timeline[arm])
        for one, after in itertools.pairwise(own):
            assert one["ts"] + one["dur"] <= after["ts"] + 1
    assert ">transfer</text>" in report.to_html()


def test_the_last_lines_are_the_one_change_as_code():
    lines = str(a_report(notes=("n" * 300,), loader="a loader")).splitlines()
    assert lines[-2:] == [
        "   from dataloaders import DataLoader",
        '   DataLoader(..., backend="h5")',
    ]
    assert "h5       9.90 (8.91 to 10.9)  3.40 x (3.06 to 3.74)  3.10 x" in "\n".join(lines)
    assert "pays after 3 epochs):" in " ".join(lines[-4:-2])
    assert f"note: {'n' * 300}" in lines
    ours = Candidate("a change", {"num_workers": 3, "backend": "h5"}, ours=True)
    assert ours.code == 'DataLoader(..., num_workers=3, backend="h5")'
    jpeg = replace(ours, options={"backend": "h5", "images": "jpeg"})
    assert jpeg.code == 'from backends.h5 import H5\nDataLoader(..., backend=H5(images="jpeg"))'


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


def test_markdown_of_a_report_with_few_figures():
    assert nothing_known().to_markdown().startswith("### inconclusive")
    assert "**Next:** let worker processes" in a_report(candidates=()).to_markdown()


HEADINGS = [
    "What the step takes on each input",
    "Where the time of a batch goes",
    "What preparing a sample costs",
    "How long the step waits for a batch",
    "What each change would gain",
    "Some steps",
    "What slows the step down",
    "Compared with before",
    "Advice and notes",
    "Environment",
]


def nothing_known():
    """A report of a check that was interrupted."""
    found = {"speedup_bound": None, "smallest_gap": None, "evidence": None, "waits": None}
    empty = {"seconds_per_batch": {}, "stalls": {}, "timeline": {}, "machine": {}}
    rows = dict.fromkeys(("advice", "notes", "preparation", "candidates", "findings"), ())
    return replace(a_report(verdict="inconclusive"), **found, **empty, **rows)


@pytest.fixture(scope="module")
def full():
    """The page of a full report, compared with one whose loader's name wants escaping."""
    return a_report().to_html(against=a_report(loader=HOSTILE, stalls={}))


def headings(page):
    return re.findall("<h2>(.*?)</h2>", page)


def test_names_of_users_are_escaped_and_changes_and_findings_have_their_code(full):
    assert "<b onclick" not in full
    assert "</script" not in full
    assert "$a_b$" in full  # no mathematics in a chart's labels
    assert "DataLoader\nDataLoader(..., backend=&#34;h5&#34;)</code></pre>" in full
    assert "h5: 3.10 x (2.98 to 3.22) as fast, measured; built once: about 12 s, 400 MiB" in full
    assert "&#34;&#34;&#34;What a report is written as" in full  # the line that it names
    assert "Saves 1.10 ms a batch (1.06 to 1.14)." in full
    link = '<a href="https://docs.pytorch.org/tutorials/recipes/tuning_guide.html">'
    assert f"{link}The guide: Syncs</a>" in full
    assert "matmul_precision" not in full  # it waits for the step's verdict


def test_the_page_has_its_sections_those_that_have_something_to_show(full):
    assert "<h1><b>INPUT-BOUND</b>: the step waits" in full
    assert headings(full) == HEADINGS
    assert full.count("<svg ") == 5
    page = nothing_known().to_html()
    assert "<h1><b>INCONCLUSIVE</b>" in page
    assert headings(page) == ["Environment"]
    open_ended = {"real": about(2.0), "synthetic": Interval(-math.inf, 1e-5, math.inf)}
    report = replace(nothing_known(), seconds_per_batch=open_ended, stalls={"prep": about(1.9)})
    assert report.to_html().count("<svg ") == 2
    assert "matmul_precision" in a_report(verdict="step-bound").to_html()


def test_without_matplotlib_there_is_no_page_and_it_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in ("charts", "page"):
        monkeypatch.delitem(sys.modules, f"dataloaders.bottleneck.outputs.{name}", raising=False)
    with pytest.raises(MissingDependency, match=r"with: pip install 'gpu-.*\[check\]'"):
        a_report().to_html()


@pytest.fixture(scope="module")
def chromium():
    try:
        with picture.browser() as found:
            yield found
    except LookupError as error:
        pytest.skip(f"{error}: see CONTRIBUTING.md")


def colours(page):
    """Return the brightness of the page, its text, and a chart's text: 0 to 765."""
    found = page.evaluate(
        "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color,"
        " getComputedStyle(document.querySelector('svg text')).fill]"
    )
    return [sum(map(int, one[one.index("(") + 1 : -1].split(",")[:3])) for one in found]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1000])
def test_the_page_fits_is_legible_and_prints_dark_on_white(chromium, full, width, scheme, tmp_path):
    path, heard = tmp_path / "report.html", []
    path.write_text(full, encoding="utf-8")
    page = chromium.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page.on("console", lambda message: heard.append(message.text))
    page.on("pageerror", lambda error: heard.append(str(error)))
    page.on("request", lambda request: heard.append(request.url))
    page.goto(path.as_uri())
    assert heard == [path.as_uri()]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    beyond = page.evaluate(
        "[...document.querySelectorAll('main *')].filter(one => !one.closest('defs') &&"
        " one.getBoundingClientRect().right > innerWidth).map(one => one.outerHTML.slice(0, 80))"
    )
    assert beyond == []
    words = "[...document.querySelectorAll('td:last-child:not(.n)')]"
    widths = page.evaluate(f"{words}.map(one => one.getBoundingClientRect().width)")
    assert min(widths) > 100  # no column of single letters
    paper, ink, chart = colours(page)
    assert chart == ink
    assert paper - ink > 500 if scheme == "light" else ink - paper > 500
    assert page.pdf(format="A4").startswith(b"%PDF")
    page.emulate_media(media="print", color_scheme=scheme)
    _, ink, chart = colours(page)
    assert ink == chart < 200
    page.close()
