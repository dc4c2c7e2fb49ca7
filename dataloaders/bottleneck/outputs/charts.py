"""The page's charts: matplotlib's SVG, in the colours of the page that it stands in."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.figure import Figure

from dataloaders.bottleneck.arms import ARMS, STALLS
from dataloaders.bottleneck.outputs.tables import LEAST_SHARE, in_order
from dataloaders.bottleneck.outputs.words import milliseconds

if TYPE_CHECKING:
    from dataloaders.bottleneck.report import Report
    from dataloaders.measuring.intervals import Interval, Step

__all__ = ["charts"]

_INK = "#010203"  # becomes currentColor: black on white, or the other way round
# Okabe and Ito's colours: told apart by colour-blind readers, on white and on black.
_STEP, _LOOP = "#009e73", "#8b949e"
_COLOURS = {
    "prep": "#e69f00",
    "fetch": "#d55e00",
    "transfer": "#56b4e9",
    "contention": "#cc79a7",
    "launch": "#999999",
}
_WIDTH = 3.6  # inches; text keeps a legible size on a phone
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
    """Return SVG elements by the page's sections, for those that have something to show."""
    made = {
        "arms": _arms(report),
        "stalls": _waterfall(report),
        "preparation": _preparation(report),
        "candidates": _candidates(report),
        "timeline": _timeline(report),
    }
    return {name: svg for name, svg in made.items() if svg}


def _arms(report: Report) -> str | None:
    shown = in_order(report.seconds_per_batch, [arm.name for arm in (*ARMS[1:], ARMS[0])])

    def draw(axes: Any) -> None:
        for row, (name, took) in enumerate(shown):
            colour = _LOOP if name in ("real", "cold") else _STEP
            axes.barh(row, 1e3 * took.estimate, 0.55, color=colour)
            ends = [1e3 * max(0.0, took.low), 1e3 * took.high]
            axes.plot(ends, [row, row], "|-", color=_INK, lw=1)
            _label(axes, max(ends[1], 1e3 * took.estimate), row, milliseconds(took.estimate))

    return _drawn(draw, [name for name, _ in shown], "ms a batch, 95 % interval")


def _waterfall(report: Report) -> str | None:
    real, alone = (report.seconds_per_batch.get(name) for name in ("real", "synthetic"))
    if real is None or alone is None or not report.stalls:
        return None
    bars = [("step alone", 0.0, alone.estimate, _STEP)]
    at = alone.estimate
    for name, lost in in_order(report.stalls, [stall.name for stall in STALLS]):
        if name == "fetch":  # beyond the loop as it was measured, with its files in memory
            bars.append(("real", 0.0, real.estimate, _LOOP))
            at = real.estimate
        if lost.estimate > 0:
            bars.append((name, at, lost.estimate, _COLOURS.get(name, _LOOP)))
            at += lost.estimate
    if "real" not in [name for name, *_ in bars]:
        bars.append(("real", 0.0, real.estimate, _LOOP))

    def draw(axes: Any) -> None:
        for row, (_, begin, seconds, colour) in enumerate(bars):
            axes.barh(row, 1e3 * seconds, 0.55, 1e3 * begin, color=colour)
            share = f"{milliseconds(seconds)}, {seconds / real.estimate:.0%}"
            _label(axes, 1e3 * (begin + seconds), row, share)
            if begin:
                axes.plot([1e3 * begin] * 2, [row - 1, row], color=_INK, lw=0.5, ls=":")

    return _drawn(draw, [name for name, *_ in bars], "ms of a batch, and share of the loop")


def _preparation(report: Report) -> str | None:
    rows = [one for one in report.preparation if one.share >= LEAST_SHARE]

    def draw(axes: Any) -> None:
        for row, one in enumerate(rows):
            axes.barh(row, 1e3 * one.seconds_per_sample, 0.55, color=_COLOURS["prep"])
            _label(axes, 1e3 * one.seconds_per_sample, row, f"{one.share:.0%}")

    return _drawn(draw, [one.call for one in rows], "CPU ms a sample, and share")


def _candidates(report: Report) -> str | None:
    found = report.candidates
    rows = [one for one in found if not one.reason and (one.predicted or one.measured)]

    def draw(axes: Any) -> None:
        axes.axvline(1, color=_INK, lw=0.5, ls=":")
        for row, one in enumerate(rows):
            _point(axes, row - 0.12, one.predicted, _COLOURS["transfer"], "predicted")
            _point(axes, row + 0.12, one.measured, _COLOURS["fetch"], "measured")
        _legend(axes)

    names = [one.name for one in rows]
    return _drawn(draw, names, "times as fast as now, 95 % interval", legend=True)


def _timeline(report: Report) -> str | None:
    arms = [name for name in (one.name for one in ARMS) if report.timeline.get(name)]
    if "real" not in arms:
        return None
    real = _last_run(report.timeline["real"], math.inf)[-_SHOWN_STEPS:]
    window = sum(real[-1]) - real[0].begin

    def draw(axes: Any) -> None:
        colours = {"wait": _COLOURS["prep"], "transfer": _COLOURS["transfer"], "step": _STEP}
        for row, arm in enumerate(arms):
            steps = real if arm == "real" else _last_run(report.timeline[arm], window)
            zero = steps[0].begin
            bars: dict[str, list[tuple[float, float]]] = {name: [] for name in colours}
            for one in steps:
                at = one.begin - zero
                for name, seconds in zip(colours, one[1:], strict=True):
                    bars[name].append((1e3 * at, 1e3 * seconds))
                    at += seconds
            for name, colour in colours.items():
                label = name if any(seconds for _, seconds in bars[name]) else None
                axes.broken_barh(bars[name], (row - 0.3, 0.6), color=colour, lw=0, label=label)
            axes.vlines([at for at, _ in bars["wait"]], row - 0.4, row + 0.4, _INK, lw=0.6)
        _legend(axes)
        axes.set_xlim(0, 1e3 * window)

    return _drawn(draw, arms, "ms, on the host's clock", legend=True)


def _last_run(steps: Sequence[Step], most_s: float) -> list[Step]:
    """Return the last steps that follow each other, as one block measured them."""
    run, end = [steps[-1]], sum(steps[-1])
    for one in reversed(steps[:-1]):
        if end - one.begin > most_s or run[0].begin - sum(one) > sum(one[1:]):
            break
        run.insert(0, one)
    return run


def _point(axes: Any, row: float, value: Interval | None, colour: str, label: str) -> None:
    if value is not None:
        axes.plot([value.low, value.high], [row, row], "|-", color=colour)
        axes.plot(value.estimate, row, "o", ms=5, color=colour, label=label)


def _label(axes: Any, x: float, row: float, text: str) -> None:
    axes.annotate(text, (x, row), (4, 0), textcoords="offset points", va="center")


def _legend(axes: Any) -> None:
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    axes.legend(handles.values(), handles.keys(), ncols=3, frameon=False, loc="lower left",
                bbox_to_anchor=(0, 1), borderaxespad=0)  # fmt: skip


def _drawn(
    draw: Callable[[Any], None], names: list[str], unit: str, *, legend: bool = False
) -> str | None:
    """Return a chart with a row for each name, from the top."""
    if not names:
        return None
    short = [name if len(name) <= 26 else f"{name[:25]}…" for name in names]
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a name in a script that its font lacks
        figure = Figure((_WIDTH, 0.55 + 0.27 * len(names) + 0.2 * legend), layout="constrained")
        axes = figure.add_subplot()
        axes.margins(x=0.02)
        draw(axes)
        axes.set_yticks(range(len(names)), short)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.set_xlabel(unit)
        file = io.StringIO()
        none = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        with matplotlib.rc_context({"svg.hashsalt": unit}):
            figure.savefig(file, format="svg", transparent=True, metadata=none)
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :].replace(_INK, "currentColor")
    svg = re.sub(r' id="[A-Za-z.]+_\d+"', "", svg)  # the same in each chart
    return svg.replace("<svg", f'<svg role="img" aria-label="{unit}"', 1)
