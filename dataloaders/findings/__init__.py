"""Finds what slows the training step itself down.

    Watch ──some steps of the warm-up──> Facts ──rules──> Finding, Finding, ...

watch      watches steps operator by operator; what they compute does not change
sites      finds the line of the user's code that called an operator
facts      what was seen, and the settings that it ran under, as plain values
rules      the tuning guides' list: a decision on facts for each entry
toggles    settings that can be tried from outside, around blocks of steps
probe      the largest batch that the step takes, and its rate at each size
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
