"""``dataloaders tune --backends SCRIPT``, and ``backend="auto"``, which uses what it learned."""

import json
import sys
import warnings

import pytest
import torch

import dataloaders
from backends.h5 import H5
from backends.prefetch import Prefetch
from backends.stock import Stock
from dataloaders import DataLoader
from dataloaders.errors import BackendWarning, OptionError
from dataloaders.tuning import auto, learned
from helpers import warm

pytestmark = pytest.mark.usefixtures("cache_folder")

SCRIPT = """
import os, sys, time, torch
from dataloaders import DataLoader
from torch.utils.data import Dataset

class Samples(Dataset):
    def __init__(self, transform):
        self.transform = transform
    def __len__(self):
        return 4000
    def __getitem__(self, index):
        return self.transform(torch.full((4,), float(index)))

def sleeps(sample):
    time.sleep(0.004)
    return sample

def computes(sample):
    return sample + 1

loader = DataLoader(Samples(globals()[sys.argv[1]]), batch_size=4, **eval(sys.argv[2]))
if "explain" in sys.argv:
    print(loader.num_workers, type(loader.backend).__name__)
    print(loader.explain())
    sys.exit()
torch.set_num_threads(1)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
for epoch in range(100):
    for batch in loader:
        optimizer.zero_grad()
        model(batch).sum().backward()
        time.sleep(0.001)
        optimizer.step()
"""
AUTO = "dict(num_workers='auto', backend='auto')"


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def tuned(script, *options):
    """By name, the candidates of ``tune --backends`` that were tried, and what it printed."""
    result = script.parent / "tuning.json"
    command = ["-m", "dataloaders", "tune", "--backends", "--json", result, *options]
    done = warm.run([*command, script, "--", "sleeps", "{}"], timeout=120)
    found = json.loads(result.read_text())["candidates"]
    return {one["name"]: one for one in found if one["measured"]}, done.stdout


def explained(script, transform="sleeps"):
    done = warm.run([script, transform, AUTO, "explain"])
    return done.stdout


@pytest.mark.measures
def test_the_best_way_is_tried_printed_remembered_and_taken(script, tmp_path):
    """A cache only where its path is given."""
    before = explained(script)
    assert 'backend="auto" is stock: nothing was learned for this dataset' in before
    tried, out = tuned(script, "--budget", 20)
    assert "the best way for this script is workers; it is remembered:" in out
    assert "h5 is left out: give --cache FILE to use a cache" in out
    assert 'backend="auto")' in out
    assert tried["workers"]["measured"]["estimate"] > 1.2
    after = explained(script)
    assert after.startswith(f"{tried['workers']['options']['num_workers']} str\n")
    assert 'backend="auto" is stock: learned on 2' in after
    assert "nothing was learned" in explained(script, transform="computes")
    path = tmp_path / "train.h5"
    cached, out = tuned(script, "--budget", 30, "--cache", path)
    assert path.exists()
    assert "workers" not in cached  # which the prediction rules out
    assert cached["h5"]["measured"]["estimate"] > tried["workers"]["measured"]["estimate"]
    assert "the best way for this script is h5" in out
    assert 'backend="auto" is h5: learned on 2' in explained(script)
    path.unlink()
    assert "backend 'h5'" in explained(script)  # built again at the first iter()


@pytest.mark.nightly
def test_the_best_way_is_remembered_for_the_script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.replace("time.sleep(0.004)", "").replace("sleep(0.001)", "sleep(0.02)"))
    _, out = tuned(path, "--budget", 3)
    assert "the best way for this script is the loader as it is; it is remembered:" in out
    assert 'backend="auto" is stock: learned on 2' in explained(path)


@pytest.mark.nightly
def test_workers_that_may_repeat_samples_are_not_tried(script):
    made = "return self.transform(torch.full((4,), float(index)))"
    text = SCRIPT.replace("import Dataset", "import IterableDataset as Dataset")
    text = text.replace("__getitem__(self, index)", "__iter__(self)")
    text = text.replace(made, f"{made.replace('return', 'yield from (')} for index in range(4000))")
    script.write_text(text)
    tried, out = tuned(script, "--budget", 6)
    assert "workers" not in tried
    assert "if it does not divide its samples among workers" in out
    assert "the best way for this script is the loader as it is; it is remembered:" in out


NUMBERS = [torch.tensor([float(index)]) for index in range(100)]


def learn(loader, backend):
    found = learned.Learned(1, 3, False, backend=backend, gain=1.5, day="2026-11-23")
    assert learned.remember(learned.key_of_loader(loader, "auto"), found) is not None


def test_backend_auto_uses_what_was_learned_and_explain_says_since_when(monkeypatch):
    loader = DataLoader(NUMBERS, 4, backend="auto")
    expected = [batch.tolist() for batch in DataLoader(NUMBERS, 4)]
    assert [batch.tolist() for batch in loader] == expected
    assert loader.explain().backend == "stock"
    learn(loader, auto.entry_of(Prefetch(inner=Stock(), ahead=3)))
    loader = DataLoader(NUMBERS, 4, num_workers="auto", prefetch_factor="auto", backend="auto")
    assert (loader.num_workers, loader.prefetch_factor, loader.backend) == (1, 3, "auto")
    plan = loader.explain()
    assert plan.backend == "prefetch"
    note = 'backend="auto" is prefetch: learned on 2026-11-23 with num_workers=1, 1.50 x the loader'
    assert any(one.startswith(note) for one in plan.notes)
    assert [batch.tolist() for batch in loader] == expected
    monkeypatch.setattr(sys, "argv", ["another.py"])  # another script, another step
    assert DataLoader(NUMBERS, 4, backend="auto").explain().backend == "stock"


def test_backend_auto_is_stock_where_the_learned_one_cannot_serve(tmp_path):
    loader = DataLoader(NUMBERS, 4, backend="auto")
    learn(loader, auto.entry_of(H5(tmp_path / "gone.h5", build="never")))
    with pytest.warns(BackendWarning, match="h5 cannot serve a loader any more: there is no cache"):
        assert len(list(loader)) == 25
    assert any("cannot serve a loader any more" in one for one in loader.explain().notes)
    learn(loader, {"name": "elsewhere", "options": {}})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(list(DataLoader(NUMBERS, 4, backend="auto"))) == 25
    assert "cannot be made: backend='elsewhere'" in str(loader.explain())


def test_wrap_and_run_take_backend_auto(script, monkeypatch):
    loader = dataloaders.wrap(torch.utils.data.DataLoader(NUMBERS, 4), backend="auto")
    assert len(list(loader)) == 25
    monkeypatch.setenv("DATALOADERS_BACKEND", "auto")
    assert 'backend="auto" is stock' in str(DataLoader(NUMBERS).explain())
    command = ["-m", "dataloaders", "run", "--backend", "auto", script, "sleeps", "{}", "explain"]
    assert 'backend="auto" is stock' in warm.run(command).stdout
    with pytest.raises(OptionError, match="must be a name"):
        DataLoader(NUMBERS, backend=3)
