"""Operators of the automatic policies: AutoAugment, RandAugment, TrivialAugmentWide, AugMix.

    _Space: what a policy may do, and how strongly ──> which of it, at which level and sign
                                                       ──> one action for each primitive of a slot

Which levels there are is asked of the user's own object, so it is what torchvision would use.
v1 and v2 draw in different ways: v1 a sign as a whole number, v2 as a number in [0, 1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from dataloaders.transforms.actions import Action, Operator, Primitive, Sizes, taking
from dataloaders.transforms.draws import Draws, Where
from dataloaders.transforms.primitives.auto import AugMixed, numbers_of, step_of
from dataloaders.transforms.primitives.colour import Posterize

from .colour import refuse
from .options import fill_of, whole
from .table import NotRead, mode_of, reads

_Levels: TypeAlias = "npt.NDArray[np.float64] | None"
_Table: TypeAlias = Mapping[str, tuple[_Levels, bool]]
"""By name: its levels, if it has any, and whether they may be negative too."""

_MOST_SIZES = 4096


class _Space:
    """What a policy may do, and how strongly.

    Args:
        of_size: the table for images of a height and a width.

    Attributes:
        names: what it may do.
        graded: whether each has levels, bool [k].
        signed: whether its levels may be negative too, bool [k].
    """

    def __init__(self, of_size: Callable[[int, int], _Table]) -> None:
        self._of_size = of_size
        self._tables: dict[tuple[int, int], npt.NDArray[np.float64]] = {}
        table = of_size(64, 64)
        self.names = tuple(table)
        self.graded = np.array([levels is not None for levels, _ in table.values()], np.bool_)
        self.signed = np.array([signed for _, signed in table.values()], np.bool_) & self.graded
        self._fixed = _stacked(table)
        # Equal for two sizes: equal for all.
        self._sized = (self._fixed != _stacked(of_size(97, 131))).any(axis=1)

    @property
    def bins(self) -> int:
        """How many levels each has."""
        return int(self._fixed.shape[1])

    def levels(
        self,
        chosen: npt.NDArray[np.int64],
        bins: npt.NDArray[np.int64],
        sizes: Sizes,
        where: Where,
    ) -> npt.NDArray[np.float64]:
        """float64 [n]: what each of the samples in ``where`` has chosen, at that bin; no sign."""
        found = self._fixed[chosen, bins]
        for sample in np.flatnonzero(taking(where, self._sized[chosen])).tolist():
            size = int(sizes.height[sample]), int(sizes.width[sample])
            found[sample] = self._table(size)[chosen[sample], bins[sample]]
        return found

    def _table(self, size: tuple[int, int]) -> npt.NDArray[np.float64]:
        if size not in self._tables:
            if len(self._tables) >= _MOST_SIZES:
                self._tables.clear()
            self._tables[size] = _stacked(self._of_size(*size))
        return self._tables[size]


class _Slots:
    """The primitives of some slots: in each slot, each of some names, of which a sample takes one.

    Args:
        slots: the places in ``names`` that may be taken in each slot.
    """

    def __init__(
        self,
        slots: Sequence[Sequence[int]],
        names: Sequence[str],
        steps: Sequence[Primitive | None],
    ) -> None:
        self._names = names
        self._slots = [[place for place in slot if steps[place] is not None] for slot in slots]
        self._steps = steps
        self.primitives = tuple(step for slot in self._slots for step in self._taken(slot))

    def actions(
        self,
        slot: int,
        chosen: npt.NDArray[np.int64],
        levels: npt.NDArray[np.float64],
        sizes: Sizes,
        where: Where,
    ) -> list[Action]:
        """Those of one slot, where each sample has chosen a name and a level."""
        places = self._slots[slot]
        actions = [
            Action(step, numbers_of(self._names[place], levels), taking(where, chosen == place))
            for place, step in zip(places, self._taken(places), strict=True)
        ]
        for action in actions:
            if isinstance(action.primitive, Posterize):
                bits = action.numbers["bits"]
                refuse(action, (bits < 1) | (bits > 8), sizes)
        return actions

    def _taken(self, slot: Sequence[int]) -> list[Primitive]:
        return [step for place in slot if (step := self._steps[place]) is not None]


class AutoAugment(Operator):
    """One of some policies, each two steps that are taken with a probability."""

    random = True
    few = True

    def __init__(self, transform: Any, v2: bool) -> None:
        self._v2 = v2
        space = self._space = _space_of(transform, 10, v2)
        policies = transform._policies if v2 else transform.policies
        for name in {name for policy in policies for name, _, _ in policy} - set(space.names):
            raise NotRead(f"its policies have a step {name!r}, which torchvision does not know")
        if any(len(policy) != 2 for policy in policies):
            raise NotRead("its policies must be of two steps each, as torchvision's are")
        self._chosen = np.array(
            [[space.names.index(name) for name, _, _ in policy] for policy in policies]
        )
        # torch compares these with its float32 numbers as float32.
        self._shares = np.array([[share for _, share, _ in each] for each in policies], np.float32)
        bins = [[bin for _, _, bin in policy] for policy in policies]
        self._bins = np.array([[bin or 0 for bin in policy] for policy in bins])
        known = np.array([[bin in range(space.bins) for bin in policy] for policy in bins])
        if (space.graded[self._chosen] & ~known).any():
            raise NotRead(f"its policies must give each step a level from 0 to {space.bins - 1}")
        slots = [np.unique(self._chosen[:, slot]).tolist() for slot in range(2)]
        self._slots = _Slots(slots, space.names, _steps_of(transform, space.names, v2))
        self.primitives = self._slots.primitives

    def draw(self, draws: Draws, sizes: Sizes, where: Where = None) -> list[Action]:
        """See `Operator`."""
        policy = draws.randint(0, len(self._chosen), where)
        if not self._v2:
            rand = [draws.rand(where) for _ in range(2)]
            signs = [draws.randint(0, 2, where) for _ in range(2)]
        actions = []
        for slot in range(2):
            chosen, bins = self._chosen[policy, slot], self._bins[policy, slot]
            share = self._shares[policy, slot]
            signed = self._space.signed[chosen]
            if self._v2:
                taken = taking(where, draws.rand(where) <= share)
                negative = _negative(v2=True, draws=draws, where=taken & signed)
            else:
                taken = taking(where, rand[slot] <= share)
                negative = signs[slot] == 0
            levels = self._space.levels(chosen, bins, sizes, taken)
            levels = np.where(signed & negative, -levels, levels)
            actions += self._slots.actions(slot, chosen, levels, sizes, taken)
        return actions


class RandomSteps(Operator):
    """RandAugment and TrivialAugmentWide: some steps, each any of a space.

    Args:
        steps: how many.
        bin: the level of all of them; None: each is drawn.
    """

    random = True
    few = True

    def __init__(self, transform: Any, v2: bool, steps: int, bin: int | None) -> None:
        self._v2 = v2
        self._steps = steps
        self._bin = bin
        self._space = _space_of(transform, transform.num_magnitude_bins, v2)
        if bin is not None and bin not in range(-self._space.bins, self._space.bins):
            raise NotRead(
                f"magnitude={bin!r} with num_magnitude_bins={self._space.bins}: torchvision takes "
                "whole numbers below that; lower it"
            )
        names = self._space.names
        slots = [range(len(names))] * steps
        self._slots = _Slots(slots, names, _steps_of(transform, names, v2))
        self.primitives = self._slots.primitives

    def draw(self, draws: Draws, sizes: Sizes, where: Where = None) -> list[Action]:
        """See `Operator`."""
        actions = []
        for slot in range(self._steps):
            chosen, levels = _step(
                self._space, self._bin, self._space.bins, self._v2, draws, sizes, where
            )
            actions += self._slots.actions(slot, chosen, levels, sizes, where)
        return actions


class AugMix(Operator):
    """AugMix: weights from Dirichlet's distribution, and the steps of each of the chains."""

    random = True

    def __init__(self, transform: Any, v2: bool) -> None:
        self._v2 = v2
        self._severity = whole(transform.severity, "severity")
        self._width = whole(transform.mixture_width, "mixture_width")
        self._depth = whole(transform.chain_depth, "chain_depth")
        self._space = _space_of(transform, transform._PARAMETER_MAX, v2)
        alpha = transform.alpha
        self._of_two = torch.tensor([alpha, alpha]).expand(1, -1)
        self._of_width = torch.tensor([alpha] * self._width).expand(1, -1)
        try:
            self._weights(torch.Generator())
        except (RuntimeError, IndexError) as error:
            raise NotRead(
                f"torch cannot draw weights with alpha={alpha!r} and mixture_width={self._width}: "
                f"{error}; give alpha as a positive float"
            ) from None
        names = self._space.names
        self.primitives = (AugMixed(names, _steps_of(transform, names, v2), v2),)

    def draw(self, draws: Draws, sizes: Sizes, where: Where = None) -> list[Action]:
        """See `Operator`."""
        samples, most = len(sizes), self._depth if self._depth > 0 else 3
        original = np.zeros(samples, np.float32)
        weights = np.zeros((samples, self._width), np.float32)
        for sample in np.flatnonzero(taking(where, np.ones(samples, np.bool_))).tolist():
            with draws.generator(sample) as generator:
                original[sample], weights[sample] = self._weights(generator)
        operations = np.full((samples, self._width, most), -1)
        levels = np.zeros((samples, self._width, most))
        for chain in range(self._width):
            depth = np.full(samples, self._depth)
            if self._depth <= 0:
                depth = draws.randint(1, 4, where)
            for step in range(most):
                taken = taking(where, step < depth)
                chosen, level = _step(
                    self._space, None, self._severity, self._v2, draws, sizes, taken
                )
                operations[:, chain, step] = np.where(taken, chosen, -1)
                levels[:, chain, step] = level
        numbers = (original, weights, operations, levels)
        primitive = self.primitives[0]
        return [Action(primitive, dict(zip(primitive.numbers, numbers, strict=True)), where)]

    def _weights(self, generator: torch.Generator) -> tuple[float, npt.NDArray[np.float32]]:
        pair = torch._sample_dirichlet(self._of_two, generator=generator)
        weights = torch._sample_dirichlet(self._of_width, generator=generator) * pair[:, 1:]
        return pair[0, 0].item(), weights[0].numpy()


def _step(
    space: _Space,
    bin: int | None,
    bins: int,
    v2: bool,
    draws: Draws,
    sizes: Sizes,
    where: Where,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """For each sample one of ``space`` and its level: ``bin``, or any of the first ``bins``."""
    chosen = draws.randint(0, len(space.names), where)
    if bin is None:
        graded = taking(where, space.graded[chosen])
        places = np.where(graded, draws.randint(0, bins, graded), 0)
    else:
        places = np.full(len(draws), bin)
    levels = space.levels(chosen, places, sizes, where)
    signed = taking(where, space.signed[chosen])
    return chosen, np.where(signed & _negative(v2, draws, signed), -levels, levels)


def _negative(v2: bool, draws: Draws, where: Where) -> npt.NDArray[np.bool_]:
    """For each sample that draws, whether its level gets a minus."""
    if v2:
        return np.asarray(draws.rand(where) <= np.float32(0.5))
    return np.asarray(draws.randint(0, 2, where) == 1)


def _space_of(transform: Any, bins: int, v2: bool) -> _Space:
    """What ``transform`` may do, and how strongly, in so many levels."""
    if v2:
        every = getattr(transform, "all_ops", True)
        space = transform._AUGMENTATION_SPACE if every else transform._PARTIAL_AUGMENTATION_SPACE

        def of_size(height: int, width: int) -> _Table:
            return {
                name: (_floats(levels(bins, height, width)), signed)
                for name, (levels, signed) in space.items()
            }
    else:
        of_any_size = type(transform).__name__ == "TrivialAugmentWide"

        def of_size(height: int, width: int) -> _Table:
            size = () if of_any_size else ((height, width),)
            return {
                name: (_floats(levels) if levels.ndim > 0 else None, signed)
                for name, (levels, signed) in transform._augmentation_space(bins, *size).items()
            }

    try:
        found = _Space(of_size)
    except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:
        raise NotRead(f"torchvision cannot make {bins!r} levels of each step: {error}") from None
    if found.bins < 1:
        raise NotRead(f"num_magnitude_bins={bins} leaves no level to draw; give 1 or more")
    return found


def _floats(levels: torch.Tensor | None) -> _Levels:
    return None if levels is None else levels.numpy().astype(np.float64)


def _stacked(table: _Table) -> npt.NDArray[np.float64]:
    """float64 [k, bins]: the levels of each; 0 where it has none."""
    bins = max((len(levels) for levels, _ in table.values() if levels is not None), default=1)
    rows = [np.zeros(bins) if levels is None else levels for levels, _ in table.values()]
    return np.stack(rows)


def _steps_of(transform: Any, names: Sequence[str], v2: bool) -> tuple[Primitive | None, ...]:
    """What does each of ``names`` with the user's interpolation and fill."""
    mode, fill = mode_of(transform.interpolation, v2), fill_of(transform, v2)
    try:
        return tuple(step_of(name, mode, fill, v2) for name in names)
    except KeyError as error:
        raise NotRead(f"its step {error} is none that torchvision's policies had so far") from None


@reads("AutoAugment")
def _auto_augment(transform: Any, v2: bool) -> Operator:
    return AutoAugment(transform, v2)


@reads("RandAugment")
def _rand_augment(transform: Any, v2: bool) -> Operator:
    return RandomSteps(transform, v2, whole(transform.num_ops, "num_ops"), transform.magnitude)


@reads("TrivialAugmentWide")
def _trivial_augment(transform: Any, v2: bool) -> Operator:
    return RandomSteps(transform, v2, 1, None)


@reads("AugMix")
def _aug_mix(transform: Any, v2: bool) -> Operator:
    return AugMix(transform, v2)
