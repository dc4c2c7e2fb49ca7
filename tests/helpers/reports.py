"""A report with everything in it, and names that need escaping."""

from dataloaders.bottleneck import Interval, Report, Step
from dataloaders.bottleneck.causes.preparation import Call
from dataloaders.findings import Finding
from dataloaders.predicting import Candidate

HOSTILE = "</script><b onclick='x'>$a_b$ | `c` & \u6570"


def about(seconds, share=0.04):
    return Interval(seconds * (1 - share), seconds, seconds * (1 + share))


def a_report(**changes):
    """Return a full report of a loop of 33.7 ms a batch, 6.6 ms of it the step."""
    real = [Step(0.034 * k, 0.027 + 0.004 * (k % 3), 0.0061) for k in range(20)]
    alone = [Step(1 + 0.0066 * k, 0.0, 0.0066) for k in range(100)]
    given = {
        "verdict": "input-bound",
        "speedup_bound": Interval(4.9, 5.13, 5.37),
        "seconds_per_batch": {
            "real": about(0.0337),
            "synthetic": about(0.00657),
            "host": about(0.0072),
            "contended": about(0.0081),
            "cold": about(0.0377),
        },
        "stalls": {
            "fetch": about(0.004),
            "prep": about(0.025),
            "transfer": about(0.0006),
            "contention": about(0.0015),
        },
        "smallest_gap": 0.046,
        "loader": f"DataLoader over ImageFolder, {HOSTILE}",
        "batch": "[float32 8x3x128x128, int64 8]",
        "advice": ('let worker processes prepare batches: `num_workers="auto"`',),
        "notes": (f"measured in loader 1: {HOSTILE}",),
        "rounds": 5,
        "seconds": 7.0,
        "evidence": "blocks",
        "machine": {"cores": "2 cores", "cpu": "a processor", "torch": "torch 2.15"},
        "timeline": {"real": tuple(real), "synthetic": tuple(alone)},
        "waits": {
            "p50": 0.026,
            "p99": 0.04,
            "longest": 0.3,
            "slow": ((17, f"photos/{HOSTILE}/{'long' * 20}.jpg", 0.3), (4, "", 0.12)),
        },
        "preparation": (
            Call("read", 0.0004, 0.1),
            Call("seldom", 0.00001, 0.003),
            Call("decode", 0.0019, 0.48),
            Call("RandomResizedCrop(size=(128, 128), scale=(0.08, 1.0))", 0.0012, 0.31),
            Call(HOSTILE, 0.0004, 0.11),
        ),
        "candidates": (
            Candidate("workers", {"num_workers": 2}, about(1.9), about(1.8)),
            Candidate(
                *("h5", {"backend": "h5"}, about(3.4, 0.1), about(3.1), "", about(0.0099, 0.1)),
                *(12.0, 400 << 20, 3),
            ),
            Candidate("dali", reason="no GPU, and two cores are taken"),
        ),
        "findings": (
            Finding(
                "item",
                f"`loss.item()` waits for the device {HOSTILE}",
                f"{__file__}:1",
                "The guide: Syncs, https://docs.pytorch.org/tutorials/recipes/tuning_guide.html",
                about(0.0011),
                anyway=True,
            ),
            Finding("tf32", "matmul_precision is not set", None, "the guide, on TF32"),
        ),
    }
    return Report(**{**given, **changes})
