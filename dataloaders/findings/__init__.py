"""What of the step itself could be faster.

    Watch ──some steps of the warm-up──> Facts ──rules──> Finding, Finding, ...

watch      a step seen operator by operator; nothing that it computes changes
sites      where on the stack an operator was called
facts      what was seen, and the settings that it ran under, as plain values
rules      the tuning guides' list, one decision on facts each
toggles    what of it can be tried from outside, around blocks of steps
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
