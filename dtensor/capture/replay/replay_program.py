"""Replay program: a recorded run that is ready for replay, and the autograd functions around the run and its replays.

A program has the tape of the forward pass, the tapes of its backward passes, and descriptions of its inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version

from ...base.group_by import group_by_key
from ...base.torch_internals import autocast_enabled, pytree
from ...comm import PerRank
from ...comm.map_ranks import communicator_of
from ...dispatch import below_autograd
from ...errors import CaptureError
from ...layout.layout import Layout
from ...state.wrap import wrap_local
from ...tensor.dtensor import DTensor
from ...tensor.functorch_function import make_apply
from ...tensor.local_tensors import local_tensors_of
from ..guards.gradient_guards import GradGuards, set_carried_state
from ..guards.signature import MetadataGuard, TensorCheck, guarded_metadata, make_picker, strides_of
from ..tracing.tape import LocalMetadata, Step, Tape, Var
from .codegen import TapeFunction
from .outputs import (
    ENV,
    CarriedOutput,
    ComputedOutput,
    ComputedTensor,
    ConstantOutput,
    InputRef,
    LocalOutput,
    Output,
    PerRankOutput,
    ViewOutput,
    replay_views,
)
from .passes import MAX_BUCKET_BYTES, bucket_collectives, optimize_tape, overlap_collectives

# The tensors of one call, as InputRef numbers them: arguments, tensors of the guard set, gradients of leaves. Then the floats of
# the guard set: by their place in its key, the dictionary that has the float and its key there.
Sources = tuple[Sequence[Any], Sequence[Any], Sequence[Any], Any]

_LOCAL = attrgetter("_local")
_LOCAL_GETTERS: dict[tuple[bool, bool], Callable[[Any], Any]] = {  # by (is_dtensor, is_per_rank)
    (True, False): _LOCAL,
    (True, True): attrgetter("_local.shards"),
    (False, True): attrgetter("shards"),
}


class InputSpec(NamedTuple):
    """An input tensor of the tape.

    ``is_per_rank``: the local value holds the tensors of all ranks. ``locals`` and ``strides``: for each local tensor its
    variable and the strides for which the tape was recorded.
    """

    ref: InputRef
    is_dtensor: bool
    is_per_rank: bool
    locals: tuple[Var, ...]
    strides: tuple[tuple[int, ...], ...]

    @staticmethod
    def describe(ref: InputRef, x: Any, locals_: tuple[Var, ...], strides: tuple[tuple[int, ...], ...]) -> InputSpec:
        is_dtensor = isinstance(x, DTensor)
        return InputSpec(ref, is_dtensor, isinstance(x._local if is_dtensor else x, PerRank), locals_, strides)


def with_recorded_strides(x: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """Return ``x`` with the strides for which the tape was recorded, copied if necessary.

    Ranks may have different strides, so strides are no guard. A tensor stays as it is if the recorded one had repeated elements
    (stride 0), because the elements of ``x`` may differ.
    """
    repeated = any(step == 0 and size > 1 for size, step in zip(x.shape, stride, strict=True))
    if x.stride() == stride or repeated:
        return x
    return torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device).copy_(x.detach())


@dataclass(slots=True, eq=False)
class BackwardTape:
    """The tape of a backward pass.

    Attributes:
        incoming: for each incoming gradient the variables of its local tensors, () for none.
        strides: the strides of these local tensors.
        layouts: for each incoming gradient its layout, None for a plain tensor or none.
        gradients: for each differentiable input its computed gradient, or None.
        needed: the variables of the forward tape that this tape reads.
        copied: for each local tensor of the gradients, whether the replay returns a copy, because its memory is shared. Autograd
            may keep a gradient as ``.grad`` and add to it in place.
        function: the function that runs the tape.
    """

    incoming: tuple[tuple[Var, ...], ...]
    strides: tuple[tuple[tuple[int, ...], ...], ...]
    layouts: tuple[Layout | None, ...]
    steps: list[Step]
    gradients: tuple[ComputedTensor | None, ...]
    needed: tuple[Var, ...] = ()
    copied: tuple[bool, ...] = ()
    function: TapeFunction | None = None
    _stride_check: TensorCheck = field(init=False)
    _single_rank: bool = field(init=False)  # whether all incoming gradients are DTensors with one local tensor here

    def __post_init__(self) -> None:
        self._stride_check = TensorCheck(strides_of, [*chain.from_iterable(self.strides)])
        self._single_rank = all(layout is not None and not communicator_of(layout.mesh).holds_all for layout in self.layouts)

    def run(self, grads: Sequence[Any], saved: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """Return the gradients of the differentiable inputs.

        Args:
            grads: the incoming gradients, None for a missing one.
            saved: the values of ``needed``.
        """
        assert self.function is not None
        locals_ = (
            [*map(_LOCAL, grads)]
            if self._single_rank
            else [x for grad in grads if grad is not None for x in local_tensors_of(grad)]
        )
        if not self._stride_check(locals_):
            strides = chain.from_iterable(self.strides)
            locals_ = [with_recorded_strides(local, stride) for local, stride in zip(locals_, strides, strict=True)]
        with below_autograd():
            return self.function.run(*locals_, *saved)


@dataclass(slots=True, eq=False)
class CompiledProgram:
    """The forward function for a set of backward tapes: it also returns the values that they need.

    Attributes:
        function: runs the forward tape.
        watched: inputs, and computed tensors by number, with memory that is saved for backward. They must not be written to.
        backwards: for each kind of incoming gradients the tape, and a function that picks its values of all saved values.
    """

    function: TapeFunction
    watched: tuple[InputRef | int, ...]
    backwards: dict[Any, tuple[BackwardTape, Callable[[Any], Any]]]


@dataclass(slots=True, eq=False)
class ReplayProgram:
    """A recorded run that is ready for replay; see the module.

    Attributes:
        inputs: the tensors that the tape reads.
        metadata_guard: checks the metadata of the tensors of the guard set that the program uses.
        grad_guards: checks the gradients of leaves, if they matter.
        steps, constants, metadata: the forward tape, its constants, and the metadata of its local tensors.
        computed: the tensors that the tape computes.
        outputs, output_tree: how the leaves of the result are made, and their tree.
        assigned_grads: ``(number in the guard set, output)`` for each tensor with a ``.grad`` that the run replaces.
        carried: library state that the run leaves for later calls.
        rebound_locals: ``(number in the guard set, number of the computed tensor)`` for each tensor with a new local tensor.
        mutated: inputs that the tape writes to.
        differentiable: inputs that get gradients.
        float_inputs: floats of the guard set that are variables of the tape, with their place in its key.
        has_floats: whether the tape has float variables. Some may have been missed (see ``recording_check.py``).
        guarded_floats: places of floats that must not change after all.
        bucket_bytes: most bytes of one joined collective.
        ready: whether calls can be replayed. A differentiable program must have seen a backward pass.
        has_single_output: whether the function returns one leaf.
    """

    inputs: tuple[InputSpec, ...]
    metadata_guard: MetadataGuard
    grad_guards: GradGuards
    steps: list[Step]
    constants: dict[Var, torch.Tensor]
    metadata: dict[Var, LocalMetadata]
    computed: tuple[ComputedTensor, ...]
    outputs: tuple[Output, ...]
    assigned_grads: tuple[tuple[int, Output], ...]
    carried: tuple[CarriedOutput, ...]
    rebound_locals: tuple[tuple[int, int], ...]
    output_tree: Any
    mutated: tuple[InputRef, ...]
    differentiable: tuple[InputRef, ...]
    float_inputs: tuple[tuple[Var, int], ...] = ()
    has_floats: bool = False
    guarded_floats: frozenset[int] = frozenset()
    bucket_bytes: int = MAX_BUCKET_BYTES
    backwards: dict[Any, BackwardTape] = field(default_factory=dict)
    compiled: CompiledProgram | None = None
    ready: bool = field(init=False)
    has_single_output: bool = field(init=False)
    all_require_grad: bool = False  # whether all computed tensors do
    _readers: list[Any] = field(default_factory=list)  # (kind, picker of the inputs, getter of their local values, is_per_rank)
    _returns_computed: bool = False  # whether the outputs are the computed tensors, and nothing else is to be done
    _pick_written: Any = None  # picks the written DTensors, None if there are none; the tape writes to their local tensors
    _stride_check: TensorCheck = field(init=False)

    def __post_init__(self) -> None:
        """Group the inputs for fast access, precompute what a replay checks, and bucket the collectives."""

        def reader_key(spec: InputSpec) -> tuple[int, bool, bool]:
            return spec.ref.kind, spec.is_dtensor, spec.is_per_rank

        self.inputs = tuple(sorted(self.inputs, key=reader_key))  # so that few readers are needed
        for (kind, is_dtensor, is_per_rank), specs in groupby(self.inputs, key=reader_key):
            getter = _LOCAL_GETTERS.get((is_dtensor, is_per_rank))
            self._readers.append((kind, make_picker([spec.ref.number for spec in specs]), getter, is_per_rank))
        returns_computed = self.outputs == tuple(map(ComputedOutput, range(len(self.computed))))
        self._returns_computed = returns_computed and not (self.assigned_grads or self.carried or self.rebound_locals)
        self.all_require_grad = all(tensor.requires_grad for tensor in self.computed)
        mutated = frozenset(self.mutated)
        written = [place for place, spec in enumerate(self.inputs) if spec.is_dtensor and spec.ref in mutated]
        self._pick_written = make_picker(written) if written else None
        self._stride_check = TensorCheck(strides_of, [stride for spec in self.inputs for stride in spec.strides])
        self.ready, self.has_single_output = not self.differentiable, self.output_tree.is_leaf()
        self.steps = bucket_collectives(self.steps, self.metadata, frozenset(self._input_storages()), self.bucket_bytes)

    # --- building ------------------------------------------------------------------------------------------------------
    def get_or_compile(self) -> CompiledProgram:
        """Return the compiled forward function; it is compiled again after a new backward tape was added."""
        if self.compiled is None:
            self.compiled = self._compile()
        return self.compiled

    def add_backward(self, key: Any, backward: BackwardTape) -> None:
        """Add and compile a recorded backward tape for the kind ``key`` of incoming gradients."""
        computed = {var for step in backward.steps for var in step.outputs}
        inputs = tuple(var for group in backward.incoming for var in group)
        incoming = set(inputs)
        results = tuple(var for gradient in backward.gradients if gradient is not None for var in gradient.locals)
        written = {storage for step in self.steps for storage in step.writes}
        constants = {var: value for var, value in self.constants.items() if var.storage not in written}
        external = frozenset(self._input_storages() | {var.storage for var in incoming})
        backward.steps = bucket_collectives(backward.steps, self.metadata, external, self.bucket_bytes)
        read = [var for step in backward.steps for var in step.inputs] + list(results)
        earlier = tuple(
            dict.fromkeys(var for var in read if var not in computed and var not in incoming and var not in constants)
        )
        tape = self._optimize_tape(Tape(inputs + earlier, backward.steps, results, constants), external)
        backward.needed = tuple(var for var in tape.inputs if var not in incoming)
        tape.inputs = inputs + backward.needed
        shared = {var.storage for var in tape.inputs} | {var.storage for var in constants}
        copied = []
        for var in results:
            copied.append(var.storage in shared)
            shared.add(var.storage)
        backward.copied = tuple(copied)
        backward.function = TapeFunction("backward", tape, backward.gradients, copied)
        self.backwards[key] = backward
        self.compiled, self.ready = None, True

    def _optimize_tape(self, tape: Tape, external: frozenset[int]) -> Tape:
        """Return the tape after all optimization passes, with collectives overlapped with computation."""
        tape = optimize_tape(tape, self.metadata, external)
        tape.steps = overlap_collectives(tape.steps, self.metadata, external, self.bucket_bytes)
        return tape

    def _input_storages(self) -> set[int]:
        return {var.storage for spec in self.inputs for var in spec.locals}

    def _compile(self) -> CompiledProgram:
        """Compile the optimized forward tape, which also returns the values that the backward tapes need."""
        inputs = tuple(var for spec in self.inputs for var in spec.locals) + tuple(var for var, _ in self.float_inputs)
        results = tuple(var for tensor in self.computed for var in tensor.locals)
        saved = tuple(dict.fromkeys(var for backward in self.backwards.values() for var in backward.needed))
        external = frozenset(self._input_storages())
        tape = self._optimize_tape(Tape(inputs, self.steps, results + saved, self.constants), external)
        tape.inputs = inputs
        owners: list[tuple[int, InputRef | int]] = [(var.storage, spec.ref) for spec in self.inputs for var in spec.locals]
        owners += [(var.storage, number) for number, tensor in enumerate(self.computed) for var in tensor.locals]
        owners_of = group_by_key(owners)
        watched = tuple(dict.fromkeys(owner for var in saved for owner in owners_of.get(var.storage, ())))
        backwards = {
            key: (backward, make_picker([*map(saved.index, backward.needed)])) for key, backward in self.backwards.items()
        }
        return CompiledProgram(TapeFunction("forward", tape, self.computed), watched, backwards)

    # --- running -------------------------------------------------------------------------------------------------------
    def replay(self, sources: Sources) -> Any:
        """Run the compiled program on these inputs; return the function's result, and repeat its effects on state."""
        if autocast_enabled():  # the casts of autocast are steps of the tape
            with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False, dtype=torch.float16):
                computed = self._compute_tensors(sources)
        else:
            computed = self._compute_tensors(sources)
        leaves = self.make_outputs(computed, sources)
        return leaves[0] if self.has_single_output else pytree.tree_unflatten(leaves, self.output_tree)

    def _compute_tensors(self, sources: Sources) -> Sequence[Any]:
        """Run the compiled forward, and return the computed tensors, linked to autograd where they require grad."""
        if not self.differentiable:
            return self.run_forward(self.get_or_compile(), sources)
        without_grad: dict[int, Any] = {}
        inputs = [sources[kind][number] for kind, number in self.differentiable]
        with_grad = apply_replay(self, sources, without_grad, *inputs)
        if not without_grad:
            return with_grad
        rest = iter(with_grad)
        return [without_grad[number] if number in without_grad else next(rest) for number in range(len(self.computed))]

    def run_forward(self, compiled: CompiledProgram, sources: Sources) -> tuple[Any, ...]:
        """Run the forward tape on local tensors; return the computed tensors, then the values saved for backward."""
        inputs: list[Any] = []
        own: list[torch.Tensor] = []
        for kind, pick, getter, is_per_rank in self._readers:
            tensors = pick(sources[kind])
            inputs += tensors
            locals_ = tensors if getter is None else map(getter, tensors)
            own += chain.from_iterable(locals_) if is_per_rank else locals_
        read = own
        if not self._stride_check(own):
            strides = chain.from_iterable(spec.strides for spec in self.inputs)
            read = [*map(with_recorded_strides, own, strides)]
        floats: Sequence[float] = ()
        if self.float_inputs:
            floats = [mapping[key] for mapping, key in [sources[3][place] for _, place in self.float_inputs]]
        with below_autograd():
            values = compiled.function.run(*read, *floats)
        if read is not own and self.mutated:
            for local, copy in zip(own, read, strict=True):
                if local is not copy:
                    local.copy_(copy)
        if self._pick_written is not None:
            _bump_versions(self._pick_written(inputs))
        return values

    def make_outputs(self, computed: Sequence[Any], sources: Sources) -> Sequence[Any]:
        """Return the leaves of the function's result, and set the gradients, states and local tensors that the run set."""
        if self._returns_computed:
            return computed[: len(self.computed)]
        gradients = [self._make_output(output, computed, sources) for _, output in self.assigned_grads]
        carried = [
            (state, tree, [self._make_output(output, computed, sources) for output in leaves])
            for state, leaves, tree in self.carried
        ]
        for state, tree, leaves in carried:
            set_carried_state(state, pytree.tree_unflatten(leaves, tree))
        for (number, _), gradient in zip(self.assigned_grads, gradients, strict=True):
            sources[ENV][number].grad = gradient
        for number, place in self.rebound_locals:
            sources[ENV][number]._local = computed[place]._local
        return [self._make_output(output, computed, sources) for output in self.outputs]

    def _make_output(self, output: Output, computed: Sequence[Any], sources: Sources) -> Any:
        """Return one result of a replay by its description, from computed tensors and inputs."""
        match output:
            case ComputedOutput(number):
                return computed[number]
            case ConstantOutput(value):
                return value
            case InputRef():
                return sources[output[0]][output[1]]
            case LocalOutput(ref):
                return sources[ref[0]][ref[1]]._local.detach()
            case PerRankOutput(numbers):
                return PerRank([computed[number] for number in numbers])
            case ViewOutput(root, views):
                base = computed[root.number] if isinstance(root, ComputedOutput) else sources[root[0]][root[1]]
                return replay_views(views, base)


def _bump_versions(written: Sequence[Any]) -> None:
    """Increment the version counters of tensors of which the tape has written the local tensors."""
    try:
        increment_version(written)
    except RuntimeError:  # a tensor made in inference mode has no counter
        increment_version([x for x in written if not x.is_inference()])


def join_locals(locals_: tuple[torch.Tensor, ...], layout: Layout | None) -> Any:
    """Return the DTensor with these local tensors of this process; the only one as it is if ``layout`` is None."""
    if layout is None:
        return locals_[0]
    return wrap_local(communicator_of(layout.mesh).local(locals_), layout)


def detach_same_layout(x: Any) -> Any:
    """Return ``x.detach()`` in exactly the layout of ``x``, which ``detach`` may change on a mesh dim of one rank."""
    detached = x.detach()
    if isinstance(detached, DTensor):
        detached._layout = x._layout
    return detached


# --- autograd functions ----------------------------------------------------------------------------------------------------
class Replayed(torch.autograd.Function):
    """The autograd function of a replay.

    ``(program, sources, without_grad, *differentiable inputs)`` -> the computed tensors that require grad. The dict
    ``without_grad`` receives the others, by number.
    """

    @staticmethod
    def forward(ctx: Any, program: ReplayProgram, sources: Sources, without_grad: dict[int, Any], *inputs: torch.Tensor) -> Any:
        """Run the compiled forward, and save what backward needs; outputs without gradient go to ``without_grad``."""
        compiled = ctx.compiled = program.compiled or program.get_or_compile()
        values, computed = program.run_forward(compiled, sources), program.computed
        watched = [values[ref] if isinstance(ref, int) else sources[ref[0]][ref[1]] for ref in compiled.watched]
        # Autograd checks that saved tensors were not written to since. Local tensors have no version counters of their own.
        ctx.save_for_backward(*values[len(computed) :], *watched)
        ctx.set_materialize_grads(False)
        if program.all_require_grad:
            return values[: len(computed)]
        without_grad.update((number, values[number]) for number, tensor in enumerate(computed) if not tensor.requires_grad)
        return tuple([values[number] for number, tensor in enumerate(computed) if tensor.requires_grad])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Run the compiled backward for these gradients, redistributed to recorded layouts if theirs were not recorded."""
        _check_no_double_backward()
        compiled, saved = ctx.compiled, ctx.saved_tensors
        entry = compiled.backwards.get(grads_key(grads))
        if entry is None:
            key, grads = _to_recorded_layouts(compiled, grads)
            entry = compiled.backwards[key]
        backward, pick = entry
        return None, None, None, *backward.run(grads, pick(saved))


apply_replay = make_apply(Replayed)


class Recorded(torch.autograd.Function):
    """Autograd function of the recorded run. Its backward uses the graph that the run built, and records that pass."""

    @staticmethod
    def forward(ctx: Any, recording: Any, program: ReplayProgram, tensors: list[Any], *inputs: torch.Tensor) -> Any:
        """Return the computed tensors that require grad, detached, so that they become outputs of this node."""
        ctx.recording, ctx.program, ctx.tensors = recording, program, tensors
        ctx.set_materialize_grads(False)
        with_grad = [x for x, tensor in zip(tensors, program.computed, strict=True) if tensor.requires_grad]
        return tuple(map(detach_same_layout, with_grad))  # they share the version counters of what the run has saved

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _check_no_double_backward()
        return None, None, None, *ctx.recording.run_backward(ctx.program, ctx.tensors, grads)


def _check_no_double_backward() -> None:
    """Raise for ``backward(create_graph=True)``, because the tape of a backward pass is not differentiable."""
    if torch.is_grad_enabled():
        raise CaptureError(
            "capture: backward(create_graph=True) needs a graph of the backward pass, but a captured "
            "function cannot be differentiated twice. Call the uncaptured function, which is f.fn, or capture a "
            "function that contains torch.autograd.grad"
        )


def grads_key(grads: Any) -> tuple[Any, ...]:
    """Return a key of the kind of incoming gradients: their layouts or metadata, and whether autocast is on."""
    kinds = [grad._layout if type(grad) is DTensor else None if grad is None else guarded_metadata(grad) for grad in grads]
    return (autocast_enabled(), *kinds)


def _to_recorded_layouts(compiled: CompiledProgram, grads: Any) -> tuple[Any, Any]:
    """Return ``(key, gradients)``: a recorded backward pass, and the gradients redistributed to the layouts that it takes."""
    for key, (backward, _) in compiled.backwards.items():
        if all((grad is None) == (not variables) for grad, variables in zip(grads, backward.incoming, strict=True)) and all(
            isinstance(grad, DTensor) or grad is None for grad in grads
        ):
            redistributed = [
                grad if grad is None or layout is None else _to_layout(grad, layout)
                for grad, layout in zip(grads, backward.layouts, strict=True)
            ]
            return key, redistributed
    raise CaptureError(
        "capture: the backward pass gets gradients of other results than the recorded one. Call backward "
        "in the same way each time, or drop the recordings with .clear() before it changes"
    )


def _to_layout(grad: DTensor, layout: Any) -> Any:
    """Return an incoming gradient in the placements and dtype of the recorded backward pass."""
    redistributed = grad
    if grad._layout.placements != layout.placements:
        redistributed = grad.redistribute(layout.mesh, layout.placements)
    return redistributed if redistributed.dtype == layout.dtype else redistributed.to(layout.dtype)
