"""A recorded run made ready to be replayed: the tapes of the forward run and of its backward passes, and what goes in and out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version

from ..base.group_by import by_key
from ..base.torch_internals import pytree
from ..comm import PerRank, communicator_of
from ..dispatch.local_op import below_autograd
from ..dispatch.wrap import wrap_local
from ..layout.layout import Layout
from ..tensor.dtensor import DTensor
from ..tensor.views.block_owners import locals_of
from .buckets import BYTES, bucketed
from .codegen import Source
from .copy_elision import with_bound_collectives, without_copies
from .dce_cse import optimized, without_unused
from .leaf_gradients import Guarded, put
from .outputs import ENV, Base, Constant, Given, Joined, Kept, LocalOf, Made, Result, View, follow
from .overlap import overlapped
from .signature import Alike, Metadata, picking, strides_of
from .tape import Step, Tape, Var

# Arguments, tensors of the survey and leaves' gradients, as Given numbers them; floats by their place in the survey's key
Sources = tuple[Sequence[Any], Sequence[Any], Sequence[Any], Any]

_LOCAL = attrgetter("_local")
_LOCALS: dict[tuple[bool, bool], Callable[[Any], Any]] = {  # by whether it is a DTensor, and whether of all ranks
    (True, False): _LOCAL,
    (True, True): attrgetter("_local.shards"),
    (False, True): attrgetter("shards"),
}


class Form(NamedTuple):
    """What the tape takes a tensor to be: whether a DTensor, whether all ranks' in one process, the strides of its locals."""

    given: Given
    distributed: bool
    joint: bool
    locals: tuple[Var, ...]
    strides: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(given: Given, x: Any, locals_: tuple[Var, ...], strides: tuple[tuple[int, ...], ...]) -> Form:
        distributed = isinstance(x, DTensor)
        return Form(given, distributed, isinstance(x._local if distributed else x, PerRank), locals_, strides)


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
        gradients: for each differentiable input what it gives, or None.
        copied: for each of the locals of these whether it is given as a copy, since its memory is something else's too: autograd
            may keep gradients as they are.
    """

    incoming: tuple[tuple[Var, ...], ...]
    strides: tuple[tuple[tuple[int, ...], ...], ...]
    layouts: tuple[Layout | None, ...]
    steps: list[Step]
    gradients: tuple[Base | None, ...]
    needed: tuple[Var, ...] = ()
    copied: tuple[bool, ...] = ()
    source: Source | None = None
    alike: Alike = field(init=False)
    _single: bool = field(init=False)  # whether all that comes are DTensors of one rank's

    def __post_init__(self) -> None:
        self.alike = Alike(strides_of, [*chain.from_iterable(self.strides)])
        self._single = all(layout is not None and not communicator_of(layout.mesh).holds_all for layout in self.layouts)

    def run(self, grads: Sequence[Any], values: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """The gradients of the differentiable inputs.

        Args:
            grads: the gradients that come, None where there is none.
            values: of what it reads of the forward run.
        """
        assert self.source is not None
        found = [*map(_LOCAL, grads)] if self._single else [x for grad in grads if grad is not None for x in locals_of(grad)]
        if not self.alike(found):
            strides = chain.from_iterable(self.strides)
            found = [as_recorded(local, stride) for local, stride in zip(found, strides, strict=True)]
        with below_autograd():
            return self.source.run(*found, *values)


@dataclass(slots=True, eq=False)
class Compiled:
    """The text for a set of backward passes: the forward run also gives what they need."""

    source: Source
    watched: tuple[Given | int, ...]  # given tensors, and results by number, whose memory is saved: they must not be written to
    backwards: dict[Any, tuple[Backward, Callable[[Any], Any]]]  # which also picks what it needs of what is saved


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
        assigned: what the run leaves in ``.grad`` of tensors of the survey, rebound: what as locals of others;
        kept: what the library is to keep for later calls.
        ready: whether calls can be replayed: the backward pass has been seen, where there is one.
        alone: whether the function returns one leaf.
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
    kept: tuple[Kept, ...]
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
    ready: bool = field(init=False)
    alone: bool = field(init=False)
    _reads: list[Any] = field(default_factory=list)  # by kind of what is given: which, and how its locals are had
    only_differentiable: bool = False  # whether all that it makes has gradients
    _as_made: bool = False  # whether all that it does with what it makes is to return it
    _counted: Any = None  # picks the DTensors that are written to, of which the tape sees locals
    _alike: Alike = field(init=False)

    def __post_init__(self) -> None:
        def reading(form: Form) -> tuple[int, bool, bool]:
            return form.given.kind, form.distributed, form.joint

        self.forms = tuple(sorted(self.forms, key=reading))  # few ways to read them
        for (kind, distributed, joint), forms in groupby(self.forms, key=reading):
            self._reads.append((kind, picking([form.given.number for form in forms]), _LOCALS.get((distributed, joint)), joint))
        returned = self.results == tuple(map(Made, range(len(self.bases))))
        self._as_made = returned and not (self.assigned or self.kept or self.rebound)
        self.only_differentiable = all(base.requires_grad for base in self.bases)
        written = frozenset(self.mutated)
        counted = [place for place, form in enumerate(self.forms) if form.distributed and form.given in written]
        self._counted = picking(counted) if counted else None
        self._alike = Alike(strides_of, [stride for form in self.forms for stride in form.strides])
        self.ready, self.alone = not self.differentiable, self.tree.is_leaf()
        self.steps = bucketed(self.steps, self.facts, frozenset(self._storages()), self.together)

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
        results = tuple(var for gradient in backward.gradients if gradient is not None for var in gradient.locals)
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
        backward.source = Source("backward", tape, backward.gradients, copied)
        self.backwards[key] = backward
        self.compiled, self.ready = None, True

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
        given: list[tuple[int, Given | int]] = [(var.storage, form.given) for form in self.forms for var in form.locals]
        by_storage = by_key([*given, *((var.storage, k) for k, base in enumerate(self.bases) for var in base.locals)])
        watched = tuple(dict.fromkeys(owner for var in saved for owner in by_storage.get(var.storage, ())))
        backwards = {key: (one, picking([*map(saved.index, one.needed)])) for key, one in self.backwards.items()}
        return Compiled(Source("forward", tape, self.bases), watched, backwards)

    # --- running -------------------------------------------------------------------------------------------------------
    def run(self, compiled: Compiled, sources: Sources) -> tuple[Any, ...]:
        """The bases, and what is saved for backward passes."""
        given: list[Any] = []
        own: list[torch.Tensor] = []
        for kind, pick, read, joint in self._reads:
            tensors = pick(sources[kind])
            given += tensors
            locals_ = tensors if read is None else map(read, tensors)
            own += chain.from_iterable(locals_) if joint else locals_
        shown = own if self._alike(own) else [*map(as_recorded, own, chain.from_iterable(form.strides for form in self.forms))]
        floats = [held[key] for held, key in [sources[3][place] for _, place in self.numbers]] if self.numbers else ()
        with below_autograd():
            values = compiled.source.run(*shown, *floats)
        if shown is not own and self.mutated:
            for mine, copy in zip(own, shown, strict=True):
                if mine is not copy:
                    mine.copy_(copy)
        if self._counted is not None:
            _count(self._counted(given))
        return values

    def finish(self, bases: Sequence[Any], sources: Sources) -> Sequence[Any]:
        """The leaves of what the function returns; gradients that it leaves are put in their places."""
        if self._as_made:
            return bases[: len(self.bases)]
        gradients = [self._result(result, bases, sources) for _, result in self.assigned]
        kept = [(held, tree, [self._result(one, bases, sources) for one in leaves]) for held, leaves, tree in self.kept]
        for held, tree, leaves in kept:
            put(held, pytree.tree_unflatten(leaves, tree))
        for (number, _), gradient in zip(self.assigned, gradients, strict=True):
            sources[ENV][number].grad = gradient
        for number, base in self.rebound:
            sources[ENV][number]._local = bases[base]._local
        return [self._result(result, bases, sources) for result in self.results]

    def _result(self, result: Result, bases: Sequence[Any], sources: Sources) -> Any:
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


def _count(written: Sequence[Any]) -> None:
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
