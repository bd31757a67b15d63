"""What code reads that a survey reached: variables, modules, classes of libraries; and what follows from all names together."""

from __future__ import annotations

import abc
import functools
import math
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any, cast

import torch

from ..base.torch_internals import PRINT_OPTS
from ..tensor.dtensor import DTensor
from .bytecode_names import names_of, paths_named
from .guard_set import Notes, Ran
from .guards import contents
from .object_ownership import MISSING, VALUES, ById, foreign, installed, is_users, key_of, module_of, plain, value_of
from .opaque_state import state_of
from .setting_guards import ASKING, SETTINGS

_SPOKEN = ("__name__", "__qualname__", "__doc__", "__module__", "__annotations__")  # of functions, where code asks
_CALLED = ("forward", "__call__", "_call_impl", "_wrapped_call_impl")  # of torch's modules, whoever calls
_CHANGES = 1 << 9  # of a class: it is made by a class statement, so that its attributes may be set
CODE = (
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    property,
    staticmethod,
    classmethod,
    functools.cached_property,
    functools.partialmethod,
)
_BOUND = (types.MethodType, types.BuiltinMethodType)  # which may be those of a module
BEARING = (type, types.FunctionType, types.BuiltinFunctionType)  # what says itself where it stands


class CodeReads(Notes):
    """The part of a survey that reads code; ``_visit`` and the like look into objects."""

    _visit: Callable[[Any, str], None]
    _walk: Callable[[], None]
    _members: Callable[[], None]
    _all: Callable[[Iterable[Any], Iterable[str], str], None]
    _hold_dict: Callable[[Mapping[Any, Any], str, str], None]

    def __init__(self, ran: Ran | None) -> None:
        super().__init__()
        self.ran = ran or Ran()
        self._modules: dict[int, types.ModuleType] = {}  # the user's
        self._loose: dict[int, types.ModuleType] = {}  # those that are handed on
        self._asked: list[types.FunctionType] = []  # whose names and documents may be asked for
        self._caches: list[Any] = []  # which may be asked how often they were
        self._far: set[int] = set()  # those that only computed names lead to
        self._spaces: dict[int, tuple[dict[str, Any], str]] = {}  # of which any variable may be read
        self._classes: list[tuple[type, set[str], str, bool]] = []
        self._others: dict[type, None] = {DTensor: None}  # classes of libraries, of which there are objects
        self._attributes_named: dict[str, None] = {}
        self._users = self._computes = self._imports = False  # any code; whether it computes names of attributes, of modules
        self._read: set[tuple[int, str]] = set()  # variables of modules
        self._data = False  # whether code that is met is not looked into, as it is seen which one runs
        self._as_data: set[int] = set()  # what was met so

    def _settings(self, module: str, path: str) -> None:
        """What is set of a library that the function has something of."""
        for name, state in SETTINGS.items():
            if (module == name or module.startswith(name + ".")) and self._first(state):
                self._note_state(state, f"{path}, settings of {name}")

    def _asks(self, module: str, names: Iterable[str], path: str) -> None:
        """Whether these functions of a module tell how torch is set."""
        if module.partition(".")[0] in ("torch", "") and any(name.startswith(ASKING) for name in names):
            self._settings("torch.backends", path)

    def _function(self, fn: types.FunctionType, path: str) -> None:
        self._note(ById(fn.__code__), path)
        cells, names = fn.__closure__ or (), names_of(fn.__code__)
        if foreign(fn):
            self._visit([x for x in map(contents, cells) if is_users(x)], f"{path} variables")
            return
        self._watch.function(fn)
        if not installed(fn):
            self._asked.append(fn)
        self._watch.cells(cells)
        self._all(map(contents, cells), [f" variable {name}" for name in fn.__code__.co_freevars], path)
        self._all((fn.__defaults__, fn.__kwdefaults__), (" default", " default"), path)
        self._hold_dict(vars(fn), path, ".{}")
        self._attributes_named.update(dict.fromkeys(names.attributes))
        self.codes |= names.codes
        self._users, space = True, fn.__globals__
        if not names.codes.isdisjoint(self.ran.computing):
            self._computes, self._imports = self._computes or names.computed, self._imports or names.imports
            if names.whole:
                self._spaces[id(space)] = space, path
        if names.kinds and self._first(abc.get_cache_token):
            self._note_state(abc.get_cache_token, f"{path} classes that are registered")
        self._named(space, names.variables, f"{path} global ")
        every: dict[str, Any] = cast(Any, fn).__builtins__  # not all typesheds have it
        self._builtins(every, [name for name in names.variables if name not in space], path)
        variables = {name: space.get(name) for name in names.variables}
        for name, module in (variables | dict(zip(fn.__code__.co_freevars, map(contents, cells), strict=True))).items():
            if isinstance(module, types.ModuleType):
                self._through(module, names.attributes, names.loose, path, name in names.loose)
        paths = [name for name in dict.fromkeys(paths_named(fn)) if (id(sys.modules), name) not in self._read]
        self._read.update((id(sys.modules), name) for name in paths)
        self._watch.names(sys.modules, paths)
        self._note(tuple(ById(sys.modules.get(name)) for name in paths), f"{path} imports")
        for name in dict.fromkeys(paths_named(fn)):
            if (found := sys.modules.get(name)) is not None:
                self._through(found, names.attributes, names.loose, path, names.computed)

    def _builtins(self, space: dict[str, Any], names: Iterable[str], path: str) -> None:
        """Which objects bear these names everywhere; what users have put there, whole."""
        for name in names:
            held = space.get(name, MISSING)
            if held is not MISSING and not (isinstance(held, BEARING) and module_of(held) in ("builtins", "io")):
                self._named(space, (name,), f"{path} builtin ")
            elif (id(space), name) not in self._read:
                self._read.add((id(space), name))
                self._watch.names(space, (name,))
                self._note(ById(held), f"{path} builtin {name}")

    def _through(self, module: types.ModuleType, names: Iterable[str], loose: frozenset[str], path: str, on: bool) -> None:
        """What code that names a module and these attributes reads of it, and of the modules in it; ``on``: it hands it on."""
        self._settings(module.__name__, path)
        self._asks(module.__name__, names, path)
        if module is math:  # whose functions are others while somebody records
            held = functools.partial(_of_math, [name for name in names if name in vars(math)])
            self._watch.other(held)
            self._note(tuple(map(ById, held())), path)
            return
        space, path = vars(module), f"{path} {module.__name__}."
        users = not foreign(module)
        if hasattr(type(module), "__getattr__") and not users:
            self._answers(module, [name for name in names if name not in space], path)
        if users:
            self._module(module, on)
            self._named(space, names, path)
        for name in names:
            value = space.get(name, MISSING)
            if isinstance(value, types.ModuleType):
                if (id(module), name + ".") not in self._read:
                    self._read.add((id(module), name + "."))
                    self._through(value, names, loose, path, name in loose)
            elif not users and value is not MISSING:
                self._of_others(space, name, value, path)

    def _answers(self, module: types.ModuleType, names: Iterable[str], path: str) -> None:
        """What a library's module gives by code of its own under names that it has in some table, as one of settings does."""
        tables = [held for held in vars(module).values() if type(held) is dict]
        known = [name for name in names if (id(module), name) not in self._read and any(name in table for table in tables)]
        if known:
            self._read.update((id(module), name) for name in known)
            self._note_state(functools.partial(_answered, module, known), path)

    def _module(self, module: types.ModuleType, loose: bool) -> None:
        self._far.discard(id(module))
        if not foreign(module) and self._modules.setdefault(id(module), module) and loose:
            self._loose[id(module)] = module

    # --- what follows from all names -----------------------------------------------------------------------------------
    def _reach(self) -> None:
        """What any code that was reached names, of all classes and modules that were reached: they may have been handed on."""
        known: Any = None
        done: dict[int, int] = {}
        while known != (
            known := (
                *map(len, (self._attributes_named, self._classes, self._seen, self._modules)),
                self._computes,
                self._imports,
            )
        ):
            self._members()
            if self._imports:
                self._spaces[id(sys.modules)] = sys.modules, "sys.modules"
            for key, module in list(self._modules.items()):
                space = vars(module)
                if (before := done.get(key, 0)) != len(self._attributes_named):
                    done[key] = len(self._attributes_named)
                    named = [name for name in ("__getattr__", *islice(self._attributes_named, before, None)) if name in space]
                    self._data = key in self._far
                    self._named(space, named, module.__name__)
                    self._data = False
                if self._computes and key in self._loose:
                    self._spaces[id(space)] = space, module.__name__
            for space, path in list(self._spaces.values()):
                self._whole(space, path)
            self._walk()

    def _finish(self) -> None:
        """What is read by names without being found: of modules their attributes' names; of functions how they are called; of
        libraries' classes the methods."""
        for module in self._modules.values():
            self._watch.keys(vars(module))
            self._watch.object(module)
        if self._users:
            self._hold_dict(vars(PRINT_OPTS), "print options", ".{}")
            self._watch.tensors(self.tensors)
            spoken = [name for name in _SPOKEN if self._computes or name in self._attributes_named]
            self._visit(self._watch.asked(spoken, self._asked), "functions")
            self._walk()
        if "cache_info" in self._attributes_named:
            for cache in self._caches:
                self._note_state(cache.cache_info, "how often a cache was asked")
        for kind in list(dict.fromkeys(base for one in self._others for base in one.__mro__[:-1])):
            self._methods(kind)

    def _methods(self, kind: type) -> None:
        """What of a library's class code names, or is called by the library."""
        held = vars(kind)
        own = module_of(kind).startswith(("dtensor.", "torch._C")) and kind is not DTensor
        if own or not kind.__flags__ & _CHANGES:
            return
        special = not issubclass(kind, torch.Tensor)
        names = [name for name in held if name in self._attributes_named or name in _CALLED or (special and name[:2] == "__")]
        self._watch.names(held, names)
        self._watch.size(held)
        self._note(tuple(ById(held[name]) for name in names), kind.__name__)
        if isinstance(forward := held.get("forward"), types.FunctionType):
            self._called(forward, kind.__name__)

    def _called(self, fn: types.FunctionType, path: str) -> None:
        """Which functions code of a library calls."""
        names, space = names_of(fn.__code__), fn.__globals__
        for name in names.variables:
            value = space.get(name)
            if isinstance(value, types.ModuleType):
                self._through(value, names.attributes, names.loose, path, False)
            elif isinstance(value, types.FunctionType):
                self._of_others(space, name, value, path)

    def _whole(self, space: dict[str, Any], path: str) -> None:
        """All that a module holds."""
        self._watch.keys(space)
        for name, value in list(space.items()):
            if name[:2] != "__" and (id(space), name) not in self._read:
                self._watch.names(space, (name,))
                self._by_computing(space, name, value, f"{path} all {name}")

    def _by_computing(self, space: Any, name: str, value: Any, path: str) -> None:
        """What has a name that code may compute: which code it is, as it is seen which is called; of data, what they hold."""
        if (id(space), name + "()") in self._read:
            return
        self._read.add((id(space), name + "()"))
        if isinstance(value, types.ModuleType) and id(value) not in self._modules:
            self._module(value, loose=False)
            self._far.add(id(value))
        self._data, before = True, self._data
        self._visit(value, path)
        self._data = before

    def _named(self, space: dict[str, Any], names: Iterable[str], path: str) -> None:
        """What ``names`` are in a module."""
        read = [name for name in names if (id(space), name) not in self._read]
        self._read.update((id(space), name) for name in read)
        self._watch.names(space, read)
        self._all([space.get(name, MISSING) for name in read], read, path)

    def _of_others(self, space: dict[str, Any], name: str, value: Any, path: str) -> None:
        """A variable of a module that is not the user's."""
        if (id(space), name) in self._read or value is sys.modules:
            return
        self._read.add((id(space), name))
        self._watch.names(space, (name,))
        path = f"{path}{name}"
        if isinstance(value, types.FunctionType):
            self._note(ById(value), path)
            for own in names_of(value.__code__).variables:  # as os.getenv reads os.environ
                found = value.__globals__.get(own, MISSING)
                if type(found) in VALUES or (isinstance(found, Mapping) and not isinstance(found, dict)):
                    self._of_others(value.__globals__, own, found, path)
        elif isinstance(value, Mapping) and hasattr(value, "__dict__"):
            self._hold_dict(vars(value), path, ".{}")
        elif type(value) in VALUES or plain(value) or is_users(value) or state_of(value) is not None:
            self._visit(value, path)
        elif isinstance(value, _BOUND) and state_of(value.__self__) is not None:
            self._visit(value.__self__, path)
        elif type(value) in (list, dict, set):
            self._watch.other(held := functools.partial(_held, value))
            self._note(tuple(map(key_of, held())), path)
        else:
            self._note(ById(value), path)
            if isinstance(value, type):
                self._others[value] = None


def _answered(module: types.ModuleType, names: list[str]) -> list[Any]:
    found = [getattr(module, name, MISSING) for name in names]
    return [value_of(held) if type(held) in VALUES else repr(held) if plain(held) else type(held) for held in found]


def _of_math(names: list[str]) -> list[Any]:
    return [getattr(held, "__wrapped__", held) for held in map(vars(math).get, names)]


def _held(value: Any) -> list[Any]:
    return [*value, *value.values()] if isinstance(value, dict) else [*value]
