"""Threads of ours that work beside the user's: what torch and CUDA shall do otherwise in them.

share_work(n)          torch divides its operations here among n threads; elsewhere as before
let_others_capture()   CUDA calls of this thread spoil no graph that another thread captures
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import torch

__all__ = ["let_others_capture", "share_work"]

_THREAD_LOCAL = 1
"""CU_STREAM_CAPTURE_MODE_THREAD_LOCAL in cuda.h."""

_TELLING = threading.Lock()  # two that begin at once would each put back what the other one told


def share_work(count: int) -> None:
    """Have torch's operations on the calling thread, which is new, use ``count`` threads.

    1: this thread alone, as it works beside others of its kind.
    """
    with _TELLING:
        before = torch.get_num_threads()
        torch.set_num_threads(count)
        # That is also what threads begin with that are new to torch from now on: put it back, in
        # a thread to which it then applies.
        other = threading.Thread(target=torch.set_num_threads, args=(before,))
        other.start()
        other.join()


def let_others_capture() -> None:
    """Let CUDA calls of the calling thread run while another thread captures a CUDA graph.

    ``torch.cuda.graph`` captures in CUDA's mode "global": until its end, calls of every thread that
    a graph could not hold (to allocate memory, to ask for an event) fail, and the graph is lost.
    Threads in the mode "thread_local" are left out of that, as long as they capture nothing
    themselves (cuThreadExchangeStreamCaptureMode in CUDA's driver API). Does nothing without CUDA.
    """
    driver = _driver()
    if driver is not None:
        mode = ctypes.c_int(_THREAD_LOCAL)
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))  # else it stays as it was


def _driver() -> Any:
    if not torch.cuda.is_initialized() or torch.version.cuda is None:  # type: ignore[no-untyped-call]
        return None
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:  # another system's name for it
        return None
