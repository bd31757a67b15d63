"""Recorded run: one run of the function on stand-ins for its arguments, and the replay program that it gives."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ...base import tensor_tree
from ...base.torch_internals import autocast_enabled, pytree
from ...errors import CaptureError
from ...state.wrap import wrap_local
from ...tensor.dtensor import DTensor
from ...tensor.local_tensors import local_tensors_of
from ..guards.guard_discovery import discover_guards
from ..guards.guard_set import GuardSet
from ..guards.object_model import guarded_attributes, has_user_attributes
from ..guards.signature import MetadataGuard, Signature, may_differ_across_ranks
from ..replay.outputs import ARG, ENV, GRAD, ComputedTensor, InputRef
from ..replay.replay_program import BackwardTape, InputSpec, Recorded, ReplayProgram, detach_same_layout, grads_key, join_locals
from ..tracing.float_provenance import TracedFloat, to_plain_float
from ..tracing.impure_calls import call_captured
from ..tracing.recorder import Recorder
from ..tracing.tape import Step, Var
from .gradient_recording import LeafGradients, reachable_from, redistribute_leaf_gradients, suspend_hooks
from .output_classifier import OutputClassifier, describe_carried


class Recording:
    """Recorded run of a function. :meth:`run` returns the results of the function and the replay program.

    Args:
        fn: the captured function.
        signature: of the call.
        guards: what the function reads besides its arguments.
        changing: floats that are variables of the tape, by their place in the key of ``guards``.
        trusted: modules of compiled code that may be called.

    Attributes:
        user_tensors: the user's input tensors.
        run_tensors: the tensors that the function gets in place of them.
        vars, locals, strides: for each input, the variables, local tensors and strides that the recorder knows.
        copied: inputs that were replaced by copies because they share memory, with the storage numbers of this memory.
        observed: code that the run executed and guard discovery has not looked into.
        same_on_ranks: whether the guarded facts are equal on all ranks.
    """

    def __init__(
        self, fn: Any, signature: Signature, guards: GuardSet, changing: Sequence[int], trusted: Collection[str]
    ) -> None:
        self.fn, self.signature, self.guards, self.changing = fn, signature, guards, changing
        self.float_vars: dict[int, Var] = {}
        self.recorder = Recorder(trusted, guards)
        self.observed = self.recorder.calls.observed
        self.steps: list[Step] = []
        self.user_tensors: dict[InputRef, torch.Tensor] = {}
        self.run_tensors: dict[InputRef, Any] = {}
        self.vars: dict[InputRef, tuple[Var, ...]] = {}
        self.locals: dict[InputRef, tuple[torch.Tensor, ...]] = {}
        self.strides: dict[InputRef, tuple[tuple[int, ...], ...]] = {}
        self.copied: dict[InputRef, set[int]] = {}
        self.rebound: list[int] = []  # numbers of the tensors of the guard set that have another local tensor after the run
        self.same_on_ranks = True
        self._own_locals: list[tuple[Any, Any]] = []  # (DTensor, its local value), to be put back after the run
        for number, x in enumerate(signature.tensors):
            self._add_input(InputRef(ARG, number), x)
        for number, x in enumerate(guards.tensors):
            self._add_input(InputRef(ENV, number), x)
        self.gradients = LeafGradients(guards.tensors, guards.library_states)
        for number, grad in enumerate(self.gradients.gradients_before()):
            if grad is not None:
                self._add_input(InputRef(GRAD, number), grad)

    def _add_input(self, ref: InputRef, x: Any) -> None:
        """Register ``x`` as an input of the recording; if it shares memory with another input, use a copy or raise."""
        own = local_tensors_of(x)
        locals_, self.vars[ref] = self._add_locals(own)
        self.user_tensors[ref], self.locals[ref] = x, locals_
        self.strides[ref] = tuple(local.stride() for local in locals_)
        shared = {self.recorder.storage_of(mine) for local, mine in zip(locals_, own, strict=True) if local is not mine}
        if shared:
            self.copied[ref] = shared
        if ref.kind == ARG:
            self.run_tensors[ref] = _make_stand_in(x, locals_, bool(shared))
            return
        self.run_tensors[ref] = x
        if shared:
            if type(x) is not DTensor:
                raise CaptureError(
                    f"capture: the function reads a tensor of shape {tuple(x.shape)} that shares its memory with another one; "
                    "pass them as arguments"
                )
            self._own_locals.append((x, x._local))
            x._local = join_locals(locals_, x._layout)._local

    def _add_locals(self, own: Sequence[torch.Tensor]) -> tuple[tuple[torch.Tensor, ...], tuple[Var, ...]]:
        """Return local tensors and their tape variables; a tensor in memory that has a variable already is copied.

        A local tensor is copied if its memory is known already, because at a replay the two inputs may not share memory.
        """
        pairs = []
        for local in own:
            var = self.recorder.add_input(local)
            if var is None:
                local = _copy_with_strides(local)
                var = self.recorder.add_input(local)
            assert var is not None
            pairs.append((local, var))
        return tuple(local for local, _ in pairs), tuple(var for _, var in pairs)

    # --- the run -------------------------------------------------------------------------------------------------------
    def run(self, around: AbstractContextManager[Any], bucket_bytes: int) -> tuple[Any, ReplayProgram | None, str | None]:
        """Run and record the function; return ``(result, program, changed)``.

        If the run leaves other Python values in the function's variables than it found, the program is None and ``changed`` names
        the first of them. Otherwise ``changed`` is None.

        Args:
            around: a context manager to enter around the call.
            bucket_bytes: most bytes of one joined collective.
        """
        args, kwargs = self.signature.rebuild([self.run_tensors[InputRef(ARG, i)] for i in range(len(self.signature.tensors))])
        layouts = {ref: (x._layout, x._local) for ref, x in self.run_tensors.items() if type(x) is DTensor}
        if autocast_enabled():
            torch.clear_autocast_cache()
        try:
            with self.gradients.observed_access(), self.recorder.recording_to(self.steps):
                self._insert_floats()
                with around:
                    out = self._call_function(args, kwargs)
                leaves, tree = pytree.tree_flatten(out)
                for leaf in leaves:
                    if isinstance(leaf, DTensor):
                        leaf._local  # noqa: B018  waits for a pending local value, or computes a lazy one
        except CaptureError:
            self.gradients.restore()
            raise
        finally:
            states = ((ref, *before, self.run_tensors[ref]) for ref, before in layouts.items())
            rebound = [ref for ref, layout, local, x in states if x._layout is not layout or x._local is not local]
            for x, local in self._own_locals:
                x._local = local
            for mapping, key in self.guards.floats.values():
                if type(mapping.get(key)) is TracedFloat:
                    mapping[key] = to_plain_float(mapping[key])
            torch.clear_autocast_cache()
        self._check_rebound(rebound, layouts)
        changed = self._find_changed()
        program, tensors = self._make_program(leaves, tree, bucket_bytes)
        for ref in program.mutated:
            if ref in self.copied:  # the run has written to a copy
                for own, local in zip(local_tensors_of(self.user_tensors[ref]), self.locals[ref], strict=True):
                    own.copy_(local)
        linked = self._link_to_autograd(program, tensors)
        sources = self.signature.tensors, self.guards.tensors, self.gradients.gradients_before(), self.guards.floats
        result = pytree.tree_unflatten(program.make_outputs(linked, sources), tree)
        self.recorder.views.clear()
        return result, None if changed else program, changed

    def _check_rebound(self, rebound: list[InputRef], before: dict[InputRef, tuple[Any, Any]]) -> None:
        """Raise for inputs of which the run replaced the layout or local tensor in a way that a replay cannot repeat."""
        for ref in rebound:
            x = self.run_tensors[ref]
            if x._layout is not before[ref][0] or ref.kind != ENV or x.requires_grad or ref in self.copied:
                raise CaptureError(
                    f"capture: the function changes the shape or the data of {self._describe_input(ref)} (x.data = ..., "
                    "x.t_()), and a replay cannot do that; make a new tensor"
                )
        self.rebound = [ref.number for ref in rebound]

    def _insert_floats(self) -> None:
        """Replace the floats that change between calls by traced floats, which are variables of the tape."""
        for place in self.changing:
            mapping, key = self.guards.floats[place]
            self.float_vars[place] = self.recorder.new_float()
            mapping[key] = self.recorder.floats.make_float(mapping[key], self.float_vars[place], frozenset((place,)))

    def _call_function(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the captured function; raise a CaptureError for in-place writes to arguments that require grad."""
        try:
            return call_captured(self.fn, args, kwargs)
        except RuntimeError as error:
            if "a leaf Variable that requires grad" in str(error) or "a view of a leaf Variable" in str(error):
                raise CaptureError(
                    "capture: the function writes in place to an argument that requires grad, and autograd would not "
                    f"see that in a replay; write to x.clone() ({error})"
                ) from error
            raise

    def _describe_input(self, ref: InputRef) -> str:
        """Return text that names an input in an error: its argument number, or its path from the function."""
        if ref.kind == ARG:
            return f"argument tensor {ref.number}"
        number = self.gradients.leaf_number(ref.number) if ref.kind == GRAD else ref.number
        place = None if number is None else self.guards.key.index(("tensor", number))
        return "a gradient that waits for a later call" if place is None else self.guards.paths[place]

    def _find_changed(self) -> str | None:
        """Return the path of a guarded Python value that the run changed, or newly observed code; None for neither."""
        if self.observed:
            return str(self.observed)
        if self.guards.unchanged():
            return None
        return self.guards.find_difference(discover_guards(self.fn, self.guards.observed))

    # --- the program ---------------------------------------------------------------------------------------------------
    def _make_program(self, leaves: list[Any], tree: Any, bucket_bytes: int) -> tuple[ReplayProgram, list[Any]]:
        """Return the replay program of the recorded run, and the tensors that the run computed for it."""
        refs = {id(x): ref for ref, x in self.run_tensors.items()}
        input_locals = {id(x._local): ref for ref, x in self.run_tensors.items() if isinstance(x, DTensor)}
        input_storages = {var.storage for group in self.vars.values() for var in group}
        classifier = OutputClassifier(self.recorder, refs, input_locals, input_storages, self._was_differentiated)
        gradients, states = self.gradients.replaced_gradients(), self.gradients.changed_states()
        carried = tensor_tree.tensor_leaves([state_leaves for _, state_leaves, _ in states])
        outputs = classifier.classify([*leaves, *gradients.values(), *carried])
        assigned_grads = tuple(zip(gradients, outputs[len(leaves) :], strict=False))
        rebound_locals = tuple((number, classifier.add_rebound_local(self.guards.tensors[number])) for number in self.rebound)
        written = {storage for step in self.steps for storage in step.writes}
        mutated = tuple(ref for ref, group in self.vars.items() if any(var.storage in written for var in group))
        for ref in mutated:
            self._check_mutated(ref)
            x = self.user_tensors[ref]
            if ref.kind == ARG and isinstance(x, DTensor) and not x.is_inference():  # a tensor of inference mode has no version
                increment_version(x)  # the writes have counted for its stand-in
        self._check_arguments()
        differentiable = self._find_differentiable(
            [x for x, tensor in zip(classifier.tensors, classifier.computed, strict=True) if tensor.requires_grad]
        )
        read = {var for step in self.steps for var in step.inputs}
        read |= {var for tensor in classifier.computed for var in tensor.locals}
        used = [ref for ref, group in self.vars.items() if any(var in read for var in group) or ref in differentiable]
        tensors = self.guards.tensors
        self.gradients.are_used = self.gradients.are_used or any(kind == GRAD for kind, _ in used)
        # A DTensor's layout may be read without a torch function: x.placements
        read_by_code = {n for n, x in enumerate(tensors) if id(x) in self.gradients.passed_to_torch or isinstance(x, DTensor)}
        guarded = read_by_code | {number for kind, number in used if kind == ENV}
        self.same_on_ranks = not any(may_differ_across_ranks(tensors[number]) for number in guarded)
        program = ReplayProgram(
            inputs=tuple(InputSpec.describe(ref, self.user_tensors[ref], self.vars[ref], self.strides[ref]) for ref in used),
            metadata_guard=MetadataGuard(sorted(guarded), tensors),
            grad_guards=self.gradients.make_guards(),
            steps=self.steps,
            constants=self.recorder.constants,
            metadata=self.recorder.metadata,
            computed=tuple(classifier.computed),
            outputs=tuple(outputs[: len(leaves)]),
            assigned_grads=assigned_grads,
            carried=tuple(describe_carried(states, iter(outputs[len(leaves) + len(gradients) :]))),
            rebound_locals=rebound_locals,
            output_tree=tree,
            mutated=mutated,
            differentiable=differentiable,
            float_inputs=tuple((var, place) for place, var in self.float_vars.items()),
            has_floats=self.recorder.floats.has_floats,
            guarded_floats=frozenset(self.recorder.floats.guarded),
            bucket_bytes=bucket_bytes,
        )
        return program, classifier.tensors

    def _check_arguments(self) -> None:
        """Raise if the run gave an argument a gradient, or wrote values that require grad to it."""
        for ref, x in ((ref, x) for ref, x in self.run_tensors.items() if ref.kind == ARG):
            if x.grad is not None and x is not self.user_tensors[ref]:
                raise CaptureError(
                    f"capture: the function runs a backward pass that sets the .grad of {self._describe_input(ref)}. Compute "
                    "the gradient with torch.autograd.grad and return it, or make the tensor a variable of the "
                    "function"
                )
            if x.grad_fn is not None or x.requires_grad != self.user_tensors[ref].requires_grad:
                raise CaptureError(
                    f"capture: the function writes values that require grad to {self._describe_input(ref)}; return them instead"
                )

    def _check_mutated(self, ref: InputRef) -> None:
        """Raise if an input that the run wrote to shares memory with another input, or is a lazy view."""
        x, own = self.user_tensors[ref], self._storages_of(ref)
        # All inputs in the same memory but one were replaced by copies.
        sharing = [other for other in self.user_tensors if other != ref and not own.isdisjoint(self._storages_of(other))]
        if any(not _are_disjoint(self.user_tensors[other], x) for other in sharing):
            raise CaptureError(
                f"capture: the function writes to {self._describe_input(ref)}, which shares its memory with another input; "
                "pass copies"
            )
        if isinstance(x, DTensor) and type(x) is not DTensor:
            raise CaptureError(
                f"capture: the function writes to {self._describe_input(ref)}, a view with elements on other ranks than "
                "those of its base; write to the base"
            )

    def _storages_of(self, ref: InputRef) -> set[int]:
        return self.copied.get(ref, set()) | {var.storage for var in self.vars[ref]}

    def _find_differentiable(self, results: list[torch.Tensor]) -> tuple[InputRef, ...]:
        """Return the leaf inputs that the autograd graph of ``results`` reaches; raise if a replay could miss some.

        Raises:
            CaptureError: the results depend on a tensor that a replay could not give a gradient to.
        """
        reached = reachable_from(results)
        for ref, x in self.run_tensors.items():
            if ref.kind == ENV and x.requires_grad and not x.is_leaf and id(x.grad_fn) in reached:
                raise CaptureError(
                    f"capture: the function reads {self._describe_input(ref)}, which has an autograd graph from outside of "
                    "the function; pass it as an argument"
                )
        known = {id(x) for x in self.run_tensors.values()}
        for x in reached.values():
            if isinstance(x, torch.Tensor) and id(x) not in known and not self.recorder.knows_memory(x):
                raise CaptureError(
                    "capture: the function returns results that require grad because of tensors that capture cannot "
                    "find (units of fully_shard and replicate reduce the gradients of their parameters themselves). "
                    "Capture the whole step including backward(), or call the function under torch.no_grad()"
                )
        return tuple(ref for ref, x in self.run_tensors.items() if x.requires_grad and x.is_leaf and id(x) in reached)

    def _link_to_autograd(self, program: ReplayProgram, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the computed tensors, with one autograd node from the user's tensors to those that require grad."""
        linked = [bool(program.differentiable) and tensor.requires_grad for tensor in program.computed]
        apply: Any = Recorded.apply
        inputs = [self.user_tensors[ref] for ref in program.differentiable]
        outputs = iter(apply(self, program, tensors, *inputs) if any(linked) else ())
        return [
            next(outputs) if is_linked else detach_same_layout(x) if isinstance(x, torch.Tensor) and x.requires_grad else x
            for x, is_linked in zip(tensors, linked, strict=True)
        ]

    def _was_differentiated(self, x: torch.Tensor) -> bool:
        """Return True if a backward pass inside of the run went through the history of ``x``."""
        accumulated = {id(self.guards.tensors[number]) for number in self.gradients.accumulated}
        return bool(accumulated) and not accumulated.isdisjoint(reachable_from([x]))

    # --- backward ------------------------------------------------------------------------------------------------------
    def run_backward(self, program: ReplayProgram, tensors: list[Any], grads: tuple[Any, ...]) -> tuple[Any, ...]:
        """Compute the gradients of the differentiable inputs; record the first pass for each kind of gradients."""
        inputs = [self.run_tensors[ref] for ref in program.differentiable]
        roots = [x for x, tensor in zip(tensors, program.computed, strict=True) if tensor.requires_grad]
        key = grads_key(grads)
        incoming = [None if grad is None else self._add_incoming(grad) for grad in grads]
        steps: list[Step] = []
        pairs = [(root, grad[0]) for root, grad in zip(roots, incoming, strict=True) if grad is not None]
        with self.recorder.recording_to(steps), suspend_hooks(inputs):
            computed = torch.autograd.grad(
                [root for root, _ in pairs], inputs, [grad for _, grad in pairs], retain_graph=True, allow_unused=True
            )
            gradients = redistribute_leaf_gradients([self.user_tensors[ref] for ref in program.differentiable], computed)
            for gradient in gradients:
                if isinstance(gradient, DTensor):
                    gradient._local  # noqa: B018  waits for a pending local value, or computes a lazy one
        self.recorder.views.clear()
        if key not in program.backwards:
            program.add_backward(key, self._make_backward_tape(incoming, grads, steps, gradients))
        copied = iter(program.backwards[key].copied)
        return tuple(None if x is None else _own_gradient(x, copied) for x in gradients)

    def _add_incoming(self, grad: Any) -> tuple[Any, tuple[Var, ...]]:
        """Return an incoming gradient in memory that no other variable has, and its tape variables."""
        own = local_tensors_of(grad)
        locals_, variables = self._add_locals(own)
        if all(local is mine for local, mine in zip(locals_, own, strict=True)):
            return grad, variables
        return join_locals(locals_, grad._layout if isinstance(grad, DTensor) else None), variables

    def _make_backward_tape(
        self, incoming: list[Any], grads: tuple[Any, ...], steps: list[Step], gradients: list[Any]
    ) -> BackwardTape:
        """Return the tape of a recorded backward pass: incoming gradients, steps, and computed gradients."""
        variables = tuple(() if pair is None else pair[1] for pair in incoming)
        strides = tuple(() if pair is None else tuple(local.stride() for local in local_tensors_of(pair[0])) for pair in incoming)
        layouts = tuple(grad._layout if isinstance(grad, DTensor) else None for grad in grads)
        computed: list[ComputedTensor | None] = []
        for x in gradients:
            own = () if x is None else tuple(self.recorder.to_vars(local) for local in local_tensors_of(x))
            layout = x._layout if isinstance(x, DTensor) else None
            computed.append(None if x is None else ComputedTensor(own, layout, False))
        return BackwardTape(variables, strides, layouts, steps, tuple(computed))


def _make_stand_in(x: Any, locals_: tuple[torch.Tensor, ...], is_copied: bool) -> Any:
    """Return the leaf that the recorded run gets for the argument ``x``: it shares its memory, or has the copy's."""
    if isinstance(x, DTensor):
        leaf: Any = wrap_local(join_locals(locals_, x._layout)._local if is_copied else x._local, x._layout)
    else:
        leaf = locals_[0].detach()
    if x.requires_grad:
        torch.Tensor.requires_grad_(leaf)  # DTensor's method would redistribute gradients to the leaf's layout
    if has_user_attributes(x):
        leaf.__dict__.update(guarded_attributes(x))
    return leaf


def _copy_with_strides(x: torch.Tensor) -> torch.Tensor:
    """Return a copy with the strides of ``x``; repeated elements (stride 0) are copied once."""
    once = x.detach()
    for d, (size, step) in enumerate(zip(x.shape, x.stride(), strict=True)):
        once = once.narrow(d, 0, 1) if step == 0 and size > 1 else once
    copy = torch.empty_strided(once.shape, once.stride(), dtype=x.dtype, device=x.device).copy_(once)
    return copy.as_strided(x.shape, x.stride())


def _own_gradient(gradient: Any, copied: Iterator[bool]) -> Any:
    """Return a gradient that shares memory with no other tensor. ``copied``: for each local tensor whether to copy it."""
    locals_ = [_copy_with_strides(local) if next(copied) else local.detach() for local in local_tensors_of(gradient)]
    return join_locals(tuple(locals_), gradient._layout if isinstance(gradient, DTensor) else None)


def _are_disjoint(x: Any, y: Any) -> bool:
    """Return True if the address ranges of two tensors overlap on no rank of this process."""
    pairs = zip(map(_address_range, local_tensors_of(x)), map(_address_range, local_tensors_of(y)), strict=False)
    return not any(a < d and c < b for (a, b), (c, d) in pairs)


def _address_range(x: torch.Tensor) -> tuple[int, int]:
    """Return the address of the first byte of ``x``, and the address after its last one."""
    count = sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True)) + 1 if x.numel() else 0
    return x.data_ptr(), x.data_ptr() + count * x.itemsize
