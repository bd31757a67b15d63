"""One recorded run: the function is called for real, on stand-ins for its arguments, while a recorder listens."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ..base import tensor_tree
from ..base.torch_internals import autocast_enabled, pytree
from ..errors import CaptureError
from ..tensor.dtensor import DTensor
from ..tensor.views.block_owners import locals_of
from .aliasing import apart, copied, counts, detached, own, stand_in
from .float_provenance import Number, plain
from .guard_discovery import Environment
from .leaf_gradients import Leaves, arrived, leaves_of, without_hooks
from .outputs import ARG, ENV, GRAD, Base, Given, Sorter, kept
from .program import Backward, Form, Program, joined
from .recorder import Recorder
from .replay import Recorded, kind_of
from .signature import Metadata, Signature, may_differ
from .tape import Step, Var


class Recording:
    """A run under way: what was given, the recorder, and after :meth:`run` the program and the results of the run."""

    def __init__(
        self, fn: Any, signature: Signature, environment: Environment, changing: Sequence[int], trusted: Collection[str]
    ) -> None:
        self.fn, self.signature, self.environment = fn, signature, environment
        self.changing = changing  # floats of the survey that are variables of the tape, by their place in its key
        self.numbers: dict[int, Var] = {}
        self.recorder = Recorder(trusted, environment)
        self.ran = self.recorder.world.ran  # what this one was seen to do besides
        self.steps: list[Step] = []
        self.real: dict[Given, torch.Tensor] = {}  # what the user has, and
        self.seen: dict[Given, Any] = {}  # what the function sees
        self.vars: dict[Given, tuple[Var, ...]] = {}
        self.shown: dict[Given, tuple[torch.Tensor, ...]] = {}
        self.strides: dict[Given, tuple[tuple[int, ...], ...]] = {}
        self.copied: dict[Given, set[int]] = {}  # shown with memory of their own; the memory that they share in truth
        self.rebound: list[int] = []  # variables, by number, that have another local after the run
        self.alike = True  # whether what is guarded is the same on all ranks, whatever they have
        self._restore: list[tuple[Any, Any]] = []
        for number, x in enumerate(signature.tensors):
            self._give(Given(ARG, number), x)
        for number, x in enumerate(environment.tensors):
            self._give(Given(ENV, number), x)
        self.leaves = Leaves(environment.tensors, environment.between)
        for place, grad in enumerate(self.leaves.gradients()):
            if grad is not None:
                self._give(Given(GRAD, place), grad)

    def _give(self, given: Given, x: Any) -> None:
        own = locals_of(x)
        locals_, self.vars[given] = self._alone(own)
        self.real[given], self.shown[given] = x, locals_
        self.strides[given] = tuple(local.stride() for local in locals_)
        shared = {self.recorder.storage_of(mine) for local, mine in zip(locals_, own, strict=True) if local is not mine}
        if replaced := bool(shared):
            self.copied[given] = shared
        if given.kind == ARG:
            self.seen[given] = stand_in(x, locals_, replaced)
            return
        self.seen[given] = x
        if replaced:
            if type(x) is not DTensor:
                raise CaptureError(
                    f"capture: the function reads a tensor of shape {tuple(x.shape)} that shares its memory with another one; "
                    "pass them as arguments"
                )
            self._restore.append((x, x._local))
            x._local = joined(locals_, x._layout)._local

    def _alone(self, own: Sequence[torch.Tensor]) -> tuple[tuple[torch.Tensor, ...], tuple[Var, ...]]:
        """Locals and their variables; copies where their memory is something else's too, since at a replay it may not be."""
        found = []
        for local in own:
            var = self.recorder.given(local)
            if var is None:
                local = copied(local)
                var = self.recorder.given(local)
            assert var is not None
            found.append((local, var))
        return tuple(local for local, _ in found), tuple(var for _, var in found)

    # --- the run -------------------------------------------------------------------------------------------------------
    def run(self, way: AbstractContextManager[Any], together: int) -> tuple[Any, Program | None, str | None]:
        """The function's result, and the program; None, with where, if the run left other variables behind than it found.

        Args:
            way: inside of what it runs.
            together: bytes of values that collectives may move together.
        """
        args, kwargs = self.signature.rebuild([self.seen[Given(ARG, i)] for i in range(len(self.signature.tensors))])
        layouts = {given: (x._layout, x._local) for given, x in self.seen.items() if type(x) is DTensor}
        if autocast_enabled():
            torch.clear_autocast_cache()
        try:
            with self.leaves.watched(), self.recorder.running(self.steps):
                self._show_numbers()
                with way:
                    out = self._called(args, kwargs)
                leaves, tree = pytree.tree_flatten(out)
                for leaf in leaves:
                    if isinstance(leaf, DTensor):
                        leaf._local  # noqa: B018  arrives now, or is computed, if it is not there yet
        except CaptureError:
            self.leaves.put_back()
            raise
        finally:
            states = ((given, *known, self.seen[given]) for given, known in layouts.items())
            moved = [given for given, layout, local, x in states if x._layout is not layout or x._local is not local]
            for x, local in self._restore:
                x._local = local
            for held, key in self.environment.floats.values():
                if type(held.get(key)) is Number:
                    held[key] = plain(held[key])
            torch.clear_autocast_cache()
        self._check_moved(moved, layouts)
        changed = self._changed()
        program, bases = self._program(leaves, tree, together)
        for given in program.mutated:
            if given in self.copied:  # it has been shown with memory of its own
                for own, local in zip(locals_of(self.real[given]), self.shown[given], strict=True):
                    own.copy_(local)
        linked = self._linked(program, bases)
        sources = self.signature.tensors, self.environment.tensors, self.leaves.gradients(), self.environment.floats
        result = pytree.tree_unflatten(program.finish(linked, sources), tree)
        self.recorder.views.clear()
        return result, None if changed else program, changed

    def _check_moved(self, moved: list[Given], before: dict[Given, tuple[Any, Any]]) -> None:
        """Variables of the function may be given other locals of the same kind, as buffers of units are."""
        for given in moved:
            x = self.seen[given]
            if x._layout is not before[given][0] or given.kind != ENV or x.requires_grad or given in self.copied:
                raise CaptureError(
                    f"capture: the function changes the shape or the data of {self._named(given)} (x.data = ..., "
                    "x.t_()), and a replay cannot do that; make a new tensor"
                )
        self.rebound = [given.number for given in moved]

    def _show_numbers(self) -> None:
        for place in self.changing:
            held, key = self.environment.floats[place]
            self.numbers[place] = self.recorder.number()
            held[key] = self.recorder.numbers.make(held[key], self.numbers[place], frozenset((place,)))

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return self.fn(*args, **kwargs)
        except RuntimeError as error:
            if "a leaf Variable that requires grad" in str(error) or "a view of a leaf Variable" in str(error):
                raise CaptureError(
                    "capture: the function writes in place to an argument that requires grad, and autograd would not "
                    f"see that in a replay; write to x.clone() ({error})"
                ) from error
            raise

    def _named(self, given: Given) -> str:
        if given.kind == ARG:
            return f"argument tensor {given.number}"
        number = self.leaves.number(given.number) if given.kind == GRAD else given.number
        at = None if number is None else self.environment.key.index(("tensor", number))
        return "a gradient that waits for a later call" if at is None else self.environment.paths[at]

    def _changed(self) -> str | None:
        """Where the run left another value in a variable of the function."""
        if self.ran:
            return str(self.ran)
        if self.environment.unchanged():
            return None
        return self.environment.difference(Environment(self.fn, self.environment.ran))

    # --- what it made --------------------------------------------------------------------------------------------------
    def _program(self, leaves: list[Any], tree: Any, together: int) -> tuple[Program, list[Any]]:
        owners = {id(x): given for given, x in self.seen.items()}
        locals_ = {id(x._local): given for given, x in self.seen.items() if isinstance(x, DTensor)}
        storages = {var.storage for group in self.vars.values() for var in group}
        sorter = Sorter(self.recorder, owners, locals_, storages, self._spent)
        gradients, left = self.leaves.changed(), self.leaves.left()
        results = sorter.sort([*leaves, *gradients.values(), *tensor_tree.tensors([found for _, found, _ in left])])
        assigned = tuple(zip(gradients, results[len(leaves) :], strict=False))
        rebound = tuple((number, sorter.local_of(self.environment.tensors[number])) for number in self.rebound)
        written = {storage for step in self.steps for storage in step.writes}
        mutated = tuple(given for given, group in self.vars.items() if any(var.storage in written for var in group))
        for given in mutated:
            self._check_mutated(given)
            if given.kind == ARG and isinstance(self.real[given], DTensor) and counts(self.real[given]):
                increment_version(self.real[given])  # its stand-in has counted for itself
        self._check_arguments()
        differentiable = self._differentiable(
            [x for x, base in zip(sorter.tensors, sorter.bases, strict=True) if base.requires_grad]
        )
        read = {var for step in self.steps for var in step.inputs} | {var for base in sorter.bases for var in base.locals}
        used = [given for given, group in self.vars.items() if any(var in read for var in group) or given in differentiable]
        forms = tuple(Form.of(given, self.real[given], self.vars[given], self.strides[given]) for given in used)
        tensors, self.leaves.touched = self.environment.tensors, self.leaves.touched or any(kind == GRAD for kind, _ in used)
        looked = {n for n, x in enumerate(tensors) if id(x) in self.leaves.looked or isinstance(x, DTensor)}  # x.placements
        guarded = looked | {n for kind, n in used if kind == ENV}
        self.alike = not any(may_differ(tensors[number]) for number in guarded)
        program = Program(
            forms,
            Metadata(sorted(guarded), tensors),
            self.leaves.guards(),
            self.steps,
            self.recorder.constants,
            self.recorder.facts,
            tuple(sorter.bases),
            tuple(results[: len(leaves)]),
            assigned,
            tuple(kept(left, iter(results[len(leaves) + len(gradients) :]))),
            rebound,
            tree,
            mutated,
            differentiable,
            tuple((var, place) for place, var in self.numbers.items()),
            self.recorder.numbers.seen,
            frozenset(self.recorder.numbers.guarded),
            together,
        )
        return program, sorter.tensors

    def _check_arguments(self) -> None:
        for given, x in ((given, x) for given, x in self.seen.items() if given.kind == ARG):
            if x.grad is not None and x is not self.real[given]:
                raise CaptureError(
                    f"capture: the function runs a backward pass that sets the .grad of {self._named(given)}. Compute "
                    "the gradient with torch.autograd.grad and return it, or make the tensor a variable of the "
                    "function"
                )
            if x.grad_fn is not None or x.requires_grad != self.real[given].requires_grad:
                raise CaptureError(
                    f"capture: the function writes values that require grad to {self._named(given)}; return them instead"
                )

    def _check_mutated(self, given: Given) -> None:
        x = self.real[given]
        if any(not apart(self.real[other], x) for other in self._beside(given)):
            raise CaptureError(
                f"capture: the function writes to {self._named(given)}, which shares its memory with another input; pass copies"
            )
        if isinstance(x, DTensor) and type(x) is not DTensor:
            raise CaptureError(
                f"capture: the function writes to {self._named(given)}, a view with elements on other ranks than "
                "those of its base; write to the base"
            )

    def _beside(self, given: Given) -> Iterator[Given]:
        """Others in memory that a tensor is in too, of which all but one were shown as copies."""
        own = self._memory(given)
        yield from (other for other in self.real if other != given and not own.isdisjoint(self._memory(other)))

    def _memory(self, given: Given) -> set[int]:
        return self.copied.get(given, set()) | {var.storage for var in self.vars[given]}

    def _differentiable(self, bases: list[torch.Tensor]) -> tuple[Given, ...]:
        """The given tensors that the results depend on, as autograd sees it."""
        reached = leaves_of(bases)
        for given, x in self.seen.items():
            if given.kind == ENV and x.requires_grad and not x.is_leaf and id(x.grad_fn) in reached:
                raise CaptureError(
                    f"capture: the function reads {self._named(given)}, which has an autograd graph from outside of "
                    "the function; pass it as an argument"
                )
        self._check_delivered(reached)
        return tuple(given for given, x in self.seen.items() if x.requires_grad and x.is_leaf and id(x) in reached)

    def _check_delivered(self, reached: dict[int, Any]) -> None:
        """Results' gradients go to leaves that a replay hands them to: what was there before and capture cannot find is none."""
        known = {id(x) for x in self.seen.values()}
        for x in reached.values():
            if isinstance(x, torch.Tensor) and id(x) not in known and not self.recorder.made(x):
                raise CaptureError(
                    "capture: the function returns results that require grad because of tensors that capture cannot "
                    "find (units of fully_shard and replicate reduce the gradients of their parameters themselves). "
                    "Capture the whole step including backward(), or call the function under torch.no_grad()"
                )

    def _linked(self, program: Program, bases: list[torch.Tensor]) -> list[torch.Tensor]:
        """The bases, those with gradients as results of one autograd function of the user's tensors."""
        linked = [bool(program.differentiable) and base.requires_grad for base in program.bases]
        apply: Any = Recorded.apply
        made = iter(apply(self, program, bases, *(self.real[given] for given in program.differentiable)) if any(linked) else ())
        return [
            next(made) if link else detached(x) if isinstance(x, torch.Tensor) and x.requires_grad else x
            for x, link in zip(bases, linked, strict=True)
        ]

    def _spent(self, x: torch.Tensor) -> bool:
        """Whether the run itself has gone back from a tensor: leaves that it depends on have their gradients."""
        had = {id(self.environment.tensors[number]) for number in self.leaves.accumulated}
        return bool(had) and not had.isdisjoint(leaves_of([x]))

    # --- backward ------------------------------------------------------------------------------------------------------
    def backward(self, program: Program, bases: list[Any], grads: tuple[Any, ...]) -> tuple[Any, ...]:
        """The gradients of the differentiable inputs; recorded, if it is the first time for incoming ones of this kind."""
        inputs = [self.seen[given] for given in program.differentiable]
        roots = [x for x, base in zip(bases, program.bases, strict=True) if base.requires_grad]
        key = kind_of(grads)
        shown = [None if grad is None else self._incoming(grad) for grad in grads]
        steps: list[Step] = []
        chosen = [(root, grad[0]) for root, grad in zip(roots, shown, strict=True) if grad is not None]
        with self.recorder.running(steps), without_hooks(inputs):
            computed = torch.autograd.grad(
                [root for root, _ in chosen], inputs, [grad for _, grad in chosen], retain_graph=True, allow_unused=True
            )
            found = arrived([self.real[given] for given in program.differentiable], computed)
            for gradient in found:
                if isinstance(gradient, DTensor):
                    gradient._local  # noqa: B018  as above
        self.recorder.views.clear()
        if key not in program.backwards:
            program.add_backward(key, self._backward(shown, grads, steps, found))
        copies = iter(program.backwards[key].copied)
        return tuple(None if x is None else own(x, copies) for x in found)

    def _incoming(self, grad: Any) -> tuple[Any, tuple[Var, ...]]:
        """A gradient, with memory that nothing else has, and its variables."""
        own = locals_of(grad)
        locals_, variables = self._alone(own)
        if all(local is mine for local, mine in zip(locals_, own, strict=True)):
            return grad, variables
        return joined(locals_, grad._layout if isinstance(grad, DTensor) else None), variables

    def _backward(self, shown: list[Any], grads: tuple[Any, ...], steps: list[Step], gradients: list[Any]) -> Backward:
        incoming = tuple(() if pair is None else pair[1] for pair in shown)
        strides = tuple(() if pair is None else tuple(local.stride() for local in locals_of(pair[0])) for pair in shown)
        layouts = tuple(grad._layout if isinstance(grad, DTensor) else None for grad in grads)
        made = tuple(None if gradient is None else self._gradient(gradient) for gradient in gradients)
        return Backward(incoming, strides, layouts, steps, made)

    def _gradient(self, x: Any) -> Base:
        found = tuple(self.recorder.taken(local) for local in locals_of(x))
        return Base(found, x._layout if isinstance(x, DTensor) else None, False)
