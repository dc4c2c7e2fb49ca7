"""torchvision's transforms, read as operators that draw for a whole batch.

    read(Compose) ──> members ──operator_of──> Operator, or why it is none

    crops.py       CenterCrop, RandomCrop, RandomResizedCrop
    sizes.py       Resize and v2's random sizes
    geometry.py    flips, Pad, RandomZoomOut
    turns.py       rotation, affine, perspective
    erasing.py     RandomErasing
    colour.py      jitter, grey, blur, tables of levels
    auto.py        AutoAugment, RandAugment, TrivialAugmentWide, AugMix
    elastic.py     ElasticTransform
    containers.py  RandomApply, RandomChoice, RandomOrder
    convert.py     ToTensor, Normalize and what else draws nothing and changes no size

v1 and v2, which draw in different ways in places. What is drawn is torchvision's own choice for
the same state of torch's generator, to the bit; the tests say so for each of them.
"""

from __future__ import annotations

from .table import Chain, chain_of, operator_of

__all__ = ["Chain", "chain_of", "operator_of"]
