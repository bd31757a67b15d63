"""Plain tensor arguments: which plain tensors next to DTensors count as replicated, and how writes to plain tensors run.

[Note: Plain tensors next to DTensors]
The rule is the same in one process and on processes:

- Numbers (0-d, one element, one element expanded) and tensors without elements count as the same on every rank.
- While autograd computes gradients, backward or forward, all plain tensors count so: its formulas make constants from shapes.
  Other torch code that makes constants, such as ``vmap`` for ``embedding``, says so itself.
- Arguments that the operator's rule declares (``Rule.plain``: tables of indices, class weights) are compared between ranks when
  their call is planned, once for each combination of shapes and layouts. That is one exchange of a few bytes, none on a hit.
- Constants that functions of torch make are taken as replicated: see [Note: Constants of torch].
- Everything else raises on all ranks, unless ``implicit_replication()`` says that every rank has the same value.

A plain tensor that is *written to* must be the same on all ranks afterwards. Under ``implicit_replication()``, and while autograd
adds up the gradients of a plain leaf, the operation runs on a replicated copy, and every rank takes the full result from it.
Elsewhere such a write is refused.

[Note: Constants of torch]
Some Python functions of torch make plain tensors and combine them with DTensors. Dispatch cannot tell such a tensor from one of
the user's. The stack can: :data:`CONSTANT_MAKERS` declares these functions, and a call on the way from one of them to dispatch
takes plain tensors as replicated. This holds only if the function itself was given no plain tensor, so that none of the user's
can be among them. A function that draws random numbers uses the generator of each rank, so its constants are compared between
ranks in every call. Such a call is recognized after a cache miss, and its plan is not cached under its own key: the same operator
and operands in the user's code are refused.
"""

from __future__ import annotations

import inspect
import sys
from functools import partial
from types import FrameType
from typing import Any

import torch

from ..base.modes import MODES
from ..base.tensor_tree import as_sequence, iter_tree_leaves, map_leaves
from ..base.torch_internals import forward_ad, graph_task
from ..base.user_frames import iter_torch_frames, torch_ddp_hint
from ..base.validation import check_strided
from ..comm import PerRank
from ..comm.cross_rank_check import check_same_on_all_ranks
from ..comm.map_ranks import communicator_of
from ..errors import LayoutError, MixedTensorError
from ..layout.layout import Layout
from ..mesh.device_mesh import DeviceMesh
from ..propagation.op_schema import OperatorSchema
from ..propagation.propagate import CallPlan
from ..rules.registry import lookup
from ..state.functorch import layout_of
from ..state.wrap import wrap_local, write_value
from .cross_mesh import meshes_of
from .programs.frame import Runner

try:
    from ..base.torch_internals import implicit_replication_allowed
except ImportError:  # torch before 2.12 does not say it

    def implicit_replication_allowed() -> bool:
        return False


# Module and qualified name of a function, and whether it draws random numbers.
CONSTANT_MAKERS: dict[tuple[str, str], bool] = {
    ("torch.nn.functional", "multi_head_attention_forward"): False,  # zeros, with add_zero_attn=True
    ("torch.nn.modules.transformer", "_detect_is_causal_mask"): False,  # a causal mask, to compare the given one with
    ("torch.nn.attention.bias", "CausalBias._dispatch"): False,  # a causal mask
    ("torch.nn.utils.parametrizations", "_Orthogonal.forward"): False,  # an identity matrix
    ("torch.nn.utils.parametrizations", "_Orthogonal.right_inverse"): True,  # further columns of a base
    ("torch.nn.utils.rnn", "unpad_sequence"): False,  # positions, to compare lengths with
    ("torch.masked._ops", "mean"): False,  # a count of ones
    ("torch.masked._ops", "_std_var"): False,  # a count of ones
    ("torch._lowrank", "get_approximate_basis"): True,  # a normal matrix
}


# --- plain tensors that are read ----------------------------------------------------------------------------------------
def torch_makes_constants() -> bool:
    """Return True while torch's own code makes plain tensors: autograd in either mode, or a batching rule of vmap."""
    return graph_task() != -1 or forward_ad._current_level >= 0 or implicit_replication_allowed()


def keep_gradient_plain(value: torch.Tensor) -> None:
    """Register a hook that turns the gradient of a plain operand, which arrives as a DTensor, into a plain tensor.

    A loss of one rank's part of the batch may be added to a penalty of distributed parameters. The gradient of a leaf stays a
    DTensor.
    """
    if value.grad_fn is not None and torch.is_grad_enabled():
        value.register_hook(_to_plain_gradient)


def _to_plain_gradient(grad: Any) -> Any:
    return grad.full_tensor() if hasattr(grad, "_layout") else None


def is_number(value: torch.Tensor) -> bool:
    """Return True if a plain tensor counts as the same on all ranks: one number, 0-d or expanded, no element, or on ``meta``."""
    if value.numel() <= 1 or value.is_meta:
        return True
    if value.is_nested:  # it has no sizes
        return False
    return value.layout is torch.strided and not any(n != 1 and step for n, step in zip(value.shape, value.stride(), strict=True))


def counts_as_replicated(value: torch.Tensor) -> bool:
    """Return True if a plain tensor next to DTensors counts as the same on all ranks without a declaration."""
    return is_number(value) or ((MODES.implicit_replication or torch_makes_constants()) and not isinstance(value, PerRank))


def plain_arguments_of(operator: OperatorSchema) -> tuple[str, ...]:
    """Return the names of the arguments that may be plain tensors by the operator's rule."""
    rule = lookup(operator.func)
    return () if rule is None else rule.plain


def check_plain_argument(value: torch.Tensor, name: str, position: int | None, operator: OperatorSchema) -> None:
    """Raise unless a plain tensor next to DTensors counts as replicated: [Note: Plain tensors next to DTensors].

    Args:
        name: the argument that it is.
        position: its position in that argument, if the argument is a list.

    Raises:
        MixedTensorError: the plain tensor is not allowed.
    """
    allows_all = MODES.implicit_replication or torch_makes_constants()
    # step counts of optimizers are equal on all ranks; so is what a list operator writes next to its lists (``found_inf``)
    is_count = operator.traits.per_element and (value.ndim == 0 or (position is None and value.numel() == 1))
    # under the mode, out= tensors take the full value
    if name in operator.mutated and not (is_count or (allows_all and name in operator.outs)):
        raise MixedTensorError(
            f"{operator.name} would write the value of a DTensor into the plain tensor {name!r}. Distribute "
            "it first with distribute_tensor(t, mesh, [Replicate()] * mesh.ndim), or, if it is the same on "
            "every rank, use `with dtensor.implicit_replication():`"
        )
    if not is_number(value) and not allows_all and (isinstance(value, PerRank) or name not in plain_arguments_of(operator)):
        raise MixedTensorError(
            f"{operator.name} mixes DTensors with a plain tensor of shape {tuple(value.shape)} (argument {name!r}). "
            f"If every rank holds the same value, use `with dtensor.implicit_replication():`, or distribute_tensor(t, mesh, "
            f"placements){torch_ddp_hint(sys._getframe())}"
        )


def compare_plain_arguments(operator: OperatorSchema, bound: dict[str, Any], plan: CallPlan) -> bool:
    """Compare between ranks the plain tensors of a call that its rule declares, and return True if there are any.

    If the rule answers the call from layouts, it reads only the shapes, so only these are compared.

    Raises:
        MixedTensorError: the ranks have different values (on all ranks).
    """
    names, was_compared = plain_arguments_of(operator), False
    for name in names if names and not (MODES.implicit_replication or torch_makes_constants()) else ():
        for item in as_sequence(bound.get(name)):
            if isinstance(item, torch.Tensor) and not hasattr(item, "_layout") and not is_number(item):
                read = torch.tensor(item.shape, device=item.device) if plan.how == "answer" else item
                check_same_on_all_ranks(plan.call.mesh, read, f"{operator.name} (argument {name!r})")
                was_compared = True
    return was_compared


def replicate_plain(value: torch.Tensor, mesh: DeviceMesh) -> Any:
    """Return a replicated DTensor with a detached copy of ``value``, which must be equal on all ranks (not checked here)."""
    local = communicator_of(mesh).map(lambda member, x: x.clone(), check_strided(value, "a replicated copy").detach())
    return wrap_local(local, Layout.replicated(mesh, local.shape, local.stride(), local.dtype))


def distribute_like(value: torch.Tensor, x: Any) -> Any:
    """Return the plain ``value``, the same on every rank, with the placements of ``x``, to become the ``data`` of ``x``.

    Raises:
        LayoutError: no ``implicit_replication()`` says that it is the same.
    """
    if not MODES.implicit_replication or isinstance(value, PerRank):
        raise LayoutError(
            "x.data = t needs a DTensor t if x is a DTensor; use distribute_tensor(t, x.device_mesh, "
            "x.placements), or, if t is the same on every rank, `with dtensor.implicit_replication():`"
        )
    with torch.no_grad():
        return replicate_plain(value, x._layout.mesh).redistribute(placements=x.placements)


# --- plain tensors that are written to ----------------------------------------------------------------------------------
def make_plain_write_runner(operator: OperatorSchema, bound: dict[str, Any]) -> Runner | None:
    """Return the runner of a call that writes to plain tensors; None if it writes to none, or is not allowed to.

    The call runs on replicated copies of them, from which every rank takes the full values. ``out=`` arguments are handled by the
    steps of a program.
    """
    if not operator.mutated or not (MODES.implicit_replication or torch_makes_constants()):
        return None
    written = (name for name in operator.names if name in operator.mutated and name not in operator.outs)
    names = tuple(name for name in written if any(_needs_copy(operator, item) for item in as_sequence(bound.get(name))))
    return partial(_run_on_copies, operator, names) if names else None


def _needs_copy(operator: OperatorSchema, value: Any) -> bool:
    """Return True for a plain tensor that a call writes to, except the step count of an optimizer."""
    is_plain = isinstance(value, torch.Tensor) and not hasattr(value, "_layout")
    return is_plain and not (operator.traits.per_element and value.ndim == 0)


def _run_on_copies(
    operator: OperatorSchema, names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any], *_: Any
) -> Any:
    """Run the operator on replicated DTensor copies of the plain tensors that it writes to, and copy the results into them."""
    bound = operator.bind(args, kwargs)
    arguments = {name: bound[name] for name in names}
    (mesh,) = meshes_of(bound.values())
    copies: list[tuple[torch.Tensor, Any]] = []  # each plain tensor and its copy

    def copy_plain(value: Any) -> Any:
        """Return a replicated copy of a plain tensor that the operator writes to, and note the pair for the copy back."""
        if not _needs_copy(operator, value):
            return value
        copies.append((value, replicate_plain(value, mesh)))
        return copies[-1][1]

    bound.update(map_leaves(copy_plain, arguments))
    result = operator.call(bound)
    for value, copy in copies if communicator_of(mesh).held else ():
        write_value(value, copy._local)
    if len(operator.returns) == 1:
        return arguments.get(operator.returns[0] or "", result)
    results = zip(operator.returns, result or (), strict=True)
    return tuple(arguments.get(owner or "", value) for owner, value in results) if operator.returns else None


# --- constants of torch -------------------------------------------------------------------------------------------------
def make_constants_runner(operator: OperatorSchema, bound: dict[str, Any]) -> Runner | None:
    """Return the runner of a call in which torch's own code combines constants with DTensors: see [Note: Constants of torch].

    Args:
        bound: the arguments of the call by name.

    Returns:
        None if no declared function makes the call, if it was given plain tensors, or if dispatch takes all operands anyway.
    """
    allowed = (*plain_arguments_of(operator), *operator.mutated)
    names = tuple(name for name in operator.tensors if name not in allowed and any(map(_is_constant, as_sequence(bound[name]))))
    frame = _find_declared_frame() if names else None
    if frame is None or _was_given_plain(frame):
        return None
    name, draws = frame.f_code.co_name, CONSTANT_MAKERS[_function_key(frame)]
    return partial(_run_with_constants, operator, names, f"{name} (in {operator.name})" if draws else "")


def _run_with_constants(
    operator: OperatorSchema, names: tuple[str, ...], drawn_by: str, args: tuple[Any, ...], kwargs: dict[str, Any], *_: Any
) -> Any:
    """Run the operator with plain constants of torch as replicated DTensors; raise if random ones differ between ranks."""
    bound = operator.bind(args, kwargs)
    (mesh,) = meshes_of(bound.values())

    def replicate_constant(value: Any) -> Any:
        """Return a replicated DTensor of a plain constant. Check that a random one is equal on all ranks."""
        if not _is_constant(value):
            return value
        if drawn_by:
            check_same_on_all_ranks(mesh, value, drawn_by, instead="call dtensor.manual_seed(seed, mesh) before it")
        return replicate_plain(value, mesh)

    return operator.call({**bound, **{name: map_leaves(replicate_constant, bound[name]) for name in names}})


def _find_declared_frame() -> FrameType | None:
    """Return the innermost call of a declared function, if only torch's code is between it and dispatch; else None."""
    return next((frame for frame in iter_torch_frames(sys._getframe()) if _function_key(frame) in CONSTANT_MAKERS), None)


def _function_key(frame: FrameType) -> tuple[str, str]:
    return frame.f_globals.get("__name__", ""), frame.f_code.co_qualname


def _was_given_plain(frame: FrameType) -> bool:
    """Return True if an argument of the Python call ``frame``, as it is now, is a plain tensor or a module with one."""
    names, _, _, values = inspect.getargvalues(frame)
    for value in iter_tree_leaves([values.get(name) for name in names]):
        held = (*value.parameters(), *value.buffers()) if isinstance(value, torch.nn.Module) else (value,)
        # CausalBias, of the module of its function, is a tensor in name only: it has two lengths
        if any(_is_plain(x) and layout_of(x) is None and type(x).__module__ != _function_key(frame)[0] for x in held):
            return True
    return False


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not hasattr(value, "_layout") and not is_number(value)


def _is_constant(value: Any) -> bool:
    """Return True if the value is a plain tensor that can be a constant, and that dispatch would refuse."""
    return type(value) is torch.Tensor and _is_plain(value) and not value.requires_grad and not counts_as_replicated(value)
