"""The check: measure the same training step on real and on synthetic input, in turns.

inline        check a step, or a loop as it stands, in one's own code
check         yield the loop's batches: first steps, then rounds of one block for each arm

input         arms: what the step gets in each arm, and what that measures
              resident, placement: a few real batches, kept where the step wants them
measuring     first_steps: until steps are steady      blocks: steps between two marks
              steps: waits for single batches, a timeline
deciding      rhythm: the loop's cycle    schedule: how long blocks are, when to end
              evidence/: from blocks to a verdict
explaining    causes/: where the input's time goes, what changes would gain
reporting     report: the figures    outputs/: the forms in which they are written
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
