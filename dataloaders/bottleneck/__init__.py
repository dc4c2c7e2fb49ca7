"""The check: the same training step on real and on synthetic input, side by side.

resident   a few real batches, kept where the step wants them
feed       the real loader: epochs, readiness, idleness
check      blocks of each arm, interleaved, inside somebody's loop
blocks     one arm each            verdict  what the interval carries
summary    advice and notes        report   text, JSON, HTML, exit status
"""

from dataloaders.errors import MissingDependency

try:
    import rich  # noqa: F401
except ImportError as error:
    raise MissingDependency(
        f"the bottleneck check needs rich, which cannot be imported ({error}); install it with: "
        "pip install 'gpu-dataloaders[check]'"
    ) from error

from dataloaders.bottleneck.check import Check, Progress, check_bottleneck
from dataloaders.bottleneck.report import EXIT_STATUS, Report
from dataloaders.bottleneck.verdict import Verdict
from dataloaders.measuring.intervals import Interval

__all__ = [
    "EXIT_STATUS",
    "Check",
    "Interval",
    "Progress",
    "Report",
    "Verdict",
    "check_bottleneck",
]
