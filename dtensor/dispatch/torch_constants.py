"""Constants of torch: plain tensors that torch's own Python functions make inside and combine with DTensors.

Dispatch cannot tell such a tensor from one of the user's. The stack can: :data:`FUNCTIONS` declares the functions of torch that
make them, and a call on the way from one of these to dispatch takes plain tensors as replicated. This holds only if the function
itself was given no plain tensor, so that none of the user's can be among them. A function that draws random numbers takes its
draw from the generator of each rank, so the draw is compared between ranks in every call.

Such a call is looked at after a miss, and its plan is not kept under its own key: the same operator and operands in the user's
code are refused.
"""

from __future__ import annotations

import inspect
import sys
from functools import partial
from types import FrameType
from typing import Any

import torch

from ..base.tensor_tree import leaves, listed
from ..base.user_frames import frames_of_torch
from ..comm.cross_rank_check import same_on_all
from ..propagation.op_schema import Operator
from .cross_mesh import Runner, meshes_of
from .functorch import layout_of
from .plain_tensor_args import declared, is_number, replicated, taken_as_replicated

# Module and qualified name of a function, and whether it draws random numbers.
FUNCTIONS: dict[tuple[str, str], bool] = {
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


def with_constants(operator: Operator, bound: dict[str, Any]) -> Runner | None:
    """Return how to run a call that a function of :data:`FUNCTIONS` makes with plain tensors of its own.

    Args:
        bound: the arguments of the call by name.

    Returns:
        None if no declared function makes the call, if it was given plain tensors, or if dispatch takes all operands anyway.
    """
    allowed = (*declared(operator), *operator.mutated)
    names = tuple(name for name in operator.tensors if name not in allowed and any(map(_is_constant, listed(bound[name]))))
    frame = _declared_frame() if names else None
    if frame is None or _was_given_plain(frame):
        return None
    name, draws = frame.f_code.co_name, FUNCTIONS[_key(frame)]
    return partial(_run_with_constants, operator, names, f"{name} (in {operator.name})" if draws else "")


def _run_with_constants(
    operator: Operator, names: tuple[str, ...], drawn_by: str, args: tuple[Any, ...], kwargs: dict[str, Any], *_: Any
) -> Any:
    bound = operator.bind(args, kwargs)
    (mesh,) = meshes_of(bound.values())

    def distributed(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [*map(distributed, value)]
        if not _is_constant(value):
            return value
        if drawn_by:
            same_on_all(mesh, value, drawn_by, instead="call dtensor.manual_seed(seed, mesh) before it")
        return replicated(value, mesh)

    return operator.call({**bound, **{name: distributed(bound[name]) for name in names}})


def _declared_frame() -> FrameType | None:
    """Return the innermost call of a declared function, if only torch's code lies between it and dispatch."""
    return next((frame for frame in frames_of_torch(sys._getframe()) if _key(frame) in FUNCTIONS), None)


def _key(frame: FrameType) -> tuple[str, str]:
    return frame.f_globals.get("__name__", ""), frame.f_code.co_qualname


def _was_given_plain(frame: FrameType) -> bool:
    """Return True if an argument of the call, as it is now, is a plain tensor or a module with one."""
    names, _, _, values = inspect.getargvalues(frame)
    for value in leaves([values.get(name) for name in names]):
        held = (*value.parameters(), *value.buffers()) if isinstance(value, torch.nn.Module) else (value,)
        # CausalBias, of the module of its function, is a tensor in name only: it holds two lengths
        if any(_is_plain(x) and layout_of(x) is None and type(x).__module__ != _key(frame)[0] for x in held):
            return True
    return False


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not hasattr(value, "_layout") and not is_number(value)


def _is_constant(value: Any) -> bool:
    """Return True if the value is a plain tensor that can be a constant, and that dispatch would refuse."""
    return type(value) is torch.Tensor and _is_plain(value) and not value.requires_grad and not taken_as_replicated(value)
