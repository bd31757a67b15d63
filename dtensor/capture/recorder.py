"""The recorder: a dispatch mode that sees every operation on local tensors, and which of them the library calls one step.

Tensors are known by their memory (storage, offset, sizes, strides, dtype), so ``detach`` and a view taken twice are the variable
that they show, and cost nothing at replay. A local tensor that it has neither been given nor seen made has come from somewhere
that no guard watches, and is refused.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..base import tensor_tree
from ..base.generators import default_generator, state_now
from ..base.recorder_hooks import ACTIVE
from ..base.torch_internals import AccumulateGrad, TensorBase, TorchDispatchMode, autograd_node, current_dispatch_modes
from ..comm import Pending, PerRank
from ..dispatch.local_op import spelling
from ..errors import CaptureError
from ..propagation.op_schema import operator_of
from ..tensor.dtensor import DTensor
from ..tensor.views.block_owners import locals_of
from .float_provenance import Numbers
from .guard_discovery import Environment
from .impure_calls import Unvarying, World, decides, refuse
from .library_state import Keeping
from .mutations import written_by
from .tape import Ranks, Step, Var, substituted

aten = torch.ops.aten


class Recorder(Keeping, TorchDispatchMode):
    """Records while it is entered with :meth:`running`; a forward run and its backward share one."""

    of_dtensors = True  # operators are those that DTensors are asked for

    def __init__(self, trusted: Collection[str], found: Environment) -> None:
        super().__init__()
        self.world = World(self._reading, self._setting, trusted, found.wrapped, found.codes, found.ran.computing)
        self.steps: list[Step] = []
        self.constants: dict[Var, torch.Tensor] = {}
        self.paused = 0
        self.within: list[str] = []
        self.views: dict[int, tuple[Any, Any, tuple[Any, ...], dict[str, Any]]] = {}  # of DTensors: result, func, args, kwargs
        self.facts: dict[Var, tuple[Any, ...]] = {}  # offset, shape, stride, dtype, whether conjugated or negated lazily
        self._vars: dict[tuple[Any, ...], Var] = {}
        self._bases: dict[int, tuple[StorageWeakRef, int, Var, torch.dtype]] = {}  # by address, which a weak reference reserves
        self._pending: dict[int, tuple[Any, Var]] = {}
        self._generators: dict[int, tuple[torch.Generator, torch.Tensor]] = {}
        self._sets_generators = False
        self._count = 0
        self.numbers, self.unvarying = Numbers(self.number, self._step), Unvarying()

    @contextmanager
    def running(self, steps: list[Step]) -> Iterator[None]:
        """Inside, operations of this thread go to ``steps``."""
        self.steps = steps
        self._generators, self._sets_generators = {}, False
        self._expect(torch.default_generator)
        drawn = _python_draws()
        ACTIVE.append(self)
        try:
            with self.leaving(), self.numbers.running(), self, self.world.refused():
                yield
        finally:
            ACTIVE.remove(self)
        if drawn != _python_draws():
            raise CaptureError(
                "capture: the function uses random numbers of Python or numpy, and a replay would use the same "
                "ones again. Generate them outside and pass a 0-d tensor, or use torch"
            )
        self._check_generators("at the end of the captured function")

    def _reading(self, x: torch.Tensor | None) -> str | None:
        """What is at work, for a read of values in this thread."""
        if self.paused or self not in current_dispatch_modes():  # at work itself
            return None
        known = None if x is None or x.is_meta else self.find(x)
        may = x is not None and (x.is_meta or (known is not None and self.unvarying.holds((known,))))
        return None if may else self._where

    @property
    def _where(self) -> str:
        """The operation on DTensors at work."""
        return self.within[-1] if self.within else ""

    # --- what arrives --------------------------------------------------------------------------------------------------
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        distributed = [kind for kind in types if issubclass(kind, DTensor)]
        if distributed:  # the most derived one is asked, as torch does
            return self._distributed(max(distributed, key=lambda kind: len(kind.__mro__)), func, types, args, kwargs)
        if any(issubclass(kind, PerRank) for kind in types):
            with self:
                return PerRank.__torch_dispatch__(func, types, args, kwargs)
        return self._local(func, args, kwargs)

    def _distributed(self, kind: Any, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.within.append(str(func))
        try:
            with self:
                result = kind.__torch_dispatch__(func, types, args, kwargs)
        finally:
            self.within.pop()
        if func.is_view or func in (aten.detach.default, aten.alias.default):
            for place, made in enumerate(result if isinstance(result, (list, tuple)) else (result,)):
                self.views[id(made)] = (made, (func, place if isinstance(result, (list, tuple)) else None), args, kwargs)
        return result

    def _local(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.paused or func in (aten.is_pinned.default,):
            return func(*args, **kwargs)
        if _meta(args, kwargs):
            return func(*args, **kwargs)
        within = self._where
        if "c10d" in func.namespace:  # also of functional ones it is not seen who waits
            raise CaptureError(
                f"capture: the function calls {func}, and a recording cannot see which memory a torch.distributed "
                "collective reads and writes, or when. Use redistribute (also to another mesh), or call it "
                "outside of the captured function. For a pipeline, capture the computation of its stages, not "
                "the schedule"
            )
        if func is aten._local_scalar_dense.default and self.numbers.reading and args[0].is_floating_point():
            self.numbers.last = self.number()
            self._step(Step(TensorBase.item, (self._known(args[0]),), {}, self.numbers.last, within=within))
            return func(*args)
        if decides(func, args):
            if not self.unvarying.holds(map(self._known, tensor_tree.tensors((args, kwargs)))):
                raise refuse(str(func), within)
            if func is aten._local_scalar_dense.default:
                return func(*args)
        if func is aten.lift_fresh.default:
            self._constant(args[0])
        taken, named = self.numbers.inserted(self.taken(args), self.taken(kwargs))
        drawn = torch.Tag.nondeterministic_seeded in func.tags
        generator = kwargs.get("generator") or next((x for x in args if isinstance(x, torch.Generator)), None)
        if drawn:
            self._check(generator or _default(args, kwargs), str(func))
        fn = spelling(func)
        result = fn(*args, **kwargs)
        if not func._schema.returns:
            result = None  # the functions give the written list back
        if drawn:
            self._expect(generator or _default(args, kwargs))
        if _meta(result, {}):
            return result
        written = written_by(func, args, kwargs)
        known = {id(x): self._known(x) for x in tensor_tree.tensors((args, kwargs))}
        writes = frozenset(known[id(x)].storage for x in written)
        stores = isinstance(autograd_node(), AccumulateGrad) and operator_of(func).facts.stores
        checks = bool(known) and not func._schema.returns and not writes  # what reads, and neither gives nor writes, may raise
        keep = drawn or checks
        self._append(Step(fn, taken, named, None, writes, keep, within=within, stores=stores), result, known, written)
        return result

    # --- sites ---------------------------------------------------------------------------------------------------------
    def site(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``fn(*args, **kwargs)``, one step; see :class:`~dtensor.base.recorder_hooks.Recorder`."""
        step = Step(fn, self.taken(args), self.taken(kwargs), None, keep=True, site=True, within=self._where)
        result = self.aside(fn, args, kwargs)
        self._append(step, result, {}, [])
        return result

    def effect(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``fn(*args, **kwargs)``, one step that writes."""
        step = Step(fn, self.taken(args), self.taken(kwargs), None, keep=True, within=self._where)
        step.writes = frozenset(var.storage for var in step.inputs)
        self.steps.append(step)
        return self.aside(fn, args, kwargs)

    def aside(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``fn(*args, **kwargs)``, no step."""
        self._check_generators(fn.__name__)
        self.paused += 1
        try:
            return fn(*args, **kwargs)
        finally:
            self.paused -= 1
            for generator, _ in list(self._generators.values()):
                self._expect(generator)

    def knows(self, pending: Any) -> bool:
        return id(pending) in self._pending

    # --- variables -----------------------------------------------------------------------------------------------------
    def given(self, x: torch.Tensor) -> Var | None:
        """The variable of a tensor that the tape starts from; None if its memory is known already."""
        return None if _key(x)[0] in self._bases else self._new(x)

    def storage_of(self, x: torch.Tensor) -> int:
        """The number of memory that is known."""
        return self._bases[x.untyped_storage()._cdata][1]

    def find(self, x: torch.Tensor) -> Var | None:
        """The variable of a tensor, if it is known."""
        return self._vars.get(_key(x))

    def made(self, x: torch.Tensor) -> bool:
        """Whether memory of a tensor is known, so that the tape has been given or makes it."""
        return all(local.untyped_storage()._cdata in self._bases for local in locals_of(x))

    def taken(self, value: Any) -> Any:
        """``value`` with variables in place of tensors."""

        def one(x: Any) -> Any:
            if isinstance(x, PerRank):
                return Ranks(tuple(self._known(shard) for shard in x.shards))
            if isinstance(x, torch.Tensor):
                return self._known(x)
            return self._pending[id(x)][1] if isinstance(x, Pending) else x

        return substituted(value, one)

    def _known(self, x: torch.Tensor) -> Var:
        if isinstance(x, DTensor):
            raise CaptureError(f"capture: {self.within[-1:]} passes a DTensor to a function of local tensors")
        key = _key(x)
        found = self._vars.get(key)
        if found is not None:
            return found
        base = self._bases.get(key[0])
        if base is None:
            raise CaptureError(
                f"capture: {self.within[-1] if self.within else 'the function'} uses a tensor of shape "
                f"{tuple(x.shape)} and dtype {x.dtype} that capture cannot find among the arguments and the "
                "variables of the function, so a replay would not see new values of it; pass it as an argument"
            )
        _, storage, var, dtype = base
        if dtype != x.dtype or x.is_conj() or x.is_neg():
            raise CaptureError(
                f"capture: a view of shape {tuple(x.shape)} was made in a way that cannot be replayed; use x.clone()"
            )
        made = self._vars[key] = self._var(storage)
        self.facts[made] = key[1:]
        args = (var, tuple(x.shape), tuple(x.stride()), x.storage_offset())
        self.steps.append(Step(torch.as_strided, args, {}, made))
        return made

    def number(self) -> Var:
        """A new variable for a float."""
        return self._var(None)

    def _step(self, step: Step) -> None:
        self.steps.append(step)

    def _var(self, storage: int | None) -> Var:
        self._count += 1
        return Var(self._count, self._count if storage is None else storage)

    def _new(self, x: torch.Tensor) -> Var:
        """The variable of a tensor that has not been seen; it may show memory that has."""
        key = _key(x)
        base = self._bases.get(key[0])
        var = self._vars[key] = self._var(None if base is None else base[1])
        self.facts[var] = key[1:]
        if base is None:
            self._bases[key[0]] = (StorageWeakRef(x.untyped_storage()), var.storage, var, x.dtype)
        return var

    def _constant(self, x: torch.Tensor) -> None:
        """A tensor made of Python numbers, as it is now."""
        if _key(x) not in self._vars:
            var = self._new(x)
            self.constants[var] = x.detach().clone()
            self.unvarying.made(var)

    def _out(self, value: Any, fresh: list[Var]) -> Any:
        """``value`` with variables, new ones for what has not been seen."""
        if isinstance(value, PerRank):
            return Ranks(tuple(self._out(shard, fresh) for shard in value.shards))
        if isinstance(value, torch.Tensor):
            found = self._vars.get(_key(value))
            if found is None:
                found = self._new(value)
                fresh.append(found)
            return found
        if isinstance(value, Pending):
            var = self._var(None)
            self._pending[id(value)] = (value, var)
            fresh.append(var)
            return var
        if isinstance(value, (list, tuple)):
            return tuple(self._out(item, fresh) for item in value)
        return None

    def _append(self, step: Step, result: Any, known: dict[int, Var], written: list[torch.Tensor]) -> None:
        fresh: list[Var] = []
        for x in written:
            if self._vars.get(_key(x)) is not known[id(x)]:  # resized
                raise CaptureError(
                    f"capture: {step.within or step.fn} changes the size of a local tensor in place; make a new one"
                )
        step.out = self._out(result, fresh)
        self.unvarying.after(step)
        if fresh or step.writes or step.keep:
            self.steps.append(step)

    # --- generators: nobody but random operations may move them -------------------------------------------------------
    def _setting(self) -> None:
        self._sets_generators = self._sets_generators or not self.paused

    def _expect(self, generator: torch.Generator) -> None:
        self._generators[id(generator)] = (generator, state_now(generator))

    def _check(self, generator: torch.Generator, what: str) -> None:
        _, state = self._generators.get(id(generator), (None, None))
        moved = state is not None and not bool((state == state_now(generator)).all())
        if moved and self._sets_generators:  # else another thread has drawn
            raise CaptureError(
                f"capture: the state of the random generator was set between two random operators ({what}), and a "
                "replay would not set it. Call manual_seed, fork_rng and set_rng_state outside of the captured "
                "function (torch.utils.checkpoint takes preserve_rng_state=False)"
            )

    def _check_generators(self, what: str) -> None:
        self.paused += 1
        try:
            for generator, _ in self._generators.values():
                self._check(generator, what)
        finally:
            self.paused -= 1


def _python_draws() -> tuple[Any, ...]:
    """The states of the random numbers that no dispatch shows."""
    kind, state, place, *rest = numpy.random.get_state()
    return random.getstate(), kind, bytes(state), place, rest  # type: ignore[arg-type]


def _key(x: torch.Tensor) -> tuple[Any, ...]:
    if x.layout is not torch.strided:
        raise CaptureError(
            f"capture: a tensor of layout {x.layout} cannot be recorded; use dense tensors in the captured function"
        )
    return x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride(), x.dtype, x.is_conj(), x.is_neg()


def _meta(value: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an operation is planning, not work: on tensors without data."""
    return any(x.device.type == "meta" for x in tensor_tree.tensors((value, kwargs)))


def _default(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Generator:
    return default_generator(
        next((x.device for x in tensor_tree.tensors((args, kwargs))), torch.device(kwargs.get("device") or "cpu"))
    )
