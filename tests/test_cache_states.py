"""A cache that signals, disks and users do something to: the right samples, or a CacheError."""

import os
import shutil
import signal
import sys
import tempfile
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)

from dataloaders.cache import CachedDataset, verify
from dataloaders.errors import CacheError
from helpers.cached import Point, built, spoil
from helpers.compare import same
from helpers.datasets import MapDataset
from helpers.processes import becomes_true


def fixed(values, row):
    """Of one shape, small and large."""
    image = torch.from_numpy(values.integers(0, 256, (3, 5, 4), np.uint8))
    return {"image": image, "large": np.arange(row, row + 4000), "label": row}


def ragged(values, row):
    """Of many shapes and kinds, and nested."""
    leaf = None if row % 3 else values.bytes(row % 7)
    words = values.random(row % 5).astype(np.float32), "é" * (row % 4), np.full((row % 3, 2), row)
    return Point({"k": (row, leaf, *words)}, (row % 2 == 0, {1: [["a", row], None] * (row % 3)}))


KINDS = {
    "fixed": (fixed, {}),
    "compressed": (fixed, {"compress": "zstd"}),
    "ragged": (ragged, {}),
}


@dataclass
class Moment:
    """Send ``signal`` to the builder's process group at this reading, or this change of a file."""

    signal: int
    reading: int | None
    change: int | None
    whom: str = "all"
    group: int = 0

    def strike(self):
        """Send the signal: to all, to the builder, or to whoever reads the sample."""
        if self.whom == "all":
            os.killpg(self.group, self.signal)
        else:
            os.kill(self.group if self.whom == "builder" else os.getpid(), self.signal)

    def watch(self, folder):
        """Count what this process and those that it starts do to files below ``folder``."""
        self.group, done = os.getpid(), 0

        def look(event, args):
            nonlocal done
            if event not in ("open", "os.rename", "os.remove", "os.mkdir", "os.truncate"):
                return
            if isinstance(args[0], (str, bytes)) and os.fsdecode(args[0]).startswith(str(folder)):
                done += 1
                if done == self.change:
                    self.strike()

        sys.addaudithook(look)


class Samples(MapDataset):
    """Samples of one kind, each a function of its number and the version."""

    classes, version, moment = ("cat", "dog"), 0, None

    def __init__(self, kind, size, failing):
        super().__init__(None, size, kind=kind, failing=failing)

    def __getitem__(self, row):
        if self.moment is not None and row == self.moment.reading < self.size:
            self.moment.strike()
        return super().__getitem__(row)

    def sample(self, row):
        return KINDS[self.kind][0](np.random.default_rng((self.version, row)), row)


signals = st.sampled_from([signal.SIGKILL, signal.SIGINT])
numbers_of_ranks = st.sampled_from([1, 1, 2, 3])  # whoever goes on may be more or fewer
kills = st.just(signal.SIGKILL)
moments = st.one_of(
    st.builds(Moment, signals, st.integers(0, 25), st.none()),
    st.builds(Moment, signals, st.none(), st.integers(1, 60)),
    st.builds(Moment, kills, st.integers(0, 25), st.none(), st.sampled_from(["builder", "reader"])),
)


class Caches(RuleBasedStateMachine):
    """One path, at which caches are built, interrupted, killed, damaged, repaired and read.

    Where a rule cannot be followed it does nothing: its preconditions would depend on when a signal
    strikes, which hypothesis does not choose.
    """

    @initialize(
        kind=st.sampled_from(sorted(KINDS)),
        size=st.integers(1, 26),
        rows=st.integers(2, 12),
        fails=st.none() | st.integers(0, 25),
        single=st.sampled_from([None, False, False, True]),
    )
    def begin(self, kind, size, rows, fails, single):
        self.folder = Path(tempfile.mkdtemp()).resolve()
        self.path = self.folder / "train.h5"
        self.failing = [] if fails is None or fails >= size or size == 1 else [fails]
        self.dataset = Samples(kind, size, self.failing)
        self.options = {"rows": rows, "on_error": "skip", "single_file": single, **KINDS[kind][1]}
        self.whole = {}  # the files of a finished cache; empty: none is finished
        self.versions = {0}  # what may be read
        self.stale = False  # whether an unfinished build may be of another version
        self.hurt = set()  # damaged files of a build that is not finished
        self.torn = set()  # those of them that are as a power cut leaves them

    def teardown(self):
        shutil.rmtree(getattr(self, "folder", ""), ignore_errors=True)

    # What happens to it

    @rule(workers=st.sampled_from([0, 0, 0, 2]), ranks=numbers_of_ranks)
    def build(self, workers, ranks):
        """Build what is missing, and go on where others were stopped."""
        hurt = self.hurt | self.changed()
        try:
            self.delete_what_verify_names()
            self.build_missing(workers, ranks)
            if hurt and verify(self.path):  # a part is believed until verify looks
                raise CacheError("damaged")
        except CacheError:
            assert hurt - self.torn
            for file in hurt:
                file.unlink(missing_ok=True)
            self.build_missing(workers, ranks)
        self.finished()

    @rule(moment=st.none() | moments, ranks=numbers_of_ranks)
    def overwrite(self, moment, ranks):
        """Build anew of other samples, which look the same from outside.

        Nobody but the user knows that an unfinished build is of others: hence ``resume=False``, or
        another ``build_id``.
        """
        self.dataset.version += 1
        self.versions.add(self.dataset.version)
        self.stale = self.stale or not self.whole
        if self.run(ranks, moment):
            self.finished()
        else:
            self.hurt |= self.changed()
            self.whole = {}

    @rule(
        moment=moments, workers=st.sampled_from([0, 0, 2]), ranks=numbers_of_ranks,
        rank=st.integers(0, 2),
    )  # fmt: skip
    def stop(self, moment, workers, ranks, rank):
        """Begin to build, and be stopped by a signal to the builder and its workers."""
        if self.whole or len(self.versions) > 1:
            return
        shard = {} if ranks == 1 else {"shard": (rank % ranks, ranks), "wait": False}
        pid = self.start(moment, num_workers=workers, **shard)
        status = ended(pid)
        assert becomes_true(lambda: not left_of_group(pid))  # soon after it
        if status not in (0, -moment.signal):
            # The process that reads is a worker, or the one that looks at samples before a build.
            killed_worker = status in (2, 3) and moment.whom == "reader" and workers
            has_none = ranks > len(self.dataset)  # then a rank has no samples
            assert killed_worker or (status == 2 and (self.hurt or has_none)), status
        if status == 0 and ranks == 1:
            self.finished()

    @rule(
        which=st.integers(0, 20),
        place=st.floats(0, 1, exclude_max=True),
        how=st.sampled_from(["flip", "flip", "cut", "zeros", "delete", "swap"]),
    )
    def damage(self, which, place, how):
        """Flip a bit of a file, cut it short, have zeros first, delete it, or write another."""
        if not (files := self.files()):
            return
        file = files[which % len(files)]
        size = file.stat().st_size
        if not self.whole:
            self.hurt.add(file)
            if how in ("cut", "zeros", "delete") and not self.path.exists():
                self.torn.add(file)
        if how == "delete":
            file.unlink()
        elif how == "swap":
            file.write_bytes(files[int(place * len(files))].read_bytes())
        elif size and how == "cut":
            os.truncate(file, int(place * size))
        elif size and how == "zeros":
            spoil(file, 0, bytes(1 + int(place * size)))
        elif size:
            self.torn.discard(file)
            spoil(file, int(place * size))

    # What is looked at

    @rule()
    def read(self):
        """Read all samples: those of the dataset, or an error if the file is not whole."""
        if not self.path.exists():
            return
        is_damaged = self.hurt or self.changed()
        try:
            cached = CachedDataset(self.path)
            cached.namedtuples = {("Point", ("x", "y")): Point}
            samples = list(cached)
        except CacheError:
            assert is_damaged
            return
        if not is_damaged:  # bits of values flip unseen, until verify looks
            assert any(same(samples, self.stored(version)) for version in self.versions)
            assert [number for number, _ in cached.failed] == self.failing

    @rule()
    def verify(self):
        """Find damage if there is some."""
        if not self.whole:
            return
        try:
            damages = verify(self.path)
        except CacheError:
            assert self.changed()
        else:
            assert bool(damages) == bool(self.changed())

    # How

    def files(self):
        if not self.whole:
            return sorted(file for file in self.folder.rglob("*") if file.is_file())
        return [file for file in self.whole if file.exists()]

    def changed(self):
        """Return the damaged files of a finished cache."""
        return {f for f, b in self.whole.items() if not f.exists() or f.read_bytes() != b}

    def delete_what_verify_names(self):
        if not self.changed():
            return
        try:
            named = {damage.shard or self.path.name for damage in verify(self.path)}
        except CacheError:
            named = {self.path.name}
        for name in named:
            (self.folder / name).unlink(missing_ok=True)

    def start(self, moment, **options):
        """Build in a process group of its own; returns the number of its first process."""
        pid = os.fork()
        if pid:
            with suppress(OSError):  # it has done so itself
                os.setpgid(pid, pid)
            return pid
        status = 1
        try:
            os.setpgid(0, 0)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.alarm(60)
            warnings.simplefilter("ignore")
            # Workers whose builder was killed look for it every five seconds.
            torch.utils.data._utils.worker.MP_STATUS_CHECK_INTERVAL = 0.2
            if moment is not None:
                moment.watch(self.folder)
                self.dataset.moment = moment
            built(self.dataset, self.path, **self.options, **options)
            status = 0
        except KeyboardInterrupt:
            status = 130
        except CacheError:
            status = 2
        except RuntimeError as error:
            status = 3 if "DataLoader worker" in str(error) else 1
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(status)

    def build_missing(self, workers, ranks):
        # What a killed build would have overwritten may stand there still.
        if len(self.versions) > 1 or ranks > 1:
            if not self.run(ranks, None, workers, overwrite=len(self.versions) > 1):
                raise CacheError("a rank raised it")
        else:
            built(self.dataset, self.path, num_workers=workers, **self.options)

    def run(self, ranks, moment, workers=0, overwrite=True):
        """Have so many ranks build, the last of which is stopped; whether all come to an end."""
        options = {"overwrite": overwrite, "num_workers": workers}
        if ranks == 1:
            options["resume"] = not self.stale
            return ended(self.start(moment, **options)) == 0
        options["build_id"] = str(self.dataset.version)
        shards = [(rank, ranks) for rank in reversed(range(ranks))]
        pids = [
            self.start(None if number else moment, shard=shard, **options)
            for number, shard in enumerate(shards)
        ]
        statuses = [ended(pids[0])]
        for pid in pids[1:]:
            if statuses[0] != 0:  # as torchrun ends the others
                os.killpg(pid, signal.SIGKILL)
            statuses.append(ended(pid))
        ends = {0, 2} if statuses[0] == 0 else {0, 2, -signal.SIGKILL}
        assert moment is not None or set(statuses) <= ends
        return not any(statuses)

    def finished(self):
        """Look at what a build left: a whole cache, and nothing besides."""
        self.versions, self.stale = {self.dataset.version}, False
        self.hurt, self.torn = set(), set()
        files = [file for file in self.folder.rglob("*") if file.is_file()]
        assert not [file for file in files if file.suffix == ".tmp" or ".building" in str(file)]
        self.whole = {file: file.read_bytes() for file in files if file.suffix == ".h5"}
        assert verify(self.path) == []
        self.read()

    def stored(self, version):
        """Return what a cache keeps of this version of the dataset."""
        make = KINDS[self.dataset.kind][0]
        return [
            make(np.random.default_rng((version, row)), row)
            for row in range(len(self.dataset))
            if row not in self.failing
        ]


def left_of_group(pid):
    """Return the processes of a builder's group."""
    alive = []
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            if os.getpgid(process.pid) == pid and process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
    return alive


def ended(pid):
    """Return the exit status of a builder, -SIGINT after Ctrl-C."""
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return -signal.SIGINT if status == 130 else status


@pytest.mark.parametrize(
    ("examples", "steps"),
    [(4, 15), pytest.param(60, 40, marks=[pytest.mark.nightly, pytest.mark.timeout(1800)])],
)
def test_a_cache_is_whole_or_says_what_it_lacks(examples, steps):
    chosen = settings(max_examples=examples, stateful_step_count=steps)
    run_state_machine_as_test(Caches, settings=chosen)
