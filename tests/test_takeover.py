"""Which of a program's loops is taken over, and that the others never notice."""

import signal
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

import dataloaders
from dataloaders.errors import BackendWarning
from helpers import warm

pytestmark = pytest.mark.usefixtures("workers_end_fast")

HEAD = """
import sys, time, dataloaders, torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)

def rows(count, kind=DataLoader, **options):
    return kind(TensorDataset(torch.arange(count)), **options)

def train(loader, every=1, shown=0):
    seen = []
    for index, batch in enumerate(loader, start=1):
        time.sleep(0.001)
        if index % every == 0: optimizer.step()
        seen.append(batch[0].tolist())
        if index == shown: print(seen)
"""
LEFT_ALONE = """
with torch.no_grad():
    for _ in rows(8): pass
train(rows(3))
next(iter(rows(8)))
train(rows(9))
"""
ENDLESS = """
class Endless(DataLoader):  # keeps one iterator for ever, as several training libraries have it
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        object.__setattr__(self, "running", super().__iter__())
    def __iter__(self):
        for _ in range(len(self)): yield next(self.running)
loader = rows(8, Endless)
while True: train(loader)
"""
# A validation at each step; then a prefetcher that turns gradients off, as apex's does.
NO_GRADIENTS = """
@torch.no_grad()
def ahead(batches): return next(batches)
held_out, batches = iter(rows(30)), iter(rows(12))
for _ in range(8):
    ahead(held_out)
    optimizer.step()
    ahead(batches)
loader = rows(9)
while True:
    batches = iter(loader)
    for _ in range(len(loader)):
        ahead(batches)
        optimizer.step()
"""
SHARD = "from accelerate import Accelerator\ntrain(Accelerator(cpu=True).prepare(rows(8)))"
INSIDE = """
class Inside(Dataset):
    def __len__(self): return 6
    def __getitem__(self, index): return [batch[0][0] for batch in rows(5)]
train(DataLoader(Inside()))
"""
BY_HAND = HEAD.replace("optimizer = ", "# In place of optimizer = ") + "loader = rows(9)\n"
MADE = "optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)"
ENGINE = HEAD.replace(MADE, "") + f"for _ in rows(9): pass\n{MADE}\nwhile True: train(rows(8))"
PASSES = """
class Slow(Dataset):
    def __len__(self): return 10_000
    def __getitem__(self, index): time.sleep(0.001); return index
held_out, other = DataLoader(torch.utils.data.Subset(Slow(), range(3))), iter(DataLoader(Slow()))
for index, batch in enumerate(rows(1000)):
    next(other)
    if index % 4 == 0:
        for _ in held_out: pass  # with gradients on, as HF's Trainer and ignite iterate
    optimizer.step()
    time.sleep(0.002)
"""
SCRIPTS = {
    # What the script does, and what is printed.
    "past its epoch": ("train(rows(4), 1, 7)", "[[0], [0], [1], [2], [3], [0], [1]]"),
    "an epoch that begins anew": (
        "train(rows(20), 2, 6)", "[[0], [1], [0], [1], [2], [3]]",
    ),
    "not what does not train": (LEFT_ALONE, "loader 4: DataLoader of TensorDataset, 9 batches"),
    "a class of the script's": (ENDLESS, "loader 1: Endless of"),
    "without gradients": (NO_GRADIENTS, "loader 3: DataLoader of TensorDataset, 9 batches"),
    "one made anew for each epoch, and left early": (
        "while True:\n    for _, batch in zip(range(6), rows(9)): optimizer.step()",
        "loader 1: DataLoader of",
    ),
    "ours": ("train(rows(8, dataloaders.DataLoader))", "loader 1: DataLoader of"),
    "Accelerate's": (SHARD, "loader 1: DataLoader of"),
    "not one inside a dataset": (INSIDE, "loader 1: DataLoader of Inside"),
    "and ends with": ("try: train(rows(8))\nexcept BaseException: sys.exit(1)", "loader 1"),
    "and its timers": (
        "from signal import *\nsetitimer(ITIMER_PROF, 1000)\ntrain(rows(8))", "loader 1",
    ),
    "a pass over another one in a step is no input": (PASSES, "a batch for loader 1 ("),
    # Two passes over the data may compute its mean and deviation.
    "the third epoch without a torch optimizer": (
        f"{BY_HAND}while True: train(loader, 10**6, 9)",
        2 * f"{[[index] for index in range(9)]}\n",
    ),
    "one left early, its iterator kept meanwhile": (
        "loader = rows(90)\nwhile True:\n    batches = iter(loader)\n"
        "    for _ in range(6): next(batches); optimizer.step()",
        "leaves each epoch after 6 batches",
    ),
    "batches that it keeps": (
        "from itertools import cycle\ntrain(cycle(rows(8)))", "itertools.cycle keeps the batches",
    ),
    # The main file names no optimizer; as in a project whose engine makes it and trains.
    "an imported module's": ("import engine", "loader 2: DataLoader of TensorDataset, 8 batches"),
}  # fmt: skip


@pytest.mark.parametrize(("script", "says"), SCRIPTS.values(), ids=SCRIPTS)
def test_the_first_loop_that_trains_is_measured_and_stopped(script, says, command):
    before = DataLoader.__iter__, dataloaders.DataLoader.__iter__
    Path("engine.py").write_text(ENGINE)
    Path("train.py").write_text(script if script.startswith(("import", BY_HAND)) else HEAD + script)
    done = command("check", "--budget", 0.3, "--no-predict", "train.py")
    assert says in done.out
    assert "the script was ended after" in done.out
    assert "a batch for loader 3 (" not in done.out
    assert (DataLoader.__iter__, dataloaders.DataLoader.__iter__) == before
    assert signal.getitimer(signal.ITIMER_PROF) == (0, 0)


SOME = "for _, batch in zip(range(6), rows(9)): optimizer.step()\n"
WITHOUT = "while True:\n    time.sleep(0.01)\n    optimizer.step()\n"
BECOMES = (
    "import os\nif os.fork() == 0: os.execlp('true', 'true')\nassert os.wait()[1] == 0\n"
    "try: os.execvp('python', ['python', 'train it.py'])\nexcept Exception: pass\n"
)
NO_LOADER = "trained without a torch.utils.data.DataLoader"
ANOTHER = "called os.execv to become python 'train it.py', which could not be measured: make"
AGAIN = "9 batches of 1, num_workers=0: the script starts it again for each batch"
ENDED = [
    ("loader = rows(9)\nwhile True:\n    next(iter(loader))\n    optimizer.step()", 3, AGAIN),
    (f"{SOME}while True: train(rows(8))", 0, "it then trained with loader 2"),
    (SOME + WITHOUT, 0, NO_LOADER),
    (BECOMES, 3, ANOTHER),
]


@pytest.mark.parametrize(("script", "status", "says"), ENDED)
def test_a_program_that_trains_in_another_way_is_ended(script, status, says, command):
    Path("train.py").write_text(HEAD + script)
    done = command("check", "--budget", 0.3, "--no-predict", "train.py", status=status)
    out = " ".join((done.err if status else done.out).split())
    assert says in out
    assert ("measure that with --loader 2" in out) == ("loader 2" in says)
    assert ("take next(batches) in the loop" in out) == (says == AGAIN)


def test_a_program_that_trains_in_epochs_that_are_too_short_is_ended(command):
    Path("train.py").write_text(HEAD + "while True: train(rows(2))")
    done = command("check", "--budget", 0.3, "train.py", status=3)
    about = "DataLoader of TensorDataset, 2 batches of 1, num_workers=0"
    assert f"trained with loader 1 ({about}): measure that with --loader 1" in done.err
    assert done.err.count(f"{about}: an epoch has fewer than 4 batches") == 1


STATEFUL = """
from torch.utils.data import DataLoader
class StatefulDataLoader(DataLoader):
    def _get_iterator(self):
        return super()._get_iterator()
    def __iter__(self):
        return self._get_iterator()
"""


@pytest.mark.filterwarnings("ignore:BuiltinImporter:DeprecationWarning")  # by a module's repr
def test_torchdatas_loader_which_does_not_call_torchs_is_watched(command, tmp_path):
    Path("torchdata").mkdir()
    Path("torchdata/stateful_dataloader.py").write_text(STATEFUL)
    script = "from torchdata.stateful_dataloader import StatefulDataLoader as Stateful\n"
    Path("train.py").write_text(HEAD + script + "train(rows(9, Stateful))\n")
    done = command("check", "--budget", 0.3, "--no-predict", "train.py")
    assert "measured in loader 1: StatefulDataLoader of TensorDataset" in done.out
    with pytest.warns(BackendWarning, match="StatefulDataLoader overrides _get_iterator"):
        command("run", "--backend", "prefetch", "train.py")


def test_untouched_loops_draw_what_they_always_draw(command):
    script = """
torch.manual_seed(3)
loader = rows(9, batch_size=2, shuffle=True)
with torch.no_grad():
    print([x.tolist() for epoch in range(2) for (x,) in loader])
print(torch.get_rng_state().tolist())
train(rows(8))
"""
    Path("train.py").write_text(HEAD + script)
    plain = warm.run(["train.py"])
    assert plain.stdout.count("\n") == 2
    watched = command("check", "--budget", 0.3, "--no-predict", "train.py")
    assert watched.out.startswith(plain.stdout)
