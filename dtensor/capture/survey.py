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

import functools
import math
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ..base.recording import Between
from .belonging import VALUES, ById, foreign, has_contents, held_in, is_users, key_of, plain, slots_of, users_hooks, value_of
from .holding import MISSING, contents_of, entries_of, parts_of, state_of
from .names import modules_named, names_of
from .watch import Watch, contents

_HOOKS = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")  # of modules; the latter say how the first are called
_LONG = 64  # plain values in a list, from which on they are one entry of the key


class Environment:
    """One survey.

    Attributes:
        tensors: all that were found, each once, in the order found.
        key: everything else, and which places hold the same tensor; equal keys mean that a replay reads the same.
        paths: for each entry of ``key`` where it stands, to tell the user.
        floats: entries of ``key`` that are floats in dictionaries (of attributes too): the dictionary, and the key there.
        wrapped: compiled functions that partials and the like call, which nobody sees them do.
        between: what the library keeps for later calls.
        version: how often only such floats were found to have changed.
    """

    def __init__(self, fn: Any) -> None:
        self.tensors: list[torch.Tensor] = []
        self.key: list[Any] = []
        self.paths: list[str] = []
        self.floats: dict[int, tuple[dict[Any, Any], Any]] = {}
        self.wrapped: list[Any] = []
        self.between: list[Between] = []
        self.version = 0
        self._numbers: dict[int, int] = {}
        self._seen: dict[int, int] = {}
        self._watch = Watch()
        self._alive: list[Any] = []
        self._modules: dict[int, types.ModuleType] = {}  # the user's
        self._classes: list[tuple[type, set[str], str]] = []
        self._attributes_named: dict[str, None] = {}
        self._computes = False  # whether any code reads attributes by names that it computes
        self._read: set[tuple[int, str]] = set()  # variables of modules
        self._pending: deque[tuple[Any, str]] = deque()  # met, and still to be looked into
        self._visit(fn, getattr(fn, "__name__", type(fn).__name__))
        self._walk()
        self._attributes_of_modules()
        self._watch.settle()

    def unchanged(self) -> bool:
        """Whether every container still holds the objects that the survey found."""
        return self._watch.unchanged()

    def refreshed(self) -> bool:
        """Whether nothing but floats has changed; then the key is brought up to date."""
        changed = self._watch.changed_entries()
        known = {(id(held), key): place for place, (held, key) in self.floats.items()}
        if changed is None or any(entry not in known for entry in changed):
            return False
        places = [known[entry] for entry in changed]
        if any(type(self.floats[place][0][self.floats[place][1]]) is not float for place in places):
            return False
        for place in places:
            held, key = self.floats[place]
            self.key[place] = (float, repr(held[key]))
        self._watch.settle()
        self.version += 1
        return True

    def difference(self, other: Environment) -> str | None:
        """Where ``other``, a later survey, holds something else; None if it does not."""
        for path, mine, its in zip(self.paths, self.key, other.key, strict=False):
            if mine != its:
                return path
        if len(self.key) != len(other.key):
            return (self.paths if len(self.paths) > len(other.paths) else other.paths)[min(len(self.key), len(other.key))]
        for number, (mine, its) in enumerate(zip(self.tensors, other.tensors, strict=True)):
            if mine is not its:
                return self.paths[self.key.index(("tensor", number))]
        return None

    # --- the walk ------------------------------------------------------------------------------------------------------
    def _walk(self) -> None:
        while self._pending:
            self._descend(*self._pending.popleft())

    def _note(self, part: Any, path: str) -> None:
        self.key.append(part)
        self.paths.append(path)

    def _all(self, values: Iterable[Any], names: Iterable[str], path: str) -> None:
        values = list(values)
        self._note(len(values), path)
        for name, value in zip(names, values, strict=True):
            self._visit(value, f"{path}{name}")

    def _hold_dict(self, held: Mapping[Any, Any], path: str, shown: str) -> None:
        self._watch.dict_(held)
        keys, _, items = entries_of(held)
        self._keys(keys, tuple, path)
        for key, value in list(items()):
            if type(value) is float and isinstance(held, dict):
                self.floats[len(self.key)] = (held, key)
            self._visit(value, f"{path}{shown.format(key if isinstance(key, VALUES) else '...')}")

    def _keys(self, keys: Callable[[], Iterable[Any]], kind: type, path: str) -> None:
        """Keys of a dictionary and members of a set, which code may look into."""
        self._note(kind(map(key_of, keys())), path)
        for key in list(keys()):
            if not isinstance(key, (*VALUES, torch.Tensor)):
                self._visit(key, f"{path} key")

    def _visit(self, value: Any, path: str) -> None:
        if isinstance(value, torch.Tensor):
            number = self._numbers.setdefault(id(value), len(self.tensors))
            if number == len(self.tensors):
                self.tensors.append(value)
            self._note(("tensor", number), path)
        elif isinstance(value, VALUES) and (type(value) in VALUES or not has_contents(value)):
            self._note(value_of(value), path)
        elif id(value) in self._seen:
            self._note(("again", self._seen[id(value)]), path)
        else:
            self._seen[id(value)] = len(self.key)
            self._alive.append(value)  # its address is not used again
            self._note(value_of(value) if isinstance(value, VALUES) else type(value), path)
            self._pending.append((value, path))

    def _descend(self, value: Any, path: str) -> None:
        if isinstance(value, Between):
            self.between.append(value)
            return
        if isinstance(value, (dict, list, tuple, deque, set, frozenset)):
            self._items(value, path)
        elif isinstance(value, types.FunctionType):
            self._function(value, path)
        elif isinstance(value, types.ModuleType):
            self._module(value, path)
        elif isinstance(value, type):
            self._class(value, path)
        elif (parts := parts_of(value)) is not None:
            self.wrapped += [part for part in parts if isinstance(part, types.BuiltinFunctionType)]
            self._visit(parts, path)
        elif (state := state_of(value)) is not None:
            self._note(state(), path)
            self._watch.state(state, self.key[-1])
        if (now := contents_of(value)) is not None:
            self._watch.other(now)
            self._visit(now(), path)
        if has_contents(value):
            self._watch.object(value)
            self._attributes(value, path)
            self._visit(type(value), f"{path}.__class__")
        elif not isinstance(value, (types.FunctionType, dict, list, tuple, deque, set)):
            self._note(ById(value), path)

    def _items(self, value: Any, path: str) -> None:
        if isinstance(value, dict):
            self._hold_dict(value, path, "[{!r}]")
        elif isinstance(value, (set, frozenset)):
            self._watch.other(value.__iter__)
            self._keys(value.__iter__, frozenset, path)
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
            return
        others = {name for base in kind.__mro__ if foreign(base) for name in vars(base)}  # which their code may ask for
        for base in kind.__mro__:
            if not foreign(base):
                self._watch.dict_(vars(base))
                self._note(tuple(map(key_of, vars(base))), path)
                self._classes.append((base, others, path))
        self._visit(type(kind), f"{path}.__class__")

    def _members(self) -> None:
        """What classes hold under names that any code that was reached has."""
        for kind, others, path in self._classes:
            for name, value in list(vars(kind).items()):
                if (id(kind), name) not in self._read and (name in self._attributes_named or name in others or name[:2] == "__"):
                    self._read.add((id(kind), name))
                    self._visit(value, f"{path}.{name}")
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
            elif name.endswith("_hooks") and id(held) not in self._seen:
                self._seen[id(held)] = len(self.key)
                self._alive.append(held)
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
        self._computes = self._computes or names.computed
        space = fn.__globals__
        if names.whole:
            self._whole(space, path)
        self._named(space, (*names.variables, *names.attributes) if names.whole else names.variables, f"{path} global ")
        spaces = [space[name] for name in names.variables if isinstance(space.get(name), types.ModuleType)]
        for module in (*spaces, *modules_named(fn)):
            self._through(module, names.attributes, path)

    def _through(self, module: types.ModuleType, names: Iterable[str], path: str) -> None:
        """What code that names a module and these attributes reads of it, and of the modules in it."""
        if module is math:  # whose functions are others while somebody records
            return
        space, path = vars(module), f"{path} {module.__name__}."
        users = not foreign(module)
        if users:
            self._module(module, path)
            self._named(space, names, path)
        for name in names:
            value = space.get(name, MISSING)
            if isinstance(value, types.ModuleType):
                if (id(module), name + ".") not in self._read:
                    self._read.add((id(module), name + "."))
                    self._through(value, names, path)
            elif not users and value is not MISSING:
                self._of_others(space, name, value, path)

    def _module(self, module: types.ModuleType, path: str) -> None:
        if not foreign(module):
            self._modules.setdefault(id(module), module)

    def _attributes_of_modules(self) -> None:
        """What any code that was reached names, of all modules that were reached: they may have been handed on."""
        done: dict[int, int] = {}
        known = -1
        while known != len(self._attributes_named) + len(self._classes):
            known = len(self._attributes_named) + len(self._classes)
            self._members()
        while any(done.get(key) != len(self._attributes_named) for key in self._modules):
            self._members()
            for key, module in list(self._modules.items()):
                done[key] = len(self._attributes_named)
                space = vars(module)
                self._named(space, [name for name in ("__getattr__", *self._attributes_named) if name in space], module.__name__)
                self._walk()
        for module in self._modules.values():
            self._watch.keys(vars(module))
            if self._computes:
                self._whole(vars(module), module.__name__)

    def _whole(self, space: dict[str, Any], path: str) -> None:
        """Which objects a module holds."""
        self._watch.keys(space)
        self._watch.names(space, space)
        self._note(tuple(value_of(x) if type(x) in VALUES else ById(x) for x in space.values()), f"{path} all")

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
        if isinstance(value, types.FunctionType) and value.__module__ in sys.stdlib_module_names:
            self._note(ById(value), f"{path}{name}")
            for own in names_of(value.__code__).variables:  # as os.getenv reads os.environ
                found = value.__globals__.get(own, MISSING)
                if isinstance(found, Mapping) and not isinstance(found, dict):
                    self._of_others(value.__globals__, own, found, path)
        elif isinstance(value, Mapping) and hasattr(value, "__dict__"):
            self._hold_dict(vars(value), f"{path}{name}", ".{}")
        elif type(value) in VALUES or plain(value) or is_users(value):
            self._visit(value, f"{path}{name}")
        else:
            self._note(ById(value), f"{path}{name}")


_HOOKS_OF_ALL = {name: held for name, held in vars(torch.nn.modules.module).items() if name.endswith(_HOOKS)}
