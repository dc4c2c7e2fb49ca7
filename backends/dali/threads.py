"""Threads of ours that work beside each other: torch must not divide their work once more."""

from __future__ import annotations

import threading

import torch

__all__ = ["work_alone"]


def work_alone() -> None:
    """Have torch's operations on the calling thread, which is new, use this thread alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    # That is also what threads begin with that are new to torch from now on: put it back, in a
    # thread to which it then applies.
    other = threading.Thread(target=torch.set_num_threads, args=(before,))
    other.start()
    other.join()
