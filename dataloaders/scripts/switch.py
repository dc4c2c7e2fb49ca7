"""Iterate the torch loaders of a running program by another backend.

    for batch in loader:        torch's DataLoader.__iter__, replaced in this process
        └── wrap(loader) ──> $DATALOADERS_BACKEND ──> one session for each loader, across epochs

Loaders of our own class read the environment variable themselves.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch.utils.data

from dataloaders.batches.tree import Batch
from dataloaders.loader import DataLoader, wrap
from dataloaders.specification import view_of

_TorchLoader = torch.utils.data.DataLoader
Loader: TypeAlias = "torch.utils.data.DataLoader[Any]"

# Torch's own, taken before anything replaces it.
_OWN_ITERATION = _TorchLoader._get_iterator
_NOT_TORCHS = {"_iterator", *inspect.getfullargspec(wrap).kwonlyargs}


class BackendSwitch:
    """Iterates epochs by the environment's backend: the ``iterate`` of `loops.replaced_iter`.

    A loader that the backend cannot serve keeps torch's own iteration, with one warning that says
    why; so does a class with its own ``_get_iterator``.
    """

    def __init__(self, *, explain: bool = False) -> None:
        self._explain = explain  # whether to print each loader's plan when it is first iterated
        # Weak, so that a loader's session and its workers end with the loader.
        self._wrapped: weakref.WeakKeyDictionary[Loader, DataLoader[Any] | None] = (
            weakref.WeakKeyDictionary()
        )

    def __call__(
        self, loader: Loader, original: Callable[[Any], Iterator[Batch]]
    ) -> Iterator[Batch]:
        """Return an iterator over one epoch of ``loader``."""
        wrapped = self._wrapped_for(loader)
        if wrapped is None:
            return original(loader)
        # As with torch, attributes set since the last epoch count, except those with our names,
        # which the loader's class may use for something else.
        state = vars(loader)
        wrapped.__dict__.update({name: state[name] for name in state.keys() - _NOT_TORCHS})
        epoch: Iterator[Batch] = iter(wrapped)
        return epoch

    def _wrapped_for(self, loader: Loader) -> DataLoader[Any] | None:
        if loader in self._wrapped:
            return self._wrapped[loader]
        wrapped: DataLoader[Any] | None = None
        if isinstance(loader, DataLoader):
            self._show(loader)
        elif type(loader)._get_iterator is _OWN_ITERATION:
            # A view of torch's class: a subclass's own __iter__ has called this one already, and
            # must not be applied twice.
            wrapped = wrap(view_of(loader))
            self._show(wrapped)
        self._wrapped[loader] = wrapped
        return wrapped

    def _show(self, loader: DataLoader[Any]) -> None:
        if self._explain:
            print(loader.explain(), file=sys.stderr)
