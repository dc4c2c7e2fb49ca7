"""``dataloaders run``: a script on another backend."""

from __future__ import annotations

import os
from argparse import Namespace

from dataloaders import registry
from dataloaders.cli.running import refuse_unfit
from dataloaders.loader import BACKEND_VARIABLE
from dataloaders.scripts.loops import replaced_iter
from dataloaders.scripts.switch import switched
from dataloaders.scripts.target import Target


def carry_out(target: Target, args: list[str], options: Namespace) -> int:
    """Run ``target`` with its loaders on another backend; return the script's own exit status."""
    backend = options.backend
    refuse_unfit(target, f"run --backend {backend}")
    if backend != "auto":  # a wrong name or a missing package is an error before the script starts
        registry.load(backend)
    os.environ[BACKEND_VARIABLE] = backend
    with replaced_iter(switched(explain=options.explain)):
        outcome = target.run(args)
    outcome.show_error()
    return outcome.status
