"""Watch a running program's loops over its loaders, and hand one of them to a measurement.

    for batch in loader:           every DataLoader's iter(), see `loops`
        │
        ├── training loop ──> measure(loader, iterate): the loop gets these batches instead, past
        │                     the end of the epoch, until enough is measured: StopScript
        └── others        ──> the loader's own iterator; waits for it count as the loop's input

The training loop is the first one in which an optimizer steps between two batches; if gradients
were off at its first, two batches without one of another loader between them. In a program without
an optimizer, it is the first loop that asks for a second batch and had gradients on at its first.
Its loader has no length, or at least `SHORTEST` batches. ``number`` chooses another loader.
"""

from __future__ import annotations

import functools
import gc
import itertools
import math
import os
import shlex
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias
from unittest import mock

import torch

from dataloaders.batches.tree import Batch
from dataloaders.scripts.loops import Loader, Original, passing, replaced_iter
from dataloaders.scripts.optimizers import Optimizers
from dataloaders.scripts.stopping import stop
from dataloaders.specification import batches_in

SHORTEST = 4
"""The fewest batches in an epoch of a loader that is taken over without ``number``."""

_NOT_ASKED = "no batch of it was asked for"
_ONE_BATCH = "only one batch was asked for"
_RESTARTED = (
    "the script starts it again for each batch, with next(iter(loader)): that starts workers, "
    "shuffles, and loads nothing ahead, each time. Start it once, batches = iter(loader), take "
    "next(batches) in the loop, and start it again at StopIteration"
)
_BESIDE = (
    "a thread of the script takes its batches ahead of the step: what the step waits for cannot be "
    "seen. Iterate the loader itself, or measure around what the loop iterates: with "
    "dataloaders.bottleneck_check(batches) as check"
)
_STEPS_RESTARTED = 2  # the most optimizer steps for a batch: a GAN has two
_MOST_STEPS_REFUSED = 20  # of a training loop that cannot be measured, before the script is ended

Iterate: TypeAlias = Callable[[], Iterator[Batch]]
"""Starts a new epoch of the real loader, by its own ``__iter__``."""

Measure: TypeAlias = Callable[[Loader, Iterate], Iterable[Batch]]
"""Returns what the chosen loop iterates instead: it ends once enough is measured, and is iterated
again if the program breaks out of its loop."""


@dataclass
class Seen:
    """Describes a loader that the program iterated."""

    number: int  # 1 for the first one, and so on
    description: str  # class, dataset, length and workers, in a few words
    length: int | None  # batches in an epoch
    why_not: str | None = _NOT_ASKED  # why it was not taken over; None if it was
    epochs: int = 0  # in which a second batch was asked for
    begun_at: int = 0  # optimizer steps when the first batch of its last epoch was asked for


class Takeover:
    """Watches every loop over a DataLoader while entered; hands one loader to ``measure``.

    Args:
        measure: see `Measure`.
        number: the loader to take over, whatever its loop does; None: that of the training loop.
        may_take: called before a loader is taken; returns False if another process measures.
        waited: called with another loader's description and the seconds waited for its batch.
        passed_over: called with a sentence about a loop in which no optimizer has stepped yet.
        stuck: called, in a thread, if the program goes on after it was stopped.
        patience_s: the program is ended if its measured loop is over, and it has trained for so
            long in another loop or without a loader.
    """

    def __init__(
        self,
        measure: Measure,
        number: int | None = None,
        *,
        may_take: Callable[[], bool] = lambda: True,
        waited: Callable[[str, float], None] = lambda name, seconds: None,
        passed_over: Callable[[str], None] = lambda sentence: None,
        stuck: Callable[[], object] = lambda: os._exit(1),
        patience_s: float = 60.0,
    ) -> None:
        self.seen: list[Seen] = []  # every loader iterated so far, in order
        self.taken: Seen | None = None  # the one handed to measure
        self.steps = 0  # batches of the measurement that the loop was given
        self.beyond = 0  # the most batches past the end of an epoch
        self.before = 0  # batches that the measured loop got before it was handed over
        self.cycled = False  # whether the loop is itertools.cycle(loader)
        self.left_for: str | None = None  # what the program did when it was ended for that
        self.last: Seen | None = None  # the loader that gave the program its last batch
        self.thread: threading.Thread | None = None  # of the measured loop
        self.last_at = 0  # optimizer steps by then
        # The number and the time of the first optimizer step after the last batch of any loader
        # whose epochs are long enough.
        self.alone_since: tuple[int, float] | None = None
        self.optimizers = Optimizers(self._after_step)
        self._measure = measure
        self._number = number
        self._may_take = may_take
        self._waited = waited
        self._passed_over = passed_over
        self._stuck = stuck
        self._patience_s = patience_s
        self._loaders: weakref.WeakKeyDictionary[Loader, Seen] = weakref.WeakKeyDictionary()
        self._stream: Iterable[Batch] = ()
        self._running: Iterator[Batch] = iter(())
        self._measured: weakref.ref[Loop] | None = None
        self._asked_at = math.inf  # when it got its last batch
        self._refused_at: int | None = None  # optimizer steps when a loop was first refused
        # Other loops that waited since the last measured batch: whether each began since, its waits
        self._waits: list[tuple[Seen, bool, list[float]]] = []
        self._patches = ExitStack()

    def __enter__(self) -> Takeover:
        self._patches.enter_context(self.optimizers)
        self._patches.enter_context(replaced_iter(self._iterate))
        for name in ("execv", "execve"):  # which all others call
            become = functools.partial(self._become, os.getpid(), getattr(os, name))
            self._patches.enter_context(mock.patch.object(os, name, become))
        return self

    def __exit__(self, *exception: object) -> None:
        self._patches.close()

    @property
    def refused(self) -> bool:
        """Whether a training loop was found that cannot be measured; `Seen.why_not` says why."""
        return self._refused_at is not None

    # Asked by the program's loops

    def may_train(self, loop: Loop) -> bool:
        """Return whether ``loop`` may be taken over; called when it asks for its first batch."""
        seen = loop.seen
        if self.taken is not None:
            if seen.why_not == _NOT_ASKED:
                seen.why_not = "another loader was taken over before it"
            return True
        if self._number is not None:
            if seen.number != self._number:
                seen.why_not = f"--loader {self._number} was asked for"
                return False
        elif seen.length is not None and seen.length < SHORTEST:
            seen.why_not = f"an epoch has fewer than {SHORTEST} batches"
            return False
        elif not loop.trains:  # a validation, or a prefetcher that turns gradients off
            seen.why_not = "gradients were off: it does not look like training"
            self._passed_over(f"loader {seen.number}: {seen.why_not}")
            return True
        steps, begun_at = self.optimizers.steps, seen.begun_at
        seen.begun_at = steps
        if seen.why_not in (_ONE_BATCH, _RESTARTED) and 0 < steps - begun_at <= _STEPS_RESTARTED:
            self._refuse(seen, _RESTARTED)
        else:
            seen.why_not = _ONE_BATCH
        return True

    def is_training_loop(self, loop: Loop) -> bool:
        """Return whether ``loop`` is the training loop; called at each batch after its first."""
        stepped = self.optimizers.steps > loop.steps_before
        if not (loop.trains or (stepped and self.last is loop.seen) or self._number):
            return False  # a validation, maybe within the loop over another loader
        if self.taken is not None and self.taken is not loop.seen:
            return stepped and self._measured_loop() is None and self._continues(loop)
        main = threading.main_thread()
        if stepped and self.optimizers.thread is main is not threading.current_thread():
            self._refuse(loop.seen, _BESIDE)
            return False
        if self.taken is not None:  # again, while an older iterator of this loader lives
            measured = self._measured_loop()
            return stepped or measured is None or measured.asked_at < loop.asked_at
        loop.seen.epochs += loop.given == 1
        # The program may make its loader anew for each epoch.
        alike = [one.epochs for one in self.seen if one.description == loop.seen.description]
        if self._number is None and not stepped and self.optimizers.expected(sum(alike)):
            loop.seen.why_not = "no optimizer stepped between its batches"
            self._passed_over(f"loader {loop.seen.number}: {loop.seen.why_not} so far")
            return False
        if not self._may_take():
            loop.seen.why_not = "another process of the script is measured"
            loop.watched = False
            return False
        return True

    def _continues(self, loop: Loop) -> bool:
        """Return whether ``loop``, which trains after the measured one, is its next epoch."""
        assert self.taken is not None
        if loop.seen.description == self.taken.description:
            loop.seen = self.taken  # the program makes its loader anew for each epoch
            return True
        if time.monotonic() - self._asked_at > self._patience_s:
            self._leave_for(loop.seen)
        return False

    def _leave_for(self, seen: Seen) -> NoReturn:
        """End the program, which trains with ``seen``."""
        what = seen.description
        number = next(one.number for one in self.seen if one.description == what)
        self.left_for = (
            f"trained with loader {number} ({what}): measure that with --loader {number}"
        )
        stop(self._stuck)

    def _after_step(self) -> None:
        """End the program if it trains on, and no loop lives that is or may be measured."""
        now, steps = time.monotonic(), self.optimizers.steps
        first, since = self.alone_since = self.alone_since or (steps, now)
        late = steps - first > _MOST_STEPS_REFUSED and now - since > self._patience_s
        if late and self._measured_loop() is None:
            if self.last is not None and steps - self.last_at <= _MOST_STEPS_REFUSED:
                self._leave_for(self.last)
            self.left_for = "trained without a torch.utils.data.DataLoader"
            stop(self._stuck)

    def _become(self, pid: int, own: Callable[..., Any], path: Any, argv: Any, *env: Any) -> None:
        """End the program in place of becoming another one, which nobody would watch."""
        if os.getpid() != pid:  # a fork, as of pty.spawn(): the program itself goes on
            own(path, argv, *env)
        self.left_for = (
            f"called os.{own.__name__} to become {shlex.join(map(os.fsdecode, argv))}, which could "
            "not be measured: make that call, and what it is for, in the shell"
        )
        stop(self._stuck)

    def _refuse(self, seen: Seen, why_not: str) -> None:
        """Note why a training loop cannot be measured; end the program if that loop goes on."""
        seen.why_not = why_not
        if self._refused_at is None:
            self._refused_at = self.optimizers.steps
        elif self.optimizers.steps - self._refused_at > _MOST_STEPS_REFUSED:
            stop()

    def take(self, loop: Loop, original: Original) -> None:
        """Hand the loader of ``loop`` to the measurement."""
        if self.taken is not None:
            return
        self.taken = loop.seen
        loop.seen.why_not = None
        self.cycled = any(type(one) is itertools.cycle for one in gc.get_referrers(loop))
        self._stream = self._measure(loop.loader, functools.partial(original, loop.loader))

    def next_measured(self, loop: Loop) -> Batch:
        """Return the measurement's next batch for ``loop``, one of the loops over its loader.

        Raises:
            StopScript: enough is measured. It is raised in the main thread, too.
        """
        if self._measured_loop() is not loop:
            self.before = loop.given
            self._measured = weakref.ref(loop)
            self._running = iter(self._stream)
        self.thread = threading.current_thread()
        for seen, began, waits in self._waits:
            if not began or len(waits) == 1:  # else a whole pass, such as a validation: no input
                self._waited(f"loader {seen.number} ({seen.description})", sum(waits))
            waits.clear()
        self._waits.clear()
        try:
            batch = next(self._running)
        except StopIteration:
            stop(self._stuck)
        self._asked_at = time.monotonic()
        self.steps += 1
        if loop.seen.length is not None:
            self.beyond = max(self.beyond, loop.given + 1 - loop.seen.length)
        return batch

    def waited_for(self, loop: Loop, seconds: float) -> None:
        """Note how long a loop waited for a batch of another loader than the measured one."""
        if self.thread is threading.current_thread() and self._measured_loop() is not None:
            if not loop.waits:
                self._waits.append((loop.seen, loop.given == 0, loop.waits))
            loop.waits.append(seconds)

    # Iteration

    def _iterate(self, loader: Loader, original: Original) -> Iterator[Batch]:
        seen = self._find(loader)
        batches: Iterator[Batch] | None = None
        if seen is not self.taken or self._in_mid_epoch():
            batches = original(loader)
        return Loop(self, seen, loader, original, batches)

    def _in_mid_epoch(self) -> bool:
        """Return whether the measured loop has batches left: then a new loop is left alone.

        A loop that counts its batches by ``len()`` does not exhaust its iterator.
        """
        measured = self._measured_loop()
        return measured is not None and measured.given != measured.seen.length

    def _measured_loop(self) -> Loop | None:
        return None if self._measured is None else self._measured()

    def _find(self, loader: Loader) -> Seen:
        if loader not in self._loaders:
            length = batches_in(loader)
            batches = "no length" if length is None else f"{length} batches"
            size = "" if loader.batch_size is None else f" of {loader.batch_size}"
            text = f"{type(loader).__name__} of {type(loader.dataset).__name__}, {batches}{size}, "
            text += f"num_workers={loader.num_workers}"
            self.seen.append(Seen(len(self.seen) + 1, text, length))
            self._loaders[loader] = self.seen[-1]
        return self._loaders[loader]


class Loop:
    """Iterates one epoch for a loop of the program, by its loader or by the measurement."""

    def __init__(
        self,
        takeover: Takeover,
        seen: Seen,
        loader: Loader,
        original: Original,
        batches: Iterator[Batch] | None,
    ) -> None:
        self.seen = seen
        self.loader = loader
        self.trains = True  # whether gradients were on when its first batch was asked for
        self.given = 0  # batches so far
        self.steps_before = 0  # optimizer steps when its last batch was asked for
        self.asked_at = 0.0  # the time of that
        self.waits: list[float] = []  # for batches since the last measured one, of another loader
        self._takeover = takeover
        self._original = original
        self._batches = batches  # None: the measurement's
        self.watched = batches is not None  # whether it may still be the training loop

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        takeover = self._takeover
        if self.watched and self.given and takeover.is_training_loop(self):
            # The measurement begins its own epoch, after the workers of this one have ended.
            self._batches, self.watched = None, False
            takeover.take(self, self._original)
        self.steps_before = takeover.optimizers.steps
        self.asked_at = time.monotonic()
        with passing():  # a dataset may iterate loaders of its own
            batch = takeover.next_measured(self) if self._batches is None else self._next_own()
        self.given += 1
        takeover.last, takeover.last_at = self.seen, takeover.optimizers.steps
        if self._batches is None or self.seen.length is None or self.seen.length >= SHORTEST:
            takeover.alone_since = None
        return batch

    def __len__(self) -> int:
        if self._batches is not None:
            return len(self._batches)  # type: ignore[arg-type]
        if self.seen.length is None:
            raise TypeError("this loader has no length")
        return self.seen.length

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_batches" or self._batches is None:
            raise AttributeError(name)
        return getattr(self._batches, name)

    def _next_own(self) -> Batch:
        assert self._batches is not None
        takeover = self._takeover
        if not self.given:
            self.trains = torch.is_grad_enabled()
            self.watched = self.watched and takeover.may_train(self)
        batch = next(self._batches)
        if takeover.taken not in (None, self.seen) and self.trains:
            takeover.waited_for(self, time.monotonic() - self.asked_at)
        return batch
