"""Layers: a module imports only from its own and lower layers, and never torch.distributed.tensor; files are short."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from parsed_modules import parse_source

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "dtensor"
MAX_LINES = 600  # of a file
MAX_FUNCTION = 80  # lines of a function, with its docstring

# From the lowest layer up. The longest matching name is the layer of a module.
LAYERS = (
    "errors",
    "base",
    "watchdog",
    "placement",
    "ranks",
    "mesh",
    "layout",
    "comm",
    "state",
    "cost",
    "random",
    "rules",
    "rules/kernels",
    "rules/aten",
    "redistribute",
    "propagation",
    "dispatch/programs",
    "dispatch",
    "user_rules",
    "tensor",
    "tensor/modules",
    "tensor/views",
    "tensor/overrides",
    "interop",
    "parallel/tensor",
    "parallel/data/settings",
    "parallel/data/units/parameters",
    "parallel/data/units/gradients",
    "parallel/data/units",
    "parallel/data",
    "parallel",
    "sharding_spec",
    "checkpoint",
    "plan",
    "capture/guards",
    "capture/tracing",
    "capture/replay",
    "capture/recording",
    "capture",
    "testing",
    "recorders",
    "debug",
    "clusters",
    "commands",
    "sharded_tensor",
    "hf",
    "device_mesh",
    "placement_types",
    "fsdp",
    "functional",
    "experimental",
    "_utils",
    "install",
    "__init__",
    "__main__",
)
ALIASES = {
    "_utils",
    "device_mesh",
    "experimental",
    "fsdp",
    "placement_types",
}  # modules with the names of torch or transformers
FORBIDDEN = ("torch.distributed.tensor", "torch.distributed._tensor", "torch.distributed._local_tensor")

MODULES = sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    """Return the dotted name of a file, without ``__init__``."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {module_name(path) for path in MODULES}


def layer_of(module: str) -> int:
    """Return the index of the layer of a module."""
    name = module.removeprefix("dtensor").removeprefix(".").replace(".", "/") or "__init__"
    matching = [layer for layer in LAYERS if name == layer or name.startswith(layer + "/")]
    if not matching:
        raise LookupError(f"{module} is in no layer: put it in a folder of LAYERS")
    return LAYERS.index(max(matching, key=len))


@cache
def nodes_of(source: str) -> list[ast.AST]:
    """Return the module and all its statements, without expressions."""
    nodes: list[ast.AST] = [parse_source(source)]
    for node in nodes:
        nodes += [child for part in ("body", "orelse", "finalbody", "handlers", "cases") for child in getattr(node, part, ())]
    return nodes


def imports_of(source: str, module: str, is_package: bool = False) -> Iterator[tuple[str, int]]:
    """Yield the absolute name and the line of each import in ``source``, which is the text of ``module``."""
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
    """Return the module of an imported name: ``dtensor.mesh.device_mesh`` for ``dtensor.mesh.device_mesh.DeviceMesh``."""
    while name not in NAMES:
        name = name.rpartition(".")[0]
    return name


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """Return the forbidden imports in ``source``, one line each."""
    result = []
    own = layer_of(module)
    for imported, line in imports_of(source, module, is_package):
        where = f"{module}:{line} imports {imported}"
        if any(imported == forbidden or imported.startswith(forbidden + ".") for forbidden in FORBIDDEN):
            result.append(f"{where}: torch.distributed.tensor is only for tests and benchmarks")
        elif imported.partition(".")[0] == "dtensor" and (other := layer_of(module_of(imported))) > own:
            result.append(f"{where}: {LAYERS[own]} must not import {LAYERS[other]}, a higher layer")
    return result


def imports_by_module() -> dict[str, set[str]]:
    """Return, for each module, the modules that it imports."""
    found = {}
    for path in MODULES:
        module = module_name(path)
        names = imports_of(path.read_text(), module, path.name == "__init__.py")
        found[module] = {module_of(name) for name, _ in names if name.partition(".")[0] == "dtensor"} - {module}
    return found


def test_modules_import_only_lower_layers() -> None:
    found = [line for path in MODULES for line in violations(path.read_text(), module_name(path), path.name == "__init__.py")]
    assert not found, "\n".join(found)


def test_imports_have_no_cycles() -> None:
    """Remove modules without remaining imports until none is left."""
    remaining = imports_by_module()
    while independent := {module for module, imported in remaining.items() if not imported & remaining.keys()}:
        remaining = {module: imported for module, imported in remaining.items() if module not in independent}
    assert not remaining, "in an import cycle or above one: " + ", ".join(sorted(remaining))


def length_problems(source: str) -> list[str]:
    """Return the files and functions of ``source`` beyond the limits."""
    lines = len(source.splitlines())
    found = [f"the file has {lines} lines: split it by concept"] if lines > MAX_LINES else []
    for node in nodes_of(source):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            found += [f"{node.name} has {lines} lines"] if lines > MAX_FUNCTION else []
    return found


def test_length_problems_are_found_in_files_and_functions() -> None:
    body = "    pass\n"
    assert not length_problems("def f():\n" + body * (MAX_FUNCTION - 1))
    assert length_problems("class C:\n def f(self):\n" + body * MAX_FUNCTION) == [f"f has {MAX_FUNCTION + 1} lines"]
    assert not length_problems("x = 1\n" * MAX_LINES)
    assert len(length_problems("x = 1\n" * (MAX_LINES + 1))) == 1


def test_files_and_functions_are_within_the_line_limits() -> None:
    found = [f"{path.relative_to(ROOT)}: {line}" for path in MODULES for line in length_problems(path.read_text())]
    assert not found, "\n".join(found)


def test_each_folder_is_a_layer_and_the_root_has_only_public_modules() -> None:
    """``ls dtensor`` shows the layers. The root has only the package root and public aliases."""
    folders = {module_name(path).replace(".", "/").removeprefix("dtensor/") for path in MODULES if path.name == "__init__.py"}
    assert {folder.partition("/")[0] for folder in folders} - {"dtensor"} <= set(LAYERS) | {"parallel"}
    at_root = {path.stem for path in PACKAGE.glob("*.py")}
    assert at_root == {"__init__", "__main__", "errors", "functional", "install", "placement", "sharded_tensor"} | ALIASES


def test_printed_lines_per_layer_count_each_module() -> None:
    """``make layers`` prints the lines of each layer."""
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
        ("def f():\n    from torch.distributed.tensor import DTensor  # reason", "dtensor.recorders.comm_mode", False),
        ("def f():\n    from torch.distributed import tensor  # reason", "dtensor.recorders.comm_mode", False),
        ("from torch.distributed.tensor.placement_types import Shard", "dtensor.placement", False),
        ("from torch.distributed._local_tensor import LocalTensor", "dtensor.comm.in_process", False),
        ("import torch.distributed as dist", "dtensor.mesh.device_mesh", True),
    ],
)
def test_violations_finds_forbidden_imports(line: str, module: str, allowed: bool) -> None:
    assert (violations(line, module) == []) is allowed


def test_data_files_are_in_the_package_data() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["dtensor"]
    data_files = [
        path.relative_to(PACKAGE) for path in PACKAGE.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")
    ]
    assert data_files
    assert not [path for path in data_files if not any(path.match(pattern) for pattern in patterns)]
