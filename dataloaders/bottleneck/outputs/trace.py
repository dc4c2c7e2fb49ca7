"""Measured steps as Chrome's trace events, which ui.perfetto.dev and chrome://tracing open.

Format: "Trace Event Format" of the Catapult project; complete events (``ph`` "X"), microseconds.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataloaders.bottleneck.report import Report

__all__ = ["trace"]


def trace(report: Report) -> str:
    """Return the steps of the timeline as JSON: a row an arm, and in it wait, transfer, step."""
    events: list[dict[str, Any]] = [
        _named("process_name", 0, f"dataloaders check: {report.loader}")
    ]
    for row, (arm, steps) in enumerate(report.timeline.items(), 1):
        events.append(_named("thread_name", row, arm))
        for number, one in enumerate(steps):
            at = one.begin
            for name in ("wait", "transfer", "step"):
                seconds = getattr(one, name)
                if seconds > 0:
                    place = {"pid": 1, "tid": row, "ts": at * 1e6, "dur": seconds * 1e6}
                    events.append({"ph": "X", "name": name, **place, "args": {"step": number}})
                at += seconds
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _named(kind: str, row: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": 1, "tid": row, "name": kind, "args": {"name": name}}
