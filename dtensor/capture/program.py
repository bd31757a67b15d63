"""A recorded run made ready to be replayed: the tapes of the forward run and of its backward passes, and what goes in and out."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version

from ..base.torch_internals import TensorBase
from ..comm import PerRank, communicator_of, shards_of
from ..dispatch.local_op import below_autograd
from ..dispatch.wrapping import wrap_local
from ..layout.layout import Layout
from ..tensor.dtensor import DTensor
from .buckets import BYTES, bucketed
from .codegen import Source
from .graph import Step, Tape, Var
from .leaf_gradients import Guarded
from .optimize import optimized, without_unused
from .overlap import overlapped
from .passes import with_bound_collectives, without_copies
from .results import ENV, GRAD, Base, Constant, Given, Joined, LocalOf, Made, Result, View, follow
from .signature import Metadata, picking
from .survey import Environment

# By kind of Given: arguments, tensors of the survey, their gradients; then floats by their place in the survey's key
Sources = tuple[Sequence[Any], Sequence[Any], Any, Any]


_STRIDE: Any = TensorBase.stride
_LOCAL, _GRAD = attrgetter("_local"), attrgetter("grad")


class _Gradients:
    """``.grad`` of tensors, as a sequence."""

    __slots__ = ("tensors",)

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors

    def __getitem__(self, number: int) -> Any:
        return self.tensors[number].grad


def sources_of(arguments: Sequence[Any], environment: Environment) -> Sources:
    """Where a program finds the tensors that it is given."""
    return arguments, environment.tensors, _Gradients(environment.tensors), environment.floats


class Form(NamedTuple):
    """What the tape takes a tensor to be: whether a DTensor, the strides of its locals."""

    given: Given
    distributed: bool
    locals: tuple[Var, ...]
    strides: tuple[tuple[int, ...], ...]


def locals_of(x: Any) -> tuple[torch.Tensor, ...]:
    """The local tensors that this process holds of a tensor."""
    local = x._local if isinstance(x, DTensor) else x
    return shards_of(local)


def as_recorded(x: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """``x`` with the strides that the tape was recorded for: which ones a rank has is its own affair, so it is no guard."""
    repeated = any(step == 0 and size > 1 for size, step in zip(x.shape, stride, strict=True))
    if x.stride() == stride or repeated:  # values that the tape knew to be repeated may not be
        return x
    return torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device).copy_(x.detach())


@dataclass(slots=True, eq=False)
class Backward:
    """The tape of a backward pass.

    Attributes:
        incoming: for each gradient that comes in its locals, () for none; their strides beside them.
        needed: what it reads of the forward run.
        gradients: for each differentiable input what it gives: None, or locals and layout.
        copied: for each of these locals whether it is given as a copy, since its memory is something else's too.
    """

    incoming: tuple[tuple[Var, ...], ...]
    strides: tuple[tuple[tuple[int, ...], ...], ...]
    layouts: tuple[Layout | None, ...]
    steps: list[Step]
    gradients: tuple[tuple[tuple[Var, ...], Layout | None] | None, ...]
    needed: tuple[Var, ...] = ()
    copied: tuple[bool, ...] = ()
    tape: Tape | None = None
    source: Source | None = None

    def given(self, locals_: Sequence[torch.Tensor]) -> list[Any]:
        """The gradients of the differentiable inputs, which nobody else holds, so that autograd may keep them as they are."""
        found: list[Any] = []
        at = 0
        for gradient in self.gradients:
            count = 0 if gradient is None else len(gradient[0])
            found.append(None if gradient is None else joined(tuple(locals_[at : at + count]), gradient[1]))
            at += count
        return found


@dataclass(slots=True, eq=False)
class Compiled:
    """The text for a set of backward passes: the forward run also gives what they need."""

    tape: Tape
    source: Source
    saved: tuple[Var, ...]
    watched: tuple[Given | int, ...]  # given tensors, and results by number, whose memory is saved: they must not be written to
    backwards: dict[Any, Backward]
    places: dict[Any, tuple[int, ...]]  # for each backward pass: where in ``saved`` is what it needs


@dataclass(slots=True, eq=False)
class Program:
    """See the module.

    Attributes:
        guards: what must hold of the tensors of the survey that it uses,
        leaves: and of leaves, where their gradients matter.
        mutated: given tensors that it writes to.
        differentiable: given tensors that get gradients.
        numbers: floats of the survey that the tape takes, by their place in its key.
        followed: whether there are floats in the tape that change, of which some may have slipped away (see confirm.py);
        guarded: those of the survey that must not change after all.
        together: bytes of values that collectives may move together.
        assigned: what the run leaves in ``.grad`` of tensors of the survey; rebound: what as locals of others.
    """

    forms: tuple[Form, ...]
    guards: Metadata
    leaves: Guarded
    steps: list[Step]
    constants: dict[Var, torch.Tensor]
    facts: dict[Var, Any]
    bases: tuple[Base, ...]
    results: tuple[Result, ...]
    assigned: tuple[tuple[int, Result], ...]
    rebound: tuple[tuple[int, int], ...]
    tree: Any
    mutated: tuple[Given, ...]
    differentiable: tuple[Given, ...]
    numbers: tuple[tuple[Var, int], ...] = ()
    followed: bool = False
    guarded: frozenset[int] = frozenset()
    together: int = BYTES
    backwards: dict[Any, Backward] = field(default_factory=dict)
    compiled: Compiled | None = None
    _reads: list[Any] = field(default_factory=list)  # by kind of what is given: which, and whether they are DTensors
    _counting: list[int] = field(default_factory=list)  # places of DTensors that are written to, of which the tape sees locals
    _strides: list[tuple[int, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.forms = tuple(sorted(self.forms, key=lambda form: (form.given.kind, form.distributed)))  # few ways to read them
        for (kind, distributed), forms in itertools.groupby(self.forms, key=lambda form: (form.given.kind, form.distributed)):
            self._reads.append((kind, picking([form.given.number for form in forms]), distributed))
        written = frozenset(self.mutated)
        self._counting = [place for place, form in enumerate(self.forms) if form.distributed and form.given in written]
        self._strides = [stride for form in self.forms for stride in form.strides]
        self.steps = bucketed(self.steps, self.facts, frozenset(self._storages()), self.together)

    @property
    def ready(self) -> bool:
        """Whether calls can be replayed: the backward pass has been seen, where there is one."""
        return not self.differentiable or bool(self.backwards)

    # --- building ------------------------------------------------------------------------------------------------------
    def compile(self) -> Compiled:
        """The text, made anew after another backward pass was seen."""
        if self.compiled is None:
            self.compiled = self._compiled()
        return self.compiled

    def add_backward(self, key: Any, backward: Backward) -> None:
        """Remember how gradients are computed for incoming ones of this kind."""
        made = {var for step in backward.steps for var in step.outputs}
        incoming = {var for group in backward.incoming for var in group}
        results = tuple(var for gradient in backward.gradients if gradient is not None for var in gradient[0])
        kept = {storage for step in self.steps for storage in step.writes}
        constants = {var: value for var, value in self.constants.items() if var.storage not in kept}
        inputs = tuple(var for group in backward.incoming for var in group)
        lasting = frozenset(self._storages() | {var.storage for var in incoming})
        backward.steps = bucketed(backward.steps, self.facts, lasting, self.together)
        read = [var for step in backward.steps for var in step.inputs] + list(results)
        earlier = tuple(dict.fromkeys(var for var in read if var not in made and var not in incoming and var not in constants))
        tape = self._shortened(Tape(inputs + earlier, backward.steps, results, constants), lasting)
        backward.needed = tuple(var for var in tape.inputs if var not in incoming)
        tape.inputs = inputs + backward.needed
        # Autograd may keep a gradient as some leaf's ``.grad`` and add to it in place, so its memory is nobody else's.
        shared = {var.storage for var in tape.inputs} | {var.storage for var in constants}
        copied = []
        for var in results:
            copied.append(var.storage in shared)
            shared.add(var.storage)
        backward.copied = tuple(copied)
        backward.tape, backward.source = tape, Source("backward", tape, copied)
        self.backwards[key] = backward
        self.compiled = None

    def _shortened(self, tape: Tape, lasting: frozenset[int]) -> Tape:
        tape = without_unused(without_copies(optimized(tape, lasting), self.facts, lasting), lasting)
        tape = with_bound_collectives(tape, self.facts, lasting)
        tape.steps = overlapped(tape.steps, self.facts, lasting, self.together)
        return tape

    def _storages(self) -> set[int]:
        return {var.storage for form in self.forms for var in form.locals}

    def _compiled(self) -> Compiled:
        inputs = tuple(var for form in self.forms for var in form.locals) + tuple(var for var, _ in self.numbers)
        results = tuple(var for base in self.bases for var in base.locals)
        saved = tuple(dict.fromkeys(var for backward in self.backwards.values() for var in backward.needed))
        lasting = frozenset(self._storages())
        tape = self._shortened(Tape(inputs, self.steps, results + saved, self.constants), lasting)
        tape.inputs = inputs
        by_storage: dict[int, list[Given | int]] = {}
        for form in self.forms:
            for var in form.locals:
                by_storage.setdefault(var.storage, []).append(form.given)
        for number, base in enumerate(self.bases):
            for var in base.locals:
                by_storage.setdefault(var.storage, []).append(number)
        watched = tuple(dict.fromkeys(owner for var in saved for owner in by_storage.get(var.storage, ())))
        places = {key: tuple(saved.index(var) for var in backward.needed) for key, backward in self.backwards.items()}
        return Compiled(tape, Source("forward", tape), saved, watched, dict(self.backwards), places)

    # --- running -------------------------------------------------------------------------------------------------------
    def inputs(self, sources: Sources) -> tuple[list[Any], list[torch.Tensor], list[tuple[torch.Tensor, torch.Tensor]]]:
        """What the program is given, the locals that the tape starts from, and copies of those that lie otherwise in memory:
        (copy, own)."""
        given: list[Any] = []
        found: list[Any] = []
        for kind, pick, distributed in self._reads:
            tensors: Sequence[Any] = [*map(_GRAD, pick(sources[ENV]))] if kind == GRAD else pick(sources[kind])
            given += tensors
            found += map(_LOCAL, tensors) if distributed else tensors
        if PerRank in set(map(type, found)):
            found = [shard for local in found for shard in shards_of(local)]
        if [*map(_STRIDE, found)] == self._strides:
            return given, found, []
        shown = [as_recorded(own, stride) for own, stride in zip(found, self._strides, strict=True)]
        return given, shown, [(local, own) for local, own in zip(shown, found, strict=True) if local is not own]

    def run(self, compiled: Compiled, sources: Sources) -> tuple[list[Any], tuple[Any, ...]]:
        """The bases, and what is saved for backward passes."""
        given, locals_, copies = self.inputs(sources)
        if self.numbers:
            floats = [sources[3][place] for _, place in self.numbers]
            locals_ = [*locals_, *(held[key] for held, key in floats)]
        with below_autograd():
            values = compiled.source.run(*locals_)
        for copy, own in copies:
            if self.mutated:
                own.copy_(copy)
        if self._counting:
            _count([given[place] for place in self._counting])
        made, at = [], 0
        for base in self.bases:
            count = len(base.locals)
            made.append(joined(values[at : at + count], base.layout))
            at += count
        return made, values[at:]

    def finish(self, bases: list[Any], sources: Sources) -> list[Any]:
        """The leaves of what the function returns; gradients that it leaves are put in their places."""
        gradients = [self._result(result, bases, sources) for _, result in self.assigned]
        for (number, _), gradient in zip(self.assigned, gradients, strict=True):
            sources[ENV][number].grad = gradient
        for number, base in self.rebound:
            sources[ENV][number]._local = bases[base]._local
        return [self._result(result, bases, sources) for result in self.results]

    def _result(self, result: Result, bases: list[Any], sources: Sources) -> Any:
        match result:
            case Made(number):
                return bases[number]
            case Constant(value):
                return value
            case Given():
                return sources[result[0]][result[1]]
            case LocalOf(given):
                return sources[given[0]][given[1]]._local.detach()
            case Joined(numbers):
                return PerRank([bases[number] for number in numbers])
            case View(root, chain):
                return follow(chain, bases[root.base] if isinstance(root, Made) else sources[root[0]][root[1]])


def _count(written: list[Any]) -> None:
    """Tell autograd that these have been written to."""
    try:
        increment_version(written)
    except RuntimeError:  # one was made in inference mode, and has no count
        increment_version([x for x in written if not x.is_inference()])


def joined(locals_: tuple[torch.Tensor, ...], layout: Layout | None) -> Any:
    """The tensor with these locals."""
    if layout is None:
        return locals_[0]
    return wrap_local(communicator_of(layout.mesh).local(locals_), layout)
