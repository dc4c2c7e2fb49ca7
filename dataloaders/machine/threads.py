"""Set up background threads: torch's share of the cores, and CUDA graph capture.

limit_torch_threads(n)        torch uses n threads for operations of this thread
use_thread_local_capture()    CUDA calls of this thread do not break another thread's capture
"""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Any

import torch

_THREAD_LOCAL = 1
"""CU_STREAM_CAPTURE_MODE_THREAD_LOCAL in cuda.h."""

_SETTING = threading.Lock()  # two threads at once would each restore what the other one set
if hasattr(os, "register_at_fork"):  # a child forked meanwhile would wait for it for ever
    os.register_at_fork(
        before=_SETTING.acquire,
        after_in_parent=_SETTING.release,
        after_in_child=_SETTING.release,
    )


def limit_torch_threads(count: int) -> None:
    """Have torch's operations on the calling thread, which is new, use ``count`` threads.

    With 1, the thread works alone, beside others like it.
    """
    with _SETTING:
        before = torch.get_num_threads()
        torch.set_num_threads(count)
        # torch.set_num_threads also sets the number for threads that torch has not seen yet.
        # Restore it from another thread, which is the one that the call then affects.
        other = threading.Thread(target=torch.set_num_threads, args=(before,))
        other.start()
        other.join()


def use_thread_local_capture() -> None:
    """Let CUDA calls of the calling thread run while another thread captures a CUDA graph.

    ``torch.cuda.graph`` captures in CUDA's "global" mode. Until the capture ends, any call that a
    graph cannot hold (allocating memory, querying an event) fails on every thread, and the graph is
    lost. Threads in the mode "thread_local" are exempt, as long as they capture nothing themselves
    (cuThreadExchangeStreamCaptureMode in CUDA's driver API). Does nothing without CUDA.
    """
    driver = _driver()
    if driver is not None:
        mode = ctypes.c_int(_THREAD_LOCAL)
        # Not checked: on an error the mode stays as it was.
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def _driver() -> Any:
    if not torch.cuda.is_initialized() or torch.version.cuda is None:  # type: ignore[no-untyped-call]
        return None
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:  # another system's name for it
        return None
