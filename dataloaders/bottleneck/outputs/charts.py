"""Draw the page's charts as SVG, by matplotlib; text and axes have the page's text colour."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.figure import Figure

from dataloaders.bottleneck.arms import ARMS, MEANINGS, STALLS
from dataloaders.bottleneck.outputs.contents import LEAST_SHARE, in_order, milliseconds
from dataloaders.measuring.intervals import Step

if TYPE_CHECKING:
    from dataloaders.bottleneck.report import Report

_INK = "#010203"  # replaced by currentColor, which differs between light and dark mode
# Okabe and Ito's palette: colour-blind readers can tell them apart, on white and on black.
_STEP, _LOOP = "#009e73", "#8b949e"
_COLOURS = {
    "prep": "#e69f00",
    "fetch": "#d55e00",
    "transfer": "#56b4e9",
    "contention": "#cc79a7",
    "launch": "#999999",
}
_WIDTH = 3.6  # inches: narrow enough for legible text on a phone
_SHOWN_STEPS = 8
_STYLE: Any = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "ytick.left": False,
    **dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK
    ),
}


def charts(report: Report) -> dict[str, str]:
    """Return the charts that have data as SVG elements, by the section of the page."""
    made = {
        "arms": _drawn(_arms, report, "ms a batch, 95 % interval"),
        "stalls": _drawn(_waterfall, report, "ms a batch, and share of the loop"),
        "preparation": _drawn(_preparation, report, "ms a sample in one worker, and share"),
        "candidates": _drawn(_candidates, report, "times as fast as now, 95 % interval"),
        "timeline": _drawn(_timeline, report, "ms, on the host's clock"),
    }
    return {name: svg for name, svg in made.items() if svg}


# Each function draws one chart and yields the names of its rows, from top to bottom.


def _arms(axes: Any, report: Report) -> Iterator[str]:
    for row, (name, took) in enumerate(in_order(report.seconds_per_batch, MEANINGS)):
        colour = _LOOP if name in ("real", "cold") else _STEP
        _bar(axes, row, took.estimate, colour, milliseconds(took.estimate), high=took.high)
        ends = [1e3 * max(0.0, took.low), 1e3 * took.high]
        axes.plot(ends, [row, row], "|-", color=_INK, lw=1)
        yield name


def _waterfall(axes: Any, report: Report) -> Iterator[str]:
    real, alone = (report.seconds_per_batch.get(name) for name in ("real", "synthetic"))
    if real is None or alone is None or not report.stalls:
        return
    bars, at = [("step alone", 0.0, alone.estimate, _STEP)], alone.estimate
    lost = {name: each.estimate for name, each in report.stalls.items() if each.estimate > 0}
    fetch, launch = lost.pop("fetch", 0.0), lost.pop("launch", 0.0)
    if launch:  # a part of the step
        bars.append(("launch", alone.estimate - launch, launch, _COLOURS["launch"]))
    for name, seconds in in_order(lost, [stall.name for stall in STALLS]):
        bars.append((name, at, seconds, _COLOURS.get(name, _LOOP)))
        at += seconds
    bars.append(("real", 0.0, real.estimate, _LOOP))
    if fetch:  # added to the measured loop, whose files were in memory
        bars.append(("fetch", real.estimate, fetch, _COLOURS["fetch"]))
    for row, (name, begin, seconds, colour) in enumerate(bars):
        share = f"{milliseconds(seconds)}, {seconds / real.estimate:.0%}"
        _bar(axes, row, seconds, colour, share, begin)
        if begin:
            axes.plot([1e3 * begin] * 2, [row - 1, row], color=_INK, lw=0.5, ls=":")
        yield name


def _preparation(axes: Any, report: Report) -> Iterator[str]:
    shown = (one for one in report.preparation if one.share >= LEAST_SHARE)
    for row, one in enumerate(shown):
        _bar(axes, row, one.seconds_per_sample, _COLOURS["prep"], f"{one.share:.0%}")
        yield one.call


def _candidates(axes: Any, report: Report) -> Iterator[str]:
    axes.axvline(1, color=_INK, lw=0.5, ls=":")
    known = (one for one in report.candidates if not one.reason and (one.predicted or one.measured))
    for row, one in enumerate(known):
        for at, value, name in ((-0.12, one.predicted, "transfer"), (0.12, one.measured, "fetch")):
            if value is not None:
                colour, label = _COLOURS[name], "predicted" if at < 0 else "measured"
                axes.plot([value.low, value.high], [row + at] * 2, "|-", color=colour)
                axes.plot(value.estimate, row + at, "o", ms=5, color=colour, label=label)
        yield one.name


def _timeline(axes: Any, report: Report) -> Iterator[str]:
    arms = [name for name in (one.name for one in ARMS) if report.timeline.get(name)]
    if "real" not in arms:
        return
    real = _last_run(report.timeline["real"], math.inf)[-_SHOWN_STEPS:]
    window = real[-1].end - real[0].begin
    colours = {"wait": _COLOURS["prep"], "transfer": _COLOURS["transfer"], "step": _STEP}
    for row, arm in enumerate(arms):
        steps = real if arm == "real" else _last_run(report.timeline[arm], window)
        bars: dict[str, list[tuple[float, float]]] = {name: [] for name in colours}
        for one in steps:
            at = one.begin - steps[0].begin
            for name, seconds in one.parts.items():
                bars[name].append((1e3 * at, 1e3 * seconds))
                at += seconds
        for name, colour in colours.items():
            label = name if any(seconds for _, seconds in bars[name]) else None
            axes.broken_barh(bars[name], (row - 0.3, 0.6), color=colour, lw=0, label=label)
        axes.vlines([at for at, _ in bars["wait"]], row - 0.4, row + 0.4, _INK, lw=0.6)
        yield arm
    axes.set_xlim(0, 1e3 * window)


def _last_run(steps: Sequence[Step], most_s: float) -> list[Step]:
    """Return the last consecutive steps, which one block measured."""
    run, end = [steps[-1]], steps[-1].end
    for one in reversed(steps[:-1]):
        if end - one.begin > most_s or run[0].begin - one.end > one.end - one.begin:
            break
        run.insert(0, one)
    return run


def _bar(
    axes: Any, row: int, seconds: float, colour: str, text: str, begin: float = 0.0, high: float = 0
) -> None:
    axes.barh(row, 1e3 * seconds, 0.55, 1e3 * begin, color=colour)
    end = 1e3 * max(begin + seconds, high)
    axes.annotate(text, (end, row), (4, 0), textcoords="offset points", va="center")


def _drawn(draw: Callable[[Any, Report], Iterator[str]], report: Report, unit: str) -> str | None:
    """Return a chart with a row for each name that ``draw`` yields; None if it yields none."""
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": unit}), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the font may lack characters of a name
        figure = Figure(layout="constrained")
        axes = figure.add_subplot()
        axes.margins(x=0.02)
        names = list(draw(axes, report))
        if not names:
            return None
        labelled = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        if labelled:
            axes.legend(labelled.values(), labelled.keys(), ncols=3, frameon=False,
                        loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0)  # fmt: skip
        figure.set_size_inches(_WIDTH, 0.55 + 0.27 * len(names) + 0.2 * bool(labelled))
        short = [name if len(name) <= 26 else f"{name[:25]}…" for name in names]
        axes.set_yticks(range(len(names)), short)
        axes.set_ylim(len(names) - 0.4, -0.6)
        figure.supxlabel(unit, fontsize="medium")
        file = io.StringIO()
        none = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=none)
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :].replace(_INK, "currentColor")
    svg = re.sub(r' id="[A-Za-z.]+_\d+"', "", svg)  # ids would repeat from chart to chart
    return svg.replace("<svg", f'<svg role="img" aria-label="{unit}"', 1)
