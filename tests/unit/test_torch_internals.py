"""Torch internals: private names of torch are used through one module, and a missing name is reported with its use."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from parsed_modules import parse_source

from dtensor.base import torch_internals
from dtensor.base.torch_internals import NAMES, Internal

PACKAGE = Path(torch_internals.__file__).parents[1]
DOCUMENTED = ("torch._foreach_",)  # documented in the manual of torch


@pytest.mark.parametrize("name", NAMES)
def test_this_torch_has_each_listed_private_name(name: str) -> None:
    assert getattr(torch_internals, name) is not None
    assert NAMES[name].use
    assert NAMES[name].instead


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_private_name_raises_with_its_use(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(vars(torch_internals), name, raising=False)
    monkeypatch.setitem(NAMES, name, Internal(NAMES[name].path + "_of_another_torch", *NAMES[name][1:]))
    with pytest.raises(ImportError, match="_of_another_torch, which dtensor needs for: ") as found:
        getattr(torch_internals, name)
    assert NAMES[name].use in str(found.value)


def test_private_names_of_torch_are_used_only_in_torch_internals() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.name != "torch_internals.py"
        for name, line in private_names(path.read_text())
    ]
    assert not found, "take them from dtensor.base.torch_internals:\n" + "\n".join(found)


def test_private_names_finds_imports_and_attributes() -> None:
    lines = ("import torch", "from torch.utils._pytree import tree_map", "y = torch._C._nn.gelu(torch._foreach_add)")
    source = "\n".join(lines)
    assert [name for name, _ in private_names(source)] == ["torch.utils._pytree.tree_map", "torch._C._nn.gelu"]


def private_names(source: str) -> Iterator[tuple[str, int]]:
    """Yield names of torch with a part that begins with one underscore, except operators."""
    known: dict[str, str] = {}
    inner: set[ast.AST] = set()
    for node in ast.walk(parse_source(source)):
        match node:
            case ast.Import(names):
                for name in names:
                    known[name.asname or name.name.partition(".")[0]] = name.name if name.asname else name.name.partition(".")[0]
            case ast.ImportFrom(str(module), names, 0):
                for name in names:
                    known[name.asname or name.name] = f"{module}.{name.name}"
                    if is_private(f"{module}.{name.name}"):
                        yield f"{module}.{name.name}", node.lineno
            case ast.Attribute() if node not in inner:
                parts: list[str] = []
                at: ast.expr = node
                while isinstance(at, ast.Attribute):
                    parts.append(at.attr)
                    inner.add(at)
                    at = at.value
                if isinstance(at, ast.Name) and at.id in known:
                    full = ".".join([known[at.id], *reversed(parts)])
                    if is_private(full) and not is_private(known[at.id]):
                        yield full, node.lineno


def is_private(name: str) -> bool:
    first, *parts = name.split(".")
    private = any(part.startswith("_") and not part.startswith("__") for part in parts)
    return first == "torch" and private and parts[0] != "ops" and not name.startswith(DOCUMENTED)


def test_factory_calls_of_the_library_name_a_device() -> None:
    """The default device of the user must not apply to tensors of the library. Models, samples and reports are exempt."""
    exempt = {"clusters", "commands", "debug", "samples"}
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if not exempt.intersection(path.relative_to(PACKAGE).parts)
        for node in ast.walk(parse_source(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in FACTORIES
        if not any(keyword.arg in ("device", None) for keyword in node.keywords)
    ]
    assert not found, "name the device:\n" + "\n".join(found)


_FACTORY_NAMES = "arange as_tensor empty empty_strided eye full linspace ones rand randint randn randperm tensor zeros"
FACTORIES = {f"torch.{name}" for name in _FACTORY_NAMES.split()}
