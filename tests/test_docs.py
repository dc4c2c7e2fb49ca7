"""The code on the pages, the examples and the demo run as they are; command lines parse.

The blocks of a page run in their order, in one process, and know only what they import and
`STAND_INS`. A comment ``<!-- not run: reason -->`` before a block keeps it from being run.
"""

import os
import re
import shlex
import shutil
from pathlib import Path

import pytest
from PIL import Image

from dataloaders.cli import main
from dataloaders.cli.photos import make_photos
from helpers import warm
from helpers.pictures import write_folder

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

STAND_INS = """
import os

import torch
from PIL import Image
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

for number in range(32):
    os.makedirs(f"photos/{number % 2}", exist_ok=True)
    Image.new("RGB", (40, 40), (number, 0, 0)).save(f"photos/{number % 2}/{number}.jpg")
chain = [v2.Resize(32), v2.RandomCrop(24), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
dataset = ImageFolder("photos", v2.Compose(chain))
loader = torch.utils.data.DataLoader(dataset, batch_size=4)


def step(batch):
    return batch[0].mean()


names = {"dataset": dataset, "loader": loader, "step": step}
for line, text in BLOCKS:
    if "precompute(" in text and os.path.exists("train.h5"):
        os.remove("train.h5")  # each begins anew
    exec(compile("\\n" * line + text, PAGE, "exec"), names)
"""


def blocks(page, language):
    """The line and the text of each block of a language that is run."""
    pattern = r"(<!-- not run: \S[^\n]*-->\n+)?^```(\w*)\n(.*?)^```$"
    text = page.read_text()
    return [
        (text.count("\n", 0, found.start(3)), found[3])
        for found in re.finditer(pattern, text, re.DOTALL | re.MULTILINE)
        if found[2] == language and not found[1]
    ]


def runs_of(page):
    return blocks(page, "python")


@pytest.mark.parametrize("page", list(filter(runs_of, PAGES)), ids=lambda page: page.stem)
def test_python_runs(page, tmp_path):
    script = tmp_path / "page.py"
    script.write_text(f"PAGE = {str(page)!r}\nBLOCKS = {runs_of(page)!r}\n{STAND_INS}")
    warm.run([script], cwd=tmp_path)


def command_lines():
    """The words after our command, in every shell block; variables are 0."""
    pattern = r"^(?:\$ |torchrun .*-m |for .*; do )?dataloaders (\S.*?)(?:; done)?$"
    shell = [text for page in PAGES for _, text in blocks(page, "")]
    return [re.sub(r"\$\w+", "0", line) for line in re.findall(pattern, "\n".join(shell), re.M)]


@pytest.mark.parametrize("line", sorted(set(command_lines())))
def test_command_lines_parse(line, tmp_path, monkeypatch, capsys):
    """No file that they name is here: each is refused for that, if not for its words."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DATALOADERS_BACKEND", "stock")  # what tune sets is put back
    try:
        status = main(shlex.split(line, comments=True))
    except SystemExit:
        pytest.fail(capsys.readouterr().err)
    assert status != 0


# The examples: what is plain torch stays plain torch


EXAMPLES = ROOT / "examples"
OUR_IMPORT = "from dataloaders import DataLoader\n"


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("photos"), 4, "PNG")


def run(script, *words):
    """What the script prints, run from its own folder."""
    return warm.run([script, *words], cwd=script.parent).stdout


@pytest.mark.parametrize("ours", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_the_import_is_the_only_change(photos, tmp_path, ours):
    script = EXAMPLES / "train_images.py"
    source = script.read_text()
    assert re.findall(".*dataloaders.*\n", source.split('"""', 2)[2]) == [OUR_IMPORT]
    if not ours:
        script = tmp_path / "train_images.py"
        script.write_text(source.replace(OUR_IMPORT, "from torch.utils.data import DataLoader\n"))
    printed = r"epoch 1: \S+% of 4 images right\nepoch 2: \S+% of 4 images right\n"
    words = ("--data", photos, "--batch-size", 2, "--workers", 1, "--device", "cpu")
    assert re.fullmatch(printed, run(script, *words))


@pytest.mark.nightly
def test_a_lightning_script_is_checked(tmp_path, tmp_path_factory):
    photos = write_folder(tmp_path_factory.mktemp("photos"), 130, "PNG")
    script = shutil.copy(EXAMPLES / "train_lightning.py", tmp_path)
    command = ["-m", "dataloaders", "check", "--budget", 4, "--no-predict", script]
    done = warm.run([*command, "--data", photos], cwd=tmp_path, timeout=100)
    assert "measured in loader 1: DataLoader of ImageFolder, 5 batches of 32" in done.stdout
    assert "the script was ended after" in done.stdout
    assert [child.name for child in tmp_path.iterdir()] == ["train_lightning.py"]


@pytest.mark.nightly
def test_the_check_can_be_called_in_code():
    printed = run(EXAMPLES / "check_in_code.py")
    report, _, factor = printed.partition("a perfect input would gain a factor of ")
    assert re.search(r"^loader .*TensorDataset", report, re.MULTILINE), report
    bound = re.search(r"A perfect input would make this loop (\S+) x as fast", report)
    assert bound is not None, report
    assert factor.startswith(f"{bound[1]} (")


@pytest.mark.parametrize("seconds", [0.001, pytest.param(4, marks=pytest.mark.nightly)])
def test_a_check_a_switch_to_dali_and_a_check_again(photos, seconds):
    words = ("--data", photos, "--batch-size", 2, "--seconds", seconds, "--device", "cpu")
    printed = run(EXAMPLES / "switch_to_dali.py", *words)
    if seconds < 1:
        assert printed.endswith("no time for a round of batches: raise --seconds.\n"), printed
    else:
        assert printed.count("A perfect input would make this loop") == 2, printed
        assert "backend 'dali', batches delivered on cpu" in printed
        assert re.search(r"A batch took \S+ ms and takes \S+ ms: \S+ x as fast\.", printed), printed


# The demo


def test_photographs_have_a_cameras_sizes_and_are_made_once(tmp_path):
    folder = make_photos(tmp_path / "deep" / "photos", count=10)
    files = sorted(folder.rglob("*.jpg"))
    assert (len(files), len({file.parent for file in files})) == (10, 4)
    for file in files:
        assert 60_000 < file.stat().st_size < 320_000
        with Image.open(file) as image:
            assert (image.format, image.mode) == ("JPEG", "RGB")
            assert image.size in {(640, 480), (480, 640), (800, 600), (1024, 768)}
    stamps = [file.stat().st_mtime_ns for file in files]
    assert make_photos(folder, count=10) == folder
    assert [file.stat().st_mtime_ns for file in files] == stamps


@pytest.mark.nightly
def test_the_demo_checks_the_example_and_tries_remedies(tmp_path):
    env = {**os.environ, "DATALOADERS_CACHE": str(tmp_path)}
    done = warm.run(["-m", "dataloaders", "demo", "--budget", 4], env=env, timeout=100)
    command = r"\$ dataloaders check --try --budget 4 \S+/examples/train_images.py -- --data \S+ "
    assert re.search(command, done.stdout)
    for text in ("INPUT-BOUND", "measured in loader 1: DataLoader of ImageFolder", "what if"):
        assert text in done.stdout
