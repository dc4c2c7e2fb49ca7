"""Datasets of all kinds, recorded and replayed: equal to the bit, and so are the generators."""

from __future__ import annotations

import random
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import PIL
import pytest
import torch
import torchvision.transforms as v1
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset
from torchvision.transforms import v2

from helpers import recorded
from helpers.codes import CODES, COLLATIONS, MEAN, STD, exact_types, padded
from helpers.compare import assert_same, seed_everything
from helpers.recorded import Code, as_recorded, equal, is_recorded, path

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", CODES)
def test_a_recorded_sample_is_the_datasets_own(name: str) -> None:
    function, how = CODES[name]
    dataset = Code(function)
    expected = [dataset[index] for index in range(len(dataset))]
    made, count = as_recorded(dataset)
    assert [equal(*pair) for pair in zip(made, expected, strict=True)] == [True] * len(dataset)
    if how == "all":
        looks = [recorded.looks_of(dataset, index) for index in range(len(dataset))]
        assert (count, looks) == (len(dataset), [[]] * len(dataset))
    else:
        assert (count > 0) == (how == "some")
    tailed, _ = as_recorded(dataset, "tail")
    assert all(map(equal, tailed, expected))


def test_the_docs_say_what_is_recorded() -> None:
    page = (Path(__file__).parents[1] / "docs" / "dali.md").read_text()
    table = page.split("<!-- tests/test_recording.py -->")[1].split("<!-- end -->")[0]
    rows = [line.split(" | ") for line in table.strip().splitlines()[2:]]
    documented = {name.strip("| "): how for names, how, _ in rows for name in names.split(", ")}
    documented.pop("by torchcodec" if find_spec("torchcodec") is None else "", None)
    assert documented == {name.replace("_", " "): how for name, (_, how) in CODES.items()}


# Chains of transforms that hypothesis makes up

OF_BOTH = [
    v1.RandomResizedCrop(24), v1.RandomCrop(20, 3, pad_if_needed=True), v1.CenterCrop(30),
    v1.Resize((33, 21)), v1.Resize(26), v1.RandomHorizontalFlip(), v1.RandomVerticalFlip(),
    v1.Pad((1, 2, 3, 4), padding_mode="edge"), v1.Pad(2, 5), v1.ColorJitter(0.4, 0.4, 0.4, 0.2),
    v1.RandomGrayscale(0.5), v1.Grayscale(3), v1.GaussianBlur(3), v1.RandomRotation(30),
    v1.RandomAffine(20, (0.1, 0.2), (0.8, 1.3), 9), v1.RandomPerspective(0.4, 0.9),
    v1.RandomInvert(), v1.RandomPosterize(3), v1.RandomSolarize(99), v1.RandomEqualize(),
    v1.RandomAutocontrast(), v1.RandomAdjustSharpness(1.7),
]  # fmt: skip
OF_V2 = [
    v2.RandomResizedCrop(24), v2.RandomCrop(20, 3, pad_if_needed=True), v2.CenterCrop(30),
    v2.Resize((33, 21)), v2.RandomShortestSize(20, 30), v2.ScaleJitter((28, 28)),
    v2.RandomHorizontalFlip(), v2.RandomZoomOut(7, (1, 2)), v2.RandomPhotometricDistort(),
    v2.ColorJitter(0.4, 0.4, 0.4, 0.2), v2.RandomGrayscale(0.5), v2.GaussianBlur(3),
    v2.RandomRotation(30), v2.RandomAffine(20, (0.1, 0.2), (0.8, 1.3), 9), v2.ElasticTransform(9.0),
    v2.RandomPerspective(0.4, 0.9), v2.RandomPosterize(3), v2.RandomSolarize(99),
    v2.RandomEqualize(), v2.RandomAutocontrast(), v2.RandomAdjustSharpness(1.7), v2.RandomInvert(),
    v2.RandomChannelPermutation(), v2.TrivialAugmentWide(), v2.RandAugment(), v2.AutoAugment(),
]  # fmt: skip
FILES = [("JPEG", "RGB"), ("JPEG", "L"), *(("PNG", mode) for mode in ("RGB", "L", "P"))]
FILES.append(("WEBP", "RGB"))


@st.composite
def chains(draw: st.DrawFn) -> list[Any]:
    """Steps on an image, the step that makes it a tensor at any place among them, and an end."""
    second = draw(st.booleans())
    steps = draw(st.lists(st.sampled_from(OF_V2 if second else OF_BOTH), max_size=4))
    place = draw(st.integers(0, len(steps)))
    if second:
        turn = [v2.ToImage(), *draw(st.sampled_from([[], [v2.ToDtype(torch.float32, scale=True)]]))]
        end = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    else:
        turn = [draw(st.sampled_from([v1.ToTensor(), v1.PILToTensor()]))]
        end = [v1.ConvertImageDtype(torch.float32), v1.Normalize(MEAN, STD), v1.RandomErasing(0.5)]
    return [*steps[:place], *turn, *steps[place:], *draw(st.sampled_from([[], end]))]


@pytest.mark.parametrize("effort", [25, pytest.param(3000, marks=pytest.mark.nightly)])
def test_a_recorded_chain_is_the_datasets_own(effort: int) -> None:
    @settings(max_examples=effort)
    @given(chains(), st.sampled_from(FILES), st.integers(0, 999))
    def check(steps: list[Any], kind: tuple[str, str], seed: int) -> None:
        def sample(index: int) -> Any:
            made: Any = Image.open(path(index, *kind)).convert("RGB")
            torch.manual_seed(seed)
            for step in steps:
                made = step(made)
            return made

        dataset = Code(sample, 1)
        made, _ = as_recorded(dataset)
        assert equal(made[0], dataset[0])

    check()


# Through torch's workers


class Labelled:
    def __init__(self, name: str = "v1_train") -> None:
        self.name = name

    def __len__(self) -> int:
        return 13

    def __getitem__(self, index: int) -> Any:
        return CODES[self.name][0](index % 5), index % 7


class Bulk(Labelled):
    def __getitems__(self, indices: Any) -> Any:
        return [self[index] for index in indices]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        worker = torch.utils.data.get_worker_info()
        yield from (Labelled()[index] for index in range(worker.id if worker else 0, 13, 2))


def shown(worker_id: int) -> None:
    worker = torch.utils.data.get_worker_info()
    assert worker is not None
    assert type(worker.dataset) in (Labelled, *map(type, DATASETS))
    random.seed(worker_id)


JOINED = ConcatDataset([Labelled(), Labelled("arrays")])
DATASETS = Bulk(), Stream(), Subset(Labelled(), range(3, 9)), JOINED


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("dataset", "collate_fn"),
    [*((Labelled(), function) for function in COLLATIONS), *((each, None) for each in DATASETS)],
)
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_torchs(dataset: Any, collate_fn: Any, workers: int) -> None:
    streams = isinstance(dataset, IterableDataset)
    options = {"num_workers": workers, "worker_init_fn": shown, "shuffle": not streams or None}
    loader: Any = DataLoader(dataset, 4, collate_fn=collate_fn, **options)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in workers: sums of floats depend on it
    try:
        seed_everything()
        expected = list(loader)
        seed_everything()
        sent = list(recorded.recording(loader))
        assert_same([recorded.finished(batch) for batch in sent], expected)
    finally:
        torch.set_num_threads(threads)
    fails = collate_fn in (padded, exact_types)
    assert [is_recorded(batch) for batch in sent] == [not fails] * len(expected)
    if not streams and not fails:
        before = torch.get_rng_state()
        assert_same([recorded.ask_again(batch.again, loader) for batch in sent], expected)
        assert torch.equal(torch.get_rng_state(), before)


def test_nothing_is_recorded_with_an_older_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    loader: Any = DataLoader(Labelled("v1_eval"), 4)
    monkeypatch.setattr(PIL, "__version__", "10.4.0")
    recorded.self_test.cache_clear()
    try:
        sent = list(recorded.recording(loader))
    finally:
        recorded.self_test.cache_clear()
    assert not any(map(is_recorded, sent))
    assert_same(sent, list(loader))
