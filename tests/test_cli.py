"""The ``dataloaders`` command on real scripts: verdicts, endings, messages and exit statuses."""

import json
import multiprocessing
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dataloaders
from helpers import warm

HEAD = """
import argparse, multiprocessing, os, sys, threading, time, torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

class Slow(Dataset):
    def __init__(self, seconds, count=64):
        self.seconds, self.count = seconds, count
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        time.sleep(self.seconds)
        return torch.full((4,), float(index)), index

model = torch.nn.Linear(4, 2)
"""
OPTIMIZER = "optimizer = torch.optim.SGD(model.parameters(), 0.01)\n"

WAITS_FOR_INPUT = """
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=1)

def main():
    args = parser.parse_args()
    train = DataLoader(Slow(0.004), batch_size=2, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with torch.no_grad():
        for x, y in DataLoader(Slow(0), batch_size=8):
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


def write(text, head=HEAD, name="train.py"):
    Path(name).write_text(head + text)
    return name


@pytest.mark.measures
def test_an_unmodified_script_gets_its_verdict(command):
    options = ("--budget", 3, "--json", "report.json", "--html", "report.html", "--try")
    done = command("check", *options, write(WAITS_FOR_INPUT), "--", "--epochs", 1)
    report = json.loads(Path("report.json").read_text())
    assert report["verdict"] == "input-bound", done.out
    assert report["speedup_bound"]["low"] > 1.5
    assert done.out.splitlines()[-1].startswith("   DataLoader(..., ")
    for text in ("INPUT-BOUND", "what if", "the one change to make ("):
        assert text in done.out
    assert "trains its model" in done.err.splitlines()[0]
    assert "measured in loader 2: DataLoader of Slow, 32 batches of 2, num_workers=0" in done.out
    assert "the script was ended after" in done.out
    assert "trained" not in done.out
    assert "<html" in Path("report.html").read_text()


def test_a_report_is_written_in_every_form_and_compared_with_an_earlier_one(command, tmp_path):
    script = write("for batch in DataLoader(Slow(0.001)): pass\n")
    forms = ("--json", "report.json", "--markdown", "-", "--no-predict", "--quiet")
    done = command("check", "--budget", 0.5, *forms, script)
    assert done.out.startswith("### ")
    assert "measured in loader 1" in done.out
    assert json.loads(Path("report.json").read_text())["candidates"] == []
    forms = [f"--{form}=report.{form}" for form in ("html", "markdown", "trace")]
    done = command("check", "--budget", 0.5, "--against", "report.json", *forms, script)
    assert "COMPARED WITH BEFORE: " in done.out
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["report"] * 4 + ["train"]
    assert "Compared with before" in Path("report.html").read_text()
    assert Path("report.markdown").read_text().startswith("### ")
    assert json.loads(Path("report.trace").read_text())["traceEvents"]


EARLY = "for step, batch in enumerate(DataLoader(Slow(0.001))):\n    if step == 5: "
LATE = (
    "for step, batch in enumerate(DataLoader(Slow(0.002))):\n"
    "    if step == 25: raise KeyboardInterrupt\n"
    "    time.sleep(0.002)\n"
)
COUNTED = OPTIMIZER + (
    "loader = DataLoader(Slow(0.001, count=8))\n"
    "schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=len(loader))\n"
    "for x, y in loader:\n"
    "    model(x).sum().backward(); optimizer.step(); schedule.step()\n"
)
ENDINGS = [
    # The script, its status, what the report says, the last words of the script.
    (f"{EARLY}break", 0, "ended by itself after 5 steps, before enough was measured", ""),
    (f"{EARLY}raise ValueError('too hot')", 1, "the script failed after", "ValueError: too hot\n"),
    (f"{EARLY}sys.exit(7)", 7, "", ""),
    (LATE, 130, "interrupted after 2.* steps; this is what was known by then", ""),
    (
        COUNTED,
        0,
        "the check prolonged its epoch by .* a smaller --budget prolongs",
        "Tried to step.*",
    ),
]


@pytest.mark.parametrize(("text", "status", "says", "err"), ENDINGS)
def test_a_script_that_ends_early_keeps_its_ending(text, status, says, err, command):
    done = command("check", "--budget", 60, write(text), status=status)
    assert re.search(says, done.out)
    assert re.search(f"{err}$", done.err)
    assert ("prolonged" in done.out) == ("prolonged" in says)


def test_a_verdict_may_fail_the_command(command):
    verdicts = "input-bound,inconclusive"
    done = command("check", "--fail-if", verdicts, "--quiet", write(f"{EARLY}break"), status=1)
    assert (done.out.count("\n"), done.err) == (1, "")


def test_without_a_loader_to_measure_the_loaders_seen_are_listed(command):
    script = write(
        OPTIMIZER + "with torch.no_grad():\n    for batch in DataLoader(Slow(0)): pass\n"
        "for batch in DataLoader(Slow(0), batch_size=4): pass\n"
        "for batch in DataLoader(Slow(0, 3)): optimizer.step()\n"
        "next(iter(DataLoader(Slow(0))))\n"
    )
    done = command("check", script, status=3)
    assert "no loader was taken over; the script iterated 4 of them" in done.err
    assert "1. DataLoader of Slow, 64 batches of 1, num_workers=0: gradients were off" in done.err
    assert "16 batches of 4, num_workers=0: no optimizer stepped between" in done.err
    assert "--loader N" in done.err
    done = command("check", "--loader", 1, "--budget", 1, script)
    assert "measured in loader 1" in done.out
    done = command("check", write("print('no torch here')", "", "plain.py"), status=3)
    assert "check_bottleneck(loader, step)" in done.err
    done = command("check", write("import no_such_package", "", "plain.py"), status=1)
    assert done.err.endswith("iterated 0 of them\nthe script failed before that\n")


def test_a_hidden_package_is_reported_with_both_paths(command, tmp_path):
    script, mine = write("import dataloaders"), write("", "", "dataloaders.py")
    done = command("check", script, status=2)
    assert str(tmp_path / mine) in done.err
    assert str(Path(dataloaders.__file__).parent) in done.err
    Path(mine).unlink()
    Path("dataloaders").mkdir()
    command("check", script, status=3)  # a folder without Python files hides nothing


PRINTS = (
    "torch.manual_seed(5)\n"
    "loader = DataLoader(TensorDataset(torch.arange(12)), batch_size=3, shuffle=True)\n"
    "for epoch in range(2):\n    print([x.tolist() for (x,) in loader])\n"
    "sys.exit(4)\n"
)


def test_run_gives_a_torch_script_the_backend(command):
    script = write(PRINTS)
    plain = warm.run([script], status=4)
    stock = command("run", "--backend", "stock", "--explain", script, status=4)
    assert stock.out == plain.stdout
    assert stock.err.count("backend 'stock'") == 1  # one plan for one loader, not one an epoch
    synthetic = command("run", "--backend", "synthetic", script, status=4)
    assert len(json.loads(synthetic.out.splitlines()[0])) == 4
    assert synthetic.out != plain.stdout


SPAWNS = """
import sys
import torch.multiprocessing as mp
from torch.utils.data import DataLoader

def work(rank):
    print([int(batch) for batch in DataLoader(range(3), num_workers=1)])

if __name__ == "__main__":
    mp.start_processes(work, nprocs=1, start_method=sys.argv[1])
"""


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.nightly)])
def test_run_reaches_processes_that_the_script_trains_in(method, command):
    options = ("--backend", "prefetch", "--explain")
    done = command("run", *options, write(SPAWNS, ""), "--", method)
    assert done.out == "[0, 1, 2]\n"
    assert done.err.count("backend 'prefetch'") == 1


def test_run_leaves_a_subclass_its_own_seed_and_device(command):
    text = PRINTS.replace(
        "loader = DataLoader(",
        "class Mine(DataLoader):\n"
        "    def __init__(self, *args, **options):\n"
        "        super().__init__(*args, **options)\n"
        "        self.seed, self.device, self.backend = 'no number', 'no device', 'no backend'\n"
        "loader = Mine(",
    )
    plain = warm.run([write(text)], status=4)
    assert plain.stdout.count("[") == 2 * 5
    done = command("run", "--backend", "prefetch", "train.py", status=4)
    assert done.out == plain.stdout


KEPT = """
from torch.utils.data import DataLoader
loader = DataLoader(range(3), num_workers=1, persistent_workers=True)
list(loader)
worker = loader._iterator._workers[0]
list(loader)
loader._iterator._shutdown_workers()
loader._iterator = None
print(worker.is_alive(), [int(batch) for batch in loader])
"""


def test_run_keeps_persistent_workers_where_torch_does(command):
    done = command("run", "--backend", "prefetch", write(KEPT, ""))
    assert done.out == "False [0, 1, 2]\n"


LOOK = """
import json, os, pickle, sys

class Mine:
    def __init__(self, x: int = 3) -> None:
        self.x = x

paths = [os.path.abspath(path) for path in (sys.argv[0], sys.path[0], __file__)]
print(json.dumps([
    paths, sys.argv[1:], __name__, __package__, None if __spec__ is None else __spec__.name,
    sys.modules["__main__"].__dict__ is globals(), str(Mine.__init__.__annotations__["x"]),
    pickle.loads(pickle.dumps(Mine(7))).x,
]))
"""


@pytest.mark.parametrize(
    ("words", "end"),
    [
        ("program.py", "sys.exit()"),
        ("{here}/program.py --", "raise ValueError('bad')"),
        ("-m package.program --", "sys.exit(3)"),
        ("-m package", "sys.exit('no data')"),
    ],
)
def test_a_program_runs_and_ends_as_under_python(words, end, command, tmp_path):
    Path("package").mkdir()
    for file in ("program.py", "package/program.py", "package/__main__.py"):
        write(LOOK + end, "", file)
    words = words.format(here=tmp_path).split()
    ours = command("run", "--backend", "stock", *words, "-x", "1", status=None)
    plain = [sys.executable, *(word for word in words if word != "--"), "-x", "1"]
    theirs = subprocess.run(plain, capture_output=True, text=True)
    assert (ours.status, ours.err) == (theirs.returncode, theirs.stderr)
    assert json.loads(ours.out) == json.loads(theirs.stdout)


@pytest.mark.parametrize(
    "text",
    [
        "raise KeyboardInterrupt",
        # As Lightning does: catches Ctrl-C, tears down, calls sys.exit(1).
        "try:\n raise KeyboardInterrupt\nexcept KeyboardInterrupt:\n raise SystemExit(1)",
    ],
)
def test_an_interrupt_is_no_failure(text, command):
    command("run", "--backend", "stock", write(text, ""), status=130)


@pytest.mark.measures
def test_tune_takes_the_rate_from_the_scripts_own_loop(command, tmp_path):
    # Enough samples that starting workers pays within an epoch.
    # With one thread for the step, tune() has no fewer to try: only workers are chosen.
    text = WAITS_FOR_INPUT.replace("Slow(0.004)", "Slow(0.004, count=5000)")
    script = write(text.replace("def main():", "torch.set_num_threads(1)\n\ndef main():"))
    done = command("tune", "--budget", 5, "--json", "tuning.json", script)
    choice = json.loads(Path("tuning.json").read_text())["choice"]
    assert choice["num_workers"] > 0  # 8 ms of waiting a batch, a step of well below 1
    assert f"DataLoader(..., num_workers={choice['num_workers']}" in done.out
    assert 'num_workers="auto"' in done.out
    assert "note: tuned loader 2" in done.out
    assert any((tmp_path / "cache").rglob("*.json"))


@pytest.mark.nightly
def test_a_loop_that_ends_before_tuning_does(command, tmp_path):
    """With the trial of one process behind it, the first one: a worker loads by then."""
    text = (
        "for batch in DataLoader(Slow(0.005), 4):\n"
        "    if multiprocessing.active_children(): raise KeyboardInterrupt\n"
    )
    done = command("tune", "--budget", 60, "--json", "tuning.json", write(text), status=130)
    assert "interrupted after" in done.out
    assert "this is what was known by then" in done.out
    assert not multiprocessing.active_children()
    tuning = json.loads(Path("tuning.json").read_text())
    assert tuning["trials"][0]["settings"]["num_workers"] == 0
    # What an interrupted run knows is printed, and not kept for "auto".
    assert tuning["remembered"] is None
    assert not list((tmp_path / "cache").rglob("*.json"))


def test_backends_are_listed_with_what_they_lack(command, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    info = tmp_path / "third-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: third\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[dataloaders.backends]\nodd = no_such_module:Odd\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    done = command("backends")
    rows = {line.split()[0]: line for line in done.out.splitlines() if line}
    for name in ("stock", "synthetic", "prefetch", "h5", "dali"):
        assert rows[name].rstrip().endswith("yes")
    assert "from the package third" in rows["odd"]
    assert "no_such_module" in done.out
    assert "CUDA: " in done.out


def test_help(command):
    for words in ([], ["check"], ["tune"], ["run"], ["backends"], ["demo"]):
        done = command(*words, "--help")
        assert done.out.startswith(f"usage: dataloaders {' '.join(words)}".rstrip())
    assert "dataloaders check train.py" in command(status=2).out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("check", "no script was given"),
        ("check nowhere.py", "'nowhere.py' does not exist; give the path of a Python file, or -m"),
        ("check --budget 0 x.py", "must be a positive number of seconds"),
        ("check --loader 0 x.py", "0: must be a whole number, 1 or more"),
        ("check --json . x.py", "is a folder; give the path of a file to write"),
        ("check --json /no/such/folder/r.json x.py", "does not exist; make it first"),
        ("check --fail-if slow x.py", "the verdicts are input-bound, transfer-bound"),
        ("check --against broken.py x.py", "broken.py: no report of a check"),
        ("check -m torch.distributed.run x.py", "torchrun ... -m dataloaders check "),
        ("tune --cache x.h5 broken.py", "--cache is for --backends"),
        ("run --backend nonsense broken.py", "the names are: stock, prefetch"),
        ("run --backend stock broken.py", "does not compile"),
        ("run --backend stock -m no_such.x", "run this from the folder that holds the package"),
    ],
)
def test_each_wrong_command_line_has_its_own_message(words, says, command):
    write("def (", "", "broken.py")
    done = command(*words.split(), status=2)
    assert says in done.err
    assert "trains its model" not in done.err


def test_tune_refuses_several_ranks(command, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = command("tune", __file__, status=2)
    assert "tune measures one process, and WORLD_SIZE says that there are several" in done.err


def test_ctrl_c_while_torch_is_imported_ends_in_silence(tmp_path):
    pressed = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"
    (tmp_path / "torch.py").write_text(pressed)
    words = [sys.executable, "-m", "dataloaders", "backends"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "")
