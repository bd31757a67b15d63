"""Values: what ``dataclasses.dataclass`` makes of a class, without compiling six functions for it while the library is imported.

Comparison, hash and representation are the same function for all classes, over the fields; the constructor is compiled when the
first value is made, which of most classes is never.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, Field, FrozenInstanceError, dataclass
from dataclasses import field as field
from inspect import get_annotations
from operator import attrgetter
from reprlib import recursive_repr
from typing import Any, TypeVar, dataclass_transform


@dataclass
class _Known:
    field: int


T = TypeVar("T")
_FIELDS = "__dataclass_fields__"  # by name, a class's and those of its bases: what dataclasses' own functions go by
_OF_INSTANCES: Any = getattr(_Known.__dataclass_fields__["field"], "_field_type")  # noqa: B009  and what each of them has


@dataclass_transform(field_specifiers=(field,))
def as_value(
    *, frozen: bool = False, slots: bool = False, eq: bool = True, repr: bool = True, weakref_slot: bool = False
) -> Callable[[type[T]], type[T]]:
    """A decorator; arguments are those of ``dataclasses.dataclass``, what a class has of its own stays."""

    def made(cls: type[T]) -> type[T]:
        fields = {name: one for base in reversed(cls.__mro__[1:]) for name, one in base.__dict__.get(_FIELDS, {}).items()}
        own = cls.__dict__
        for name, kind in get_annotations(cls).items():
            if not kind.startswith("ClassVar"):
                given = own.get(name, MISSING)
                one: Any = given if isinstance(given, Field) else field(default=given)
                one.name, one.type, one._field_type = name, kind, _OF_INSTANCES
                fields[name] = one
        given_hash = own.get("__hash__", MISSING)
        methods: dict[str, Any] = {_FIELDS: fields, "__match_args__": tuple(name for name, one in fields.items() if one.init)}
        methods["__init__"] = _constructor(frozen, fields)
        if repr:
            methods["__repr__"] = _shown
        if eq:
            compared = [name for name, one in fields.items() if one.compare]
            methods["__eq__"] = _equals(_read(compared))
            if given_hash is MISSING or (given_hash is None and "__eq__" in own):
                methods["__hash__"] = _hashes(_read(compared)) if frozen else None
        if frozen:
            methods |= {"__setattr__": _refused, "__delattr__": _refused}
            if slots:  # as they stand in files that a dataclass has written
                methods |= {"__getstate__": _state, "__setstate__": _set_state}
        skipped = {"__hash__"} if "__hash__" in methods else set()
        methods = {name: one for name, one in methods.items() if name in skipped or name not in own}
        if slots:
            return _slotted(cls, fields, methods, ("__weakref__",) if weakref_slot else ())
        for name, one in methods.items():
            setattr(cls, name, one)
        for name, given in [(name, given) for name, given in own.items() if isinstance(given, Field)]:
            delattr(cls, name) if given.default is MISSING else setattr(cls, name, given.default)
        return cls

    return made


def _slotted(cls: type[T], fields: dict[str, Any], methods: dict[str, Any], further: tuple[str, ...]) -> type[T]:
    inherited = {name for base in cls.__mro__[1:] for name in base.__dict__.get("__slots__", ())}
    names = [name for name in (*fields, *further) if name not in inherited]
    kept = {name: one for name, one in cls.__dict__.items() if name not in (*fields, "__dict__", "__weakref__")}
    kind: Any = type(cls)
    made: type[T] = kind(cls.__name__, cls.__bases__, kept | methods | {"__slots__": tuple(names)})
    made.__qualname__ = cls.__qualname__
    return made


def _constructor(frozen: bool, fields: dict[str, Any]) -> Callable[..., None]:
    """The constructor of a class: it compiles what takes its place."""

    def first(self: Any, *args: Any, **kwargs: Any) -> None:
        owner = next(cls for cls in type(self).__mro__ if cls.__dict__.get("__init__") is first)
        setattr(owner, "__init__", made := _compiled(owner, frozen, fields))  # noqa: B010
        made(self, *args, **kwargs)

    return first


def _compiled(cls: type, frozen: bool, fields: dict[str, Any]) -> Callable[..., None]:
    names: dict[str, Any] = {"_given": object()}
    parameters, body = [], []
    for name, one in fields.items():
        names[f"_default_{name}"], names[f"_make_{name}"] = one.default, one.default_factory
        source = name
        if not one.init:
            if one.default_factory is MISSING:
                continue
            source = f"_make_{name}()"
        elif one.default_factory is not MISSING:
            parameters.append(f"{name}=_given")
            source = f"_make_{name}() if {name} is _given else {name}"
        else:
            parameters.append(name if one.default is MISSING else f"{name}=_default_{name}")
        stored: Any = getattr(cls, name, None)
        if hasattr(stored, "__set__"):  # a slot
            names[f"_set_{name}"] = stored.__set__
            body.append(f"_set_{name}(self, {source})")
        else:
            names["_set"] = object.__setattr__
            body.append(f"_set(self, {name!r}, {source})" if frozen else f"self.{name} = {source}")
    body += ["self.__post_init__()"] if hasattr(cls, "__post_init__") else []
    exec(f"def __init__(self, {', '.join(parameters)}):\n " + "\n ".join(body or ["pass"]), names)
    made: Callable[..., None] = names["__init__"]
    made.__qualname__, made.__module__ = f"{cls.__qualname__}.__init__", cls.__module__
    return made


def _read(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    """These attributes of a value."""
    match names:
        case []:
            return lambda x: ()
        case [name]:
            return lambda x: (getattr(x, name),)
    return attrgetter(*names)


def _equals(read: Callable[[Any], tuple[Any, ...]]) -> Callable[[Any, object], bool]:
    return lambda self, other: read(self) == read(other) if other.__class__ is self.__class__ else NotImplemented


def _hashes(read: Callable[[Any], tuple[Any, ...]]) -> Callable[[Any], int]:
    return lambda self: hash(read(self))


@recursive_repr()
def _shown(self: Any) -> str:
    fields = [f"{name}={getattr(self, name)!r}" for name, one in getattr(type(self), _FIELDS).items() if one.repr]
    return f"{type(self).__qualname__}({', '.join(fields)})"


def _refused(self: Any, name: str, *_: Any) -> None:
    raise FrozenInstanceError(
        f"cannot assign to field {name!r} of {type(self).__qualname__}: use dataclasses.replace(x, {name}=...)"
    )


def _state(self: Any) -> list[Any]:
    return [getattr(self, name) for name in getattr(type(self), _FIELDS)]


def _set_state(self: Any, state: list[Any]) -> None:
    for name, one in zip(getattr(type(self), _FIELDS), state, strict=True):
        object.__setattr__(self, name, one)
