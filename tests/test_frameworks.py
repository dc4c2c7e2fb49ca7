"""Lightning, Fabric, Accelerate and torch.distributed take the loader as torch's own."""

import copy

import pytest
import torch
import torch.utils.data
from torch.utils.data import TensorDataset

from backends.stock import Stock
from dataloaders import DataLoader, wrap
from helpers.compare import assert_same, seed_everything
from helpers.datasets import CountingStream, MapDataset, pair_sample

TorchLoader = torch.utils.data.DataLoader
DATASET = TensorDataset(torch.arange(12.0).reshape(12, 1), torch.arange(12.0))


# They warn of workers, of loggers and of each other.
pytestmark = pytest.mark.filterwarnings("ignore")


def loss_of(model, inputs, targets):
    return torch.nn.functional.mse_loss(model(inputs)[:, 0], targets)


# The batches that training under a framework sees


def in_lightning(tmp_path):
    """A trainer, and a model that keeps the targets that it is trained on."""
    lightning = pytest.importorskip("lightning")

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(1, 1)
            self.seen = []

        def training_step(self, batch, index):
            self.seen.append(batch[1].clone())
            return loss_of(self.linear, *batch)

        def predict_step(self, batch, index):
            return batch[1]

        validation_step = predict_step

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-4)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    place = {"accelerator": "cpu", "default_root_dir": tmp_path}
    return lightning.Trainer(max_epochs=2, enable_model_summary=False, **place, **quiet), Model()


def by_lightning(kind, tmp_path):
    trainer, model = in_lightning(tmp_path)
    trainer.fit(model, kind(DATASET, batch_size=5, shuffle=True), kind(DATASET, batch_size=6))
    return model.seen


def by_fabric(kind, tmp_path):
    fabric = pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    loader = fabric.setup_dataloaders(kind(DATASET, batch_size=5, shuffle=True))
    return [*loader, *loader]


def by_accelerate(kind, tmp_path):
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    model, seen = torch.nn.Linear(1, 1), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    loader = kind(DATASET, batch_size=5, shuffle=True, num_workers=1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for inputs, targets in [*loader, *loader]:
        accelerator.backward(loss_of(model, inputs, targets))
        optimizer.step()
        seen.append(targets.clone())
    return seen


@pytest.mark.parametrize("train", [by_lightning, by_fabric, by_accelerate])
def test_training_sees_the_batches_that_torchs_loader_gives(train, tmp_path):
    seen = []
    for kind in (DataLoader, TorchLoader):
        seed_everything()
        seen.append(train(kind, tmp_path))
    assert len(seen[0]) == 6
    assert_same(*seen)


# What they do with loaders


class Named(DataLoader):
    # With backend: of **kwargs Lightning knows only torch's own.
    def __init__(self, title, *args, backend=None, **kwargs):
        self.title = title
        super().__init__(*args, backend=backend, **kwargs)


def test_a_loader_that_lightning_builds_anew_keeps_what_it_was_given(tmp_path):
    ours = {"backend": Stock(), "device": "cpu", "seed": 8}
    given = {"num_workers": 1, **ours}
    trainer, model = in_lightning(tmp_path)
    for loader, kept in (
        (wrap(TorchLoader(DATASET, 5, num_workers=1), **ours), given),
        (DataLoader(DATASET, 5, **given), given),
        (Named("mine", DATASET, 5, backend="stock"), {"title": "mine", "backend": "stock"}),
    ):
        targets = trainer.predict(model, loader)
        rebuilt = trainer.predict_dataloaders
        assert (rebuilt is loader, type(rebuilt)) == (False, type(loader))
        assert {name: getattr(rebuilt, name) for name in kept} == kept
        assert torch.equal(torch.cat(targets), DATASET.tensors[1])


def test_wrap_takes_a_loader_that_accelerate_prepared():
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    prepared = accelerator.prepare(TorchLoader(DATASET, batch_size=5))
    ours = wrap(prepared, backend="stock")
    assert (len(ours), ours.dataset) == (3, DATASET)
    assert_same(list(ours), list(prepared))
    ours.set_epoch(2)
    assert prepared.iteration == 2


# Subclasses


def doubled(kind):
    class Doubled(kind):
        def __iter__(self):
            for batch in super().__iter__():
                yield from (batch, batch)

        def __len__(self):
            return 7

    return Doubled


@pytest.mark.parametrize("dataset", [DATASET, CountingStream(9)])
def test_a_subclass_that_overrides_only_len_keeps_its_length(dataset):
    class Sized(TorchLoader):
        def __len__(self):
            return 7

    wrapped = wrap(Sized(dataset, batch_size=2), backend="stock")
    assert len(wrapped) == len(copy.copy(wrapped)) == len(wrap(wrapped)) == 7
    assert_same(list(wrapped), list(TorchLoader(dataset, batch_size=2)))


def backwards(kind):
    class Backwards(kind):
        def _get_iterator(self):
            return reversed(list(super()._get_iterator()))

    return Backwards


def chosen(kind):
    class Chosen(kind):
        _index_sampler = ((1,), (0,), (1,))

    return Chosen


@pytest.mark.parametrize("backend", ["stock", "prefetch"])
def test_a_subclass_that_iterates_by_its_own_is_left_to_it(backend):
    for make, expected in ((doubled, [1, 1, 2, 2]), (backwards, [2, 1]), (chosen, [2, 1, 2])):
        for loader in (make(DataLoader)([1, 2], backend=backend), make(TorchLoader)([1, 2])):
            wrapped = wrap(loader, backend=backend)
            assert list(map(int, loader)) == list(map(int, wrapped)) == expected
            assert len(wrapped) == len(loader)
        with pytest.raises(ValueError, match=r"seed=3: .* iterates by a method of its own"):
            wrap(loader, seed=3)


@pytest.mark.parametrize("kind", [backwards(DataLoader), chosen(DataLoader)])
def test_what_a_subclass_overrides_is_not_passed_over(kind):
    overrides = f"{kind.__name__} overrides _"
    with pytest.raises(ValueError, match=rf"seed=3: {overrides}\w+, which seed= cannot reach"):
        iter(kind([1, 2], seed=3))
    assert kind([1, 2], backend="h5").explain().obstacle.startswith(overrides)


def test_a_subclass_keeps_attributes_of_its_own_that_have_our_names(monkeypatch):
    class Placed(DataLoader):
        def __init__(self, *args, device, **kwargs):
            self.device = device  # before torch's constructor, as loaders that move batches do
            super().__init__(*args, **kwargs)

    class Asking(DataLoader):
        @property
        def seed(self):
            return None

    placed = Placed([1, 2], device="cpu")
    shelved = Placed([1, 2], device="shelf 3")
    assert (placed.device, shelved.device) == ("cpu", "shelf 3")
    for loader in (placed, shelved, Asking([1, 2], backend="prefetch"), wrap(Asking([1, 2]))):
        assert list(map(int, loader)) == [1, 2]
    monkeypatch.setenv("DATALOADERS_BACKEND", "prefetch")
    assert list(map(int, shelved)) == [1, 2]
    assert shelved.explain().backend == "prefetch"


class Again:
    """A batch sampler that begins anew for ever."""

    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        while True:
            yield from iter(self.sampler)


def kept(kind):
    """timm's MultiEpochsDataLoader and ultralytics' InfiniteDataLoader are made so."""

    class Kept(kind):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self._DataLoader__initialized = False
            self.batch_sampler = Again(self.batch_sampler)
            self._DataLoader__initialized = True
            self.iterator = super().__iter__()

        def __len__(self):
            return len(self.batch_sampler.sampler)

        def __iter__(self):
            for _ in range(len(self)):
                yield next(self.iterator)

    return Kept


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("backend", ["stock", "prefetch"])
def test_a_loader_that_keeps_one_iterator_for_all_epochs(backend, num_workers):
    options = {"batch_size": 5, "shuffle": True, "num_workers": num_workers}
    epochs = []
    for kind, ours in ((DataLoader, {"backend": backend}), (TorchLoader, {})):
        seed_everything()
        loader = kept(kind)(MapDataset(pair_sample), **options, **ours)
        epochs.append([list(loader), list(loader), torch.rand(1)])
    assert_same(epochs[0], epochs[1])


def test_wrap_of_a_wrap_and_of_what_is_no_loader():
    theirs = TorchLoader(MapDataset(pair_sample), batch_size=4)
    assert_same(list(wrap(wrap(theirs, backend="synthetic"), backend="stock")), list(theirs))
    with pytest.raises(TypeError, match=r"takes a torch.utils.data.DataLoader and got list"):
        wrap([1, 2])
