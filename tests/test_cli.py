"""The ``dataloaders`` command on real scripts: verdicts, endings, messages and exit statuses."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from dataloaders.cli import main
from helpers import warm
from helpers.processes import wait_until_gone

HEAD = """
import argparse, os, sys, time, torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

class Slow(Dataset):
    def __init__(self, seconds, count=64):
        self.seconds, self.count = seconds, count
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        time.sleep(self.seconds)
        return torch.full((4,), float(index)), index

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
    def forward(self, x):
        return self.layer(x)
"""

WAITS_FOR_INPUT = (
    HEAD
    + """
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--start", default=None)

def main():
    args = parser.parse_args()
    train = DataLoader(Slow(0.004), batch_size=2, shuffle=True, num_workers=args.workers,
                       multiprocessing_context=args.start)
    valid = DataLoader(Slow(0), batch_size=8)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with torch.no_grad():
        for x, y in valid:
            model(x)
    for epoch in range(args.epochs):
        for x, y in train:
            loss = model(x).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print("trained")

if __name__ == "__main__":
    main()
"""
)


@dataclass
class Done:
    status: int
    out: str
    err: str


@pytest.fixture
def command(monkeypatch, capfd, tmp_path):
    """Runs one command line in this process; what scripts replace is put back afterwards."""
    monkeypatch.setenv("DATALOADERS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("DATALOADERS_BACKEND", "stock")  # `run` sets it for good: it is restored

    def carry_out(*words):
        with monkeypatch.context() as kept:
            kept.setattr(sys, "argv", sys.argv)
            kept.setattr(sys, "path", ["", *sys.path])
            kept.setitem(sys.modules, "__main__", sys.modules["__main__"])
            capfd.readouterr()
            try:
                status = main([str(word) for word in words])
            except SystemExit as error:
                status = int(error.code or 0)
        captured = capfd.readouterr()
        return Done(status, captured.out, captured.err)

    return carry_out


def write(folder, text, name="train.py"):
    path = folder / name
    path.write_text(text)
    return path


# check ------------------------------------------------------------------------------------------


@pytest.mark.measures
def test_an_unmodified_script_gets_its_verdict(command, tmp_path):
    script = write(tmp_path, WAITS_FOR_INPUT)
    result, page = tmp_path / "report.json", tmp_path / "report.html"
    options = ("--budget", 3, "--json", result, "--html", page, "--try")
    done = command("check", *options, script, "--", "--epochs", 1)
    report = json.loads(result.read_text())
    assert report["verdict"] == "input-bound", done.out
    assert done.status == 0
    assert report["speedup_bound"]["low"] > 1.5
    for text in ("INPUT-BOUND", "what if", "the one change to make: num_workers="):
        assert text in done.out
    assert "trains its model" in done.err.splitlines()[0]
    assert "measured in loader 2: DataLoader of Slow, 32 batches of 2, num_workers=0" in done.out
    assert "the script was ended after" in done.out
    assert "trained" not in done.out
    assert "<html" in page.read_text()


def test_a_report_is_written_in_every_form_and_compared_with_an_earlier_one(command, tmp_path):
    text = HEAD + "for batch in DataLoader(Slow(0.001)): pass\n"
    script, at = write(tmp_path, text), tmp_path / "report"
    options = ("--json", f"{at}.json", "--markdown", "-", "--no-predict", "--quiet")
    done = command("check", "--budget", 0.5, *options, script)
    assert done.status == 0
    assert done.out.startswith("### ")
    assert "measured in loader 1" in done.out
    assert json.loads(Path(f"{at}.json").read_text())["candidates"] == []
    forms = [f"--{form}={at}.{form}" for form in ("html", "markdown", "trace")]
    done = command("check", "--budget", 0.5, "--against", f"{at}.json", *forms, script)
    assert "COMPARED WITH BEFORE: " in done.out
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["report"] * 4 + ["train"]
    assert "Compared with before" in Path(f"{at}.html").read_text()
    assert Path(f"{at}.markdown").read_text().startswith("### ")
    assert json.loads(Path(f"{at}.trace").read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("ending", "status", "says", "err"),
    [
        ("break", 0, "the script ended by itself after 5 steps, before enough was measured", ""),
        ("raise ValueError('too hot')", 1, "the script failed after", "ValueError: too hot\n"),
        ("sys.exit(7)", 7, "", ""),
    ],
)
def test_a_script_that_ends_too_early_ends_as_it_did(ending, status, says, err, command, tmp_path):
    text = HEAD + (
        f"for step, batch in enumerate(DataLoader(Slow(0.001))):\n    if step == 5: {ending}\n"
    )
    script = write(tmp_path, text)
    done = command("check", "--budget", 30, script)
    assert done.status == status
    assert says in done.out
    assert done.err.endswith(err)
    assert "prolonged" not in done.out
    if ending == "break":
        verdicts = "input-bound,inconclusive"
        done = command("check", "--fail-if", verdicts, "--quiet", script)
        assert (done.status, done.out.count("\n"), done.err) == (1, 1, "")


def test_a_failure_past_the_epochs_end_is_laid_to_the_check(command, tmp_path):
    text = HEAD + (
        "model = Model(); loader = DataLoader(Slow(0.001, count=8))\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.01)\n"
        "schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=len(loader))\n"
        "for x, y in loader:\n"
        "    model(x).sum().backward(); optimizer.step(); schedule.step()\n"
    )
    done = command("check", "--budget", 30, write(tmp_path, text))
    assert "Tried to step" in done.err
    assert "the check prolonged its epoch by" in done.out
    assert "a smaller --budget prolongs less" in done.out
    assert done.status == 0


def test_no_loader_lists_what_was_seen(command, tmp_path):
    text = HEAD + (
        "with torch.no_grad():\n    for batch in DataLoader(Slow(0)): pass\n"
        "optimizer = torch.optim.SGD(Model().parameters(), 0.01)\n"
        "for batch in DataLoader(Slow(0), batch_size=4): pass\n"
    )
    script = write(tmp_path, text)
    done = command("check", script)
    assert done.status == 3
    assert "no loader was taken over; the script iterated 2 of them" in done.err
    assert "1. DataLoader of Slow, 64 batches of 1, num_workers=0: gradients were off" in done.err
    assert "16 batches of 4, num_workers=0: no optimizer stepped between" in done.err
    assert "--loader N" in done.err
    done = command("check", "--loader", 1, "--budget", 1, script)
    assert "measured in loader 1" in done.out
    done = command("check", write(tmp_path, "print('no torch here')", "plain.py"))
    assert done.status == 3
    assert "check_bottleneck(loader, step)" in done.err


def test_a_hidden_package_is_reported_with_both_paths(command, tmp_path):
    import dataloaders

    script = write(tmp_path, "import dataloaders")
    mine = write(tmp_path, "", "dataloaders.py")
    for subcommand in (["check"], ["run", "--backend", "stock"], ["tune"]):
        done = command(*subcommand, script)
        assert done.status == 2
        assert str(mine) in done.err
        assert str(Path(dataloaders.__file__).parent) in done.err
    mine.unlink()
    (tmp_path / "dataloaders").mkdir()
    assert command("check", script).status == 3  # a folder without Python files hides nothing
    write(tmp_path / "dataloaders", "", "__init__.py")
    assert command("check", script).status == 2


@pytest.mark.nightly
def test_spawned_workers_find_the_script_and_exit_handlers_run(tmp_path):
    text = WAITS_FOR_INPUT.replace(
        'if __name__ == "__main__":',
        'import atexit\nWORD = "goodbye"\n'
        'if __name__ == "__main__":\n    atexit.register(lambda: print(WORD))',
    )
    done = subprocess.run(
        [sys.executable, "-m", "dataloaders", "check", "--budget", "2", str(write(tmp_path, text)),
         "--", "--workers", "1", "--start", "spawn", "--epochs", "3"],
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "measured in loader 2: DataLoader of Slow, 32 batches of 2, num_workers=1" in done.stdout
    assert done.stdout.endswith("goodbye\n")


def test_ctrl_c_prints_what_is_known(command, tmp_path):
    text = HEAD + (
        "for step, batch in enumerate(DataLoader(Slow(0.002))):\n"
        "    if step == 200: raise KeyboardInterrupt\n"
        "    time.sleep(0.002)\n"
    )
    done = command("check", "--budget", 60, write(tmp_path, text))
    assert done.status == 130, done.err
    assert "interrupted after" in done.out
    assert "this is what was known by then" in done.out


def test_ctrl_c_before_anything_was_tried_prints_what_the_check_knows(command, tmp_path):
    text = HEAD + (
        "for step, batch in enumerate(DataLoader(Slow(0.002, count=400))):\n"
        "    if step == 50: raise KeyboardInterrupt\n"
    )
    done = command("tune", "--backends", "--budget", 60, write(tmp_path, text))
    assert done.status == 130
    assert "interrupted after 50 steps, before anything was tried" in done.err
    assert "loader  DataLoader over Slow, 400 batches an epoch" in done.out


LIGHTNING = (
    HEAD
    + """
import lightning, logging, warnings
warnings.simplefilter("ignore")

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = Model()
    def training_step(self, batch, index):
        return self.model(batch[0]).sum()
    def validation_step(self, batch, index):
        self.model(batch[0])
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)

class Goodbye(lightning.Callback):
    def on_exception(self, trainer, module, exception):
        print("torn down after", type(exception).__name__)

trainer = lightning.Trainer(
    max_epochs=200, logger=False, enable_checkpointing=False, accelerator="cpu",
    enable_progress_bar=False, enable_model_summary=False, callbacks=[Goodbye()],
)
trainer.fit(Module(), DataLoader(Slow(0.004, 160), batch_size=2), DataLoader(Slow(0, 8)))
"""
)


@pytest.mark.measures
def test_a_lightning_script(tmp_path):
    done = warm.run(["-m", "dataloaders", "check", "--budget", "4", write(tmp_path, LIGHTNING)])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "torn down after StopScript" in done.stdout
    assert "measured in loader 2: DataLoader of Slow, 80 batches of 2" in done.stdout


# run --------------------------------------------------------------------------------------------

PRINTS = HEAD + (
    "torch.manual_seed(5)\n"
    "loader = DataLoader(TensorDataset(torch.arange(12)), batch_size=3, shuffle=True)\n"
    "for epoch in range(2):\n    print([x.tolist() for (x,) in loader])\n"
    "sys.exit(4)\n"
)


def test_run_gives_a_torch_script_the_backend(command, tmp_path):
    script = write(tmp_path, PRINTS)
    plain = warm.run([script])
    stock = command("run", "--backend", "stock", "--explain", script)
    assert (stock.status, stock.out) == (plain.returncode, plain.stdout)
    assert stock.err.count("backend 'stock'") == 1  # one plan for one loader, not one an epoch
    synthetic = command("run", "--backend", "synthetic", script)
    assert synthetic.status == 4
    assert len(json.loads(synthetic.out.splitlines()[0])) == 4
    assert synthetic.out != plain.stdout


def test_run_leaves_a_subclass_its_own_seed_and_device(command, tmp_path):
    text = PRINTS.replace(
        "loader = DataLoader(",
        "class Mine(DataLoader):\n"
        "    def __init__(self, *args, **options):\n"
        "        super().__init__(*args, **options)\n"
        "        self.seed, self.device, self.backend = 'no number', 'no device', 'no backend'\n"
        "loader = Mine(",
    )
    script = write(tmp_path, text)
    plain = warm.run([script])
    assert plain.stdout.count("[") == 2 * 5
    done = command("run", "--backend", "prefetch", script)
    assert (done.status, done.out) == (plain.returncode, plain.stdout)


def test_a_loader_that_a_backend_cannot_serve_stays_stock_with_one_warning(command, tmp_path):
    text = HEAD + (
        "from torch.utils.data import IterableDataset\n"
        "class Stream(IterableDataset):\n"
        "    def __iter__(self): return iter(range(3))\n"
        "loader = DataLoader(Stream())\n"
        "for epoch in range(2): print([x.item() for x in loader])\n"
    )
    # A process of its own: here every warning is an error.
    done = warm.run(["-m", "dataloaders", "run", "--backend", "synthetic", write(tmp_path, text)])
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[0, 1, 2]\n[0, 1, 2]\n"
    assert done.stderr.count("stays stock") == 1


# tune and backends ------------------------------------------------------------------------------


@pytest.mark.measures
def test_tune_takes_the_rate_from_the_scripts_own_loop(command, tmp_path):
    result = tmp_path / "tuning.json"
    # Enough samples that starting workers pays within an epoch.
    # With one thread for the step, tune() has no fewer to try: only workers are chosen.
    text = WAITS_FOR_INPUT.replace("Slow(0.004)", "Slow(0.004, count=5000)")
    script = write(tmp_path, text.replace("def main():", "torch.set_num_threads(1)\n\ndef main():"))
    done = command("tune", "--budget", 5, "--json", result, script)
    assert done.status == 0, done.err
    tuning = json.loads(result.read_text())
    assert tuning["choice"]["num_workers"] > 0  # 8 ms of waiting a batch, a step of well below 1
    assert f"DataLoader(..., num_workers={tuning['choice']['num_workers']}" in done.out
    assert 'num_workers="auto"' in done.out
    assert "note: tuned loader 2" in done.out
    assert any((tmp_path / "cache").rglob("*.json"))


IN_A_DATABASE = HEAD + (
    "import sqlite3\n"
    "base = sqlite3.connect(':memory:')\n"
    "class Rows(Slow):\n"
    "    def __getitem__(self, index):\n"
    "        time.sleep(self.seconds)\n"
    "        return torch.tensor(base.execute('select ?', (float(index),)).fetchone())\n"
    "model = torch.nn.Linear(1, 1)\n"
    "for x in DataLoader(Rows(0.001), 4):\n"
    "    time.sleep(0.02)\n"
    "    model(x).sum().backward()\n"
)


@pytest.mark.nightly
def test_a_dataset_that_is_bound_to_the_scripts_thread_is_tuned(command, tmp_path):
    done = command("tune", "--budget", 1, write(tmp_path, IN_A_DATABASE))
    assert done.status == 0, done.err
    assert "use num_workers=" in done.out
    assert "known by then" not in done.out


@pytest.mark.parametrize("ending", ["break", "raise ValueError('too hot')"])
@pytest.mark.nightly
def test_a_loop_that_ends_before_tuning_does_is_told(ending, command, tmp_path):
    text = HEAD + (
        "import multiprocessing\n"
        "for batch in DataLoader(Slow(0.005), 4):\n"
        f"    if multiprocessing.active_children(): {ending}\n"
    )
    done = command("tune", "--budget", 60, write(tmp_path, text))
    assert done.status == (1 if "raise" in ending else 0)
    assert "note: the script's loop ended after" in done.out
    assert "this is what was known by then" in done.out
    assert not multiprocessing.active_children()


@pytest.mark.nightly
def test_a_thread_of_the_scripts_that_trains_on_is_left_alone(tmp_path):
    text = HEAD + (
        "import threading\n"
        "asked, ended = threading.Event(), threading.Event()\n"
        "class Stuck(Slow):\n"
        "    def __getitem__(self, index):\n"
        "        if index == 20:\n"
        "            asked.set()\n"
        "            ended.wait()\n"
        "        return super().__getitem__(index)\n"
        "def train():\n"
        "    for batch in DataLoader(Stuck(0), 4): pass\n"
        "threading.Thread(target=train, daemon=True).start()\n"
        "asked.wait()\n"
    )
    # A process of its own, with which the thread ends.
    done = warm.run(["-m", "dataloaders", "tune", "--budget", 60, write(tmp_path, text)])
    assert done.returncode == 0, done.stderr
    assert "note: the script's loop ended after" in done.stdout


@pytest.mark.nightly
def test_ctrl_c_in_tune_prints_the_trials_made_by_then(tmp_path):
    # A sample that a worker loads: the trial of one process, the first one, is over by then.
    text = WAITS_FOR_INPUT.replace("Slow(0.004)", "Slow(0.004, count=5000)").replace(
        "        time.sleep(self.seconds)\n",
        "        time.sleep(self.seconds)\n"
        "        if torch.utils.data.get_worker_info(): os.write(1, b'a worker loads\\n')\n",
    )
    result = tmp_path / "tuning.json"
    process = subprocess.Popen(
        [sys.executable, "-m", "dataloaders", "tune", "--budget", "60", "--json", str(result),
         str(write(tmp_path, text))],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "DATALOADERS_CACHE": str(tmp_path / "cache")},
    )  # fmt: skip
    first = process.stdout.readline()
    assert first == "a worker loads\n", process.communicate(timeout=60)
    workers = [child.pid for child in psutil.Process(process.pid).children()]
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers too
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert workers
    assert wait_until_gone(workers) == []
    tuning = json.loads(result.read_text())
    assert tuning["trials"][0]["settings"]["num_workers"] == 0
    assert f"use num_workers={tuning['choice']['num_workers']}" in out
    assert "one process: what a batch costs" in out
    assert "note: tuned loader 2" in out
    # What an interrupted run knows is printed, and not kept for "auto".
    assert tuning["remembered"] is None
    assert not list((tmp_path / "cache").rglob("*.json"))


def test_backends_are_listed_with_what_they_lack(command, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.chdir(tmp_path)
    info = tmp_path / "third-1.0.dist-info"
    info.mkdir()
    write(info, "Metadata-Version: 2.1\nName: third\nVersion: 1.0\n", "METADATA")
    write(info, "[dataloaders.backends]\nodd = no_such_module:Odd\n", "entry_points.txt")
    monkeypatch.syspath_prepend(str(tmp_path))
    write(tmp_path, "", "backends.py")
    done = command("backends")
    assert done.status == 0
    rows = {line.split()[0]: line for line in done.out.splitlines() if line}
    for name in ("stock", "synthetic", "prefetch", "h5", "dali"):
        assert rows[name].rstrip().endswith("yes")
    assert "from the package third" in rows["odd"]
    assert "no_such_module" in done.out
    assert "CUDA: " in done.out
    assert f"note: {tmp_path / 'backends.py'}" in done.out


# the command line itself ------------------------------------------------------------------------


def test_help_teaches(command):
    for words in ([], ["check"], ["tune"], ["run"], ["backends"], ["demo"]):
        done = command(*words, "--help")
        assert done.status == 0
        assert done.out.startswith(f"usage: dataloaders {' '.join(words)}".rstrip())
        if words == ["check"]:
            assert "3  nothing could be measured" in done.out
            assert "dataloaders check -m mypackage.train -- --config small.yaml" in done.out
    done = command()
    assert done.status == 2
    assert "dataloaders check train.py" in done.out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["check"], "no script was given"),
        (["check", "-m"], "no script was given"),
        (["check", "nowhere.py"], "'nowhere.py' does not exist"),
        (["check", "--budget", "0", "x.py"], "must be a positive number of seconds"),
        (["check", "--loader", "0", "x.py"], "loaders are numbered from 1"),
        (["check", "--json", "/no/such/folder/r.json", "x.py"], "does not exist; make it first"),
        (["check", "--fail-if", "slow", "x.py"], "the verdicts are input-bound, transfer-bound"),
        (["check", "--against", __file__, __file__], "test_cli.py: no report of a check"),
        (["check", "-m", "torch.distributed.run", "x.py"], "torchrun ... -m dataloaders check "),
        (["check", "bin/torchrun", "x.py"], "torchrun ... -m dataloaders check train.py"),
        (["run", "x.py"], "--backend"),
        (["run", "--backend", "nonsense", __file__], "the names are: stock, prefetch"),
        (["fly"], "invalid choice"),
    ],
)
def test_wrong_command_lines_are_told_apart(words, says, command):
    done = command(*words)
    assert done.status == 2
    assert says in done.err
    assert "trains its model" not in done.err


def test_tune_and_probe_measure_no_ranks(command, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for words in (["tune"], ["probe"]):
        done = command(*words, __file__)
        assert done.status == 2
        assert "measures one process, and WORLD_SIZE says that there are several" in done.err


@pytest.mark.nightly  # it imports all of the command, for seconds
def test_a_reader_that_has_read_enough_is_no_error():
    listing = f"{sys.executable} -m dataloaders backends"
    words = ["bash", "-c", f"{listing} | true; echo ${{PIPESTATUS[0]}}"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("141\n", "")
