"""Folders are layers: a file imports only from its own folder and from those that stand before it. The peer is never imported."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "dtensor"
MAX_LINES = 600  # of a file: one concept, whole
MAX_FUNCTION = 80  # lines of a function, its docstring counts

# From the ground up. A folder inside another is a layer of its own where it is named here; the longest name that fits counts.
LAYERS = (
    "errors",
    "base",
    "watchdog",
    "placement",
    "ranks",
    "mesh",
    "layout",
    "comm",
    "cost",
    "random",
    "rules",
    "rules/aten",
    "redistribute",
    "propagation",
    "dispatch",
    "tensor",
    "tensor/views",
    "tensor/overrides",
    "interop",
    "parallel/tensor",
    "parallel/data",
    "parallel",
    "sharding_spec",
    "checkpoint",
    "plan",
    "capture",
    "testing",
    "debug",
    "clusters",
    "sharded_tensor",
    "hf",
    "device_mesh",
    "placement_types",
    "fsdp",
    "experimental",
    "_utils",
    "__init__",
    "__main__",
)
ALIASES = {
    "_utils",
    "device_mesh",
    "experimental",
    "fsdp",
    "hf",
    "placement_types",
}  # by the names that others have for these rooms
PEER = ("torch.distributed.tensor", "torch.distributed._tensor", "torch.distributed._local_tensor")

MODULES = sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    """``dtensor.comm.protocol`` for its file; ``dtensor.comm`` for its ``__init__.py``."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {module_name(path) for path in MODULES}


def layer_of(module: str) -> int:
    """The layer of a module of this package."""
    name = module.removeprefix("dtensor").removeprefix(".").replace(".", "/") or "__init__"
    fitting = [layer for layer in LAYERS if name == layer or name.startswith(layer + "/")]
    if not fitting:
        raise LookupError(f"{module} is in no layer: put it in a folder of LAYERS")
    return LAYERS.index(max(fitting, key=len))


@cache
def nodes_of(source: str) -> list[ast.AST]:
    """The module and its statements, and what holds some; expressions hold none."""
    nodes: list[ast.AST] = [ast.parse(source)]
    for node in nodes:
        nodes += [below for part in ("body", "orelse", "finalbody", "handlers", "cases") for below in getattr(node, part, ())]
    return nodes


def imports_of(source: str, module: str, is_package: bool = False) -> Iterator[tuple[str, int]]:
    """Every import of ``source``, wherever it stands, and its line; relative ones absolute with ``module`` as the importer."""
    for node in nodes_of(source):
        match node:
            case ast.Import(names):
                yield from ((name.name, node.lineno) for name in names)
            case ast.ImportFrom(target, names, level):
                base = absolute(module, is_package, target, level)
                # `from . import mesh` names modules; `from .mesh import DeviceMesh` names one module's contents
                yield from ((f"{base}.{name.name}", node.lineno) for name in names)


def absolute(module: str, is_package: bool, target: str | None, level: int) -> str:
    if level == 0:
        return target or ""
    parent = module.split(".") + (["__init__"] if is_package else [])
    return ".".join(parent[:-level] + ([target] if target else []))


def module_of(name: str) -> str:
    """The module that an imported name is in: ``dtensor.mesh.device_mesh`` of ``dtensor.mesh.device_mesh.DeviceMesh``."""
    while name not in NAMES:
        name = name.rpartition(".")[0]
    return name


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """What the law forbids in ``source``, one line each."""
    result = []
    own = layer_of(module)
    for imported, line in imports_of(source, module, is_package):
        where = f"{module}:{line} imports {imported}"
        if any(imported == peer or imported.startswith(peer + ".") for peer in PEER):
            result.append(f"{where}: the peer is only for tests and benchmarks")
        elif imported.partition(".")[0] == "dtensor" and (other := layer_of(module_of(imported))) > own:
            result.append(f"{where}: {LAYERS[own]} must not import {LAYERS[other]}, which stands above it")
    return result


def arrows() -> dict[str, set[str]]:
    """Module -> the modules that it imports."""
    found = {}
    for path in MODULES:
        module = module_name(path)
        names = imports_of(path.read_text(), module, path.name == "__init__.py")
        found[module] = {module_of(name) for name, _ in names if name.partition(".")[0] == "dtensor"} - {module}
    return found


def test_modules_import_only_lower_layers() -> None:
    found = [line for path in MODULES for line in violations(path.read_text(), module_name(path), path.name == "__init__.py")]
    assert not found, "\n".join(found)


def test_no_circle() -> None:
    """Taking away what imports nothing that is left ends with nothing."""
    left = arrows()
    while ground := {module for module, below in left.items() if not below & left.keys()}:
        left = {module: below for module, below in left.items() if module not in ground}
    assert not left, "in circles or above one: " + ", ".join(sorted(left))


def too_long(source: str) -> list[str]:
    """What of ``source`` nobody understands in one sitting."""
    lines = len(source.splitlines())
    found = [f"the file has {lines} lines: split it by concept"] if lines > MAX_LINES else []
    for node in nodes_of(source):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            found += [f"{node.name} has {lines} lines"] if lines > MAX_FUNCTION else []
    return found


def test_the_measure_counts_lines() -> None:
    body = "    pass\n"
    assert not too_long("def f():\n" + body * (MAX_FUNCTION - 1))
    assert too_long("class C:\n def f(self):\n" + body * MAX_FUNCTION) == [f"f has {MAX_FUNCTION + 1} lines"]
    assert not too_long("x = 1\n" * MAX_LINES)
    assert len(too_long("x = 1\n" * (MAX_LINES + 1))) == 1


def test_files_and_functions_are_short() -> None:
    found = [f"{path.relative_to(ROOT)}: {line}" for path in MODULES for line in too_long(path.read_text())]
    assert not found, "\n".join(found)


def test_every_folder_is_a_layer() -> None:
    """``ls dtensor`` is the architecture: nothing lies at the root but the face."""
    folders = {module_name(path).replace(".", "/").removeprefix("dtensor/") for path in MODULES if path.name == "__init__.py"}
    assert {folder.partition("/")[0] for folder in folders} - {"dtensor"} <= set(LAYERS) | {"parallel"}
    at_root = {path.stem for path in PACKAGE.glob("*.py")}
    assert at_root == {"__init__", "__main__", "errors", "placement", "sharded_tensor"} | ALIASES


def test_lines_per_layer_are_shown() -> None:
    """Counted to be looked at: ``make layers`` prints them."""
    counted: dict[int, list[tuple[str, int]]] = {}
    for path in MODULES:
        name = module_name(path)
        counted.setdefault(layer_of(name), []).append((path.stem, len(path.read_text().splitlines())))
    print()
    for layer, files in sorted(counted.items()):
        longest = ", ".join(f"{name} {lines}" for name, lines in sorted(files, key=lambda item: -item[1]))
        print(f"{LAYERS[layer]}: {sum(lines for _, lines in files):6} lines  {longest}")
    assert sum(len(files) for files in counted.values()) == len(MODULES)


@pytest.mark.parametrize(
    ("line", "module", "allowed"),
    [
        ("from ..placement import Shard", "dtensor.layout.layout", True),
        ("from .mesh.device_mesh import DeviceMesh", "dtensor.placement", False),
        ("from ..tensor import dtensor", "dtensor.dispatch.dispatcher", False),
        ("from ..tensor.dtensor import DTensor", "dtensor.rules.rule", False),
        ("from ..tensor import DTensor", "dtensor.rules.rule", False),
        ("from .aten.views import own_factors", "dtensor.rules.rule", False),
        ("from ..rule import Rule", "dtensor.rules.aten.views", True),
        ("from dtensor.redistribute.planner import plan", "dtensor.rules.rule", False),
        ("from ..rules.rule import Rule", "dtensor.redistribute.planner", True),
        ("def f():\n    from ..comm import communicator_of  # the way back up", "dtensor.mesh.device_mesh", False),
        (
            "if TYPE_CHECKING:\n    from ..tensor.dtensor import DTensor  # a name in an annotation",
            "dtensor.layout.layout",
            False,
        ),
        ("import torch.distributed.tensor", "dtensor.testing.oracle", False),
        ("import torch.distributed.tensor as peer  # to compare", "dtensor.testing.oracle", False),
        ("def f():\n    from torch.distributed.tensor import DTensor  # reason", "dtensor.debug.comm_mode", False),
        ("def f():\n    from torch.distributed import tensor  # reason", "dtensor.debug.comm_mode", False),
        ("from torch.distributed.tensor.placement_types import Shard", "dtensor.placement", False),
        ("from torch.distributed._local_tensor import LocalTensor", "dtensor.comm.in_process", False),
        ("import torch.distributed as dist", "dtensor.mesh.device_mesh", True),
    ],
)
def test_the_law_catches_what_it_should(line: str, module: str, allowed: bool) -> None:
    assert (violations(line, module) == []) is allowed


def test_files_beside_modules_are_shipped() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["dtensor"]
    beside = [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")]
    assert beside
    assert not [path for path in beside if not any(path.match(pattern) for pattern in patterns)]
