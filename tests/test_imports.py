"""What the package loads, exports, and may know of itself."""

from __future__ import annotations

import ast
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
    "check_bottleneck",
    "tune",
    "wrap",
]

OURS = Path(dataloaders.__file__).parent
THEIRS = OURS.parent / "backends"

# The layers: each file may import those before it at its top level, and any inside functions.
LAYERS = (
    {
        "errors",
        "flow",
        "page_cache",
        "pool",
        "workers",
        "waiting",
        "stats",
        "random_states",
        "specification",
    },
    {"batch", "randomness", "plan"},
    {"backend", "registry", "learned"},
    {"seeding", "auto", "samplers"},
    {"loader"},
)


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


@pytest.mark.parametrize(("level", "layer"), list(enumerate(LAYERS)))
def test_the_arrows_go_one_way(level: int, layer: set[str]) -> None:
    above = set().union(*LAYERS[level + 1 :]) | {"bottleneck", "tuning", "scripts", "cli"}
    for module in sorted(layer):
        known = set(imported(OURS / f"{module}.py", top_level=True))
        forbidden = {f"dataloaders.{name}" for name in above} & known
        assert not forbidden, f"{module}.py imports {forbidden}"


@pytest.mark.parametrize("module", ["errors", "page_cache", "waiting", "workers"])
def test_the_lowest_files_import_nothing_of_ours(module: str) -> None:
    known = imported(OURS / f"{module}.py", top_level=False)
    assert not [name for name in known if name.startswith(("dataloaders", "."))]


def test_public_names_stay_what_they_are_once_their_modules_are_loaded() -> None:
    import dataloaders.cache as cache

    first = {name: getattr(cache, name) for name in cache.__all__}
    assert all(callable(value) for value in first.values())
    assert {name: getattr(cache, name) for name in cache.__all__} == first
