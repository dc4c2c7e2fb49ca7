"""The page of a check as a picture, the one in README, and its text, of one and the same report.

    python -m bench.picture docs/check.png

It checks examples/train_images.py on the demo's photographs, unless --report gives a report's JSON.
"""

from __future__ import annotations

import argparse
import io
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


@contextmanager
def browser() -> Iterator[Any]:
    """Give a headless Chromium: playwright's own, or the system's; LookupError without one."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        names = ("chromium", "chromium-browser", "google-chrome")
        paths = (playwright.chromium.executable_path, *map(shutil.which, names))
        found = next((path for path in paths if path and Path(path).exists()), None)
        if found is None:
            raise LookupError("no Chromium is found")
        # In a container Chromium has no sandbox of its own; it opens our own file alone.
        chromium = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        try:
            yield chromium
        finally:
            chromium.close()


def main() -> None:
    from PIL import Image

    from dataloaders.bottleneck import Report

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--report", type=Path, help="JSON of a check, in place of a new one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = options.report or _checked(Path(folder, "report.json"))
        page = Path(folder, "report.html")
        found = Report.from_json(report)
        system = found.machine["system"].split()[0]  # without its build
        found = replace(found, machine={**found.machine, "system": system})
        found.to_html(page)
        with browser() as chromium:
            view = chromium.new_page(viewport={"width": 1000, "height": 600})
            view.goto(page.as_uri())
            shot = view.screenshot(full_page=True)
    image = Image.open(io.BytesIO(shot)).convert("RGB").quantize(64)
    image.save(options.picture, optimize=True)
    print(found)
    print(f"{options.picture}: {options.picture.stat().st_size / 1000:.0f} kB")


def _checked(report: Path) -> Path:
    from dataloaders.cli.demo import made_photos

    script = ["examples/train_images.py", "--", "--data", str(made_photos())]
    script += ["--epochs", "100", "--batch-size", "8"]
    options = ["--json", str(report), "--quiet"]
    command = [sys.executable, "-m", "dataloaders", "check", *options, *script]
    subprocess.run(command, cwd=ROOT, check=True)
    return report


if __name__ == "__main__":
    main()
