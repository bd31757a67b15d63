"""Public names: each docstring describes communication and errors and has an example."""

from __future__ import annotations

import dataclasses
import inspect
import re
import subprocess
import sys
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest

import dtensor as dt

PACKAGES = ("checkpoint", "debug", "parallel", "sharding_spec", "testing", "sharded_tensor", "clusters", "hf")
ALIASES = ("fsdp", "experimental", "device_mesh", "placement_types")
MODULES: tuple[ModuleType, ...] = (dt, *(import_module(f"dtensor.{name}") for name in (*PACKAGES, *ALIASES)))
COST = re.compile(r"communicat|collective|gather|all-reduce|all-to-all|reduce-scatter|broadcast|\bcosts?\b", re.IGNORECASE)
ERRORS = re.compile(r"\braise[sd]?\b|Error\b|\berrors?\b", re.IGNORECASE)


def public_callables() -> dict[str, Any]:
    """Return the public callables of all public modules, each under its first name."""
    found: dict[int, tuple[str, Any]] = {}
    for module in MODULES:
        for name in module.__all__:
            public_object = getattr(module, name)
            if callable(public_object):
                found.setdefault(id(public_object), (f"{module.__name__}.{name}", public_object))
    own = dt.functional.typed_by_first  # the other names of the module are those of torch
    return dict(found.values()) | {f"{own.__module__}.{own.__name__}": own}


NAMES = public_callables()


def is_record_or_error(public_object: Any) -> bool:
    """Return True if ``public_object`` is a record, a base class of records or an error, which need not describe errors."""
    if not inspect.isclass(public_object):
        return False
    record = dataclasses.is_dataclass(public_object) or issubclass(public_object, (tuple, Exception))
    return record or any(dataclasses.is_dataclass(subclass) for subclass in public_object.__subclasses__())


@pytest.mark.parametrize("name", NAMES)
def test_docstring_of_a_public_name_has_communication_errors_and_an_example(name: str) -> None:
    public_object = NAMES[name]
    doc = (public_object.__doc__ or "") + ((public_object.__init__.__doc__ or "") if inspect.isclass(public_object) else "")
    assert ">>> " in doc, f"{name} has no example"
    assert COST.search(doc), f"{name} does not say what it communicates"
    assert is_record_or_error(public_object) or ERRORS.search(doc), f"{name} does not say what it raises"


def test_public_names_include_the_main_ones_and_all_have_docstrings() -> None:
    assert len(NAMES) > 100
    assert {"dtensor.DTensor", "dtensor.parallel.fully_shard", "dtensor.checkpoint.save"} <= {*NAMES}
    undocumented = [name for name, public_object in NAMES.items() if not (public_object.__doc__ or "").strip()]
    assert undocumented == []


ADVICE = {
    "fully_shard": "write `from dtensor.parallel import fully_shard`",
    "visualize_sharding": "write `from dtensor.debug import visualize_sharding`",
    "CommDebugMode": "write `from dtensor.debug import CommDebugMode`",
    "fullyshard": "did you mean `from dtensor.parallel import fully_shard`?",
    "distribute_tensors": "did you mean `from dtensor import distribute_tensor`?",
    "shard": "did you mean `from dtensor import Shard`?",
}


@pytest.mark.parametrize("name", ADVICE)
def test_error_of_a_missing_name_has_the_import_statement_to_write(name: str) -> None:
    assert not hasattr(dt, name)
    with pytest.raises(AttributeError) as access:
        getattr(dt, name)
    assert str(access.value) == f"module 'dtensor' has no attribute {name!r}: {ADVICE[name]}"
    with pytest.raises(ImportError) as statement:
        exec(f"from dtensor import {name}")
    assert str(statement.value) == f"cannot import name {name!r} from 'dtensor': {ADVICE[name]}"


@pytest.mark.parametrize("name", ["_fully_shard", "__wrapped__", "unrelated_name"])
def test_error_of_a_name_that_resembles_no_public_name_has_no_advice(name: str) -> None:
    with pytest.raises(AttributeError) as access:
        getattr(dt, name)
    assert str(access.value) == f"module 'dtensor' has no attribute {name!r}"
    with pytest.raises(ImportError, match=f"cannot import name '{name}' from 'dtensor' \\("):
        exec(f"from dtensor import {name}")


def test_advice_on_a_name_imports_no_package() -> None:
    code = """
import sys, dtensor
loaded = set(sys.modules)
print(hasattr(dtensor, "fully_shard"), hasattr(dtensor, "clusters"))
print(sorted(module for module in set(sys.modules) - loaded if module.startswith("dtensor.")))
import dtensor.clusters
from dtensor import commands, testing
print(dtensor.clusters.best.__module__.startswith("dtensor.clusters"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["False False", "['dtensor.base.public_names']", "True"]
