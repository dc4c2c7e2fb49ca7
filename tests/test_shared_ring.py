"""Workers' shared memory used again: torch's batches, and none of the memory left behind."""

import io
import os
import signal

import numpy as np
import pytest
import torch
import torch.utils.data
from PIL import Image
from torch.utils.data import Dataset
from torchvision.transforms.functional import to_tensor

from backends.stock import Stock
from dataloaders import DataLoader
from dataloaders.recording.worker import recording_changes
from dataloaders.replaying.evaluate import replayed
from dataloaders.specification import view_of
from helpers.compare import assert_same
from helpers.processes import run_script

TorchLoader = torch.utils.data.DataLoader
BATCH, SIDE = 4, 384
SMALLEST = 2 << 20  # of a tensor in a slot
assert BATCH * SIDE * SIDE * 4 > SMALLEST
RING = Stock(ring=True)


def image(index):
    return torch.full((SIDE, SIDE), float(index))


class Images(Dataset):
    def __init__(self, length=30):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return {"image": image(index), "mask": image(-index), "label": index}


class Sizes(Images):
    """Every batch has another size; some are too small for the ring."""

    def __getitem__(self, index):
        return torch.full((40 + 97 * (index // BATCH) % 1000, 700), float(index))


class Failing(Images):
    """The collation of its first 15 batches fails, after a first leaf was made."""

    def __getitem__(self, index):
        odd = index < 15 * BATCH and index % BATCH == 1
        return image(index), torch.zeros(SIDE, SIDE + odd)


def loaders(dataset, **options):
    options = {"batch_size": BATCH, "num_workers": 1, **options}
    return DataLoader(dataset, backend=RING, **options), TorchLoader(dataset, **options)


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (Images(), {"num_workers": 2, "prefetch_factor": 1}),
        (Images(), {"persistent_workers": True, "timeout": 60}),
        pytest.param(
            Images(), {"multiprocessing_context": "forkserver"}, marks=pytest.mark.nightly
        ),
        (Sizes(60), {"num_workers": 2}),
    ],
    ids=["workers", "persistent", "no forks", "sizes that change"],
)
def test_the_batches_are_torchs(dataset, options):
    loader, _ = loaders(dataset, **options)
    expected = list(TorchLoader(dataset, BATCH))
    for batch, other in zip(loader, expected, strict=True):
        assert_same(batch, other)
        del batch
    kept = list(loader)
    assert_same(kept, expected)
    # What was sent would share memory that may be written again: it counts as ordinary memory.
    first = kept[0] if isinstance(kept[0], torch.Tensor) else kept[0]["image"]
    assert first.nbytes < SMALLEST or not first.is_shared()


def test_a_slot_that_a_forked_child_looks_at_is_not_written_again():
    batches = iter(loaders(Images())[0])
    held = [next(batches)["image"].numpy()]  # torch's threads do not survive the fork
    expected = held[0].tobytes()
    ask, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(60)
            os._exit(int(os.read(ask, 1) != b"g" or held[0].tobytes() != expected))
        finally:
            os._exit(2)
    held.clear()
    assert len(list(batches)) == 7
    os.write(tell, b"g")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(ask)
    os.close(tell)


def test_a_few_segments_serve_a_whole_epoch():
    loader, _ = loaders(Images(80), prefetch_factor=2)
    batches = [{batch["image"].data_ptr(), batch["mask"].data_ptr()} for batch in loader]
    assert len(set().union(*batches)) <= 2 * 4


class Noise(Images):
    """Files of 1.7 MB, of random pixels."""

    def __init__(self, length):
        super().__init__(length)
        self.files = []
        for index in range(length):
            pixels = np.random.default_rng(index).integers(0, 256, (750, 750, 3), np.uint8)
            file = io.BytesIO()
            Image.fromarray(pixels).save(file, "PNG", compress_level=0)
            self.files.append(file.getvalue())

    def __getitem__(self, index):
        return to_tensor(Image.open(io.BytesIO(self.files[index])).resize((5, 5)))


def test_files_of_recorded_samples_go_into_the_ring_and_those_that_are_held_stay():
    def view(loader):
        return view_of(loader, **recording_changes(loader))

    stock = Stock(gather=False, ring=True, view=view)
    loader = DataLoader(Noise(12), 2, num_workers=1, persistent_workers=True, backend=stock)
    held = list(loader)
    assert not any(batch.files.is_shared() for batch in held[:4]), "a slot is plain memory here"
    held += list(loader)  # more than there are slots
    for batch, expected in zip(held, 2 * list(TorchLoader(Noise(12), 2)), strict=True):
        assert torch.equal(replayed(batch), expected)
    files = {batch.files.data_ptr() for batch in held}
    del batch, held
    assert files & {batch.files.data_ptr() for batch in loader}, "their memory serves again"


def test_batches_that_fail_give_their_slots_back():
    batches = iter(loaders(Failing(100))[0])
    for _ in range(15):
        with pytest.raises(RuntimeError, match="equal size"):
            next(batches)
    assert not any(leaf.is_shared() for batch in batches for leaf in batch), "all had slots"


@pytest.mark.nightly
def test_a_full_ring_leaves_the_rest_to_torch():
    loader, theirs = loaders(Images(200))
    kept = list(loader)
    shared = sum(batch["image"].is_shared() for batch in kept)
    assert len(kept) > shared >= len(kept) - 4  # those beyond the ring came as torch sends them
    assert_same(kept, list(theirs))


def test_the_plan_says_so():
    said = "workers reuse the shared memory of tensors of"
    workers = {"num_workers": 1}
    assert said in str(RING.explain(TorchLoader(Images(), **workers)))
    assert said not in str(RING.explain(TorchLoader(Images(), **workers, collate_fn=list)))
    assert said not in str(RING.explain(TorchLoader(Images(), **workers, batch_size=None)))
    assert said not in str(RING.explain(TorchLoader(Images())))
    assert said not in str(Stock().explain(TorchLoader(Images(), **workers)))


@pytest.mark.nightly
def test_files_as_the_way_of_sharing(tmp_path):
    done = run_script(
        tmp_path,
        """
        import torch
        from backends.stock import Stock
        from dataloaders import DataLoader

        class Images(torch.utils.data.Dataset):
            def __len__(self): return 40
            def __getitem__(self, index): return torch.full((400, 400), float(index))

        if __name__ == "__main__":
            torch.multiprocessing.set_sharing_strategy("file_system")
            options = {"num_workers": 2, "persistent_workers": True, "backend": Stock(ring=True)}
            loader, addresses = DataLoader(Images(), 4, **options), set()
            for _ in range(2):
                for number, batch in enumerate(loader):
                    assert batch[:, 0, 0].tolist() == [4 * number + i for i in range(4)]
                    addresses.add(batch.data_ptr())
            print(len(addresses))
        """,
    )
    assert done.returncode == 0, done.stderr
    assert 0 < int(done.stdout) <= 2 * 4
