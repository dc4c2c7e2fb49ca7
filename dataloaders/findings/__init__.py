"""Find what slows down the training step itself.

    Watch ──some steps of the warm-up──> Facts ──rules──> Finding, Finding, ...

watch      watches steps operator by operator, without changing what they compute
sites      finds the line of the user's code that called an operator
facts      holds what was seen, and under which settings, as plain values
rules      decides on facts which entries of the tuning guides apply
toggles    switches settings around blocks of steps, to measure their gain
probe      finds the largest batch that the step takes, and its rate at each size
"""

from dataloaders.findings.facts import Facts, Place
from dataloaders.findings.probe import Probe, Trial, probe_batch_sizes
from dataloaders.findings.rules import Finding, findings_of
from dataloaders.findings.toggles import TOGGLES
from dataloaders.findings.watch import Watch

__all__ = [
    "TOGGLES",
    "Facts",
    "Finding",
    "Place",
    "Probe",
    "Trial",
    "Watch",
    "findings_of",
    "probe_batch_sizes",
]
