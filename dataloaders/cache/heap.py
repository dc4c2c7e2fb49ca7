"""A worker's heap: what it frees it uses again, and what it was born with is left alone.

A decoded photo is a few MB. glibc may give such memory back to the system at each sample and ask
for it again at the next, which then costs a page fault for each 4096 bytes: a fifth of the time of
decoding, or nothing at all, as the heap happens to look when a worker is forked.
"""

from __future__ import annotations

import ctypes
import gc

__all__ = ["settle_in"]

# mallopt(3)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT = 64 << 20  # bytes at the end of the heap
_FROM_SYSTEM = 32 << 20  # bytes from which on a block is given back; glibc takes no more


def settle_in() -> None:
    """Have this process, a worker of ours, keep freed memory, and not look through what it has.

    It keeps 64 MiB at most. Where malloc is not glibc's, it stays as it is.
    """
    gc.freeze()  # else a collection writes to the pages that are shared with the parent
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # musl, macOS, Windows
        return
    mallopt(_M_MMAP_THRESHOLD, _FROM_SYSTEM)
    mallopt(_M_TRIM_THRESHOLD, _KEPT)
