"""What torchvision makes of PIL images, computed on whole batches by torch, on any device.

    Actions of a batch ──run──> group by group: kernel_for(primitive)(images, numbers)
                                                 │
        levels.py      brightness, contrast, saturation, grey, tables of levels
        hue.py         through HSV in bytes and back
        neighbours.py  sharpness, blur
        place.py       flips, crops, borders, erased boxes
        resize.py      any sizes to any sizes
        warp.py        rotated, sheared, moved, tilted (recorded.py: by which coefficients)
        own.py         AugMix, ElasticTransform: torchvision's own functions on tensors

Behind a DALI graph on a GPU they do what DALI computes otherwise than torchvision. On the CPU
they are what the tests compare with Pillow, byte by byte; there Pillow itself is mostly quicker.
"""

from __future__ import annotations

from .kernel import EXACT, Form, Images, Kernel
from .run import run
from .table import TABLE, Row, kernel_for

__all__ = ["EXACT", "TABLE", "Form", "Images", "Kernel", "Row", "kernel_for", "run"]
