"""Whether operators draw and do what torchvision draws and does, to the bit.

words of some samples ──seed_generators──> transform(image)    expected, and the next draw
                      ──Draws──> actions ──applied──> got      got, and the next draw
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torchvision import tv_tensors
from torchvision.transforms.functional import get_dimensions
from torchvision.transforms.v2 import functional

from dataloaders.random_states import random_states_kept
from dataloaders.randomness import words
from dataloaders.seeding import seed_generators
from dataloaders.transforms.actions import Action, Sizes, applied, drawn
from dataloaders.transforms.draws import Draws
from dataloaders.transforms.operators import chain_of

FORMS = ("PIL", "PIL grey", "tensor", "tensor grey", "tensor floats", "tensor tv")
"""In which an image may come to a transform."""


def images_of(form: str, sizes: Sequence[tuple[int, int]] = ((23, 17), (8, 40), (31, 32))) -> Any:
    """An image of each of ``sizes``, (height, width), in one of `FORMS`."""
    mode = "L" if "grey" in form else "RGB"
    images: list[Any] = [picture(*size, mode) for size in sizes]
    if "tensor" in form:
        images = [functional.pil_to_tensor(image) for image in images]
    if "floats" in form:
        images = [image / 255 for image in images]
    if "tv" in form:
        images = [tv_tensors.Image(image) for image in images]
    return images


def picture(height: int, width: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """A PIL image of slopes, edges and noise: with dark, light, grey and coloured parts.

    Of odd width: pale, so that no level is black or white.
    """
    generator = np.random.default_rng((seed, height, width))
    y, x = np.mgrid[0:height, 0:width]
    slopes = np.stack([x * 255 / width, y * 200 / height + 20, (x + y) * 255 / (width + height)])
    noise = generator.normal(0, 25, (3, height, width))
    pixels = np.clip(slopes + noise, 0, 255)
    pixels[:, : height // 4, : width // 3] = 0
    pixels[:, height // 4 : height // 2, : width // 3] = generator.integers(0, 256, 3)[
        :, None, None
    ]
    pixels[1:, height // 2 :, -width // 4 :] = pixels[0, height // 2 :, -width // 4 :]
    if width % 2:  # not all levels from 0 to 255
        pixels = 20 + pixels * 0.7
    return Image.fromarray(pixels.astype(np.uint8).transpose(1, 2, 0), "RGB").convert(mode)


def outcome(action: Callable[[], Any]) -> Any:
    """What ``action`` gives, or what it raises: comparable by `same`."""
    try:
        return action()
    except Exception as error:
        return (type(error), str(error))


def same(got: Any, expected: Any) -> bool:
    """Whether two outcomes are one: PIL images and tensors to the bit, errors by their text."""
    if type(got) is not type(expected):
        return False
    if isinstance(expected, torch.Tensor):
        equal = got.dtype == expected.dtype and torch.equal(got, expected)
        return equal and got.stride() == expected.stride()
    if isinstance(expected, Image.Image):
        facts = [(image.mode, image.size, image.tobytes()) for image in (got, expected)]
        return facts[0] == facts[1]
    return bool(got == expected)


def seeds_of(samples: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """uint32 [samples, 4]: what seeds the samples 0, 1, ... of an epoch."""
    return words(seed, 0, np.arange(samples))


def sizes_of(images: Sequence[Any]) -> Sizes:
    """The sizes of ``images``."""
    channels, heights, widths = np.array([get_dimensions(image) for image in images]).T
    return Sizes(heights, widths, channels)


def check_exact(transform: Any, images: Sequence[Any], samples: int, seed: int = 0) -> list[Any]:
    """Assert that ``transform``, read, does what it does itself, and leaves the streams as it does.

    For ``samples`` samples in one batch, which take turns among ``images``. Gives the outcomes.
    """
    chain = chain_of(transform)
    assert chain.why is None, chain.why
    seeds = seeds_of(samples, seed)
    own = [images[sample % len(images)] for sample in range(samples)]
    draws, sizes = Draws(seeds), sizes_of(own)
    actions: list[Action] = drawn(chain.operators, draws, sizes)
    primitives = [each for operator in chain.operators for each in operator.primitives]
    assert [action.primitive for action in actions] == primitives
    following = draws.words()
    outcomes = []
    with random_states_kept():
        for sample, image in enumerate(own):
            seed_generators(tuple(seeds[sample].tolist()))
            expected = outcome(lambda image=image: transform(image))
            got = outcome(lambda image=image, sample=sample: applied(actions, sample, image))
            if not same(got, expected):
                raise AssertionError(f"sample {sample}: not the pixels of {transform}")
            outcomes.append(expected)
            if isinstance(expected, tuple):  # it raised, maybe before it had drawn all
                continue
            next_word = torch.randint(2**24, (1,)).item()
            assert int(following[sample]) % 2**24 == next_word, f"sample {sample}: next draws"
            after = [sizes.height[sample], sizes.width[sample]]
            assert after == get_dimensions(expected)[1:]
    return outcomes
