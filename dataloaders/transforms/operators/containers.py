"""Containers that draw which of their members run: RandomApply, RandomChoice, RandomOrder.

    RandomApply   [a, b]     a and b, for those samples that the draw takes
    RandomChoice  [a, b]     a for some samples, b for the others
    RandomOrder   [a, b]     a b a b: two places, at each one member a sample

All members stand in ``primitives``, whichever run; masks say for which samples they do.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dataloaders.transforms.actions import Action, Operator, Sizes, taking
from dataloaders.transforms.draws import Draws, Where

from .table import Chain, NotRead, chain_of, reads


class _Container(Operator):
    """Members, each a chain that was read."""

    random = True

    def __init__(self, transforms: Sequence[Any]) -> None:
        self._chains = tuple(_read(transform) for transform in transforms)
        operators = [operator for chain in self._chains for operator in chain.operators]
        self.few = any(operator.few for operator in operators)

    @property
    def _once(self) -> tuple[Any, ...]:
        return tuple(
            primitive
            for chain in self._chains
            for operator in chain.operators
            for primitive in operator.primitives
        )

    def _drawn(self, chain: Chain, draws: Draws, sizes: Sizes, where: Where) -> list[Action]:
        return [
            action for operator in chain.operators for action in operator.draw(draws, sizes, where)
        ]


def _read(transform: Any) -> Chain:
    chain = chain_of(transform, "transforms")
    if chain.rest:
        raise NotRead(f"its {chain.rest[0].name} is not read: {chain.why}")
    return chain


class RandomApply(_Container):
    """All members, or none."""

    def __init__(self, transform: Any, v2: bool) -> None:
        super().__init__(tuple(transform.transforms))
        self._v2 = v2
        self._probability = np.float32(float(transform.p))
        self.primitives = self._once

    def draw(self, draws: Draws, sizes: Sizes, where: Where = None) -> list[Action]:
        """See `Operator`."""
        drawn = draws.rand(where)
        # v1 leaves them out if p < drawn, v2 if drawn >= p.
        takes = drawn < self._probability if self._v2 else drawn <= self._probability
        where = taking(where, takes)
        return [
            action for chain in self._chains for action in self._drawn(chain, draws, sizes, where)
        ]


class _OneOfEach(_Container):
    """At each of some places one member a sample."""

    def draw(self, draws: Draws, sizes: Sizes, where: Where = None) -> list[Action]:
        """See `Operator`."""
        actions = []
        for member in self.members(draws, where).T:
            for position, chain in enumerate(self._chains):
                takes = taking(where, member == position)
                actions += self._drawn(chain, draws, sizes, takes)
        return actions

    @abstractmethod
    def members(self, draws: Draws, where: Where) -> npt.NDArray[np.int64]:
        """Which member, int64 [n, places]."""


class RandomChoice(_OneOfEach):
    """One member: v1 draws it by Python's ``random``, v2 by ``torch.multinomial``."""

    def __init__(self, transform: Any, v2: bool) -> None:
        super().__init__(tuple(transform.transforms))
        self._v2 = v2
        self._weights = transform.p if transform.p is None else list(transform.p)
        self.primitives = self._once
        try:
            self._choose(Draws([[0, 0, 0, 0]]), None)
        except Exception as error:
            raise NotRead(
                f"p={transform.p!r} for {len(self._chains)} transforms: torchvision raises "
                f"{type(error).__name__} ({error}) for each image; give one weight a transform"
            ) from None

    def members(self, draws: Draws, where: Where) -> npt.NDArray[np.int64]:
        """One place."""
        return self._choose(draws, where)[:, None]

    def _choose(self, draws: Draws, where: Where) -> npt.NDArray[np.int64]:
        if self._v2:
            assert self._weights is not None
            return draws.choose(self._weights, where)
        found = np.zeros(len(draws), np.int64)
        for sample in _those(where, len(draws)):
            population = range(len(self._chains))
            found[sample] = draws.python(sample).choices(population, weights=self._weights)[0]
        return found


class RandomOrder(_OneOfEach):
    """All members: v1 shuffles them by Python's ``random``, v2 by ``torch.randperm``."""

    def __init__(self, transform: Any, v2: bool) -> None:
        super().__init__(tuple(transform.transforms))
        self._v2 = v2
        self.primitives = self._once * len(self._chains)
        self.few = self.few or len(self._chains) > 1

    def members(self, draws: Draws, where: Where) -> npt.NDArray[np.int64]:
        """As many places as members."""
        size = len(self._chains)
        if self._v2:
            return draws.randperm(size, where)
        found = np.tile(np.arange(size), (len(draws), 1))
        for sample in _those(where, len(draws)):
            order = list(range(size))
            draws.python(sample).shuffle(order)
            found[sample] = order
        return found


def _those(where: Where, size: int) -> Sequence[int]:
    return range(size) if where is None else np.flatnonzero(where).tolist()


@reads("RandomApply")
def _random_apply(transform: Any, v2: bool) -> Operator:
    return RandomApply(transform, v2)


@reads("RandomChoice")
def _random_choice(transform: Any, v2: bool) -> Operator:
    return RandomChoice(transform, v2)


@reads("RandomOrder")
def _random_order(transform: Any, v2: bool) -> Operator:
    return RandomOrder(transform, v2)
