"""tune() of a loader with backend="dali", for real: what is tried, kept, and taken by "auto"."""

import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torchvision import transforms

from dataloaders import DataLoader, tune
from dataloaders.machine import resources
from dataloaders.tuning import learned
from helpers.photos import image_folder

pytest.importorskip("nvidia.dali", reason="DALI is not installed")

from backends.dali import Dali
from backends.dali.numbers import candidates, numbers_of

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DATALOADERS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


def chain():
    return transforms.Compose([transforms.RandomCrop(8), transforms.ToTensor()])


def loader_of(root, backend="dali", **options):
    return DataLoader(image_folder(root, transform=chain()), 2, backend=backend, **options)


def learn(loader, options):
    key = learned.key_of(
        loader.dataset, loader.batch_size, loader.batch_sampler, loader.collate_fn, "dali"
    )
    assert learned.remember(key, learned.Learned(0, None, False, 9.0, options=options)) is not None


def notes(loader):
    return " ".join(loader.explain().notes)


@pytest.mark.nightly
def test_its_threads_and_depth_are_tried_and_kept(tmp_path):
    loader = loader_of(tmp_path, shuffle=True)
    before = notes(loader)
    tuning = tune(loader, lambda batch: None, budget_s=2.0)
    rule = min(32, resources.usable_cores())
    assert tuning.given.numbers == {"threads": rule, "depth": 3}
    assert tuning.trials[0].settings == tuning.given
    assert tuning.needed_samples_per_second is not None
    assert all(type(trial.settings.backend) is Dali for trial in tuning.trials)
    chosen = tuning.choice.numbers
    assert f"threads={rule}, depth=3: by a rule" in before
    said = f"threads={chosen['threads']}, depth={chosen['depth']}: as tune() learned"
    assert said in notes(loader)
    assert said in notes(loader_of(tmp_path))
    assert len(list(tuning.apply(loader))) == len(list(loader)) == len(loader)


def test_a_loader_that_was_tuned_ends_with_its_last_reference(tmp_path):
    loader = loader_of(tmp_path)
    tune(loader, budget_s=0.5)
    assert len(list(loader)) == len(loader)
    gone = weakref.ref(loader)
    del loader
    assert gone() is None  # and with it its session, before the collector comes


def test_auto_takes_what_was_learned_and_numbers_stay_as_given(tmp_path):
    loader = loader_of(tmp_path)
    first = list(loader)
    learn(loader, {"threads": 3, "depth": 5})
    assert numbers_of(Dali(), loader) == (3, 5, "tune")
    assert numbers_of(Dali(threads=2), loader) == (2, 5, "tune")
    assert numbers_of(Dali(threads=2, depth=4), loader) == (2, 4, "user")
    assert len(list(loader)) == len(first)  # with the graph made anew


@pytest.mark.parametrize("options", [None, {}, {"threads": 0, "depth": 0}, {"other": 7}])
def test_what_was_learned_of_something_else_is_the_rule(tmp_path, options):
    loader = loader_of(tmp_path)
    learn(loader, options)
    assert numbers_of(Dali(), loader)[:2] == (min(32, resources.usable_cores()), 3)


def test_ranks_share_the_cores(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(resources.usable_cores()))
    loader = loader_of(tmp_path)
    numbers = numbers_of(Dali(), loader)
    assert numbers == (1, 3, "rule")
    assert candidates(numbers, loader)["threads"] == (1, 2)


def test_a_gpu_has_at_most_8_threads(tmp_path, monkeypatch):
    """Each holds memory of the device for each graph."""
    loader = loader_of(tmp_path)
    monkeypatch.setattr("backends.dali.numbers.usable_cores", lambda: 96)
    assert max(candidates(numbers_of(Dali(), loader), loader)["threads"]) == 32
    learn(loader, {"threads": 24, "depth": 5})
    monkeypatch.setattr("backends.dali.numbers.device_of", lambda name: torch.device("cuda:0"))
    numbers = numbers_of(Dali(), loader)
    assert numbers == (8, 5, "tune")
    assert max(candidates(numbers, loader)["threads"]) == 8
    assert numbers_of(Dali(threads=16), loader).threads == 16  # as the user says


SCRIPT = """
import sys
import torch
from torchvision import datasets, transforms
chain = transforms.Compose([transforms.RandomCrop(8), transforms.ToTensor()])
loader = torch.utils.data.DataLoader(datasets.ImageFolder(sys.argv[1], chain), 2)
model = torch.nn.Linear(8, 2)
for epoch in range(200):
    for images, targets in loader:
        model(images).sum().backward()
"""


@pytest.mark.nightly
def test_a_script_of_torchs_own_loader_is_tuned_for_the_backend(tmp_path):
    command = ["tune", "--budget", "1", "--backend", "dali"]
    folder = image_folder(tmp_path).root
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    run = subprocess.run(
        [sys.executable, "-m", "dataloaders", *command, str(script), "--", folder],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert run.returncode == 0, run.stderr
    assert "backend=Dali(threads=" in run.stdout
    assert (
        "with the backend's options left to it" in run.stdout or "nothing to change" in run.stdout
    )
