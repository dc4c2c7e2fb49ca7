"""Real scripts under ``dataloaders check``: the loop that it measures, its end, what it leaves.

Each script runs in a process of its own. The tests assert what is measured and reported, not how
long it took: ``python -m bench third_party`` compares verdicts with brute force.
"""

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

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


def scratch_of(folder):
    """Where what is diverted goes, and sockets, whose paths have to be short."""
    return folder.with_name(folder.name[-9:])


def check(folder, text, *options, budget=0.5, status=0):
    script = folder / "train.py"
    script.write_text(HEAD + text)
    words = ["-m", "dataloaders", "check", "--budget", budget, *options, script.name]
    scratch = scratch_of(folder)
    scratch.mkdir(exist_ok=True)
    env = {**os.environ, "TMPDIR": str(scratch)}
    return warm.run(words, cwd=folder, env=env, status=status)


def measured_in(done):
    """The loader that the report names, as ``1: DataLoader of Data, ...``."""
    assert "step: " not in done.stdout  # clean steps, as far as `findings` goes
    (line,) = (one for one in done.stdout.splitlines() if "note: measured in loader" in one)
    return line.partition("note: measured in loader ")[2]


def test_a_loop_in_a_thread_after_a_first_pass_over_the_data(tmp_path):
    """Other uses of the loader are left alone, and a finding about the step names its line."""
    text = (
        "import atexit; atexit.register(print, 'goodbye')\n"
        "data = DataLoader(Data(count=40), batch_size=4)\n"
        "mean = sum(batch.mean() for batch in data) / len(data)\n"
        "print('mean', mean.item())\n" + OPTIMIZER + LOADER + "def train():\n"
        "    for epoch in range(1000):\n"
        "        for i, batch in enumerate(loader):\n"
        "            loss = model(batch).mean()\n"
        "            optimizer.zero_grad(set_to_none=False)\n"
        "            loss.backward()\n"
        "            optimizer.step()\n"
        "            if i % 5 == 2: print('looked at', int(next(iter(loader))[0, 0]))\n"
        "threading.Thread(target=train, daemon=True).start()\n"
        "queue.Queue().get()  # for ever\n"
    )
    result = tmp_path / "report.json"
    done = check(tmp_path, text, "--json", result)
    assert "measured in loader 2: DataLoader of Data, 16 batches" in done.stdout
    assert "mean 19.5" in done.stdout  # of all batches, each of them once
    assert done.stdout.count("looked at") > 3
    assert "the script was ended after" in done.stdout
    assert "ended by itself" not in done.stdout
    assert done.stdout.endswith("\ngoodbye\n")
    (finding,) = json.loads(result.read_text())["findings"]
    line = next(n for n, each in enumerate((HEAD + text).splitlines(), 1) if "set_to_none" in each)
    assert (finding["name"], finding["where"]) == ("zero-grad", f"train.py:{line}")


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


def test_a_thread_that_runs_ahead_of_the_step_is_refused_and_the_script_ends(tmp_path):
    done = check(tmp_path, f"{THREADED}loader = LoaderX(Data(400), 4)\n{EPOCHS}", status=3)
    assert "a thread of the script takes its batches ahead of the step" in done.stderr
    assert "--loader" not in done.stderr  # no other loader is the one that trains


TRAINS_ON = OPTIMIZER + "def train(*rank):\n" + textwrap.indent(LOADER + EPOCHS, "    ")


def test_a_script_that_goes_elsewhere_and_redirects_its_output_in_a_thread_that_outlives_it(
    tmp_path,
):
    text = (
        "import os; os.mkdir('elsewhere'); os.chdir('elsewhere')\n"
        "os.dup2(os.open('c.txt', os.O_CREAT | os.O_WRONLY), 1); print('in C')\n"
        "sys.stdout = open('log.txt', 'w'); print('hello')\n"
        "sys.stdout.close(); sys.__stdout__.close()\n"
        "threading.Thread(target=train).start()\n"  # Python waits for it
    )
    done = check(tmp_path, TRAINS_ON + text, "--json", "report.json")
    assert measured_in(done).startswith("1: ")
    assert json.loads((tmp_path / "report.json").read_text())["verdict"]
    assert (tmp_path / "elsewhere" / "log.txt").read_text() == "hello\n"
    assert (tmp_path / "elsewhere" / "c.txt").read_text() == "in C\n"


@pytest.mark.nightly
@pytest.mark.parametrize(
    "text",
    [
        "threading.Thread(target=queue.Queue().get).start()\ntrain()\n",
        # Its end waits for a thread that waits for room.
        "from concurrent.futures import ThreadPoolExecutor\n"
        "full = queue.Queue(1)\n"
        "def fill():\n"
        "    while True: full.put(1)\n"
        "with ThreadPoolExecutor(1) as pool:\n"
        "    pool.submit(fill)\n"
        "    train()\n",
        "while True:\n    try: train()\n    except: time.sleep(0.1)\n",
    ],
    ids=["thread", "pool", "except"],
)
def test_a_script_that_would_not_end_is_ended(text, tmp_path):
    done = check(tmp_path, TRAINS_ON + text)
    assert measured_in(done).startswith("1: ")
    assert "the script was ended after" in done.stdout


LIGHTNING = """
import lightning
from lightning.pytorch.callbacks import ModelCheckpoint

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.linear = model
    def training_step(self, batch, index):
        return sum(self.linear(part).mean() for part in batch.values())
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)

loaders = {"labelled": DataLoader(Data(400, 0), 4), "unlabelled": DataLoader(Data(400, 0.005), 4)}
saver = ModelCheckpoint("out", "model", every_n_train_steps=5, enable_version_counter=False)
lightning.Trainer(
    max_epochs=1000, accelerator="cpu", logger=False, callbacks=[saver], enable_progress_bar=False,
).fit(Module(), loaders)
"""


@pytest.mark.nightly
def test_lightnings_combined_loader_and_its_checkpoint(tmp_path):
    """Each step waits 20 ms for the loader that is not measured."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.ckpt").write_text("of three weeks")
    result = tmp_path / "report.json"
    done = check(tmp_path, LIGHTNING, "--no-predict", "--json", result, budget=4)
    assert measured_in(done).startswith("1: ")
    report = json.loads(result.read_text())
    assert report["verdict"] == "input-bound"
    assert any("loader 2 (DataLoader of Data, 100" in note for note in report["notes"])
    assert [path.name for path in tmp_path.rglob("*.ckpt")] == ["model.ckpt"]
    assert (tmp_path / "out" / "model.ckpt").read_text() == "of three weeks"
    assert re.search(r"note: written to .+: out/model.ckpt", done.stdout)


WRITES = OPTIMIZER + LOADER + (
    "import numpy, os, shutil, tarfile\n"
    "from pathlib import Path\n"
    "from safetensors.torch import load_file, save_file\n"
    "folder = Path('out')\n"
    "class Log: write = sys.stdout.write\n"  # no flush(), no isatty()
    "sys.stdout = Log()\n"
    "os.makedirs('runs/first')\n"  # as HF Trainer, before training
    "shutil.rmtree('made')\n"
    "os.makedirs('made/anew')\n"
    "import atexit\n"
    "atexit.register(lambda text: Path('exit.txt').write_text(text), 'ended')\n"
    "script = torch.jit.script(torch.nn.Linear(2, 2))\n"
    "try:\n"
    "    for epoch in range(1000):\n"
    "        for step, batch in enumerate(loader):\n"
    "            train_on(batch, optimizer)\n"
    "            torch.save(model.state_dict(), 'again.pt')\n"
    "            torch.save(model.state_dict(), 'new.pt')\n"
    "            torch.jit.save(script, 'script.pt')\n"
    "            torch.jit.load('script.pt')\n"
    "            numpy.savetxt('loss.txt', [step, step])\n"
    "            assert len(numpy.loadtxt('loss.txt')) == 2\n"
    "            with tarfile.open('model.tar', 'w') as tar: tar.add('new.pt')\n"
    "            model.load_state_dict(torch.load('again.pt'))\n"
    "finally:\n"
    "    os.link('log.txt', 'log.bak')\n"  # this, chmod and utime change a file's st_ctime
    "    shutil.copy2('new.pt', 'copied.pt')\n"
    "    os.remove('copied.pt')\n"
    "    os.chmod('moded.pt', 0o600)\n"
    "    os.remove('moded.pt')\n"
    "    with open('log.txt', 'a') as log: log.write('; and a line')\n"
    "    print('read back:', open('log.txt').read())\n"
    "    os.remove('old.pt')\n"
    "    open('dataset.idx', 'w').write('made by the way')\n"
    "    torch.save(model, folder / 'last.tmp')\n"
    "    os.replace(folder / 'last.tmp', folder / 'last.pt')\n"
    "    print(type(torch.load('out/last.pt', weights_only=False)).__name__)\n"
    "    save_file(model.state_dict(), 'out/step-1/model.safetensors')\n"
    "    print(sorted(load_file('out/step-1/model.safetensors')))\n"
    "    save_file(model.state_dict(), 'runs/first/model.safetensors')\n"
    "    shutil.rmtree('out/step-1')\n"
    "    os.mkdir('out/step-2')\n"
    "    save_file(model.state_dict(), 'out/step-2/model.safetensors')\n"
    "    (folder / 'step-2' / 'state.json').write_text('{}')\n"
    "    (folder / 'last.pt').rename(folder / 'best.pt')\n"
    "    os.remove('linked.pt')\n"  # as timm's saver replaces its best one
    "    os.link('again.pt', 'linked.pt')\n"
    "    os.remove('latest.pt')\n"
    "    Path('latest.pt').symlink_to('linked.pt')\n"
    "    for name in ('linked.pt', 'latest.pt'): print(name, len(torch.load(name)))\n"
    "    open(b'out/events.out.tfevents.1', 'wb').close()\n"  # as TensorBoard does, in bytes
    "    print({name: os.environ[name] for name in os.environ if name.startswith(\n"
    "        ('DATALOADERS_CHECK', 'MLFLOW', 'TENSORBOARD', 'WANDB'))})\n"
)  # fmt: skip


@pytest.mark.parametrize("let", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_files_that_existed_are_neither_overwritten_moved_nor_deleted(tmp_path, let):
    (tmp_path / "out" / "step-1").mkdir(parents=True)
    (tmp_path / "made" / "anew").mkdir(parents=True)
    names = [f"{name}.pt" for name in ("again", "copied", "latest", "linked", "moded", "old")]
    names += ["log.txt", "out/last.pt", "out/step-1/model.safetensors"]
    names += ["exit.txt", "loss.txt", "made/anew/data.txt", "model.tar", "script.pt"]
    before = {name: f"{name} of three weeks" for name in names}
    for name, text in before.items():
        (tmp_path / name).write_text(text)
    done = check(tmp_path, WRITES, "--no-predict", *(["--let-write"] if let else []))
    assert "read back: log.txt of three weeks; and a line" in done.stdout
    assert "Linear\n['bias', 'weight']\nlinked.pt 2\nlatest.pt 2\n" in done.stdout
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "train.py"]
    left = {str(path.relative_to(tmp_path)): path.read_bytes() for path in files}
    events = "out/events.out.tfevents.1"
    if let:
        assert left["log.txt"] == b"log.txt of three weeks; and a line"
        assert {"out/best.pt", "out/step-2/state.json", events} < set(left)
        assert not {"old.pt", "out/last.pt", "out/step-1/model.safetensors"} & set(left)
    else:
        before["dataset.idx"] = "made by the way"  # a new file that is no checkpoint stays
        before["log.bak"] = before["log.txt"]
        assert left == {name: text.encode() for name, text in before.items()}
        assert not (tmp_path / "out" / "step-2").exists()
        assert not (tmp_path / "runs").exists()
        scratch = re.search("note: written to (.+) and not in place", done.stdout)[1]
        assert Path(f"{scratch}{tmp_path}", events).is_file()
        trackers = (
            f"{{'DATALOADERS_CHECK': '1', 'WANDB_MODE': 'disabled', 'MLFLOW_TRACKING_URI': "
            f"'file://{scratch}/mlruns', 'TENSORBOARD_LOGGING_DIR': '{scratch}/tensorboard'}}"
        )
        assert trackers in done.stdout


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.nightly)])
def test_a_process_that_trains_is_measured_there(method, tmp_path):
    start = f"torch.multiprocessing.start_processes(train, (), 2, start_method={method!r})\n"
    done = check(tmp_path, f"{TRAINS_ON}if __name__ == '__main__':\n    {start}")
    assert measured_in(done).startswith("1: DataLoader of Data, 16 batches of 4")


DISTRIBUTED = (
    "import datetime, os\n"
    "import torch.distributed as dist\n"
    "dist.init_process_group('gloo', timeout=datetime.timedelta(seconds=20))\n"
    "slow = dist.get_rank() == int(sys.argv[1])\n"
    "loader = DataLoader(Data(400, 0.004 if slow else 0), batch_size=4)\n"
    "model = torch.nn.parallel.DistributedDataParallel(model)\n"
    + OPTIMIZER + EPOCHS +
    "        time.sleep(0.01)\n"
)  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize(("ranks", "slow"), [(2, 0), (4, 3), (2, -1)])
def test_ranks_measure_together_and_report_once(ranks, slow, tmp_path):
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
    report = json.loads(result.read_text())
    if slow < 0:
        assert report["verdict"] != "input-bound"
        return
    # Every rank waits 16 ms for the slow one, and steps for 10 ms.
    assert f"note: rank {slow} of {ranks} waits longest for its batches" in done.stdout
    assert report["verdict"] == "input-bound"
    assert report["speedup_bound"]["estimate"] > 1.5


LAUNCHES = (
    "import os, subprocess\n"
    "import torch.distributed as dist\n"
    "rank = int(os.environ.setdefault('RANK', '0'))\n"
    "if rank == 0: subprocess.Popen([sys.executable, __file__], env={**os.environ, 'RANK': '1'})\n"
    "store = f'file://{os.getcwd()}/store'\n"
    "dist.init_process_group('gloo', init_method=store, rank=rank, world_size=2)\n"
    "model = torch.nn.parallel.DistributedDataParallel(model)\n" + OPTIMIZER + LOADER + EPOCHS
)  # fmt: skip


@pytest.mark.nightly
def test_ranks_that_the_script_starts_by_itself_are_not_measured(tmp_path):
    # As Lightning starts them without torchrun; each wait of theirs is a step's on rank 0.
    done = check(tmp_path, LAUNCHES, status=3)
    assert "since it is one of 2 ranks, and no check watches the others" in done.stderr
    assert "torchrun --nproc-per-node 2 -m dataloaders check" in done.stderr
