"""Real scripts under ``dataloaders check``: which loop it measures, that it ends, what it leaves.

Each runs as a process of its own. What is asserted is what is measured and what is said, not how
long anything took; the verdicts on such loops are the bench's (``python -m bench scripts``).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers import warm

HEAD = """
import queue, sys, threading, time, torch
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)

class Data(Dataset):
    def __init__(self, count=64, seconds=0.0005):
        self.count, self.seconds = count, seconds
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        time.sleep(self.seconds)
        return torch.full((4,), float(index))

model = torch.nn.Linear(4, 1)

def train_on(batch, optimizer):
    loss = model(batch).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
OPTIMIZER = "optimizer = torch.optim.SGD(model.parameters(), 0.01)\n"
LOADER = "loader = DataLoader(Data(), batch_size=4)\n"
EPOCHS = (
    "for epoch in range(1000):\n"
    "    for batch in loader:\n"
    "        train_on(batch, optimizer)\n"
)  # fmt: skip


def check(
    folder: Path, text: str, *options: object, budget: float = 0.5
) -> subprocess.CompletedProcess[str]:
    script = folder / "train.py"
    script.write_text(HEAD + text)
    words = ["-m", "dataloaders", "check", "--budget", budget, *options, script.name]
    scratch = folder.with_name(folder.name + "-scratch")  # where what is diverted goes
    scratch.mkdir(exist_ok=True)
    return warm.run(words, cwd=folder, env={**os.environ, "TMPDIR": str(scratch)})


def measured_in(done: subprocess.CompletedProcess[str]) -> str:
    """The loader that the report names, as ``1: DataLoader of Data, ...``."""
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step: " not in done.stdout  # clean steps, as far as `findings` goes
    (line,) = (one for one in done.stdout.splitlines() if "note: measured in loader" in one)
    return line.partition("note: measured in loader ")[2]


def test_a_first_pass_over_the_data_is_passed_over(tmp_path: Path) -> None:
    text = (
        "data = DataLoader(Data(count=40), batch_size=4)\n"
        "mean = sum(batch.mean() for batch in data) / len(data)\n"
        "print('mean', mean.item())\n" + OPTIMIZER + LOADER + EPOCHS
    )
    done = check(tmp_path, text)
    assert measured_in(done).startswith("2: DataLoader of Data, 16 batches")
    assert "mean 19.5" in done.stdout  # of all batches, each of them once


def test_a_loop_in_which_no_optimizer_steps_is_told_as_that(tmp_path: Path) -> None:
    done = check(tmp_path, LOADER + OPTIMIZER + "for batch in loader: pass\n")
    assert done.returncode == 3
    assert "16 batches of 4, num_workers=0: no optimizer stepped between" in done.stderr
    done = check(tmp_path, LOADER + OPTIMIZER + "for batch in loader: pass\n", "--loader", 1)
    assert measured_in(done).startswith("1: ")


def test_a_script_without_an_optimizer_is_taken_at_once(tmp_path: Path) -> None:
    # Its own update rule: nothing in its source speaks of an opti-mizer.
    text = (
        "loader = DataLoader(Data())\nfor batch in loader:\n    model(batch).mean().backward()\n"
        "    with torch.no_grad(): model.weight -= 0.01 * model.weight.grad\n"
    )
    (tmp_path / "train.py").write_text(HEAD.partition("def train_on")[0] + text)
    done = warm.run(
        ["-m", "dataloaders", "check", "--budget", 0.5, "train.py"], cwd=tmp_path
    )  # fmt: skip
    assert measured_in(done).startswith("1: ")


def test_looks_at_the_data_inside_the_loop_leave_the_measurement_alone(tmp_path: Path) -> None:
    text = LOADER + OPTIMIZER + (
        "seen = []\n"
        "for epoch in range(1000):\n"
        "    for i, batch in enumerate(loader):\n"
        "        train_on(batch, optimizer)\n"
        "        if i % 5 == 2: print('looked at', int(next(iter(loader))[0, 0]))\n"
    )  # fmt: skip
    done = check(tmp_path, text)
    assert "the script was ended after" in done.stdout
    assert done.stdout.count("looked at") > 3
    assert "ended by itself" not in done.stdout


def test_a_loader_in_a_thread_of_its_own_class_is_measured_around_the_thread(
    tmp_path: Path,
) -> None:
    done = check(tmp_path, THREADED + "loader = LoaderX(Data(), batch_size=4)\n" + EPOCHS)
    assert measured_in(done).startswith("1: LoaderX of Data")
    assert "the script was ended after" in done.stdout


THREADED = (
    OPTIMIZER
    + """
class Background(threading.Thread):
    def __init__(self, batches):
        super().__init__(daemon=True)
        self.queue, self.batches = queue.Queue(2), batches
        self.start()
    def run(self):
        for batch in self.batches:
            self.queue.put(batch)
        self.queue.put(None)
    def __iter__(self):
        return self
    def __next__(self):
        batch = self.queue.get()
        if batch is None:
            raise StopIteration
        return batch

class LoaderX(DataLoader):
    def __iter__(self):
        return Background(super().__iter__())

"""
)


def test_a_thread_that_runs_ahead_of_the_step_is_refused_and_the_script_ends(
    tmp_path: Path,
) -> None:
    text = (
        "plain = DataLoader(Data(400), batch_size=4)\n"
        "for epoch in range(1000):\n"
        "    for batch in Background(iter(plain)):\n"
        "        train_on(batch, optimizer)\n"
    )
    done = check(tmp_path, THREADED + text)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "a thread of the script takes its batches ahead of the step" in done.stderr


def test_a_training_loop_in_a_thread_is_measured_and_the_main_thread_ended(tmp_path: Path) -> None:
    text = OPTIMIZER + LOADER + (
        "def train():\n"
        "    for epoch in range(1000):\n"
        "        for batch in loader: train_on(batch, optimizer)\n"
        "threading.Thread(target=train, daemon=True).start()\n"
        "queue.Queue().get()  # for ever\n"
    )  # fmt: skip
    done = check(tmp_path, text)
    assert measured_in(done).startswith("1: ")
    assert "the script was ended after" in done.stdout


@pytest.mark.nightly
def test_two_loaders_in_step_name_the_one_that_is_not_measured(tmp_path: Path) -> None:
    text = OPTIMIZER + (
        "labelled = DataLoader(Data(400, 0), batch_size=4)\n"
        "unlabelled = DataLoader(Data(400, 0.002), batch_size=4)\n"
        "for epoch in range(1000):\n"
        "    for batch, other in zip(labelled, unlabelled): train_on(batch, optimizer)\n"
    )
    result = tmp_path / "report.json"
    done = check(tmp_path, text, "--json", result, budget=1.5)
    assert measured_in(done).startswith("1: ")
    report = json.loads(result.read_text())
    other = "loader 2 (DataLoader of Data, 100 batches of 4, num_workers=0)"
    assert any(other in note for note in report["notes"]), report["notes"]
    assert report["verdict"] != "step-bound"


# what it leaves ---------------------------------------------------------------------------------


@pytest.mark.nightly
def test_files_that_existed_are_not_overwritten(tmp_path: Path) -> None:
    for name in ("last.pt", "best.txt", "log.txt", "old.pt"):
        (tmp_path / name).write_text(f"{name} of three weeks")
    text = OPTIMIZER + LOADER + (
        "import os, shutil\n"
        "try:\n"
        "    for epoch in range(1000):\n"
        "        for step, batch in enumerate(loader):\n"
        "            train_on(batch, optimizer)\n"
        "            torch.save(model.state_dict(), 'last.pt')\n"
        "            torch.save(model.state_dict(), 'new.pt')\n"
        "            model.load_state_dict(torch.load('last.pt'))\n"
        "finally:\n"
        "    open('best.txt', 'w').write('a model of the check')\n"
        "    with open('log.txt', 'a') as log: log.write('; and a line')\n"
        "    print('read back:', open('best.txt').read(), '/', open('log.txt').read())\n"
        "    os.remove('old.pt')\n"
        "    open('dataset.idx', 'w').write('made by the way')\n"
    )  # fmt: skip
    done = check(tmp_path, text, "--quiet")
    assert done.returncode == 0, done.stderr
    assert "read back: a model of the check / log.txt of three weeks; and a line" in done.stdout
    left = {path.name: path.read_bytes().decode() for path in tmp_path.iterdir()}
    del left["train.py"]
    assert left == {
        "last.pt": "last.pt of three weeks",
        "best.txt": "best.txt of three weeks",
        "log.txt": "log.txt of three weeks",
        "old.pt": "old.pt of three weeks",
        "dataset.idx": "made by the way",
    }
    done = check(tmp_path, text, "--let-write", "--quiet")
    assert (tmp_path / "best.txt").read_text() == "a model of the check"
    assert not (tmp_path / "old.pt").exists()


def test_checkpoints_that_rotate_are_neither_moved_nor_deleted(tmp_path: Path) -> None:
    (tmp_path / "out" / "step-1").mkdir(parents=True)
    for name in ("out/last.pt", "out/step-1/model.safetensors"):
        (tmp_path / name).write_text(f"{name} of three weeks")
    text = OPTIMIZER + LOADER + (
        "import os, shutil\n"
        "from pathlib import Path\n"
        "from safetensors.torch import load_file, save_file\n"
        "folder = Path('out')\n"
        "try:\n"
        "    for epoch in range(1000):\n"
        "        for step, batch in enumerate(loader): train_on(batch, optimizer)\n"
        "finally:\n"
        "    torch.save(model, folder / 'last.tmp')\n"
        "    os.replace(folder / 'last.tmp', folder / 'last.pt')\n"
        "    print(type(torch.load('out/last.pt', weights_only=False)).__name__)\n"
        "    save_file(model.state_dict(), 'out/step-1/model.safetensors')\n"
        "    print(sorted(load_file('out/step-1/model.safetensors')))\n"
        "    shutil.rmtree('out/step-1')\n"
        "    os.mkdir('out/step-2')\n"
        "    save_file(model.state_dict(), 'out/step-2/model.safetensors')\n"
        "    (folder / 'step-2' / 'state.json').write_text('{}')\n"
        "    (folder / 'last.pt').rename(folder / 'best.pt')\n"
    )  # fmt: skip
    done = check(tmp_path, text, "--quiet")
    assert "Linear\n['bias', 'weight']\n" in done.stdout, done.stderr
    left = {str(path.relative_to(tmp_path)) for path in (tmp_path / "out").rglob("*")}
    assert left == {"out/last.pt", "out/step-1", "out/step-1/model.safetensors"}
    for name in ("out/last.pt", "out/step-1/model.safetensors"):
        assert (tmp_path / name).read_text() == f"{name} of three weeks"


# processes --------------------------------------------------------------------------------------

SPAWNED = (
    "import torch.multiprocessing as mp\n"
    "def work(rank, how):\n"
    "    optimizer = torch.optim.SGD(model.parameters(), 0.01)\n"
    "    loader = DataLoader(Data(), batch_size=4)\n"
    "    for epoch in range(1000):\n"
    "        for batch in loader: train_on(batch, optimizer)\n"
    "if __name__ == '__main__':\n"
)


@pytest.mark.parametrize(
    ("processes", "method"), [(2, "fork"), pytest.param(2, "spawn", marks=pytest.mark.nightly)]
)
def test_a_process_that_trains_is_measured_there(
    processes: int, method: str, tmp_path: Path
) -> None:
    text = f"    mp.start_processes(work, ('x',), {processes}, start_method={method!r})\n"
    done = check(tmp_path, SPAWNED + text)
    assert measured_in(done).startswith("1: DataLoader of Data, 16 batches of 4")


def test_processes_that_do_not_train_are_counted(tmp_path: Path) -> None:
    text = (
        "import multiprocessing\n"
        "child = multiprocessing.get_context('fork').Process(target=print, args=('child',))\n"
        "child.start(); child.join()\n"
    )
    done = check(tmp_path, text)
    assert done.returncode == 3
    assert "it started 1 processes, and none of them trained" in done.stderr
    assert "child" in done.stdout


@pytest.mark.parametrize("words", [["-m", "torch.distributed.run"], ["bin/torchrun"]])
def test_a_launcher_is_told_to_come_first(words: list[str], tmp_path: Path) -> None:
    done = warm.run(["-m", "dataloaders", "check", *words, "train.py"], cwd=tmp_path)
    assert done.returncode == 2
    assert "torchrun ... -m dataloaders check train.py" in done.stderr


DISTRIBUTED = (
    "import datetime, os\n"
    "import torch.distributed as dist\n"
    "dist.init_process_group('gloo', timeout=datetime.timedelta(seconds=20))\n"
    "slow = dist.get_rank() == int(sys.argv[1])\n"
    "loader = DataLoader(Data(400, 0.004 if slow else 0.0002), batch_size=4)\n"
    "model = torch.nn.parallel.DistributedDataParallel(model)\n"
    + OPTIMIZER + EPOCHS
)  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize(("ranks", "slow"), [(2, -1), (2, 0), (2, 1), (4, 3)])
def test_ranks_measure_together_and_report_once(ranks: int, slow: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(HEAD + DISTRIBUTED)
    result = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone",
         "--nproc-per-node", str(ranks), "-m", "dataloaders", "check", "--budget", "4",
         "--json", str(result), "train.py", "--", str(slow)],
        cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("note: measured in loader") == 1
    assert "Traceback" not in done.stderr
    report: dict[str, Any] = json.loads(result.read_text())
    assert f"of {ranks} waits longest for its batches" in done.stdout
    if slow >= 0:
        assert f"note: rank {slow} of {ranks} waits longest" in done.stdout
        assert report["verdict"] != "step-bound"


# short epochs -----------------------------------------------------------------------------------


@pytest.mark.measures
def test_a_script_that_fails_past_its_one_epoch_gets_what_is_known(tmp_path: Path) -> None:
    text = OPTIMIZER + (
        "loader = DataLoader(Data(40, 0.005), batch_size=4)\n"
        "schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=len(loader))\n"
        "for batch in loader:\n"
        "    train_on(batch, optimizer)\n"
        "    time.sleep(0.02)\n"
        "    schedule.step()\n"
    )
    result = tmp_path / "report.json"
    done = check(tmp_path, text, "--json", result, budget=10)
    assert done.returncode == 0, done.stderr
    assert "Tried to step" in done.stderr
    report = json.loads(result.read_text())
    assert report["verdict"] == "input-bound"
    assert report["speedup_bound"]["low"] > 1.5  # 2 in truth
