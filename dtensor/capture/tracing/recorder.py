"""Recorder: a dispatch mode that records every operation on local tensors.

Tensors are identified by their memory (storage, offset, sizes, strides, dtype). So ``detach`` and a view that is taken twice give
the variable of the tensor that they alias, and cost nothing at replay. A local tensor that is neither an input nor a recorded
result comes from a place that no guard checks. It is refused.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ...base import tensor_tree
from ...base.generators import default_generator, get_generator_state
from ...base.recorder_hooks import ACTIVE_RECORDERS
from ...base.torch_internals import AccumulateGrad, TensorBase, TorchDispatchMode, autograd_node, current_dispatch_modes
from ...comm import Pending, PerRank
from ...dispatch import named_function_of
from ...errors import CaptureError
from ...propagation.op_schema import operator_schema_of
from ...rules.call import Call
from ...rules.registry import lookup
from ...tensor.dtensor import DTensor
from ...tensor.local_tensors import local_tensors_of
from ..guards.guard_set import GuardSet
from .flex_recording import register_flex_attention
from .float_provenance import FloatTracer
from .impure_calls import CallMonitor, ConstantStorages, is_data_dependent, value_read_error
from .tape import LocalMetadata, PerRankVars, Step, Var, map_step_values

aten = torch.ops.aten


class Recorder(TorchDispatchMode):
    """Dispatch mode that records the operations on local tensors as steps. One recorder serves the forward and backward of a run.

    Attributes:
        calls: monitors the calls into compiled code.
        steps: the recorded steps.
        constants: tensors made of Python numbers.
        metadata: of each recorded local tensor.
        paused: how many functions run inside of which nothing is recorded.
        operators: the DTensor operators that are running, the innermost last.
        views: for each DTensor view, by address: the result, ``(func, index in its results)``, the arguments, keyword arguments.
        floats: traces the floats of the run.
        constant_storages: the memory that holds the same values at each replay.
    """

    of_dtensors = True  # the mode records DTensor operators (see base/tracing.py)

    def __init__(self, trusted: Collection[str], guards: GuardSet) -> None:
        super().__init__()
        self.calls = CallMonitor(self._reading_operator, self._note_generator_set, trusted, guards)
        self.steps: list[Step] = []
        self.constants: dict[Var, torch.Tensor] = {}
        self.paused = 0
        self.operators: list[str] = []
        self.views: dict[int, tuple[Any, Any, tuple[Any, ...], dict[str, Any]]] = {}
        self.metadata: dict[Var, LocalMetadata] = {}
        self._vars: dict[tuple[int, LocalMetadata], Var] = {}
        # By address of the storage, which the weak reference reserves: (reference, storage number, first variable, dtype)
        self._storages: dict[int, tuple[StorageWeakRef, int, Var, torch.dtype]] = {}
        self._pending: dict[int, tuple[Any, Var]] = {}
        self._generators: dict[int, tuple[torch.Generator, torch.Tensor]] = {}
        self._generator_was_set = False
        self._count = 0
        self.floats, self.constant_storages = FloatTracer(self.new_float, self._add_step), ConstantStorages()
        self._library_state: dict[int, tuple[Any, dict[str, Any]]] = {}  # by address of its owner, the attributes from before
        self._refusal_callbacks: list[Callable[[], Any]] = []

    @contextmanager
    def recording_to(self, steps: list[Step]) -> Iterator[None]:
        """Record the operations of this thread to the list ``steps`` inside of the context; raise for impure use of random
        numbers."""
        self.steps = steps
        self._generators, self._generator_was_set = {}, False
        self._expect_state(torch.default_generator)
        states = _python_random_states()
        ACTIVE_RECORDERS.append(self)
        try:
            with self._restoring_library_state(), self.floats.tracing(), self, self.calls.monitored():
                yield
        finally:
            ACTIVE_RECORDERS.remove(self)
        if states != _python_random_states():
            raise CaptureError(
                "capture: the function uses random numbers of Python or numpy, and a replay would use the same "
                "ones again. Generate them outside and pass a 0-d tensor, or use torch"
            )
        self._check_generators("at the end of the captured function")

    def _reading_operator(self, x: torch.Tensor | None) -> str | None:
        """Return the operator that a forbidden read of tensor values is in ("" for none); None if the read is allowed."""
        if self.paused or self not in current_dispatch_modes():  # the recorder itself is running
            return None
        var = None if x is None or x.is_meta else self.find_var(x)
        allowed = x is not None and (x.is_meta or (var is not None and self.constant_storages.contain((var,))))
        return None if allowed else self._operator

    @property
    def _operator(self) -> str:
        """Return the name of the DTensor operator that is running, "" for none."""
        return self.operators[-1] if self.operators else ""

    # --- dispatch ------------------------------------------------------------------------------------------------------
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        dtensor_types = [kind for kind in types if issubclass(kind, DTensor)]
        if dtensor_types:  # torch asks the most derived class
            most_derived = max(dtensor_types, key=lambda kind: len(kind.__mro__))
            return self._dispatch_dtensor(most_derived, func, types, args, kwargs)
        if any(issubclass(kind, PerRank) for kind in types):
            with self:
                return PerRank.__torch_dispatch__(func, types, args, kwargs)
        return self._record_local(func, args, kwargs)

    def _dispatch_dtensor(self, kind: Any, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator on DTensors, so that its local operations are recorded, and note results that are views."""
        self.operators.append(str(func))
        try:
            with self:
                result = kind.__torch_dispatch__(func, types, args, kwargs)
        finally:
            self.operators.pop()
        if func.is_view or func in (aten.detach.default, aten.alias.default):
            several = isinstance(result, (list, tuple))
            for place, view in enumerate(result if several else (result,)):
                self.views[id(view)] = (view, (func, place if several else None), args, kwargs)
        return result

    def _record_local(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operator on local tensors and record it as a step; raise if a replay could not repeat it."""
        if self.paused or func in (aten.is_pinned.default,) or _has_meta_tensor(args, kwargs):
            return func(*args, **kwargs)
        operator = self._operator
        if "c10d" in func.namespace:  # also the functional ones: the recorder does not see where they are waited for
            raise CaptureError(
                f"capture: the function calls {func}, and a recording cannot see which memory a torch.distributed "
                "collective reads and writes, or when. Use redistribute (also to another mesh), or call it "
                "outside of the captured function. For a pipeline, capture the computation of its stages, not "
                "the schedule"
            )
        if func is aten._local_scalar_dense.default and self.floats.is_reading and args[0].is_floating_point():
            self.floats.last_read = self.new_float()
            self._add_step(Step(TensorBase.item, (self._var_of(args[0]),), {}, self.floats.last_read, operator=operator))
            return func(*args)
        if is_data_dependent(func, args):
            if not self.constant_storages.contain(map(self._var_of, tensor_tree.tensor_leaves((args, kwargs)))):
                raise value_read_error(str(func), operator)
            if func is aten._local_scalar_dense.default:
                return func(*args)
        if func is aten.lift_fresh.default:
            self._add_constant(args[0])
        recorded_args, recorded_kwargs = self.floats.insert_floats(self.to_vars(args), self.to_vars(kwargs))
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        generator = kwargs.get("generator") or next((x for x in args if isinstance(x, torch.Generator)), None)
        if is_random:
            self._check_generator(generator or _default_generator(args, kwargs), str(func))
        fn = named_function_of(func)
        result = fn(*args, **kwargs)
        if not func._schema.returns:
            result = None  # the functions return the written list
        if is_random:
            self._expect_state(generator or _default_generator(args, kwargs))
        if _has_meta_tensor(result, {}):
            return result
        written = _written_tensors(func, args, kwargs)
        known = {id(x): self._var_of(x) for x in tensor_tree.tensor_leaves((args, kwargs))}
        writes = frozenset(known[id(x)].storage for x in written)
        stores_grad = isinstance(autograd_node(), AccumulateGrad) and operator_schema_of(func).traits.stores_gradient
        only_checks = bool(known) and not func._schema.returns and not writes  # such an operation may raise
        step = Step(
            fn,
            recorded_args,
            recorded_kwargs,
            None,
            writes,
            required=is_random or only_checks,
            operator=operator,
            stores_grad=stores_grad,
        )
        self._finish_step(step, result, known, written)
        return result

    # --- the protocol of base/recorder_hooks.py ------------------------------------------------------------------------
    def record_op(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a library operation ``fn``, such as a collective, and record it as one step."""
        step = Step(
            fn, self.to_vars(args), self.to_vars(kwargs), None, required=True, is_library_op=True, operator=self._operator
        )
        result = self.run_untracked(fn, args, kwargs)
        self._finish_step(step, result, {}, [])
        return result

    def record_mutation(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``fn``, which writes to its arguments, and record it as one step."""
        step = Step(fn, self.to_vars(args), self.to_vars(kwargs), None, required=True, operator=self._operator)
        step.writes = frozenset(var.storage for var in step.inputs)
        self.steps.append(step)
        return self.run_untracked(fn, args, kwargs)

    def run_untracked(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``fn`` without recording anything, also not its use of random generators."""
        self._check_generators(fn.__name__)
        self.paused += 1
        try:
            return fn(*args, **kwargs)
        finally:
            self.paused -= 1
            for generator, _ in list(self._generators.values()):
                self._expect_state(generator)

    def has_recorded(self, pending: Any) -> bool:
        """Return True if this recorder recorded the step that issued a pending collective."""
        return id(pending) in self._pending

    def isolate_state(self, owner: Any, empty: Mapping[str, Any]) -> None:
        """Set attributes of ``owner`` that carry library state between calls to ``empty``, until the run ends."""
        if id(owner) not in self._library_state:
            self._library_state[id(owner)] = owner, {name: getattr(owner, name) for name in empty}
            _set_attributes(owner, empty)

    def on_refusal(self, fn: Callable[[], Any]) -> None:
        """Register ``fn`` to be called if the recording is refused, to undo a change of library state."""
        self._refusal_callbacks.append(fn)

    @contextmanager
    def _restoring_library_state(self) -> Iterator[None]:
        """Restore the library state that was isolated at the end of the context; if refused, undo other changes too."""
        self._refusal_callbacks.clear()
        try:
            yield
        except CaptureError:
            for fn in reversed(self._refusal_callbacks):
                fn()
            raise
        finally:
            for owner, attributes in self._library_state.values():
                _set_attributes(owner, attributes)
            self._library_state.clear()

    # --- variables -----------------------------------------------------------------------------------------------------
    def add_input(self, x: torch.Tensor) -> Var | None:
        """Return a new variable for an input of the tape; None if its memory has a variable already."""
        return None if _memory_key(x)[0] in self._storages else self._new_tensor(x)

    def storage_of(self, x: torch.Tensor) -> int:
        """Return the number by which the tape identifies the memory of ``x``."""
        return self._storages[x.untyped_storage()._cdata][1]

    def find_var(self, x: torch.Tensor) -> Var | None:
        """Return the variable of a local tensor, None if it has none."""
        return self._vars.get(_memory_key(x))

    def knows_memory(self, x: torch.Tensor) -> bool:
        """Return True if all memory of a tensor is that of a tape input, or was made by a step."""
        return all(local.untyped_storage()._cdata in self._storages for local in local_tensors_of(x))

    def to_vars(self, value: Any) -> Any:
        """Return a nested argument with tape variables in place of tensors and pending collectives."""

        def to_var(x: Any) -> Any:
            """Return the variable of a tensor or pending collective, or variables of a PerRank; other leaves unchanged."""
            if isinstance(x, PerRank):
                return PerRankVars(tuple(self._var_of(shard) for shard in x.shards))
            if isinstance(x, torch.Tensor):
                return self._var_of(x)
            return self._pending[id(x)][1] if isinstance(x, Pending) else x

        return map_step_values(value, to_var)

    def _var_of(self, x: torch.Tensor) -> Var:
        """Return the variable of a local tensor. A new view of recorded memory becomes an ``as_strided`` step."""
        if isinstance(x, DTensor):
            raise CaptureError(
                f"capture: {self.operators[-1:]} passes a DTensor to a function of local tensors; pass x.to_local()"
            )
        key = _memory_key(x)
        known = self._vars.get(key)
        if known is not None:
            return known
        address, metadata = key
        entry = self._storages.get(address)
        if entry is None:
            raise CaptureError(
                f"capture: {self.operators[-1] if self.operators else 'the function'} uses a tensor of shape "
                f"{tuple(x.shape)} and dtype {x.dtype} that capture cannot find among the arguments and the "
                "variables of the function, so a replay would not see new values of it; pass it as an argument"
            )
        _, storage, base, dtype = entry
        if dtype != x.dtype or x.is_conj() or x.is_neg():
            raise CaptureError(
                f"capture: a view of shape {tuple(x.shape)} was made in a way that cannot be replayed; use x.clone()"
            )
        view = self._vars[key] = self._new_var(storage)
        self.metadata[view] = metadata
        args = (base, tuple(x.shape), tuple(x.stride()), x.storage_offset())
        self.steps.append(Step(torch.as_strided, args, {}, view))
        return view

    def new_float(self) -> Var:
        """Return a new tape variable for a float."""
        return self._new_var(None)

    def _add_step(self, step: Step) -> None:
        self.steps.append(step)  # to the list of the present run

    def _new_var(self, storage: int | None) -> Var:
        self._count += 1
        return Var(self._count, self._count if storage is None else storage)

    def _new_tensor(self, x: torch.Tensor) -> Var:
        """Return a new tape variable for a local tensor, with the number of its memory and its metadata."""
        key = _memory_key(x)
        address, metadata = key
        entry = self._storages.get(address)
        var = self._vars[key] = self._new_var(None if entry is None else entry[1])
        self.metadata[var] = metadata
        if entry is None:
            self._storages[address] = (StorageWeakRef(x.untyped_storage()), var.storage, var, x.dtype)
        return var

    def _add_constant(self, x: torch.Tensor) -> None:
        """Store the present values of a tensor made of Python numbers as a constant of the tape."""
        if _memory_key(x) not in self._vars:
            var = self._new_tensor(x)
            self.constants[var] = x.detach().clone()
            self.constant_storages.add(var)

    def _name_result(self, value: Any, fresh: list[Var]) -> Any:
        """Return a step's result with tape variables in place of tensors; new variables are added to ``fresh``."""
        if isinstance(value, PerRank):
            return PerRankVars(tuple(self._name_result(shard, fresh) for shard in value.shards))
        if isinstance(value, torch.Tensor):
            var = self._vars.get(_memory_key(value))
            if var is None:
                var = self._new_tensor(value)
                fresh.append(var)
            return var
        if isinstance(value, Pending):
            var = self._new_var(None)
            self._pending[id(value)] = (value, var)
            fresh.append(var)
            return var
        if isinstance(value, (list, tuple)):
            return tuple(self._name_result(item, fresh) for item in value)
        return None

    def _finish_step(self, step: Step, result: Any, known: dict[int, Var], written: list[torch.Tensor]) -> None:
        """Set the result variables of a step, and append it to the tape unless it neither makes nor writes anything."""
        fresh: list[Var] = []
        for x in written:
            if self._vars.get(_memory_key(x)) is not known[id(x)]:  # resized
                raise CaptureError(
                    f"capture: {step.operator or step.fn} changes the size of a local tensor in place; make a new one"
                )
        step.out = self._name_result(result, fresh)
        self.constant_storages.update(step)
        if fresh or step.writes or step.required:
            self.steps.append(step)

    # --- random generators: only random operations may change their states ---------------------------------------------
    def _note_generator_set(self) -> None:
        self._generator_was_set = self._generator_was_set or not self.paused

    def _expect_state(self, generator: torch.Generator) -> None:
        self._generators[id(generator)] = (generator, get_generator_state(generator))

    def _check_generator(self, generator: torch.Generator, place: str) -> None:
        """Raise if the program has set the generator's state between two random operators."""
        _, state = self._generators.get(id(generator), (None, None))
        changed = state is not None and not bool((state == get_generator_state(generator)).all())
        if changed and self._generator_was_set:  # otherwise another thread has used the generator
            raise CaptureError(
                f"capture: the state of the random generator was set between two random operators ({place}), and a "
                "replay would not set it. Call manual_seed, fork_rng and set_rng_state outside of the captured "
                "function (torch.utils.checkpoint takes preserve_rng_state=False)"
            )

    def _check_generators(self, place: str) -> None:
        """Raise if the program has set the state of any recorded random generator; nothing of the check is recorded."""
        self.paused += 1
        try:
            for generator, _ in self._generators.values():
                self._check_generator(generator, place)
        finally:
            self.paused -= 1


def _set_attributes(owner: Any, attributes: Mapping[str, Any]) -> None:
    for name, value in attributes.items():
        setattr(owner, name, value)


def _python_random_states() -> tuple[Any, ...]:
    """Return the states of the random generators of Python and numpy, to detect that the function used them."""
    kind, state, place, *rest = numpy.random.get_state()
    return random.getstate(), kind, bytes(state), place, rest  # type: ignore[arg-type]


def _memory_key(x: torch.Tensor) -> tuple[int, LocalMetadata]:
    """Return the address of a tensor's storage and the tensor's metadata; together they identify it."""
    if x.layout is not torch.strided:
        raise CaptureError(
            f"capture: a tensor of layout {x.layout} cannot be recorded; use dense tensors in the captured function"
        )
    metadata = LocalMetadata(x.storage_offset(), x.shape, x.stride(), x.dtype, x.is_conj(), x.is_neg())
    return x.untyped_storage()._cdata, metadata


def _has_meta_tensor(value: Any, kwargs: dict[str, Any]) -> bool:
    """Return True if a call has meta tensors, so that it is part of planning and is not recorded."""
    return any(x.device.type == "meta" for x in tensor_tree.tensor_leaves((value, kwargs)))


def _default_generator(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Generator:
    device = next((x.device for x in tensor_tree.tensor_leaves((args, kwargs))), torch.device(kwargs.get("device") or "cpu"))
    return default_generator(device)


def _written_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the arguments that a call writes to: those of its schema, and those that its rule declares in addition."""
    written: list[torch.Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            written.extend(tensor_tree.tensor_leaves(value))
    rule = lookup(func)
    if rule is not None and rule.writes is not None:
        bound = operator_schema_of(func).bind(args, kwargs)
        call = Call(func, None, bound, (), ())  # type: ignore[arg-type]  # of local tensors, on no mesh
        written.extend(tensor_tree.tensor_leaves([bound[name] for name in rule.writes(call)]))
    return written


register_flex_attention(Recorder)
