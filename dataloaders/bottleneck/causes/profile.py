"""Sample the calls of one thread: seconds by call, under names that a user knows.

A call is something that a user can change: a transform by its class, decoding, reading, a function.
The sampling thread needs the interpreter's lock, so it notices a long call in C only when the call
ends. It then counts all the time since its last sample, so that shares are right.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from types import CodeType, FrameType

from dataloaders.findings.sites import owner_of

_FETCHES = ("__getitem__", "__getitems__", "__iter__", "__next__")
_LOOK_EVERY_S = 0.001
_DECODES = (os.path.join("PIL", "ImageFile.py"), os.path.join("torchvision", "io", ""))
_READS = tuple(
    part.replace("/", os.sep)
    for part in (
        "h5py/",
        "zarr/",
        "numpy/lib/npyio",
        "numpy/lib/_npyio",
        "zipfile",
        "tarfile.py",
        "dataloaders/scripts/scratch",  # stands in for open()
    )
)


class Profile:
    """Samples what this thread does while ``watching``, from another thread.

    Attributes:
        watching: whether this thread's time counts now.
        seconds: by call.
        cpu: CPU seconds by call; empty on systems that do not report them.
    """

    def __init__(self, outermost: Callable[..., object]) -> None:
        self._outermost = outermost.__code__  # frames outside of it are ours
        self.watching = False
        self.seconds: dict[str, float] = defaultdict(float)
        self.cpu: dict[str, float] = defaultdict(float)

    def __enter__(self) -> Profile:
        self._ended = threading.Event()
        self._before = sys.getswitchinterval()
        sys.setswitchinterval(_LOOK_EVERY_S / 2)
        args = (threading.get_ident(),)
        self._thread = threading.Thread(target=self._run, args=args, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()
        sys.setswitchinterval(self._before)

    def _run(self, watched: int) -> None:
        clock = getattr(time, "pthread_getcpuclockid", lambda thread: None)(watched)
        last, last_cpu = time.perf_counter(), 0.0
        while not self._ended.wait(_LOOK_EVERY_S):
            watching, frame = self.watching, sys._current_frames().get(watched)
            now, cpu = time.perf_counter(), 0.0 if clock is None else time.clock_gettime(clock)
            if frame is not None and watching and self.watching:
                call = _call_of(frame, self._outermost)
                self.seconds[call] += now - last
                if clock is not None and last_cpu:
                    self.cpu[call] += cpu - last_cpu
            last, last_cpu = now, cpu


def _call_of(frame: FrameType | None, outermost: CodeType) -> str:
    """Return the user's name for the work that ``frame`` is a part of."""
    stack: list[FrameType] = []  # the innermost first
    while frame is not None and frame.f_code is not outermost:
        stack.append(frame)
        frame = frame.f_back
    for each in stack:
        for call, parts in (("decode", _DECODES), ("read", _READS)):
            if any(part in each.f_code.co_filename for part in parts):
                return call
    called = [each for each in stack if each.f_code.co_name in ("__call__", "forward")]
    owners = [each.f_locals.get(each.f_code.co_varnames[0]) for each in called]
    holders = ("Sequential", "StandardTransform")
    kinds = [type(one) for one in owners if not hasattr(one, "transforms")]
    kinds = [kind for kind in kinds if kind.__name__ not in holders]
    if kinds:
        known = [kind for kind in kinds if kind.__module__.startswith("torchvision.")]
        return (known or kinds)[-1].__name__
    own = [each.f_code for each in stack if owner_of(each.f_code.co_filename) == "user"]
    if not own:
        return "read"  # the code of a library's dataset
    # The function that the dataset calls says more than those inside it, or __getitem__ itself.
    code = next((code for code in reversed(own) if code.co_name not in _FETCHES), own[0])
    return f"{code.co_name} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"
