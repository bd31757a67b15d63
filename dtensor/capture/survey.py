"""What a function can read besides its arguments: whatever can be reached from it, by the law of this walk.

A *survey* lists every tensor that can be reached from the function, and every Python value on the way, in a fixed order. Tensors
are inputs of the tape, fetched anew at each call; the rest is guarded. Between surveys it is enough to see that every container
still holds the same objects. What code reads, it reads of

- its closure, defaults and attributes: all are guarded;
- the variables of its module: those that it names, also while missing (where it names
  ``globals``, ``eval`` or ``exec`` also which objects the others are);
- objects, by attribute or item: all that they and their classes hold, as long as they are the user's, torch's modules, optimizers
  and schedules, or the standard library's containers; the parts of properties, methods, partials; arrays and iterators by state;
- the user's modules: the attributes that any code reached names, by ``.name`` or by a string (where code that names the module
  computes names, by ``getattr`` or ``vars``, also which objects the others are); also modules that code imports;
- modules of others: values and containers of them that code names there, and which function it is that bears a name.

Not guarded is what stands outside of the program (clocks, files) and inside of other libraries' objects.
"""

from __future__ import annotations

import abc
import functools
import math
import operator
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ..base.recording import Between
from ..errors import CaptureError
from ..tensor.dtensor import DTensor
from .belonging import (
    MISSING,
    VALUES,
    ById,
    attributes_of,
    foreign,
    has_contents,
    held_in,
    is_users,
    key_of,
    module_of,
    plain,
    slots_of,
    users_hooks,
    value_of,
)
from .holding import contents_of, entries_of, parts_of
from .names import names_of, paths_named
from .notes import Notes, Ran
from .settings import SETTINGS
from .states import state_of
from .watch import contents

_HOOKS = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")  # of modules; the latter say how the first are called
_LONG = 64  # plain values in a list, from which on they are one entry of the key
_SPOKEN = ("__name__", "__qualname__", "__doc__", "__module__", "__annotations__")  # of functions, where code asks
_CALLED = ("forward", "__call__", "_call_impl", "_wrapped_call_impl")  # of torch's modules, whoever calls
_ASKING = (operator.attrgetter, operator.methodcaller)
_COMPUTING = (getattr, hasattr, vars, dir)  # where code hands them on
_CODE = (
    type,
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
_BEARING = (type, types.FunctionType, types.BuiltinFunctionType)
_ABOUT = ("__mro__", "__name__", "__qualname__")  # of classes


class Environment(Notes):
    """One survey of a function, and of what runs of it were seen to do; see :class:`Notes`."""

    def __init__(self, fn: Any, ran: Ran | None = None) -> None:
        super().__init__()
        self._ran = ran or Ran()
        self._modules: dict[int, types.ModuleType] = {}  # the user's
        self._loose: dict[int, types.ModuleType] = {}  # those that are handed on
        self._spaces: dict[int, tuple[dict[str, Any], str]] = {}  # of which any variable may be read
        self._classes: list[tuple[type, set[str], str]] = []
        self._others: dict[type, None] = {DTensor: None}  # classes of libraries, of which there are objects
        self._attributes_named: dict[str, None] = {}
        self._users = self._computes = self._imports = False  # any code; whether it computes names of attributes, of modules
        self._read: set[tuple[int, str]] = set()  # variables of modules
        self._pending: deque[tuple[Any, str]] = deque()  # met, and still to be looked into
        for called in (fn, *self._ran.functions):
            self._visit(called, getattr(called, "__name__", type(called).__name__))
        self._walk()
        self._reach()
        self._finish()
        self._watch.settle()

    # --- the walk ------------------------------------------------------------------------------------------------------
    def _walk(self) -> None:
        while self._pending:
            self._descend(*self._pending.popleft())

    def _all(self, values: Iterable[Any], names: Iterable[str], path: str) -> None:
        values = list(values)
        self._note(len(values), path)
        for name, value in zip(names, values, strict=True):
            self._visit(value, f"{path}{name}")

    def _hold_dict(self, held: Mapping[Any, Any], path: str, shown: str) -> None:
        self._watch.dict_(held)
        keys, _, items = entries_of(held)
        self._keys(keys, path)
        for key, value in list(items()):
            if type(value) is float and isinstance(held, dict):
                self.floats[len(self.key)] = (held, key)
            self._visit(value, f"{path}{shown.format(key if isinstance(key, VALUES) else '...')}")

    def _keys(self, keys: Callable[[], Iterable[Any]], path: str) -> None:
        """Keys of a dictionary and members of a set, in their order, which code may look into."""
        self._note(tuple(map(key_of, keys())), path)
        for key in list(keys()):
            if not isinstance(key, VALUES):
                self._visit(key, f"{path} key")

    def _visit(self, value: Any, path: str) -> None:
        try:
            value.__class__  # noqa: B018  which some answer by code of their own
        except Exception as error:
            raise CaptureError(
                f"capture: {path} has attributes that only its own code knows ({type(error).__name__} where its class is asked "
                "for), so what it holds cannot be guarded; keep it out of the captured function"
            ) from error
        if isinstance(value, torch.Tensor):
            number = self._numbers.setdefault(id(value), len(self.tensors))
            self._note(("tensor", number), path)
            if number == len(self.tensors):
                self.tensors.append(value)
                self._tensor(value, path)
        elif isinstance(value, VALUES) and (type(value) in VALUES or not has_contents(value)):
            self._note(value_of(value), path)
        elif not self._first(value):
            self._note(("again", self._seen[id(value)]), path)
        else:
            self._note(value_of(value) if isinstance(value, VALUES) else type(value), path)
            self._pending.append((value, path))

    def _tensor(self, x: torch.Tensor, path: str) -> None:
        """Its class, and what was put on it."""
        self._note(type(x), path)
        if (held := attributes_of(x)) and self._first(x):
            self._watch.other(lambda: attributes_of(x).values())
            self._note(tuple(held), path)
            self._all(held.values(), [f".{name}" for name in held], path)
        if not foreign(type(x)):
            self._visit(type(x), f"{path}.__class__")

    def _descend(self, value: Any, path: str) -> None:
        if isinstance(value, Between):
            self.between.append(value)
            return
        if isinstance(value, (dict, list, tuple, deque, set, frozenset)):
            self._items(value, path)
        elif isinstance(value, types.FunctionType):
            self._function(value, path)
        elif isinstance(value, types.ModuleType):
            self._module(value, loose=True)
            self._settings(value.__name__, path)
        elif isinstance(value, type):
            self._class(value, path)
        elif (parts := parts_of(value)) is not None:
            self.wrapped += [part for part in parts if isinstance(part, types.BuiltinFunctionType)]
            self._visit(parts, path)
        if isinstance(value, _ASKING):
            named = [part for x in value.__reduce__()[1] if isinstance(x, str) for part in x.split(".")]
            self._attributes_named.update(dict.fromkeys(named))
        self._computes = self._computes or any(value is one for one in _COMPUTING)
        self._contents(value, path)
        if has_contents(value):
            self._watch.object(value)
            self._attributes(value, path)
            self._visit(type(value), f"{path}.__class__")
        elif not isinstance(value, (types.FunctionType, types.MethodType, dict, list, tuple, deque, set)):
            self._note(ById(value), path)
        self._settings(module_of(value if isinstance(value, _BEARING) else type(value)), path)

    def _contents(self, value: Any, path: str) -> None:
        """What of an object is neither an attribute nor an item."""
        if (state := state_of(value)) is not None:
            self._note(state(), path)
            self._watch.state(state, self.key[-1])
        if (now := contents_of(value)) is not None:
            self._watch.other(now)
            self._visit(now(), path)

    def _settings(self, module: str, path: str) -> None:
        """What is set of a library that the function has something of."""
        for name, state in SETTINGS.items():
            if (module == name or module.startswith(name + ".")) and self._first(state):
                self._note(state(), f"{path}, settings of {name}")
                self._watch.state(state, self.key[-1])

    def _items(self, value: Any, path: str) -> None:
        if isinstance(value, dict):
            self._hold_dict(value, path, "[{!r}]")
        elif isinstance(value, (set, frozenset)):
            self._watch.other(value.__iter__)
            self._keys(value.__iter__, path)
        else:
            kind = next(kind for kind in (list, tuple, deque) if isinstance(value, kind))
            iterate = functools.partial(kind.__iter__, value)
            if kind is not tuple:
                self._watch.other(iterate)
            items = list(iterate())
            if len(items) > _LONG and {*map(type, items)} <= {int, float, str, bool, bytes}:
                self._note(tuple(map(value_of, items)), path)
            else:
                self._all(items, [f"[{place}]" for place in range(len(items))], path)

    def _class(self, kind: type, path: str) -> None:
        if foreign(kind):
            self._others[kind] = None
            return
        others = {name for base in kind.__mro__ if foreign(base) for name in vars(base)}  # which their code may ask for
        about = functools.partial(_about, kind)
        self._watch.other(about)
        self._note(tuple(map(key_of, (*kind.__mro__, *about()[1:]))), path)
        for base in kind.__mro__:
            if not foreign(base):
                self._watch.dict_(vars(base))
                self._note(tuple(map(key_of, vars(base))), path)
                self._classes.append((base, others, path))
            else:
                self._others[base] = None
        self._visit(type(kind), f"{path}.__class__")

    def _members(self) -> None:
        """What classes hold under names that any code that was reached has."""
        for kind, others, path in self._classes:
            for name, value in list(vars(kind).items()):
                if (id(kind), name) in self._read:
                    continue
                if name in self._attributes_named or name in others or name[:2] == "__":
                    self._read.add((id(kind), name))
                    self._visit(value, f"{path}.{name}")
                elif self._computes:
                    self._by_computing(kind, name, value, f"{path}.{name}")
        self._walk()

    def _attributes(self, value: Any, path: str) -> None:
        slots = slots_of(type(value))
        if slots:
            held = functools.partial(held_in, slots, value)
            self._watch.other(held)
            self._all(held(), [f".{name}" for name in slots], path)
        if not isinstance(value, torch.nn.Module):
            if hasattr(value, "__dict__"):
                self._hold_dict(vars(value), path, ".{}")
            return
        self._watch.dict_(vars(value))
        self._hooks(vars(value), path)
        self._hooks(_HOOKS_OF_ALL, " every module")

    def _hooks(self, attributes: Mapping[str, Any], path: str) -> None:
        """Attributes of a module, among them hooks, of which only the users' count."""
        for name, held in list(attributes.items()):
            if not name.endswith(_HOOKS):
                self._visit(held, f"{path}.{name}")
            elif name.endswith("_hooks") and self._first(held):
                found = users_hooks(held)
                if held:
                    self._watch.other(functools.partial(users_hooks, held))
                else:
                    self._watch.dict_(held)
                self._note(len(found), f"{path}.{name}")
                for hook in found:
                    self._visit(hook, f"{path}.{name}")

    # --- functions and modules -----------------------------------------------------------------------------------------
    def _function(self, fn: types.FunctionType, path: str) -> None:
        self._note(ById(fn.__code__), path)
        cells, names = fn.__closure__ or (), names_of(fn.__code__)
        if foreign(fn):
            self._visit([x for x in map(contents, cells) if is_users(x)], f"{path} variables")
            return
        self._watch.function(fn)
        self._watch.cells(cells)
        self._all(map(contents, cells), [f" variable {name}" for name in fn.__code__.co_freevars], path)
        self._all((fn.__defaults__, fn.__kwdefaults__), (" default", " default"), path)
        self._hold_dict(vars(fn), path, ".{}")
        self._attributes_named.update(dict.fromkeys(names.attributes))
        self.codes |= names.codes
        self._users, space = True, fn.__globals__
        if not names.codes.isdisjoint(self._ran.computing):
            self._computes, self._imports = self._computes or names.computed, self._imports or names.imports
            if names.whole:
                self._spaces[id(space)] = space, path
        if names.kinds and self._first(abc.get_cache_token):
            self._note(abc.get_cache_token(), f"{path} classes that are registered")
            self._watch.state(abc.get_cache_token, self.key[-1])
        self._named(space, names.variables, f"{path} global ")
        self._builtins(fn.__builtins__, [name for name in names.variables if name not in space], path)  # type: ignore[attr-defined]  # typeshed's
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
            if held is not MISSING and not (module_of(held if isinstance(held, _BEARING) else type(held)) in ("builtins", "io")):
                self._named(space, (name,), f"{path} builtin ")
            elif (id(space), name) not in self._read:
                self._read.add((id(space), name))
                self._watch.names(space, (name,))
                self._note(ById(held), f"{path} builtin {name}")

    def _through(self, module: types.ModuleType, names: Iterable[str], loose: frozenset[str], path: str, on: bool) -> None:
        """What code that names a module and these attributes reads of it, and of the modules in it; ``on``: it hands it on."""
        self._settings(module.__name__, path)
        if module is math:  # whose functions are others while somebody records
            held = functools.partial(_of_math, [name for name in names if name in vars(math)])
            self._watch.other(held)
            self._note(tuple(map(ById, held())), path)
            return
        space, path = vars(module), f"{path} {module.__name__}."
        users = not foreign(module)
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

    def _module(self, module: types.ModuleType, loose: bool) -> None:
        if not foreign(module) and self._modules.setdefault(id(module), module) and loose:
            self._loose[id(module)] = module

    # --- what follows from all names -----------------------------------------------------------------------------------
    def _reach(self) -> None:
        """What any code that was reached names, of all classes and modules that were reached: they may have been handed on."""
        known: Any = None
        done: dict[int, int] = {}
        while known != (known := (len(self._attributes_named), len(self._classes), len(self._seen), self._computes, self._imports)):
            self._members()
            if self._imports:
                self._spaces[id(sys.modules)] = sys.modules, "sys.modules"
            for key, module in list(self._modules.items()):
                space = vars(module)
                if done.get(key) != len(self._attributes_named):
                    done[key] = len(self._attributes_named)
                    named = [name for name in ("__getattr__", *self._attributes_named) if name in space]
                    self._named(space, named, module.__name__)
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
        if not self._users:
            return
        self._watch.tensors(self.tensors)
        spoken = [name for name in _SPOKEN if self._computes or name in self._attributes_named]
        self._visit(self._watch.of_functions(spoken), "functions")
        self._walk()
        for kind in list(dict.fromkeys(base for kind in self._others for base in kind.__mro__[:-1])):
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
        if isinstance(value, types.ModuleType):
            self._module(value, loose=False)
        if isinstance(value, _CODE):
            self._note(ById(value), path)
        else:
            self._visit(value, path)

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
        elif type(value) in (list, dict, set):
            self._watch.other(held := functools.partial(_held, value))
            self._note(tuple(map(key_of, held())), path)
        else:
            self._note(ById(value), path)
            if isinstance(value, type):
                self._others[value] = None


def _of_math(names: list[str]) -> list[Any]:
    return [getattr(held, "__wrapped__", held) for held in map(vars(math).get, names)]


def _about(kind: type) -> list[Any]:
    return [getattr(kind, name) for name in _ABOUT]


def _held(value: Any) -> list[Any]:
    return [*value, *value.values()] if isinstance(value, dict) else [*value]


_CHANGES = 1 << 9  # of a class: it is made by a class statement, so that its attributes may be set
_HOOKS_OF_ALL = {name: held for name, held in vars(torch.nn.modules.module).items() if name.endswith(_HOOKS)}
