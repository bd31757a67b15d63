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

What only a computed name leads to is looked into as data: which of its code runs is seen, and surveyed from then on.

Not guarded is what stands outside of the program (clocks, files) and inside of other libraries' objects.
"""

from __future__ import annotations

import functools
import operator
import types
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ..base.recorder_hooks import Between
from ..errors import CaptureError
from .guard_set import Ran
from .object_children import contents_of, entries_of, is_compiled, parts_of, referents
from .object_ownership import (
    VALUES,
    ById,
    attributes_of,
    foreign,
    has_contents,
    held_in,
    installed,
    key_of,
    module_of,
    slots_of,
    users_hooks,
    value_of,
)
from .opaque_state import CACHE, state_of
from .reachable_names import BEARING, CODE, CodeReads

_HOOKS = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")  # of modules; the latter say how the first are called
_LONG = 64  # plain values in a list, from which on they are one entry of the key
_ASKING = (operator.attrgetter, operator.methodcaller)
_COMPUTING = (getattr, hasattr, vars, dir)  # where code hands them on


class Environment(CodeReads):
    """One survey of a function, and of what runs of it were seen to do; see :class:`Notes`."""

    def __init__(self, fn: Any, ran: Ran | None = None) -> None:
        super().__init__(ran)
        self._pending: deque[tuple[Any, str, bool]] = deque()  # met, and still to be looked into; whether as data
        for called in (fn, *self.ran.functions):
            self._visit(called, getattr(called, "__name__", type(called).__name__))
        self._walk()
        self._reach()
        self._finish()
        self._watch.settle()

    # --- the walk ------------------------------------------------------------------------------------------------------
    def _walk(self) -> None:
        while self._pending:
            value, path, self._data = self._pending.popleft()
            self._descend(value, path)
        self._data = False

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
                f"capture: {path} has attributes that capture cannot read ({type(error).__name__} when its class "
                "is read), so it cannot check them for changes; keep it out of the captured function"
            ) from error
        if isinstance(value, torch.Tensor):
            number = self._numbers.setdefault(id(value), len(self.tensors))
            self._note(("tensor", number), path)
            if number == len(self.tensors):
                self.tensors.append(value)
                self._tensor(value, path)
        elif isinstance(value, VALUES) and (type(value) in VALUES or not has_contents(value)):
            self._note(value_of(value), path)
        elif self._data and isinstance(value, CODE):
            self._note(ById(value), path)
        elif not self._first(value):
            self._note(("again", self._seen[id(value)]), path)
            if not self._data and id(value) in self._as_data:
                self._as_data.discard(id(value))
                self._pending.append((value, path, False))
        else:
            self._note(value_of(value) if isinstance(value, VALUES) else type(value), path)
            self._pending.append((value, path, self._data))
            if self._data:
                self._as_data.add(id(value))

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
            self._visit(tuple(parts), path)
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
        self._settings(module_of(value if isinstance(value, BEARING) else type(value)), path)
        if isinstance(value, BEARING):
            self._asks(module_of(value), (value.__name__,), path)

    def _contents(self, value: Any, path: str) -> None:
        """What of an object is neither an attribute nor an item."""
        try:
            state, now = state_of(value), contents_of(value)
        except CaptureError:
            if self._data:
                return
            raise
        if state is not None:
            self._note_state(state, path)
        if now is not None:
            if isinstance(value, CACHE):  # whose state tells
                self._caches.append(value)
            else:
                self._watch.other(now)
            self._visit(tuple(now()), path)
        elif is_compiled(value):
            self._watch.referents(value)
            self._visit(tuple(referents(value)), path)

    def _items(self, value: Any, path: str) -> None:
        if isinstance(value, dict):
            self._hold_dict(value, path, "[{!r}]")
        elif isinstance(value, (set, frozenset)):
            if type(value) is set:
                self._watch.list_(value)
            elif isinstance(value, set):
                self._watch.other(value.__iter__)
            self._keys(value.__iter__, path)
        else:
            kind = next(kind for kind in (list, tuple, deque) if isinstance(value, kind))
            iterate = functools.partial(kind.__iter__, value)
            if type(value) is list:
                self._watch.list_(value)
            elif kind is not tuple:
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
        if not installed(kind):
            self._note(tuple(map(key_of, (*kind.__mro__, *self._watch.class_(kind)[1:]))), path)
        for base in kind.__mro__:
            if not foreign(base):
                self._watch.dict_(vars(base))
                self._note(tuple(map(key_of, vars(base))), path)
                self._classes.append((base, others, path, self._data))
            else:
                self._others[base] = None
        self._visit(type(kind), f"{path}.__class__")

    def _members(self) -> None:
        """What classes hold under names that any code that was reached has."""
        for kind, others, path, data in self._classes:
            self._data = data
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
            self._watch.slots(slots, value)
            self._all(held_in(slots.values(), value), [f".{name}" for name in slots], path)
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


_HOOKS_OF_ALL = {name: held for name, held in vars(torch.nn.modules.module).items() if name.endswith(_HOOKS)}
