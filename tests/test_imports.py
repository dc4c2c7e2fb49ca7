"""What the package loads, exports, and may know of itself."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import dataloaders

HEAVY = ("h5py", "nvidia.dali", "torchvision", "PIL", "rich", "psutil")
EXPORTED = [
    "Backend",
    "DataLoader",
    "DataLoadersError",
    "Plan",
    "Session",
    "bottleneck_check",
    "check_bottleneck",
    "tune",
    "wrap",
]

OURS = Path(dataloaders.__file__).parent
THEIRS = OURS.parent / "backends"

ROW = re.compile(r"^\| `([a-z.]+)` \|[^|]*\|([^|]*)\|$", re.MULTILINE)


def rooms() -> dict[str, set[str]]:
    """By room, those that it may import: the table in docs/architecture.md."""
    page = (OURS.parent / "docs" / "architecture.md").read_text()
    table = {room: set(re.findall(r"`([a-z.]+)`", allowed)) for room, allowed in ROW.findall(page)}
    table["cli"] |= {room for room in table if room != "cli"}
    return table


def room_of(module: str) -> str | None:
    """The room of ``dataloaders.x.y`` or of a name in it; None for the package itself."""
    parts = module.split(".")[1:]
    if parts[:2] in (["tuning", "auto"], ["tuning", "learned"]):
        return "tuning.auto"
    return parts[0] if parts and parts[0] in rooms() else None


def test_importing_loads_nothing_heavy() -> None:
    source = (
        "import sys, dataloaders, backends.stock\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_the_exports() -> None:
    assert sorted(dataloaders.__all__) == sorted(EXPORTED)
    for name in EXPORTED:
        assert hasattr(dataloaders, name)


def imported(path: Path, *, top_level: bool) -> Iterator[str]:
    """Modules that the file imports, those for type checking left out."""
    tree = ast.parse(path.read_text())
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            name = "." * node.level + (node.module or "")
            yield name
            joint = "" if name.endswith(".") else "."
            yield from (f"{name}{joint}{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if top_level and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        pending.extend(ast.iter_child_nodes(node))


def names(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


@pytest.mark.parametrize("path", names(OURS), ids=lambda path: str(path.relative_to(OURS)))
def test_the_interface_imports_no_backend(path: Path) -> None:
    assert not [
        name for name in imported(path, top_level=False) if name.split(".")[0] == "backends"
    ]


@pytest.mark.parametrize("path", names(THEIRS), ids=lambda path: str(path.relative_to(THEIRS)))
def test_a_backend_imports_no_other_backend(path: Path) -> None:
    """Also not itself by its absolute name: a user's own ``backends`` folder may stand there."""
    inside = path.relative_to(THEIRS).parts[:-1]
    for name in imported(path, top_level=False):
        assert name.split(".")[0] != "backends", f"use a relative import for {name}"
        climbs = len(name) - len(name.lstrip("."))
        assert climbs <= len(inside), f"{name} leaves the backend's own folder"


def test_the_arrows_go_one_way() -> None:
    allowed = rooms()
    seen: set[str] = set()
    for room, others in allowed.items():
        assert others <= seen | {room}, f"{room} may import {others - seen}, which comes after it"
        seen.add(room)
    for path in names(OURS):
        place = path.relative_to(OURS).with_suffix("").parts
        own = room_of(".".join(("dataloaders", *place)))
        if own is None:
            continue
        known = {name for name in imported(path, top_level=False) if "dataloaders." in name}
        packages = {name.rpartition(".")[0] for name in known}
        found = {room_of(name) for name in known - packages} - {None}
        within = {own} if own != "tuning" else {own, "tuning.auto"}
        assert found <= allowed[own] | within, f"{path.relative_to(OURS)}: {found}"


def test_every_module_has_a_room() -> None:
    interface = {"__init__", "__main__", "_installed_backends"}
    tops = {path.relative_to(OURS).parts[0].removesuffix(".py") for path in names(OURS)}
    assert tops - interface == {room.partition(".")[0] for room in rooms()}


def test_public_names_stay_what_they_are_once_their_modules_are_loaded() -> None:
    import dataloaders.cache as cache

    first = {name: getattr(cache, name) for name in cache.__all__}
    assert all(callable(value) for value in first.values())
    assert {name: getattr(cache, name) for name in cache.__all__} == first
