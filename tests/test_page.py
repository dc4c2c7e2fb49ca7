"""The page of a check: what stands on it, and that a browser shows it as it is meant."""

import math
import re
import sys
from dataclasses import replace

import pytest

from bench import picture
from dataloaders.bottleneck import Interval
from dataloaders.errors import MissingDependency
from helpers.reports import HOSTILE, a_report, about

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
    assert "&#34;&#34;&#34;A report with everything in it" in full  # the line that it names
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
    report = replace(
        nothing_known(),
        verdict="input-bound",
        seconds_per_batch={"real": about(2.0), "synthetic": Interval(-math.inf, 1e-5, math.inf)},
        stalls={"prep": about(1.99999)},
        candidates=(replace(a_report().candidates[0], predicted=Interval(1.1, 1.2, math.inf)),),
    )
    assert report.to_html().count("<svg ") == 3


def test_without_matplotlib_there_is_no_page_and_it_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in ("charts", "page"):
        monkeypatch.delitem(sys.modules, f"dataloaders.bottleneck.outputs.{name}", raising=False)
    with pytest.raises(MissingDependency, match=r"with: pip install 'gpu-.*\[check\]'"):
        a_report().to_html()


def test_without_a_sure_gain_the_page_begins_with_the_advice():
    open_ones = tuple(
        replace(one, predicted=Interval(0.9, 2.0, 3.0), measured=None)
        for one in a_report().candidates
    )
    page = a_report(candidates=open_ones).to_html()
    assert page.count("<table>") == 6
    assert "<code>num_workers=&#34;auto&#34;</code>" in page.partition("</header>")[0]
    assert "matmul_precision" in a_report(verdict="step-bound").to_html()


# In a browser ------------------------------------------------------------------------------------


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
