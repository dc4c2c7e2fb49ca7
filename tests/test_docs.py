"""The code on the pages runs: Python blocks as they stand, and the command lines parse.

The blocks of a page run in their order, in one process, and know only what they import and
`STAND_INS`. A comment ``<!-- not run: reason -->`` before a block keeps it from being run.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from dataloaders.cli import main
from helpers import warm

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


class Block(NamedTuple):
    line: int
    language: str
    text: str
    not_run: bool


def blocks(page):
    """What stands between fences."""
    pattern = r"(<!-- not run: \S[^\n]*-->\n+)?^```(\w*)\n(.*?)^```$"
    text = page.read_text()
    for found in re.finditer(pattern, text, re.DOTALL | re.MULTILINE):
        line = text.count("\n", 0, found.start(3))
        yield Block(line, found[2], found[3], found[1] is not None)


def runs_of(page):
    """The line and the text of each block that is run."""
    python = (each for each in blocks(page) if each.language == "python" and not each.not_run)
    return [(each.line, each.text) for each in python]


@pytest.mark.parametrize("page", list(filter(runs_of, PAGES)), ids=lambda page: page.stem)
def test_python_runs(page, tmp_path):
    script = tmp_path / "page.py"
    script.write_text(f"PAGE = {str(page)!r}\nBLOCKS = {runs_of(page)!r}\n{STAND_INS}")
    warm.run([script], cwd=tmp_path)


def test_python_uses_what_its_page_imports(tmp_path):
    """Also what is not run."""
    for page in PAGES:
        python = [each.text for each in blocks(page) if each.language == "python"]
        code = "\n".join(["dataset = step = loader = None", *python])
        (tmp_path / page.with_suffix(".py").name).write_text(code)
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", tmp_path]
    done = subprocess.run(ruff, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def command_lines():
    """The words after our command, in every shell block; variables are 0."""
    pattern = r"^(?:\$ |torchrun .*-m |for .*; do )?dataloaders (\S.*?)(?:; done)?$"
    shell = [each.text for page in PAGES for each in blocks(page) if not each.language]
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
