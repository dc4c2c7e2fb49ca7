"""The check: the same training step on real and on synthetic input, side by side.

inline     a check in one's own code: of a step, or of a loop as it stands
check      the loop's batches: a warm-up, then rounds of one block an arm
advice     what settings that findings name would gain
arms       what the step gets in each arm, and what its difference tells
schedule   how long blocks are, when enough is known: decided from numbers
blocks     one block: batches out, marks of the clock between them
resident   a few real batches, kept where the step wants them
verdict    what the intervals carry, and by which evidence
causes     after the verdict: slow samples, cold files, remedies and what they gain
preparation   what a sample's preparation consists of, by calls
summary    advice and notes        report   the result: data and text
outputs/   JSON, page, Markdown, trace, two reports compared
"""

from dataloaders.errors import MissingDependency

try:
    import psutil  # noqa: F401
    import rich  # noqa: F401
except ImportError as error:
    raise MissingDependency(
        f"the bottleneck check needs psutil and rich, and {error.name} cannot be imported "
        f"({error}); install them with: pip install 'gpu-dataloaders[check]'"
    ) from error

from dataloaders.bottleneck.arms import Verdict
from dataloaders.bottleneck.check import Check, Progress
from dataloaders.bottleneck.inline import bottleneck_check, check_bottleneck
from dataloaders.bottleneck.outputs.against import Comparison
from dataloaders.bottleneck.report import Report
from dataloaders.measuring.intervals import Interval, Step

__all__ = [
    "Check",
    "Comparison",
    "Interval",
    "Progress",
    "Report",
    "Step",
    "Verdict",
    "bottleneck_check",
    "check_bottleneck",
]
