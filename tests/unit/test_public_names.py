"""Whoever asks ``help`` of a public name is told what it costs and what goes wrong, and shown a program."""

from __future__ import annotations

import dataclasses
import inspect
import re
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest

import dtensor as dt

WINGS = ("checkpoint", "debug", "parallel", "sharding_spec", "testing", "sharded_tensor", "clusters", "hf")
ALIASES = ("fsdp", "experimental", "device_mesh", "placement_types")
ROOMS: tuple[ModuleType, ...] = (dt, *(import_module(f"dtensor.{name}") for name in (*WINGS, *ALIASES)))
COST = re.compile(r"communicat|collective|gather|all-reduce|all-to-all|reduce-scatter|broadcast|\bcosts?\b", re.IGNORECASE)
FAULTS = re.compile(r"\braise[sd]?\b|Error\b|\berrors?\b", re.IGNORECASE)


def names() -> dict[str, Any]:
    """What the rooms of the face offer and that can be called, each under its first name."""
    found: dict[int, tuple[str, Any]] = {}
    for room in ROOMS:
        for name in room.__all__:
            thing = getattr(room, name)
            if callable(thing):
                found.setdefault(id(thing), (f"{room.__name__}.{name}", thing))
    return dict(found.values())


NAMES = names()


def is_value(thing: Any) -> bool:
    """Whether it is a record, a base of records or an error: it raises nothing that its makers do not."""
    if not inspect.isclass(thing):
        return False
    record = dataclasses.is_dataclass(thing) or issubclass(thing, (tuple, Exception))
    return record or any(dataclasses.is_dataclass(below) for below in thing.__subclasses__())


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_says_what_it_costs_and_raises_and_shows_a_program(name: str) -> None:
    thing = NAMES[name]
    said = (thing.__doc__ or "") + ((thing.__init__.__doc__ or "") if inspect.isclass(thing) else "")
    assert ">>> " in said, f"{name} has no example"
    assert COST.search(said), f"{name} does not say what it communicates"
    assert is_value(thing) or FAULTS.search(said), f"{name} does not say what it raises"


def test_all_rooms_are_asked() -> None:
    assert len(NAMES) > 100
    assert {"dtensor.DTensor", "dtensor.parallel.fully_shard", "dtensor.checkpoint.save"} <= {*NAMES}
    hidden = [name for name, thing in NAMES.items() if not (thing.__doc__ or "").strip()]
    assert hidden == []
