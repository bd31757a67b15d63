"""Each module imports only from lower layers, the peer is never imported, and files stay readable in one sitting."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "dtensor"
MAX_LINES = 400


def layers_of(page: str) -> dict[str, int]:
    """Module -> layer, from the table of a page: ``| 1 | `mesh` `layout` |``. ``dtensor/__init__.py`` is above all."""
    rows = re.findall(r"^\| (\d+) \|([^|]*)\|", page, re.MULTILINE)
    layers = {name.rstrip("/"): int(layer) for layer, names in rows for name in re.findall(r"`([\w/]+)`", names)}
    return layers | {"__init__": 1 + max(layers.values(), default=0)}


# The table is the specification: a module that it does not name fails the test. Inside one layer imports are free.
LAYER_OF = layers_of((ROOT / "docs" / "design.md").read_text().partition("Layers\n")[2])
PEER = ("torch.distributed.tensor", "torch.distributed._tensor", "torch.distributed._local_tensor")

MODULES = sorted(PACKAGE.rglob("*.py"))


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module, absolute, and where it stands."""

    module: str
    line: int
    at_module_level: bool
    reason: str  # the comment on its line


def module_name(path: Path) -> str:
    """``dtensor.comm.protocol`` for its file; ``dtensor.comm`` for its ``__init__.py``."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)


def layer_of(module: str) -> int:
    """The layer of a module of this package."""
    name = (module.split(".") + ["__init__"])[1]
    if name not in LAYER_OF:
        raise LookupError(f"dtensor.{name} is in no layer: name it in the table of layers in docs/design.md")
    return LAYER_OF[name]


def imports_of(source: str, module: str, is_package: bool = False) -> Iterator[Import]:
    """Every import of ``source``, relative ones made absolute with ``module`` as the importer."""
    lines = source.splitlines()

    def found(name: str, node: ast.stmt, top: bool) -> Import:
        text = "".join(lines[node.lineno - 1 : node.end_lineno])
        return Import(name, node.lineno, top, text.partition("#")[2].strip())

    def visit(node: ast.AST, top: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            match child:
                case ast.Import(names):
                    yield from (found(name.name, child, top) for name in names)
                case ast.ImportFrom(target, names, level):
                    base = absolute(module, is_package, target, level)
                    # `from . import mesh` names modules; `from .mesh import DeviceMesh` names one module's contents
                    yield from (found(f"{base}.{name.name}", child, top) for name in names)
                case _:
                    inner = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) or is_type_checking(child)
                    yield from visit(child, top and not inner)

    return visit(ast.parse(source), True)


def absolute(module: str, is_package: bool, target: str | None, level: int) -> str:
    if level == 0:
        return target or ""
    parent = module.split(".") + (["__init__"] if is_package else [])
    return ".".join(parent[:-level] + ([target] if target else []))


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """What the law forbids in ``source``, one line each."""
    result = []
    own = layer_of(module)
    for found in imports_of(source, module, is_package):
        where = f"{module}:{found.line} imports {found.module}"
        if any(found.module == peer or found.module.startswith(peer + ".") for peer in PEER):
            result.append(f"{where}: the peer is only for tests and benchmarks")
        elif found.module.partition(".")[0] == "dtensor" and found.module != "dtensor":
            upward = layer_of(found.module) > own
            excused = not found.at_module_level and found.reason
            if upward and not excused:
                result.append(
                    f"{where}: layer {own} must not import layer {layer_of(found.module)}; "
                    "if a function really needs it, import it there, with the reason as a comment on the line"
                )
    return result


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_module_imports_only_lower_layers(path: Path) -> None:
    found = violations(path.read_text(), module_name(path), path.name == "__init__.py" and path.parent != PACKAGE)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_every_module_has_a_layer(path: Path) -> None:
    assert layer_of(module_name(path)) >= 0


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_file_is_at_most_400_lines(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= MAX_LINES, f"{path.relative_to(ROOT)} has {lines} lines: split it by concept"


def test_the_layers_are_read_from_the_page() -> None:
    assert layers_of("| layer | modules |\n|---|---|\n| 0 | `errors` `placement` |\n| 1 | `comm/` |\n") == {
        "errors": 0,
        "placement": 0,
        "comm": 1,
        "__init__": 2,
    }
    assert LAYER_OF["errors"] < LAYER_OF["mesh"] < LAYER_OF["rules"] < LAYER_OF["dispatch"] < LAYER_OF["tensor"]


def test_lines_per_layer_are_shown() -> None:
    """Counted to be looked at: ``make layers`` prints them."""
    counted: dict[int, list[tuple[str, int]]] = {}
    for path in MODULES:
        name = module_name(path)
        counted.setdefault(layer_of(name), []).append((name.removeprefix("dtensor."), len(path.read_text().splitlines())))
    print()
    for layer, files in sorted(counted.items()):
        longest = ", ".join(f"{name} {lines}" for name, lines in sorted(files, key=lambda item: -item[1]))
        print(f"layer {layer}: {sum(lines for _, lines in files):6} lines  {longest}")
    assert sum(len(files) for files in counted.values()) == len(MODULES)


@pytest.mark.parametrize(
    ("line", "module", "allowed"),
    [
        ("from .placement import Shard", "dtensor.layout", True),
        ("from .mesh import DeviceMesh", "dtensor.placement", False),
        ("from . import tensor", "dtensor.dispatch", False),
        ("from ..tensor import DTensor", "dtensor.rules.rule", False),
        ("from dtensor.redistribute.plan import plan", "dtensor.rules.rule", False),
        ("from ..rules.rule import Rule", "dtensor.redistribute.cost", True),
        ("def f():\n    from .comm import communicator_of", "dtensor.mesh", False),
        ("def f():\n    from .comm import communicator_of  # the way back up", "dtensor.mesh", True),
        ("if TYPE_CHECKING:\n    from .tensor import DTensor  # a name in an annotation", "dtensor.layout", True),
        ("import torch.distributed.tensor", "dtensor.testing.oracle", False),
        ("import torch.distributed.tensor as peer  # to compare", "dtensor.testing.oracle", False),
        ("def f():\n    from torch.distributed.tensor import DTensor  # reason", "dtensor.debug", False),
        ("def f():\n    from torch.distributed import tensor  # reason", "dtensor.debug", False),
        ("from torch.distributed.tensor.placement_types import Shard", "dtensor.placement", False),
        ("from torch.distributed._local_tensor import LocalTensor", "dtensor.comm.in_process", False),
        ("import torch.distributed as dist", "dtensor.mesh", True),
    ],
)
def test_the_law_catches_what_it_should(line: str, module: str, allowed: bool) -> None:
    assert (violations(line, module) == []) is allowed
