"""The check: the same training step on real and on synthetic input, side by side.

inline        a check in one's own code: of a step, or of a loop as it stands
check         the loop's batches: first steps, then rounds of one block an arm

what is fed        arms: what the step gets in each arm, and what its difference measures
                   resident, placement: a few real batches, kept where the step wants them
what is measured   first_steps: until steps are steady      blocks: batches between two marks
                   steps: single waits, a timeline
what is decided    rhythm: the loop's cycle    schedule: how long blocks are, when to end
                   evidence/: from blocks to a verdict
after the verdict  causes/: where input's time goes, what changes would gain
what is reported   report: the figures, and the forms that they are written in (outputs/)
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
