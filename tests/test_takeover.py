"""Which of a program's loops is taken over, and that the others never notice."""

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import dataloaders
from dataloaders.scripts.stopping import StopScript
from dataloaders.scripts.takeover import SHORTEST, Takeover

pytestmark = pytest.mark.usefixtures("workers_end_fast")


class Recorder:
    """A measurement that hands out the real batches, epoch after epoch, ``enough`` of them."""

    def __init__(self, enough):
        self.enough = enough
        self.loader = None
        self.epochs = 0
        self._iterate = lambda: iter(())
        self.running = iter(())

    def __call__(self, loader, iterate):
        self.loader, self._iterate = loader, iterate
        return self

    def __iter__(self):
        while self.enough:
            try:
                batch = next(self.running)
            except StopIteration:
                self.running = self._iterate()
                self.epochs += 1
                continue
            self.enough -= 1
            yield batch


def loader_of(samples, **options):
    return DataLoader(TensorDataset(torch.arange(samples)), **options)


def loop(loader):
    """Everything that one loop over ``loader`` gets, until it is stopped."""
    seen = []
    try:
        for (batch,) in loader:
            seen += batch.tolist()
    except StopScript:
        seen.append(-1)
    return seen


def test_the_first_training_loop_goes_on_past_its_epoch_and_is_stopped():
    measure = Recorder(enough=11)
    loader = loader_of(4)
    before = (DataLoader.__iter__, dataloaders.DataLoader.__iter__)
    with Takeover(measure) as takeover:
        assert DataLoader.__iter__ is not before[0]
        assert loop(loader) == [0, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, -1]
    with pytest.raises(LookupError), Takeover(measure):
        raise LookupError
    assert (DataLoader.__iter__, dataloaders.DataLoader.__iter__) == before
    assert measure.loader is loader
    assert (takeover.steps, takeover.beyond) == (11, 8)
    assert takeover.taken.length == 4


def test_what_is_not_training_is_left_alone():
    measure = Recorder(enough=3)
    validation, short, peeked, training = (loader_of(n) for n in (8, SHORTEST - 1, 8, 8))
    with Takeover(measure) as takeover:
        with torch.no_grad():
            assert loop(validation) == list(range(8))
        assert loop(short) == list(range(SHORTEST - 1))
        assert next(iter(peeked))[0].tolist() == [0]
        assert loop(training)[-1] == -1
        assert loop(peeked) == list(range(8))
    assert measure.loader is training
    why = [seen.why_not for seen in takeover.seen]
    assert "gradients were off" in str(why[0])
    assert "fewer than 4 batches" in str(why[1])
    assert "only one batch was asked for" in str(why[2])
    assert why[3] is None


def test_a_number_chooses_whatever_the_loader_is():
    measure = Recorder(enough=3)
    loaders = [loader_of(2), loader_of(8), loader_of(9)]
    with Takeover(measure, 2), torch.no_grad():
        stopped = [loop(loader)[-1] == -1 for loader in loaders]
    assert stopped == [False, True, False]
    assert measure.loader is loaders[1]


class Endless(DataLoader):
    """A subclass that keeps one iterator for ever, as several training libraries have it."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        object.__setattr__(self, "running", super().__iter__())

    def __iter__(self):
        for _ in range(len(self)):
            yield next(self.running)


def test_subclasses_and_our_own_loader_pass_by_here():
    data = TensorDataset(torch.arange(8))
    for make in (Endless, dataloaders.DataLoader):
        measure = Recorder(enough=3)
        with Takeover(measure):
            loader = make(data)
            with pytest.raises(StopScript):
                for _ in loader:
                    pass
        assert measure.loader is loader


def test_accelerates_shards_pass_by_here():
    accelerate = pytest.importorskip("accelerate")
    measure = Recorder(enough=9)
    loader = accelerate.Accelerator(cpu=True).prepare(loader_of(8))
    with Takeover(measure):
        assert loop(loader)[-1] == -1
    assert measure.epochs == 2


class LoadsInside(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return torch.stack([batch[0][0] for batch in loader_of(5)]).sum() + index


@pytest.mark.parametrize("workers", [{}, {"num_workers": 1, "multiprocessing_context": "fork"}])
def test_a_loader_inside_a_dataset_is_not_the_one(workers):
    """And the measurement sees the state of torch's queues."""
    measure = Recorder(enough=7)
    loader = DataLoader(LoadsInside(), **workers)
    with Takeover(measure, number=1):
        batches = iter(loader)
        next(batches), next(batches)
        assert not workers or measure.running._tasks_outstanding > 0
        with pytest.raises(StopScript):
            list(batches)
    assert measure.loader is loader


def test_untouched_loops_draw_what_they_always_draw():
    def epochs():
        torch.manual_seed(3)
        loader = loader_of(9, batch_size=2, shuffle=True)
        with torch.no_grad():
            seen = loop(loader) + loop(loader)
        return seen, torch.get_rng_state()

    plain, plain_state = epochs()
    with Takeover(Recorder(enough=1)):
        watched, watched_state = epochs()
    assert watched == plain
    assert torch.equal(watched_state, plain_state)


@pytest.mark.parametrize("cycle", [2, 7])
def test_the_epoch_that_is_measured_begins_anew(cycle):
    got = []

    def accumulate(optimizer):
        for index, (batch,) in enumerate(loader_of(20)):
            got.append(batch.item())
            if (index + 1) % cycle == 0:
                optimizer.step()

    with Takeover(Recorder(enough=4)), pytest.raises(StopScript):
        accumulate(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1))
    assert got == [*range(cycle), 0, 1, 2, 3]
