"""Value classes are what ``dataclasses`` makes of them, but for what is compiled when."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import weakref
from typing import Any, ClassVar

import pytest

from dtensor.base.values import as_value, field


@as_value(frozen=True, slots=True)
class Point:
    kind: ClassVar[str] = "point"
    x: int
    y: int = 2
    made: list[int] = field(default_factory=list, compare=False)
    hidden: int = field(default=7, repr=False)


@as_value(frozen=True, slots=True, weakref_slot=True)
class Named(Point):
    name: str = "origin"


@as_value()
class Open:
    x: float
    seen: dict[str, int] = field(default_factory=dict)
    twice: float = field(init=False)

    def __post_init__(self) -> None:
        self.twice = 2 * self.x

    def __repr__(self) -> str:
        return "mine"


@as_value(slots=True, eq=False)
class Apart:
    x: int


@dataclasses.dataclass(frozen=True, slots=True)
class Known:
    kind: ClassVar[str] = "point"
    x: int
    y: int = 2
    made: list[int] = dataclasses.field(default_factory=list, compare=False)
    hidden: int = dataclasses.field(default=7, repr=False)


def test_values_are_made_compared_hashed_and_shown_as_a_dataclass_has_it() -> None:
    for args, kwargs in [((1,), {}), ((1, 3), {}), ((), {"x": 1, "made": [4]}), ((1, 2, [5], 8), {})]:
        ours, theirs = Point(*args, **kwargs), Known(*args, **kwargs)
        assert dataclasses.asdict(ours) == dataclasses.asdict(theirs)
        assert repr(ours) == repr(theirs).replace("Known", "Point")
        assert hash(ours) == hash(theirs)
        assert ours != theirs
        assert ours == Point(*args, **kwargs)
    assert Point(1) == Point(1, made=[3]) != Point(2)
    assert Point(1).made is not Point(1).made
    assert (Point.kind, Point.__match_args__, Point.__doc__) == ("point", Known.__match_args__, None)
    for bad in ((), (1, 2, [], 3, 4)):
        with pytest.raises(TypeError, match="__init__"):
            Point(*bad)
    with pytest.raises(TypeError, match="unexpected"):
        Point(1, z=2)  # type: ignore[call-arg]


def test_frozen_values_stay_and_have_no_more_attributes() -> None:
    point: Any = Point(1)
    for change in (lambda: setattr(point, "x", 2), lambda: delattr(point, "x"), lambda: setattr(point, "z", 2)):
        with pytest.raises(dataclasses.FrozenInstanceError, match=r"dataclasses\.replace"):
            change()
    with pytest.raises(AttributeError):
        Apart(1).z = 2  # type: ignore[attr-defined]
    assert dataclasses.replace(point, x=5) == Point(5)
    assert not hasattr(point, "__dict__")


def test_values_are_copied_and_pickled() -> None:
    for x in (Point(1, made=[2]), Named(3, name="a"), Apart(4)):
        for other in (copy.copy(x), copy.deepcopy(x), pickle.loads(pickle.dumps(x))):
            assert dataclasses.asdict(other) == dataclasses.asdict(x)


def test_a_class_has_the_fields_of_its_bases_first() -> None:
    named = Named(1, 3)
    assert [one.name for one in dataclasses.fields(named)] == ["x", "y", "made", "hidden", "name"]
    assert repr(named) == "Named(x=1, y=3, made=[], name='origin')"
    assert named != Point(1, 3)
    assert weakref.ref(named)() is named
    match named:
        case Point(1, y):
            assert y == 3
        case _:
            pytest.fail("values match by position")


def test_what_a_class_has_of_its_own_stays() -> None:
    x = Open(1.5)
    assert (x.twice, repr(x), x == Open(1.5), Open.__hash__) == (3.0, "mine", True, None)
    x.x = 2.0
    assert x != Open(1.5)
    assert Apart(1) != Apart(1)
    assert len({Apart(1), Apart(1)}) == 2


def test_the_first_value_of_a_class_may_be_one_of_a_class_below() -> None:
    @as_value()
    class Above:
        x: int

    class Below(Above):
        pass

    assert [Below(1), Below(1).x, Above(2).x] == [Below(1), 1, 2]
