"""A chain drawn for a batch and applied, held against torchvision itself, sample by sample."""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import PIL.Image
import torch

from dataloaders.seeding.seeded import seed_generators
from dataloaders.transforms.actions import Action, Operator, SampleError, applied, drawn
from dataloaders.transforms.draws import Draws
from dataloaders.transforms.operators import chain_of

from .compare import assert_same
from .drawn import in_form, seeds_of, sizes_of
from .pictures import noise

SHAPES = ((1, 1), (5, 7), (13, 13), (20, 9), (9, 31), (40, 33), (2, 37), (37, 1))
"""Heights and widths of the images that are tried."""


def images(kind: str, shapes: Sequence[tuple[int, int]] = SHAPES) -> list[Any]:
    """Images of these shapes; ``kind``: a PIL mode, "bytes", "floats" or "tv" (of bytes)."""
    forms = {"bytes": "tensor", "floats": "tensor floats", "tv": "tensor tv"}
    mode = "RGB" if kind in forms else kind
    channels = len(PIL.Image.new(mode, (1, 1)).getbands())
    made = [noise(*shape, channels, number).convert(mode) for number, shape in enumerate(shapes)]
    return in_form(forms.get(kind, "PIL"), made)


def copied(value: Any) -> Any:
    """The image in memory of its own."""
    return value.clone() if isinstance(value, torch.Tensor) else value.copy()


def told(transform: Any, given: Any, row: np.ndarray) -> tuple[Any, float, float]:
    """What torchvision makes of one image, or its exception; and what is drawn after it."""
    seed_generators(tuple(row.tolist()))
    try:
        made = transform(copied(given))
    except Exception as error:
        return error, 0.0, 0.0
    return made, torch.rand(1).item(), random.random()


def assert_exact(transform: Any, given: Sequence[Any], *, repeats: int = 3, seed: int = 0) -> int:
    """That ``transform`` is drawn and done exactly, on each image ``repeats`` times.

    Also that what is drawn after it is the same, that the sizes it ends with are those of the
    images, and that errors have torchvision's own type and text.

    Returns:
        How many samples torchvision did not raise for.
    """
    chain = chain_of(transform)
    assert chain.why is None, chain.why
    batch = [one for one in given for _ in range(repeats)]
    rows = seeds_of(len(batch), seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = [told(transform, one, row) for one, row in zip(batch, rows, strict=True)]
        left = list(range(len(batch)))
        while True:
            try:
                _assert_same(
                    chain.operators,
                    [batch[i] for i in left],
                    rows[left],
                    [expected[i] for i in left],
                )
                break
            except SampleError as error:
                raised = error
            assert_error(expected[left.pop(raised.sample)][0], raised.error)
            assert str(raised) == str(raised.error)
    return sum(not isinstance(made, Exception) for made, _, _ in expected)


def assert_error(made: Any, raised: Exception | None) -> None:
    """That an error is torchvision's."""
    assert (type(raised), str(raised)) == (type(made), str(made))


def _raised(actions: Sequence[Action], sample: int, given: Any) -> Exception | None:
    try:
        applied(actions, sample, copied(given))
    except Exception as error:
        return error
    return None


def _assert_same(
    operators: Sequence[Operator], batch: Sequence[Any], rows: np.ndarray, expected: Sequence[Any]
) -> None:
    draws, sizes = Draws(rows), sizes_of(batch)
    actions = drawn(operators, draws, sizes)
    primitives = [primitive for operator in operators for primitive in operator.primitives]
    assert [action.primitive for action in actions] == primitives
    for action in actions:
        assert set(action.numbers) == set(action.primitive.numbers)
        assert all(len(array) == len(batch) for array in action.numbers.values())
        hash(action.primitive)
    after = draws.rand()
    for sample, (made, torchs, pythons) in enumerate(expected):
        if isinstance(made, Exception):
            assert_error(made, _raised(actions, sample, batch[sample]))
            continue
        given = copied(batch[sample])
        assert_same(applied(actions, sample, given), made, f"sample {sample}", strides=False)
        assert_same(given, batch[sample], "the given image")
        assert after[sample] == torchs, "the stream is elsewhere"
        assert draws.python(sample).random() == pythons, "Python's stream is elsewhere"
        ends = sizes_of([made])
        for name in ("height", "width", "channels", "tensors"):
            assert getattr(sizes, name)[sample] == getattr(ends, name)[0], name
