"""The value "auto", of settings and backends: learned before, or from a rule about the machine."""

import json
import os
import sys
import warnings

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    Dataset,
    SequentialSampler,
    Subset,
    TensorDataset,
)

import dataloaders
from backends.h5 import H5
from backends.prefetch import Prefetch
from backends.stock import Stock
from dataloaders import DataLoader
from dataloaders.errors import BackendWarning, CapacityWarning, OptionError
from dataloaders.machine import resources
from dataloaders.tuning import auto, learned
from helpers import warm
from helpers.datasets import CountingStream

pytestmark = [
    pytest.mark.usefixtures("cache_folder"),
    # As on machines of more cores.
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]
CHOICE = learned.Learned(3, 1, False, batch_bytes=4096)
AUTO = {"num_workers": "auto", "prefetch_factor": "auto", "pin_memory": "auto"}


@pytest.fixture(autouse=True)
def pinning_pays(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


class Files(Dataset):
    loaded = 0

    def __init__(self, size=1000, root="photos", transform=None):
        self.size, self.root, self.transform = size, root, transform

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        Files.loaded += 1
        return torch.zeros(3)


class Hostile:
    def __getattr__(self, name):
        raise RuntimeError(name)

    def __len__(self):
        return 1000


def stack(samples):
    return torch.tensor(samples)


OWN = BatchSampler(SequentialSampler(Files()), 3, False)


def resolved(dataset, **arguments):
    """Return workers, prefetch factor and pinning of a loader whose arguments are "auto"."""
    loader = DataLoader(dataset, **{"batch_size": 4, **AUTO, **arguments})
    return loader.num_workers, loader.prefetch_factor, loader.pin_memory


def key_of(dataset, batch_size=4, sampler=None, collate=None):
    return learned.key_of(dataset, batch_size, sampler, collate)


def learn(dataset, *choice, **more):
    assert learned.remember(key_of(dataset), learned.Learned(*choice, **more)) is not None


def test_attributes_are_plain_and_no_sample_is_loaded(monkeypatch):
    workers, prefetch, pinned = resolved(Files())
    assert (type(workers), prefetch, pinned) == (int, 2, True)
    assert workers > 0
    assert Files.loaded == 0
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert resolved(Files())[2] is False


def test_one_worker_a_core_and_no_more_than_16(monkeypatch):
    monkeypatch.setattr(resources, "available_memory", lambda: 2**40)
    monkeypatch.setattr(resources, "shm_room", lambda path=None: None)
    for cores, workers in ((1, 1), (6, 6), (64, 16)):
        monkeypatch.setattr(resources, "usable_cores", lambda cores=cores: cores)
        assert resolved(Files())[0] == workers
        assert [resolved(Files(size))[0] for size in (0, 4)] == [0, 1]  # no more than batches
        assert resolved(Files(4), batch_size=None)[0] == min(workers, 4)


class Augmented(TensorDataset):
    def __getitem__(self, index):
        return super().__getitem__(index)[0] + torch.rand(1)


HELD, CHANGED = TensorDataset(torch.zeros(99, 3)), Augmented(torch.zeros(4, 3))
RULE = [
    *((one, {}, (0, None)) for one in (HELD, Subset(HELD, range(50)), ConcatDataset([HELD, HELD]))),
    (HELD, {"persistent_workers": True}, (1, 2)),  # which needs a worker, as the next two do
    (HELD, {"timeout": 5.0}, (1, 2)),
    (HELD, {"prefetch_factor": 3}, (1, 3)),
    (CountingStream(), {}, (1, 2)),  # more may repeat samples
    *((one, {}, (1, 2)) for one in (CHANGED, Subset(CHANGED, range(4)))),  # changed when read
    (Files(), {"num_workers": 0}, (0, None)),
    (Files(), {"num_workers": 1}, (1, 2)),
    (Files(), {"num_workers": 1, "prefetch_factor": 5}, (1, 5)),
]


@pytest.mark.parametrize(("dataset", "given", "expected"), RULE)
def test_the_rule_by_dataset_and_given_settings(dataset, given, expected):
    assert resolved(dataset, **given) == (*expected, expected[0] > 0)


def test_unusual_datasets_are_accepted_and_invalid_values_are_torchs_errors():
    for size in (2**62, 1.5, None):
        assert resolved(Files(size), sampler=range(9))[0] >= 0
    assert resolved(Hostile(), sampler=range(9))[0] >= 1
    assert "Hostile" in key_of(Hostile()).dataset
    holds_itself = Files()
    vars(holds_itself).update(dataset=holds_itself, datasets=[holds_itself] * 9)
    # Eight of a list and four levels down are enough.
    assert key_of(holds_itself).dataset.count("Files") == sum(9**depth for depth in range(5))
    for wrong in (-1, "many"):
        with pytest.raises((ValueError, TypeError)):
            resolved(Files(), num_workers=wrong)


def test_a_learned_choice_is_used_for_its_batch_size_and_bounded_by_the_cores(monkeypatch):
    learn(Files(), 1, 4, True)
    assert resolved(Files()) == resolved(Files(), backend="auto") == (1, 4, True)
    assert resolved(Files(), batch_size=8)[1] == 2
    learn(Files(), 0, None, False)
    assert resolved(Files())[:2] == (0, None)
    assert resolved(Files(), persistent_workers=True)[:2] == (1, 2)
    monkeypatch.setattr(resources, "available_memory", lambda: 2**50)
    for cores, most in ((1, 8), (6, 24)):
        monkeypatch.setattr(resources, "usable_cores", lambda cores=cores: cores)
        learn(Files(), 1000, 2, False, batch_bytes=1)
        assert resolved(Files())[0] == most


def test_fewer_workers_where_memory_or_shared_memory_is_short(monkeypatch):
    each = 128 * 2**20 + resources.python_heap_bytes()
    monkeypatch.setattr(resources, "python_heap_bytes", lambda: each - 128 * 2**20)
    monkeypatch.setattr(resources, "available_memory", lambda: 5 * each)  # half is for workers
    learn(Files(), 5, 2, False)
    assert resolved(Files())[0] == 2
    monkeypatch.undo()
    monkeypatch.setattr(resources, "shm_room", lambda path=None: 500)
    learn(Files(), 5, 2, False, batch_bytes=100)
    with pytest.warns(CapacityWarning, match=r"num_workers=3, prefetch_factor=1: 5 workers"):
        assert resolved(Files())[:2] == (3, 1)
    with pytest.warns(CapacityWarning, match="--shm-size"):
        assert [resolved(Files(), prefetch_factor=depth)[0] for depth in (1, 2)] == [3, 1]
    with pytest.warns(CapacityWarning, match=r"num_workers=5, prefetch_factor=1"):
        assert resolved(Files(), num_workers=5)[:2] == (5, 1)
    learn(Files(), 5, 2, False, batch_bytes=1000)  # not one of them fits
    with pytest.warns(CapacityWarning) as caught:
        loader = DataLoader(Files(), 4, **AUTO)
    assert (loader.num_workers, loader.prefetch_factor) == (0, None)
    assert [warning.filename for warning in caught] == [__file__]  # the line that asked
    # Without a known batch, three batches fit: one in a worker's queue, and two of the step.
    monkeypatch.setattr(resources, "shm_room", lambda path=None: 8 * 2**20)
    monkeypatch.setattr(resources, "usable_cores", lambda: 4)
    rule = '"auto" chose num_workers=1, prefetch_factor=1: .* 8.0 MiB are free .* is a guess'
    learn(Files(root="learned"), 4, 2, False)
    for root in ("others", "learned"):
        with pytest.warns(CapacityWarning, match=rule):
            assert resolved(Files(root=root))[:2] == (1, 1)


WRONG = {
    "surplus": (1,), "num_workers": (-1, "4", True, 0), "prefetch_factor": (None, 0, 1.5),
    "pin_memory": (1,), "batch_bytes": (-5,), "gain": ("much",),
}  # fmt: skip


def test_a_damaged_file_counts_as_nothing_learned_and_is_replaced(cache_folder):
    key = key_of(Files())
    assert learned.recall(key) is None
    path = learned.remember(key, CHOICE)
    entry = json.loads(path.read_text())
    others = [{"version": 2}, {"key": {}}, {"learned": {}}]
    for name, values in WRONG.items():
        others += [{"learned": {**entry["learned"], name: value}} for value in values]
    most = 64 << 10  # bytes that are read
    path.write_text(path.read_text().ljust(most))
    assert learned.recall(key) == CHOICE
    large = path.read_text() + " "
    texts = ["", "{", "[" * 100_000, "null", "x" * 200_000, "\udcff", large]
    for text in [*texts, *(json.dumps(entry | other) for other in others)]:
        path.write_bytes(text.encode(errors="surrogateescape"))
        assert learned.recall(key) is None, text[:80]
        assert learned.remember(key, CHOICE) == path
        assert learned.recall(key) == CHOICE
    assert list((cache_folder / "tuned").iterdir()) == [path]


def test_the_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("DATALOADERS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert learned.cache_folder() == tmp_path / "xdg" / "gpu-dataloaders"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert learned.cache_folder() == tmp_path / ".cache" / "gpu-dataloaders"


def test_keys_are_stable_contain_no_path_and_differ_where_loaders_do(monkeypatch):
    one = key_of(Files(root="some/where", transform=object()))
    assert one == key_of(Files(root=os.path.abspath("some/where"), transform=object()))
    keys = [
        key_of(Files()),
        key_of(Files(root="elsewhere")),
        key_of(Files(11)),
        key_of(Files(transform=("resized", 32))),
        key_of(Files(), batch_size=8),
        key_of(Files(), batch_size=None),
        key_of(Files(), batch_size=None, sampler=OWN),
        *(key_of(Files(), collate=function) for function in (stack, key_of, CHOICE)),
        key_of(list(range(1000))),
        *(key_of(Subset(Files(transform=("resized", n)), range(1000))) for n in (32, 224)),
    ]
    for script in ("some/train.py", "some/other.py"):
        monkeypatch.setattr(sys, "argv", [script, "--fast"])
        keys.append(learned.key_of(Files(), 4, None, None, "auto"))
        assert learned.key_of(Files(), 4, None, None, "prefetch") == keys[0]
    for name, value in (("total_memory", 3 << 40), ("usable_cores", 99), ("cpu_model", "Z80")):
        monkeypatch.setattr(resources, name, lambda value=value: value)
        keys.append(key_of(Files()))
    monkeypatch.setattr(learned, "gpu_name", lambda: "T4")
    keys.append(key_of(Files()))
    assert keys[-1].machine == "99 cores, Z80, 3072 GiB, T4"
    assert "some" not in str([one, *keys])
    assert len(set(map(str, keys))) == len(keys)


@pytest.mark.parametrize(
    "options",
    [{"shuffle": True}, {"batch_size": None}, {"collate_fn": stack}, {"batch_sampler": OWN}],
)
def test_a_choice_is_found_by_loaders_with_the_same_arguments(options):
    loader = torch.utils.data.DataLoader(Files(), **options)
    key = learned.key_of_loader(loader, "stock")
    assert DataLoader(Files(), num_workers="auto", **options).num_workers > 0
    assert learned.remember(key, learned.Learned(0, None, False)) is not None
    assert DataLoader(Files(), num_workers="auto", **options).num_workers == 0


# Backends: `dataloaders tune --backends SCRIPT`, and backend="auto"


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
    options = "dict(num_workers='auto', backend='auto')"
    return warm.run([script, transform, options, "explain"]).stdout


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
    assert 'backend="auto" is stock: learned on 2' in explained(script)


NUMBERS = [torch.tensor([float(index)]) for index in range(100)]


def learn_backend(loader, backend):
    found = learned.Learned(1, 3, False, backend=backend, gain=1.5, day="2026-11-23")
    assert learned.remember(learned.key_of_loader(loader, "auto"), found) is not None


def test_backend_auto_uses_what_was_learned_and_explain_says_since_when(monkeypatch):
    loader = DataLoader(NUMBERS, 4, backend="auto")
    expected = [batch.tolist() for batch in DataLoader(NUMBERS, 4)]
    assert [batch.tolist() for batch in loader] == expected
    assert loader.explain().backend == "stock"
    learn_backend(loader, auto.entry_of(Prefetch(inner=Stock(), ahead=3)))
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
    learn_backend(loader, auto.entry_of(H5(tmp_path / "gone.h5", build="never")))
    with pytest.warns(BackendWarning, match="h5 cannot serve a loader any more: there is no cache"):
        assert len(list(loader)) == 25
    assert any("cannot serve a loader any more" in one for one in loader.explain().notes)
    learn_backend(loader, {"name": "elsewhere", "options": {}})
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
