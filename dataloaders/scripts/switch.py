"""Iterate the torch loaders of a running program by another backend.

    for batch in loader:        torch's DataLoader.__iter__, replaced in this process
        └── wrap(loader) ──> $DATALOADERS_BACKEND ──> one session for each loader, across epochs

Loaders of our own class read the environment variable themselves.
"""

from __future__ import annotations

import inspect
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from dataloaders.batches.tree import Batch
from dataloaders.errors import BackendWarning
from dataloaders.loader import DataLoader, wrap
from dataloaders.scripts.loops import Loader, Original
from dataloaders.specification import overridden, show_workers, view_of

_NOT_TORCHS = set(inspect.getfullargspec(wrap).kwonlyargs)


def switched(*, explain: bool = False) -> Callable[[Loader, Original], Iterator[Batch]]:
    """Return what iterates epochs by the environment's backend, for `loops.replaced_iter`.

    A loader that the backend cannot serve keeps its own iteration, with one warning that says why;
    so does a class that overrides what ``__iter__`` calls. ``explain`` prints the plan of each
    loader to stderr when it is first iterated.
    """
    # Weak, so that a loader's session and its workers end with the loader.
    known: weakref.WeakKeyDictionary[Loader, DataLoader[Any] | None] = weakref.WeakKeyDictionary()

    def iterate(loader: Loader, original: Original) -> Iterator[Batch]:
        if loader not in known:
            known[loader] = None  # ours reads the variable itself
            name = overridden(type(loader))
            if name is not None and not isinstance(loader, DataLoader):
                text = (
                    f"dataloaders run: {type(loader).__name__} overrides {name}: it stays as it is"
                )
                warnings.warn(text, BackendWarning, stacklevel=4)
            elif not isinstance(loader, DataLoader):
                # A view of torch's class: a subclass's own __iter__ has called this one already,
                # and must not be applied twice.
                known[loader] = wrap(view_of(loader))
            shown = loader if known[loader] is None else known[loader]
            if explain and isinstance(shown, DataLoader):
                print(shown.explain(), file=sys.stderr)
        wrapped = known[loader]
        if wrapped is None:
            return original(loader)
        # As with torch, attributes set since the last epoch count, except those with our names,
        # which the loader's class may use for something else.
        state = vars(loader)
        wrapped.__dict__.update({name: state[name] for name in state.keys() - _NOT_TORCHS})
        epoch: Iterator[Batch] = iter(wrapped)
        show_workers(loader, wrapped)
        return epoch

    return iterate
