"""``dataloaders run``: a script on another backend."""

from __future__ import annotations

import functools
import os
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from dataloaders import registry
from dataloaders.cli.running import refuse_unfit
from dataloaders.loader import BACKEND_VARIABLE
from dataloaders.scripts.children import children_run_by
from dataloaders.scripts.loops import replaced_iter
from dataloaders.scripts.switch import switched
from dataloaders.scripts.target import Outcome, Target


def carry_out(target: Target, args: list[str], options: Namespace) -> int:
    """Run ``target`` with its loaders on another backend; return the script's own exit status."""
    backend = options.backend
    refuse_unfit(target, f"run --backend {backend}")
    if backend != "auto":  # a wrong name or a missing package is an error before the script starts
        registry.load(backend)
    os.environ[BACKEND_VARIABLE] = backend
    switching = functools.partial(_switching, options.explain)
    with children_run_by(switching):
        outcome: Outcome = switching(target.run, (args,), {})
    outcome.show_error()
    return outcome.status


def _switching(
    explain: bool, function: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]
) -> Any:
    """Call ``function`` in this process, with loaders on the backend of the environment."""
    with replaced_iter(switched(explain=explain)):
        return function(*args, **keywords)
