"""Guard discovery: walks everything that a function can read besides its arguments, and fills a guard set.

The walk lists every reachable tensor and every Python value on the way, in a fixed order. Code can read:

- its closure, defaults and attributes. All are guarded.
- the variables of its module: those that it names, also while they are missing. If it names ``globals``, ``eval`` or ``exec``,
  the identity of all other variables is guarded as well.
- objects, by attribute or item: all that they and their classes hold. This is for objects of the user, torch's modules,
  optimizers and schedulers, and containers of the standard library. Properties, methods and partials are guarded by their parts,
  arrays by their content.
- modules of the user: the attributes that any reached code names, by ``.name`` or by a string. If code that names the module
  computes names (``getattr``, ``vars``), the identity of all other attributes is guarded as well. Imports are followed.
- modules of libraries: values and containers of values that code names there, and the identity of functions.

Objects that only a computed name leads to, or an attribute that no code reads, are walked *as data*: their code is not looked
into. The recorder sees which of it runs, and later discoveries look into this.

Opaque objects (iterators, files that are read, compressors) are refused, unless they are walked as data. Those that only code of
installed packages names are refused when code runs that has this name: a model reaches much of its library, and runs little.

Not guarded are things outside of the program (clocks, files), and the internals of objects of other libraries.
"""

from __future__ import annotations

import abc
import functools
import math
import operator
import re
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any, cast

import torch

from ...base.recorder_hooks import CrossCallState
from ...base.torch_internals import PRINT_OPTS
from ...tensor.dtensor import DTensor
from . import object_model as objects
from .bytecode_names import imported_module_names, read_code_names
from .guard_set import GuardSet, ObservedCode, cell_contents
from .object_model import MISSING, VALUES, ById
from .setting_guards import settings_of

_NAME = re.compile(r"(?:^|[ .])([^\W\d]\w*)")  # of a variable or an attribute in a path; not the keys in brackets
_LONG_LIST = 64  # a longer list of plain values is one entry of the key
_GETTER_TYPES = (operator.attrgetter, operator.methodcaller)
_NAME_COMPUTERS = (getattr, hasattr, vars, dir)
_FUNCTION_TEXTS = ("__name__", "__qualname__", "__doc__", "__module__", "__annotations__")
_MODULE_CALLS = ("forward", "__call__", "_call_impl", "_wrapped_call_impl")  # methods that torch calls without naming them
_IS_HEAP_TYPE = 1 << 9  # the type flag of classes made by a class statement; their attributes may be set
# fmt: off
_CODE_TYPES = (
    types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, property, staticmethod, classmethod,
    functools.cached_property, functools.partialmethod,
)
# fmt: on
_BOUND_METHODS = (types.MethodType, types.BuiltinMethodType)
_DEFINITIONS = (type, types.FunctionType, types.BuiltinFunctionType)  # objects with the name of the module that defines them
_GLOBAL_HOOKS = {name: x for name, x in vars(torch.nn.modules.module).items() if "_hooks" in name and isinstance(x, dict)}
_HOOK_TABLES = {name for name in vars(torch.nn.Module()) if "_hooks" in name} | _GLOBAL_HOOKS.keys()  # not a user's attributes


def discover_guards(fn: Any, observed: ObservedCode | None = None) -> GuardSet:
    """Return the guard set of a function, or of a Python value.

    Args:
        fn: the function or value.
        observed: code that earlier runs were seen to execute.
    """
    return _Discovery(GuardSet(observed)).discover(fn)


class _Discovery:
    """The state of one walk, which fills a guard set. It is dropped afterwards."""

    def __init__(self, guards: GuardSet) -> None:
        self.guards, self.containers = guards, guards.containers
        # Objects to look into: (object, path, as data, by installed code)
        self._pending: deque[tuple[Any, str, bool, bool]] = deque()
        self._as_data = False  # whether the present object is walked as data
        self._walked_as_data: set[int] = set()
        self._by_installed_code = False  # whether code of an installed package led to the present object
        self._user_modules: dict[int, types.ModuleType] = {}
        self._escaping_modules: dict[int, types.ModuleType] = {}  # modules that code passes on
        self._computed_modules: set[int] = set()  # modules that only computed names lead to
        self._read: set[tuple[int, str]] = set()  # (address of a namespace, name) that is guarded already
        self._open_namespaces: dict[int, tuple[dict[str, Any], str]] = {}  # any variable of these may be read
        self._functions: list[types.FunctionType] = []  # with names and docstrings that code may read
        self._caches: list[Any] = []  # with statistics that code may read
        self._classes: list[tuple[type, set[str], str, bool]] = []  # (class, names in library bases, path, as data)
        self._library_classes: dict[type, None] = {DTensor: None}  # library classes with reachable objects
        self._attribute_names: dict[str, None] = {}  # that any reached code names
        self._read_attributes: set[str] = set()  # that any reached code reads; ``__init__`` names all, but only assigns them
        # Attributes that no code reads yet: (name, value, path). First those that were not visited, then those visited as data.
        self._unread: list[tuple[str, Any, str]] = []
        self._unread_data: list[tuple[str, Any, str]] = []
        self._reaches_code = self._computes_attributes = self._computes_imports = False
        self._user_computes_attributes = False  # code of installed packages computes names for its own objects

    def discover(self, fn: Any) -> GuardSet:
        """Walk from the function and from all functions that runs were seen to call."""
        for root in (fn, *self.guards.observed.functions):
            self._visit(root, getattr(root, "__name__", type(root).__name__))
        self._walk_pending()
        self._follow_names()
        while self._unread:
            self._visit_unread_as_data()
            self._follow_names()
        self._guard_nameless_reads()
        self.containers.snapshot()
        return self.guards

    # --- the walk ------------------------------------------------------------------------------------------------------
    def _walk_pending(self) -> None:
        while self._pending:
            value, path, self._as_data, self._by_installed_code = self._pending.popleft()
            self._look_into(value, path)
        self._as_data = self._by_installed_code = False

    def _visit_all(self, values: Iterable[Any], names: Iterable[str], path: str) -> None:
        values = list(values)
        self.guards.add(len(values), path)
        for name, value in zip(names, values, strict=True):
            self._visit(value, f"{path}{name}")

    def _visit_dict(self, mapping: Mapping[Any, Any], path: str, key_format: str) -> None:
        self.containers.add_dict(mapping)
        keys, _, items = objects.stored_entries(mapping)
        self._visit_keys(keys, path)
        for key, value in list(items()):
            if type(value) is float and isinstance(mapping, dict):
                self.guards.floats[len(self.guards.key)] = (mapping, key)
            self._visit(value, f"{path}{key_format.format(key if isinstance(key, VALUES) else '...')}")

    def _visit_keys(self, keys: Callable[[], Iterable[Any]], path: str) -> None:
        """Visit the keys of a dictionary or the members of a set, in their order."""
        self.guards.add(tuple(map(objects.dict_key, keys())), path)
        for key in list(keys()):
            if not isinstance(key, VALUES):
                self._visit(key, f"{path} key")

    def _visit(self, value: Any, path: str) -> None:
        """Add an entry for an object, and queue the object if it is new."""
        objects.check_class(value, path)
        guards = self.guards
        if isinstance(value, torch.Tensor):
            if guards.add_tensor(value, path):
                self._look_into_tensor(value, path)
        elif isinstance(value, VALUES) and (type(value) in VALUES or not objects.has_user_state(value)):
            guards.add(objects.value_key(value), path)
        elif self._as_data and isinstance(value, _CODE_TYPES):
            guards.add(ById(value), path)
        elif not guards.add_object(value):
            guards.add_known_object(value, path)
            if not self._as_data and id(value) in self._walked_as_data:
                self._walked_as_data.discard(id(value))
                self._pending.append((value, path, False, self._by_installed_code))
        else:
            guards.add(objects.value_key(value) if isinstance(value, VALUES) else type(value), path)
            self._pending.append((value, path, self._as_data, self._by_installed_code))
            if self._as_data:
                self._walked_as_data.add(id(value))

    def _look_into_tensor(self, x: torch.Tensor, path: str) -> None:
        """Guard the class of a tensor and the attributes that user code has set on it."""
        self.guards.add(type(x), path)
        if (members := objects.guarded_attributes(x)) and self.guards.add_object(x):
            self.containers.add_objects(lambda: objects.guarded_attributes(x).values())
            self.guards.add(tuple(members), path)
            self._visit_all(members.values(), [f".{name}" for name in members], path)
        if not objects.is_library(type(x)):
            self._visit(type(x), f"{path}.__class__")

    def _look_into(self, value: Any, path: str) -> None:
        """Guard the content of an object and visit its children."""
        if isinstance(value, CrossCallState):
            self.guards.library_states.append(value)
            return
        if isinstance(value, (dict, list, tuple, deque, set, frozenset)):
            self._look_into_items(value, path)
        elif isinstance(value, types.FunctionType):
            self._look_into_function(value, path)
        elif isinstance(value, types.ModuleType):
            self._add_module(value, escapes=True)
            self._guard_settings(value.__name__, path)
        elif isinstance(value, type):
            self._look_into_class(value, path)
        elif (parts := objects.wrapped_parts(value)) is not None:
            self.guards.compiled_callables += [part for part in parts if isinstance(part, types.BuiltinFunctionType)]
            self._visit(tuple(parts), path)
        if isinstance(value, _GETTER_TYPES):
            names = [part for x in value.__reduce__()[1] if isinstance(x, str) for part in x.split(".")]
            self._attribute_names.update(dict.fromkeys(names))
            self._read_attributes.update(names)
        if any(value is one for one in _NAME_COMPUTERS):
            self._computes_attributes = self._user_computes_attributes = True
        self._look_into_contents(value, path)
        if objects.has_user_state(value):
            self.containers.add_object(value)
            self._look_into_attributes(value, path)
            self._visit(type(value), f"{path}.__class__")
        elif not isinstance(value, (types.FunctionType, types.MethodType, dict, list, tuple, deque, set)):
            self.guards.add(ById(value), path)
        definition = value if isinstance(value, _DEFINITIONS) else type(value)
        self._guard_settings(objects.module_name(definition), path, (definition.__name__,))

    def _look_into_contents(self, value: Any, path: str) -> None:
        """Guard what an object holds outside of attributes and items.

        Raises:
            CaptureError: the object is opaque, and code reads it.
        """
        if objects.is_opaque(value):
            if self._as_data:
                return
            if not (self._by_installed_code and (names := _NAME.findall(path))):
                raise objects.opaque_object_error(value, path)
            self.guards.opaque_objects.setdefault(names[-1], (value, path))
            return
        get_content, get_children = objects.make_content_getter(value), objects.make_children_getter(value)
        if get_content is not None:
            self.guards.add_state(get_content, path)
        if get_children is not None:
            if isinstance(value, objects.CACHE_TYPE):  # its content, the count of misses, changes with its entries
                self._caches.append(value)
            else:
                self.containers.add_objects(get_children)
            self._visit(tuple(get_children()), path)
        elif objects.is_compiled_object(value):
            self.containers.add_referents(value)
            self._visit(tuple(objects.read_referents(value)), path)

    def _look_into_items(self, value: Any, path: str) -> None:
        """Guard the items of a builtin container, and visit them; a long list of plain values is guarded by value."""
        if isinstance(value, dict):
            self._visit_dict(value, path, "[{!r}]")
        elif isinstance(value, (set, frozenset)):
            if type(value) is set:
                self.containers.add_collection(value)
            elif isinstance(value, set):
                self.containers.add_objects(value.__iter__)
            self._visit_keys(value.__iter__, path)
        else:
            kind = next(kind for kind in (list, tuple, deque) if isinstance(value, kind))
            iterate = functools.partial(kind.__iter__, value)
            if type(value) is list:
                self.containers.add_collection(value)
            elif kind is not tuple:
                self.containers.add_objects(iterate)
            items = list(iterate())
            if len(items) > _LONG_LIST and {*map(type, items)} <= {int, float, str, bool, bytes}:
                self.guards.add(tuple(map(objects.value_key, items)), path)
            else:
                self._visit_all(items, [f"[{place}]" for place in range(len(items))], path)

    def _look_into_class(self, kind: type, path: str) -> None:
        """Guard the bases and attributes of a class, but for those of library classes."""
        if objects.is_library(kind):
            self._library_classes[kind] = None
            return
        library_names = {name for base in filter(objects.is_library, kind.__mro__) for name in vars(base)}  # it may read them
        if not objects.is_installed(kind):
            self.guards.add(tuple(map(objects.dict_key, (*kind.__mro__, *self.containers.add_class(kind)[1:]))), path)
        for base in kind.__mro__:
            if not objects.is_library(base):
                self.containers.add_dict(vars(base))
                self.guards.add(tuple(map(objects.dict_key, vars(base))), path)
                self._classes.append((base, library_names, path, self._as_data))
            else:
                self._library_classes[base] = None
        self._visit(type(kind), f"{path}.__class__")

    def _look_into_attributes(self, value: Any, path: str) -> None:
        kind = type(value)
        if slots := objects.slot_descriptors(kind):
            self.containers.add_slots(slots, value)
            self.guards.add(len(slots), path)
            self._visit_attributes(kind, zip(slots, objects.read_slots(slots.values(), value), strict=True), path)
        if isinstance(value, torch.nn.Module):
            self.containers.add_dict(vars(value))
            self._look_into_module_attributes(kind, vars(value), path)
            self._look_into_module_attributes(kind, _GLOBAL_HOOKS, " every module")
        elif hasattr(value, "__dict__"):
            attributes = vars(value)
            self.containers.add_dict(attributes)
            self._visit_keys(attributes.keys, path)
            self._visit_attributes(kind, attributes.items(), path, attributes)

    def _look_into_module_attributes(self, kind: type, attributes: Mapping[str, Any], path: str) -> None:
        """Visit the attributes of an ``nn.Module``; of the tables of hooks, only the user's hooks."""
        self._visit_attributes(kind, (pair for pair in attributes.items() if pair[0] not in _HOOK_TABLES), path)
        for name, table in list(attributes.items()):
            if name in _HOOK_TABLES and name.endswith("_hooks") and self.guards.add_object(table):
                hooks = objects.user_hooks(table)
                if table:
                    self.containers.add_objects(functools.partial(objects.user_hooks, table))
                else:
                    self.containers.add_dict(table)
                self.guards.add(len(hooks), f"{path}.{name}")
                for hook in hooks:
                    self._visit(hook, f"{path}.{name}")

    def _visit_attributes(
        self, kind: type, attributes: Iterable[tuple[str, Any]], path: str, floats_in: dict[str, Any] | None = None
    ) -> None:
        """Visit attributes of an object of the class ``kind``: plain values and tensors, and all others that code reads.

        ``floats_in``: the dictionary in which floats may change.
        """
        for name, value in list(attributes):
            is_value = type(value) in VALUES or issubclass(type(value), torch.Tensor)
            if type(value) is float and floats_in is not None:
                self.guards.floats[len(self.guards.key)] = (floats_in, name)
            if is_value or self._as_data or name in self._read_attributes or objects.is_named_by_library(kind, name):
                self._visit(value, f"{path}.{name}")
            else:
                self._unread.append((name, value, f"{path}.{name}"))

    def _visit_read_attributes(self) -> None:
        """Visit the attributes that reached code reads by now."""
        unnamed, data = self._unread, self._unread_data
        self._unread, self._unread_data = [], []
        for rest, attributes in ((self._unread, unnamed), (self._unread_data, data)):
            for name, value, path in attributes:
                if self._user_computes_attributes or name in self._read_attributes:
                    self._visit(value, path)
                else:
                    rest.append((name, value, path))

    def _visit_unread_as_data(self) -> None:
        unnamed, self._unread = self._unread, []
        self._unread_data += unnamed
        self._as_data = True
        for _, value, path in unnamed:
            self._visit(value, path)
        self._walk_pending()

    # --- code ----------------------------------------------------------------------------------------------------------
    def _look_into_function(self, fn: types.FunctionType, path: str) -> None:
        """Guard all that the code of a function reads."""
        self.guards.add(ById(fn.__code__), path)
        cells, names = fn.__closure__ or (), read_code_names(fn.__code__)
        if objects.is_library(fn):
            self._visit([x for x in map(cell_contents, cells) if objects.is_user_object(x)], f"{path} variables")
            return
        self._by_installed_code = self._by_installed_code or objects.is_installed(fn)
        self.containers.add_function(fn)
        if not objects.is_installed(fn):
            self._functions.append(fn)
        self.containers.add_cells(cells)
        self._visit_all(map(cell_contents, cells), [f" variable {name}" for name in fn.__code__.co_freevars], path)
        self._visit_all((fn.__defaults__, fn.__kwdefaults__), (" default", " default"), path)
        self._visit_dict(vars(fn), path, ".{}")
        self._attribute_names.update(dict.fromkeys(names.attributes))
        self._read_attributes |= names.read_attributes
        self.guards.codes |= names.codes
        self._reaches_code, namespace = True, fn.__globals__
        if not names.codes.isdisjoint(self.guards.observed.computing):
            self._computes_attributes = self._computes_attributes or names.computes_attributes
            self._user_computes_attributes |= names.computes_attributes and not objects.is_installed(fn)
            self._computes_imports = self._computes_imports or names.computes_imports
            if names.reads_any_variable:
                self._open_namespaces[id(namespace)] = namespace, path
        if names.checks_classes and self.guards.add_object(abc.get_cache_token):
            self.guards.add_state(abc.get_cache_token, f"{path} classes that are registered")
        self._visit_names(namespace, names.variables, f"{path} global ")
        builtins: dict[str, Any] = cast(Any, fn).__builtins__  # some type stubs lack it
        self._visit_builtins(builtins, [name for name in names.variables if name not in namespace], path)
        variables = {name: namespace.get(name) for name in names.variables}
        variables |= dict(zip(fn.__code__.co_freevars, map(cell_contents, cells), strict=True))
        for name, module in variables.items():
            if isinstance(module, types.ModuleType):
                self._read_module(module, names.attributes, names.escaping, path, name in names.escaping)
        imports = [name for name in dict.fromkeys(imported_module_names(fn)) if (id(sys.modules), name) not in self._read]
        self._read.update((id(sys.modules), name) for name in imports)
        self.containers.add_names(sys.modules, imports)
        self.guards.add(tuple(ById(sys.modules.get(name)) for name in imports), f"{path} imports")
        for name in dict.fromkeys(imported_module_names(fn)):
            if (imported := sys.modules.get(name)) is not None:
                self._read_module(imported, names.attributes, names.escaping, path, names.computes_attributes)

    def _visit_builtins(self, namespace: dict[str, Any], names: Iterable[str], path: str) -> None:
        """Guard the identity of builtins; visit those that the user has replaced."""
        for name in names:
            builtin = namespace.get(name, MISSING)
            if builtin is not MISSING and not (
                isinstance(builtin, _DEFINITIONS) and objects.module_name(builtin) in ("builtins", "io")
            ):
                self._visit_names(namespace, (name,), f"{path} builtin ")
            elif (id(namespace), name) not in self._read:
                self._read.add((id(namespace), name))
                self.containers.add_names(namespace, (name,))
                self.guards.add(ById(builtin), f"{path} builtin {name}")

    def _visit_names(self, namespace: dict[str, Any], names: Iterable[str], path: str) -> None:
        """Visit the variables with these names, and guard which objects they are."""
        unread = [name for name in names if (id(namespace), name) not in self._read]
        self._read.update((id(namespace), name) for name in unread)
        self.containers.add_names(namespace, unread)
        self._visit_all([namespace.get(name, MISSING) for name in unread], unread, path)

    # --- modules -------------------------------------------------------------------------------------------------------
    def _add_module(self, module: types.ModuleType, escapes: bool) -> None:
        self._computed_modules.discard(id(module))
        if not objects.is_library(module):
            self._user_modules.setdefault(id(module), module)
            if escapes:
                self._escaping_modules[id(module)] = module

    def _read_module(
        self, module: types.ModuleType, names: Iterable[str], escaping: frozenset[str], path: str, escapes: bool
    ) -> None:
        """Guard what code reads of a module, and of the modules in it.

        Args:
            module: a module that the code names.
            names: attributes that the code names.
            escaping: names that the code passes on.
            path: for messages.
            escapes: whether the code passes the module on.
        """
        self._guard_settings(module.__name__, path, names)
        if module is math:  # float_provenance patches its functions during a recording
            get_functions = functools.partial(objects.math_functions, [name for name in names if name in vars(math)])
            self.containers.add_objects(get_functions)
            self.guards.add(tuple(map(ById, get_functions())), path)
            return
        namespace, path = vars(module), f"{path} {module.__name__}."
        is_users = not objects.is_library(module)
        if hasattr(type(module), "__getattr__") and not is_users:
            self._guard_computed_attributes(module, [name for name in names if name not in namespace], path)
        if is_users:
            self._add_module(module, escapes)
            self._visit_names(namespace, names, path)
        for name in names:
            value = namespace.get(name, MISSING)
            if isinstance(value, types.ModuleType):
                if (id(module), name + ".") not in self._read:
                    self._read.add((id(module), name + "."))
                    self._read_module(value, names, escaping, path, name in escaping)
            elif not is_users and value is not MISSING:
                self._read_library_variable(namespace, name, value, path)

    def _guard_settings(self, module: str, path: str, names: Iterable[str] = ()) -> None:
        """Guard the settings of a library that the function has an object of, or a module with these attributes that it names."""
        for name, get_settings in settings_of(module, names):
            if self.guards.add_object(get_settings):
                self.guards.add_state(get_settings, f"{path}, settings of {name}")

    def _guard_computed_attributes(self, module: types.ModuleType, names: Iterable[str], path: str) -> None:
        """Guard attributes that a library's module computes from a table, such as settings."""
        tables = [table for table in vars(module).values() if type(table) is dict]
        known = [name for name in names if (id(module), name) not in self._read and any(name in table for table in tables)]
        if known:
            self._read.update((id(module), name) for name in known)
            self.guards.add_state(functools.partial(objects.computed_attributes, module, known), path)

    def _read_library_variable(self, namespace: dict[str, Any], name: str, value: Any, path: str) -> None:
        """Guard a variable of a library's module: values by content, functions and classes by identity."""
        if (id(namespace), name) in self._read or value is sys.modules:
            return
        self._read.add((id(namespace), name))
        self.containers.add_names(namespace, (name,))
        path = f"{path}{name}"
        if isinstance(value, types.FunctionType):
            self.guards.add(ById(value), path)
            for variable in read_code_names(value.__code__).variables:  # as os.getenv reads os.environ
                variable_value = value.__globals__.get(variable, MISSING)
                if type(variable_value) in VALUES or (
                    isinstance(variable_value, Mapping) and not isinstance(variable_value, dict)
                ):
                    self._read_library_variable(value.__globals__, variable, variable_value, path)
        elif isinstance(value, Mapping) and hasattr(value, "__dict__"):
            self._visit_dict(vars(value), path, ".{}")
        elif type(value) in VALUES or objects.is_plain_data(value) or objects.is_user_object(value) or objects.has_content(value):
            self._visit(value, path)
        elif isinstance(value, _BOUND_METHODS) and objects.has_content(value.__self__):
            self._visit(value.__self__, path)
        elif type(value) in (list, dict, set):
            self.containers.add_objects(get_items := functools.partial(objects.keys_and_values, value))
            self.guards.add(tuple(map(objects.dict_key, get_items())), path)
        else:
            self.guards.add(ById(value), path)
            if isinstance(value, type):
                self._library_classes[value] = None

    # --- names ---------------------------------------------------------------------------------------------------------
    def _follow_names(self) -> None:
        """Visit what any reached code names, in all classes and modules that were reached.

        Objects may be passed to other code, so the names of all code count for all objects. New objects bring new code and names,
        until nothing is new.
        """
        previous: Any = None
        names_done: dict[int, int] = {}  # by address of a module, how many names were looked up in it
        while previous != (
            previous := (
                *map(len, (self._attribute_names, self._classes, self._user_modules)),
                self.guards.object_count,
                self._computes_attributes,
                self._computes_imports,
            )
        ):
            self._visit_read_attributes()
            self._visit_class_members()
            if self._computes_imports:
                self._open_namespaces[id(sys.modules)] = sys.modules, "sys.modules"
            for key, module in list(self._user_modules.items()):
                namespace = vars(module)
                if (done := names_done.get(key, 0)) != len(self._attribute_names):
                    names_done[key] = len(self._attribute_names)
                    names = [name for name in ("__getattr__", *islice(self._attribute_names, done, None)) if name in namespace]
                    self._as_data, self._by_installed_code = key in self._computed_modules, objects.is_installed(module)
                    self._visit_names(namespace, names, f"{module.__name__}.")
                    self._as_data = self._by_installed_code = False
                if self._computes_attributes and key in self._escaping_modules:
                    self._open_namespaces[id(namespace)] = namespace, module.__name__
            for namespace, path in list(self._open_namespaces.values()):
                self._visit_all_variables(namespace, path)
            self._walk_pending()

    def _visit_class_members(self) -> None:
        """Visit the members of classes that any reached code names, or that library code may call."""
        for kind, library_names, path, as_data in self._classes:
            self._as_data, self._by_installed_code = as_data, objects.is_installed(kind)
            for name, value in list(vars(kind).items()):
                if (id(kind), name) in self._read:
                    continue
                if name in self._attribute_names or name in library_names or name[:2] == "__":
                    self._read.add((id(kind), name))
                    self._visit(value, f"{path}.{name}")
                elif self._computes_attributes:
                    self._visit_as_data(kind, name, value, f"{path}.{name}")
        self._walk_pending()

    def _visit_all_variables(self, namespace: dict[str, Any], path: str) -> None:
        """Visit all variables of a module as data."""
        self.containers.add_dict_keys(namespace)
        for name, value in list(namespace.items()):
            if name[:2] != "__" and (id(namespace), name) not in self._read:
                self.containers.add_names(namespace, (name,))
                self._visit_as_data(namespace, name, value, f"{path} all {name}")

    def _visit_as_data(self, owner: Any, name: str, value: Any, path: str) -> None:
        """Visit the object with a name that code may compute. Its code is guarded by identity; the recorder sees what runs."""
        if (id(owner), name + "()") in self._read:
            return
        self._read.add((id(owner), name + "()"))
        if isinstance(value, types.ModuleType) and id(value) not in self._user_modules:
            self._add_module(value, escapes=False)
            self._computed_modules.add(id(value))
        self._as_data, before = True, self._as_data
        self._visit(value, path)
        self._as_data = before

    def _guard_nameless_reads(self) -> None:
        """Guard what code reads without a name: attribute names of modules, texts of functions, methods of library classes."""
        for module in self._user_modules.values():
            self.containers.add_dict_keys(vars(module))
            self.containers.add_object(module)
        if self._reaches_code:
            self._visit_dict(vars(PRINT_OPTS), "print options", ".{}")
            self.containers.add_tensors(self.guards.tensors)
            texts = [name for name in _FUNCTION_TEXTS if self._computes_attributes or name in self._attribute_names]
            self._visit(self.containers.add_function_attributes(texts, self._functions), "functions")
            self._walk_pending()
        if "cache_info" in self._attribute_names:
            for cache in self._caches:
                self.guards.add_state(cache.cache_info, "statistics of a cache")
        for kind in list(dict.fromkeys(base for one in self._library_classes for base in one.__mro__[:-1])):
            self._guard_library_methods(kind)

    def _guard_library_methods(self, kind: type) -> None:
        """Guard the identity of the methods of a library's class that code names, or that the library calls."""
        members = vars(kind)
        is_fixed = objects.module_name(kind).startswith(("dtensor.", "torch._C")) and kind is not DTensor
        if is_fixed or not kind.__flags__ & _IS_HEAP_TYPE:
            return
        with_special, named = not issubclass(kind, torch.Tensor), self._attribute_names
        names = [name for name in members if name in named or name in _MODULE_CALLS or (with_special and name[:2] == "__")]
        self.containers.add_names(members, names)
        self.containers.add_dict_size(members)
        self.guards.add(tuple(ById(members[name]) for name in names), kind.__name__)
        if isinstance(forward := members.get("forward"), types.FunctionType):
            self._guard_called_functions(forward, kind.__name__)

    def _guard_called_functions(self, fn: types.FunctionType, path: str) -> None:
        """Guard the identity of the functions that a library's function calls."""
        names, namespace = read_code_names(fn.__code__), fn.__globals__
        for name in names.variables:
            value = namespace.get(name)
            if isinstance(value, types.ModuleType):
                self._read_module(value, names.attributes, names.escaping, path, False)
            elif isinstance(value, types.FunctionType):
                self._read_library_variable(namespace, name, value, path)
