"""A build survives: kill -9 of anything at any moment, Ctrl-C, a full disk, a second builder."""

import os
import re
import signal
import subprocess
import sys
import textwrap

import pytest

from helpers.processes import run_script, start_script

SLOW = """
import os, sys, time
from pathlib import Path
import torch
from dataloaders.cache import precompute, CachedDataset
from dataloaders.errors import CacheError

class Slow:
    def __len__(self):
        return 200

    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.full((20,), index)
"""


def script(text):
    return SLOW + textwrap.dedent(text)


def test_ctrl_c_says_how_to_go_on(tmp_path):
    source = script(
        """
        def tell(progress):
            print(progress.phase, progress.samples_done, flush=True)

        if __name__ == "__main__":
            cached = precompute(Slow(), "a.h5", num_workers=2, rows=5, progress=tell)
            print("sum", sum(int(sample[0]) for sample in cached))
        """
    )
    process = start_script(tmp_path, source)
    assert process.stdout is not None
    while process.stdout.readline() not in ("compute 20\n", ""):
        pass
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole group
    output, _ = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    last = output.strip().splitlines()[-1]
    kept = re.fullmatch(
        r"KeyboardInterrupt: interrupted: (\d+) of 200 samples are kept in (.*); start it "
        "again with the same arguments to go on",
        last,
    )
    assert kept is not None, output
    assert 5 * len(list((tmp_path / "a.parts").glob("*.h5"))) == int(kept[1]) >= 20
    assert kept[2] == str(tmp_path / "a.parts")
    done = run_script(tmp_path, source)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0] == f"compute {kept[1]}"
    assert done.stdout.splitlines()[-1] == f"sum {sum(range(200))}"
    assert not (tmp_path / "a.parts").exists()


@pytest.mark.nightly
def test_who_waits_sees_progress_and_goes_on_where_a_killed_builder_was(tmp_path):
    done = run_script(
        tmp_path,
        script(
            """
            import signal, threading

            if __name__ == "__main__":
                pid = os.fork()
                if pid == 0:
                    precompute(Slow(), "a.h5", num_workers=0, rows=5)
                    os._exit(0)
                while not os.path.exists("a.parts/build.json"):
                    time.sleep(0.01)
                try:
                    precompute(Slow(), "a.h5", num_workers=0, wait=False)
                except CacheError as error:
                    print("being built by another process or thread (wait" in str(error))
                seen = []

                def tell(progress):
                    seen.append(progress)
                    if progress.waiting and progress.samples_done >= 20:
                        os.kill(pid, signal.SIGKILL)
                        os.waitpid(pid, 0)

                cached = precompute(Slow(), "a.h5", num_workers=0, progress=tell)
                mine = [one for one in seen if not one.waiting]
                print(mine[0].samples_done >= 20, len(cached), os.path.exists("a.parts"))
            """
        ),
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "True\nTrue 200 False\n"


@pytest.mark.nightly
def test_a_disk_that_is_full_loses_nothing(tmp_path):
    """A file system of 8 MB that fills up while parts are written, then while they are copied."""
    source = """
        import os, sys
        import torch
        from dataloaders.cache import precompute
        from dataloaders.errors import CacheError

        def fill():
            room = os.statvfs("disk")
            with open("disk/filler", "wb", buffering=0) as file:
                file.write(bytes(room.f_bavail * room.f_frsize - 100_000))

        class Images:
            full_at = 37

            def __len__(self):
                return 60

            def __getitem__(self, index):
                if index == self.full_at:
                    fill()
                return torch.full((50_000 + index % 2,), index, dtype=torch.uint8)

        def fill_late(progress):
            if progress.phase == "compute" and progress.samples_done == 60:
                fill()

        if __name__ == "__main__":
            images = Images()
            try:
                precompute(images, "disk/a.h5", num_workers=int(sys.argv[1]), rows=4)
            except CacheError as error:
                print(error)
                print(*error.__notes__)
            os.unlink("disk/filler")
            images.full_at = -1
            try:
                precompute(images, "disk/a.h5", num_workers=0, progress=fill_late)
            except CacheError as error:
                print(error)
                print(*error.__notes__)
            print(os.path.exists("disk/a.h5"))
            os.unlink("disk/filler")
            cached = precompute(images, "disk/a.h5", num_workers=0)
            precompute(images, "b.h5", num_workers=0)
            same = open("disk/a.h5", "rb").read() == open("b.h5", "rb").read()
            print(same, sorted(os.listdir("disk")))
        """
    (tmp_path / "script.py").write_text(textwrap.dedent(source))
    (tmp_path / "disk").mkdir()
    for num_workers in ("0", "2"):
        (tmp_path / "b.h5").unlink(missing_ok=True)
        shell = 'mount -t tmpfs -o size=8m tmpfs disk && exec "$0" script.py "$1"'
        run = subprocess.run(
            ["unshare", "-m", "sh", "-c", shell, sys.executable, num_workers],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        if "unshare" in run.stderr or "mount" in run.stderr:
            pytest.skip(f"a mount namespace needs root: {run.stderr.strip()}")
        assert (run.returncode, run.stderr) == (0, ""), run.stdout
        first, kept, *joined, there, last = run.stdout.splitlines()
        assert "No space left on device" in first
        assert "make room" in first
        assert re.search(r"\d+ of 60 samples are kept in .*/disk/a.parts; start it again", kept)
        assert "No space left on device" in joined[0]
        assert "60 of 60 samples are kept" in joined[1]
        assert (there, last) == ("False", "True ['.a.h5.lock', 'a.h5']")
