"""What the package loads and exports, and which of its rooms may import which."""

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import dataloaders

TESTS = Path(__file__).parent
FRONT_DOORS = {
    "dataloaders",
    *(f"dataloaders.{name}" for name in ("backend", "bottleneck", "cache", "cli", "errors")),
    *(f"dataloaders.{name}" for name in ("predicting", "findings", "plan", "registry", "samplers")),
    *("dataloaders.specification", "dataloaders.tuning"),
    *(f"backends.{name}" for name in ("dali", "h5", "prefetch", "stock", "synthetic")),
}
MOST_INTERNAL_IMPORTS = 65  # may only fall: lower it when you remove some
HEAVY = ("h5py", "nvidia.dali", "torchvision", "PIL", "rich", "psutil", "matplotlib")
OURS = Path(dataloaders.__file__).parent
THEIRS = OURS.parent / "backends"

ROW = re.compile(r"^\| `([a-z.]+)` \|[^|]*\|([^|]*)\|$", re.MULTILINE)


def rooms():
    """By room, those that it may import: the table in docs/architecture.md."""
    page = (OURS.parent / "docs" / "architecture.md").read_text()
    table = {room: set(re.findall(r"`([a-z.]+)`", allowed)) for room, allowed in ROW.findall(page)}
    table["cli"] |= {room for room in table if room != "cli"}
    return table


ROOMS = rooms()


def room_of(module):
    """The room of ``dataloaders.x.y`` or of a name in it; None for the package itself."""
    parts = module.split(".")[1:]
    if parts[:2] in (["tuning", "auto"], ["tuning", "learned"]):
        return "tuning.auto"
    return parts[0] if parts and parts[0] in ROOMS else None


def files(folder):
    """Each module below ``folder``, by its path from there, and what it imports."""
    found = sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)
    assert len(found) > 20
    for path in found:
        yield path.relative_to(folder), list(imported(path))


def imported(path):
    """Modules that the file imports, also in functions, except those for type checking."""
    pending = [ast.parse(path.read_text())]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            name = "." * node.level + (node.module or "")
            yield name
            joint = "" if name.endswith(".") else "."
            yield from (f"{name}{joint}{alias.name}" for alias in node.names)
        elif not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            pending.extend(ast.iter_child_nodes(node))


def test_importing_loads_nothing_heavy():
    source = (
        "import sys, dataloaders; print('torch' in sys.modules); dataloaders.registry.load('stock')"
        f"\ndataloaders.DataLoader; print([name for name in {HEAVY} if name in sys.modules])"
    )
    done = subprocess.check_output([sys.executable, "-c", source], text=True)
    assert done == "False\n[]\n"


def test_the_exports():
    names = "Backend DataLoader DataLoadersError Plan Session"
    functions = "bottleneck_check check_bottleneck tune wrap"
    assert sorted(dataloaders.__all__) == f"{names} {functions}".split()
    assert all(hasattr(dataloaders, name) for name in dataloaders.__all__)
    assert set(dataloaders.__all__) <= set(dir(dataloaders))  # what consoles complete


def test_a_backend_imports_no_other_backend():
    """Also not itself by its absolute name: a user's own ``backends`` folder may stand there."""
    for path, names in files(THEIRS):
        for name in names:
            assert name.split(".")[0] != "backends", f"{path}: use a relative import for {name}"
            climbs = len(name) - len(name.lstrip("."))
            assert climbs < len(path.parts), f"{path}: {name} leaves the backend's own folder"


def test_rooms_import_those_of_their_row_only_and_no_backend():
    seen = set()
    for room, others in ROOMS.items():
        assert others <= seen | {room}, f"{room} may import {others - seen}, which comes after it"
        seen.add(room)
    tops = set()
    for path, names in files(OURS):
        assert not [name for name in names if name.split(".")[0] == "backends"], path
        tops.add(path.parts[0].removesuffix(".py"))
        own = room_of(".".join(("dataloaders", *path.with_suffix("").parts)))
        if own is None:
            continue
        known = {name for name in names if "dataloaders." in name}
        # `from dataloaders import DataLoader` would pass by the table.
        roots = [name for name in known if name.count(".") == 1 and not room_of(name)]
        assert not roots or own == "cli", f"{path}: {roots}, from the package itself"
        packages = {name.rpartition(".")[0] for name in known}
        found = {room_of(name) for name in known - packages} - {None}
        within = {own} if own != "tuning" else {own, "tuning.auto"}
        assert found <= ROOMS[own] | within, f"{path}: {found}"
    expected = {"__init__", "__main__", "_installed_backends"}
    assert tops - expected == {room.partition(".")[0] for room in ROOMS}


def test_no_module_imports_itself_by_way_of_others():
    modules = {}
    for path, names in files(OURS):
        parts = ("dataloaders", *path.with_suffix("").parts)
        name = ".".join(parts).removesuffix(".__init__")
        package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
        found = set()
        for other in names:
            dots = len(other) - len(other.lstrip("."))
            base = package[: len(package) + 1 - dots] if dots else []
            found.add(".".join([*base, *filter(None, other.lstrip(".").split("."))]))
        modules[name] = found - {name}
    for name, found in modules.items():
        found &= modules.keys()
        # `from a import b` needs a only to find the module b.
        modules[name] = found - {other.rpartition(".")[0] for other in found}
    TopologicalSorter(modules).prepare()


def is_internal(module):
    """Return whether it is ours and no front door, nor a name of one that is no module."""
    if module.split(".")[0] not in ("dataloaders", "backends") or module in FRONT_DOORS:
        return False
    outer, _, _ = module.rpartition(".")
    place = OURS.parent.joinpath(*module.split("."))
    return outer not in FRONT_DOORS or place.is_dir() or place.with_suffix(".py").is_file()


def test_tests_come_through_the_front_doors():
    """An import of an internal is what a redesign of it breaks: see CONTRIBUTING.md.

    A patch by a name in a string sets what nobody reads any more once the module has moved.
    """
    found = []
    for path in sorted(TESTS.rglob("*.py")):
        text = path.read_text()
        assert not re.search(r"""setattr\(\s*["']""", text), path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                names = names if node.module in FRONT_DOORS else [node.module]
            else:
                continue
            if any(map(is_internal, names)):
                found.append(f"{path.relative_to(TESTS)}:{node.lineno}")
    assert len(found) <= MOST_INTERNAL_IMPORTS, "\n".join(found)
