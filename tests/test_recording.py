"""Samples of all kinds, recorded and replayed: equal to the bit, and so are the generators.

Batches, collation and torch's workers: test_dali and test_device_tail.
"""

from __future__ import annotations

import pickle
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import PIL
import pytest
import torch
import torchvision.transforms as v1
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile
from torch.utils.data import DataLoader
from torchvision.transforms import v2

from helpers import recorded
from helpers.codes import CODES, MEAN, STD, Codes
from helpers.compare import assert_same
from helpers.processes import run_script
from helpers.recorded import Code, Photos, as_recorded, encoded, equal, is_recorded, path

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


def test_a_process_that_has_recorded_nothing_replays(tmp_path: Path) -> None:
    names = {"decoded_and_arithmetic", "modes", "by_torchcodec"} & CODES.keys()
    stock, sent = recorded.both(Codes(sorted(names)), list)
    (tmp_path / "sent").write_bytes(pickle.dumps(sent))
    source = """
        import pickle
        from pathlib import Path
        from dataloaders.recording import ops, program

        made = program.filled(pickle.loads(Path("sent").read_bytes()), ops.run)
        Path("made").write_bytes(pickle.dumps(made))
        """
    run_script(tmp_path, source)
    assert_same(pickle.loads((tmp_path / "made").read_bytes()), stock, strides=False)


def test_the_docs_say_what_is_recorded() -> None:
    page = (Path(__file__).parents[1] / "docs" / "dali.md").read_text()
    table = page.split("<!-- tests/test_recording.py -->")[1].split("<!-- end -->")[0]
    rows = [line.split(" | ") for line in table.strip().splitlines()[2:]]
    documented = {name.strip("| "): how for names, how, _ in rows for name in names.split(", ")}
    documented.pop("by torchcodec" if find_spec("torchcodec") is None else "", None)
    assert documented == {name.replace("_", " "): how for name, (_, how) in CODES.items()}


# Chains of transforms that hypothesis makes up


def of_both(lib: Any) -> list[Any]:
    return [
        lib.RandomResizedCrop(24), lib.RandomCrop(20, 3, pad_if_needed=True), lib.CenterCrop(30),
        lib.Resize((33, 21)), lib.Resize(26), lib.RandomHorizontalFlip(), lib.RandomVerticalFlip(),
        lib.Pad((1, 2, 3, 4), padding_mode="edge"), lib.Pad(2, 5), lib.RandomGrayscale(0.5),
        lib.ColorJitter(0.4, 0.4, 0.4, 0.2), lib.Grayscale(3), lib.GaussianBlur(3),
        lib.RandomRotation(30), lib.RandomAffine(20, (0.1, 0.2), (0.8, 1.3), 9),
        lib.RandomPerspective(0.4, 0.9), lib.RandomInvert(), lib.RandomPosterize(3),
        lib.RandomSolarize(99), lib.RandomEqualize(), lib.RandomAutocontrast(),
        lib.RandomAdjustSharpness(1.7),
    ]  # fmt: skip


STEPS = {v1: of_both(v1), v2: [
    *of_both(v2), v2.RandomShortestSize(20, 30), v2.ScaleJitter((28, 28)),
    v2.RandomZoomOut(7, (1, 2)), v2.RandomPhotometricDistort(), v2.ElasticTransform(9.0),
    v2.RandomChannelPermutation(), v2.TrivialAugmentWide(), v2.RandAugment(), v2.AutoAugment(),
]}  # fmt: skip
FILES = [("JPEG", "RGB"), ("JPEG", "L"), *(("PNG", mode) for mode in ("RGB", "L", "P"))]
FILES.append(("WEBP", "RGB"))


@st.composite
def chains(draw: st.DrawFn) -> list[Any]:
    """Steps on an image, the step that makes it a tensor at any place among them, and an end."""
    second = draw(st.booleans())
    steps = draw(st.lists(st.sampled_from(STEPS[v2 if second else v1]), max_size=4))
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


def test_files_are_recorded_where_truncated_ones_are_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    files = [encoded(0), encoded(1)[:-200], encoded(2, "PNG"), encoded(3, "PNG")[:-200]]
    dataset = Code(Photos(files, v1.Compose([v1.Resize((9, 9)), v1.ToTensor()])).__getitem__, 4)
    made, count = as_recorded(dataset)
    assert all(map(equal, made, [dataset[index] for index in range(4)]))
    assert count == 2


def test_nothing_is_recorded_with_an_older_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    loader: Any = DataLoader(Code(CODES["v1_eval"][0]), 4)
    monkeypatch.setattr(PIL, "__version__", "10.4.0")
    sent = list(recorded.recording(loader))
    assert not any(map(is_recorded, sent))
    assert_same(sent, list(loader))
