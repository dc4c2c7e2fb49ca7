"""What is said before a build whose rows are images as large as they are decoded."""

import re
import warnings

import pytest
from torch.utils.data import ConcatDataset, Subset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from backends.h5 import H5
from dataloaders import DataLoader
from dataloaders.cache import estimate, precompute
from dataloaders.cli import main
from dataloaders.errors import CacheWarning
from helpers.photos import picture

LARGE = (300, 400)  # 360,000 bytes as pixels
FIRST = v2.RandomResizedCrop(32)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return _photos(tmp_path_factory.mktemp("large"), *LARGE)


def _photos(root, height, width):
    for number in range(4):
        (root / f"class{number % 2}").mkdir(exist_ok=True)
        picture(number, height, width).save(root / f"class{number % 2}" / f"{number}.jpg")
    return root


def folder(root, *members):
    return ImageFolder(str(root), v2.Compose([*members, v2.ToImage()]))


def said(dataset, path, **options):
    return estimate(dataset, path / "a.h5", num_workers=0, **options).advice


def test_what_is_said_of_the_member_that_comes_first(photos, tmp_path):
    dataset = folder(photos, FIRST)
    advice = said(dataset, tmp_path)
    assert advice.startswith("RandomResizedCrop comes first, and is random")
    assert '351.6 KiB a row. Smaller are images="packed"' in advice
    assert "351.6 KiB" in said(ConcatDataset([Subset(dataset, [0]), dataset]), tmp_path)
    for images in ("packed", "jpeg", {"0": "png"}):
        assert said(dataset, tmp_path, images=images) == ""
    (tmp_path / "small").mkdir()
    assert said(folder(_photos(tmp_path / "small", 60, 60), FIRST), tmp_path) == ""


@pytest.mark.parametrize(
    ("members", "where"),
    [
        ([v2.RandomHorizontalFlip(), v2.Resize(32)], "RandomHorizontalFlip comes first"),
        ([v2.Lambda(lambda image: image), FIRST], "Lambda comes first"),
        ([v2.Compose([FIRST])], "RandomResizedCrop comes first"),
        ([v2.Resize((32, 40)), FIRST], "^$"),
        ([v2.CenterCrop(32), v2.RandomHorizontalFlip()], "^$"),
        ([v2.RGB()], "^$"),
    ],
    ids=repr,
)
def test_which_member_it_is(photos, tmp_path, members, where):
    assert re.search(where, said(folder(photos, *members), tmp_path))


def test_who_hears_of_it(photos, tmp_path, capsys, monkeypatch):
    dataset, heard = folder(photos, FIRST), []
    with pytest.warns(CacheWarning, match=r"RandomResizedCrop .* 351\.6 KiB a row"):
        precompute(dataset, tmp_path / "a.h5", num_workers=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        precompute(dataset, tmp_path / "a.h5", num_workers=0)  # it is there, and only opened
        precompute(dataset, tmp_path / "b.h5", num_workers=0, announce=heard.append)
    assert "RandomResizedCrop" in heard[0].advice
    capsys.readouterr()
    next(iter(DataLoader(dataset, batch_size=2, backend=H5(tmp_path / "c.h5"))))
    assert "h5  RandomResizedCrop comes first" in capsys.readouterr().err
    (tmp_path / "advice_data.py").write_text(
        "from torchvision.datasets import ImageFolder\nfrom torchvision.transforms import v2\n"
        f"data = ImageFolder({str(photos)!r}, v2.Compose([v2.RandomResizedCrop(9), v2.ToImage()]))"
    )
    monkeypatch.chdir(tmp_path)
    command = ["cache", "build", "advice_data.py:data", "d.h5", "--workers", "0"]
    assert main(command) == 0
    lines = capsys.readouterr().err.splitlines()
    assert any(line.startswith("build  RandomResizedCrop comes first") for line in lines)
    assert main([*command, "--overwrite", "--quiet"]) == 0
    assert "RandomResizedCrop" not in capsys.readouterr().err
