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
from dataloaders.errors import CacheWarning
from helpers.photos import picture

FIRST = v2.RandomResizedCrop(32)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Of 360,000 bytes each as pixels."""
    root = tmp_path_factory.mktemp("large")
    for number in range(4):
        (root / f"class{number % 2}").mkdir(exist_ok=True)
        picture(number, 300, 400).save(root / f"class{number % 2}" / f"{number}.jpg")
    return root


def folder(root, *members):
    return ImageFolder(str(root), v2.Compose([*members, v2.ToImage()]))


def said(dataset, path, **options):
    return estimate(dataset, path / "a.h5", num_workers=0, **options).advice


def test_what_is_said_of_the_member_that_comes_first(photos, tmp_path):
    dataset = folder(photos, FIRST)
    advice = said(dataset, tmp_path)
    assert advice.startswith("RandomResizedCrop at dataset.transform.transforms[0] is random")
    assert '351.6 KiB a row. Smaller are images="packed"' in advice
    assert "351.6 KiB" in said(ConcatDataset([Subset(dataset, [0]), dataset]), tmp_path)
    for images in ("packed", "jpeg", {"0": "png"}):
        assert said(dataset, tmp_path, images=images) == ""
    for members, where in (
        ([v2.RGB(), FIRST], r"RandomResizedCrop at dataset.transform.transforms\[1\] is random"),
        ([v2.Lambda(lambda image: image), FIRST], "Lambda at .* is code of your own"),
        ([v2.Resize((32, 40)), FIRST], "^$"),
        ([v2.RGB()], "^$"),
    ):
        assert re.search(where, said(folder(photos, *members), tmp_path))


def test_who_hears_of_it(photos, tmp_path, capfd, command):
    dataset, heard = folder(photos, FIRST), []
    with pytest.warns(CacheWarning, match=r"RandomResizedCrop .* 351\.6 KiB a row"):
        precompute(dataset, tmp_path / "a.h5", num_workers=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        precompute(dataset, tmp_path / "a.h5", num_workers=0)  # it is there, and only opened
        precompute(dataset, tmp_path / "b.h5", num_workers=0, announce=heard.append)
    assert "RandomResizedCrop" in heard[0].advice
    capfd.readouterr()
    next(iter(DataLoader(dataset, batch_size=2, backend=H5(tmp_path / "c.h5"))))
    assert "h5  RandomResizedCrop at dataset.transform" in capfd.readouterr().err
    (tmp_path / "advice_data.py").write_text(
        "from torchvision.datasets import ImageFolder\nfrom torchvision.transforms import v2\n"
        f"data = ImageFolder({str(photos)!r}, v2.Compose([v2.RandomResizedCrop(9), v2.ToImage()]))"
    )
    told = command("cache", "build", "advice_data.py:data", "d.h5", "--workers", "0").err
    assert "build  RandomResizedCrop at dataset.transform" in told
