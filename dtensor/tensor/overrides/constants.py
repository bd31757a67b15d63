"""Constants that torch's composite operators make as plain tensors, made as replicated DTensors.

Examples: an attention mask, a window, a range, the first state of a recurrent layer. Below autograd such a constant is a plain
tensor next to DTensors, which dispatch refuses. So it is made here, above autograd. All ranks make the same value, without
communication.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...base.caches import memoize
from ...comm import PerRank
from ...comm.cross_rank_check import check_same_on_all_ranks
from ...dispatch import is_number, replicate_plain
from ...mesh.device_mesh import DeviceMesh
from ...placement import Replicate, Shard
from ..dtensor import DTensor
from .register import overload_named

aten = torch.ops.aten


def constant(value: Tensor, like: Any) -> Any:
    """Return ``value``, equal on all ranks, as a replicated DTensor on the mesh of ``like``."""
    return replicate_plain(value, like._layout.mesh)


def checked_constant(value: Any, like: Any, operator: str) -> Any:
    """Return a plain operand as a replicated DTensor, after ranks compared it; DTensors and numbers are returned unchanged.

    Ranks compare the values once for each operator, mesh, shape and dtype.
    """
    if isinstance(value, DTensor) or is_number(value):
        return value
    _make_check(like._layout.mesh, operator, value.shape, value.dtype)(value)
    return constant(value, like)


@memoize(1024)
def _make_check(mesh: DeviceMesh, operator: str, shape: torch.Size, dtype: torch.dtype) -> Any:
    """Return a function that compares its first argument between ranks at its first call, and does nothing later."""
    unchecked = [True]

    def compare_once(value: Tensor) -> None:
        """Compare ``value`` between ranks, at the first call only."""
        if unchecked:
            check_same_on_all_ranks(mesh, value, operator)
            unchecked.clear()

    return compare_once


def combinations(x: Any, r: int = 2, with_replacement: bool = False) -> Any:
    """Compute ``torch.combinations``: index ``x`` with the combinations of its positions, a plain tensor."""
    if not isinstance(x, DTensor) or x.ndim != 1 or r < 1:
        return NotImplemented
    return x[torch.combinations(torch.arange(x.shape[0], device=x.device), r, with_replacement)]


def vander(x: Any, n: int | None = None, increasing: bool = False) -> Any:
    """Compute ``torch.vander``, the powers of each element, by ``linalg.vander``: torch writes into a plain tensor."""
    if not isinstance(x, DTensor) or x.ndim != 1 or (count := x.shape[0] if n is None else n) < 2:
        return NotImplemented
    powers = aten.linalg_vander(x, N=count)
    return powers if increasing else powers.flip(1)


def matrix_power(x: Any, n: int) -> Any:
    """Compute ``matrix_power`` for the power 0: replicated identity matrices, which torch makes as a plain tensor."""
    if n or not isinstance(x, DTensor) or x.ndim < 2 or x.shape[-1] != x.shape[-2]:
        return NotImplemented
    return x.clone().copy_(constant(torch.eye(x.shape[-1], dtype=x.dtype, device=x.device), x))


def istft(
    x: Any,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Any = None,
    *rest: Any,
    **options: Any,
) -> Any:
    """Compute ``istft`` without a window, with a replicated window of ones: torch makes a plain one."""
    if window is not None or not isinstance(x, DTensor) or not x.is_complex() or n_fft < 1:
        return NotImplemented
    ones = torch.ones(win_length or n_fft, dtype=x.dtype.to_real(), device=x.device)
    return aten.istft(x, n_fft, hop_length, win_length, constant(ones, x), *rest, **options)


def causal_attention(
    query: Any, key: Any, value: Any, mask: Any = None, dropout: float = 0.0, is_causal: bool = False, *rest: Any, **options: Any
) -> Any:
    """Compute attention with ``is_causal`` by a replicated mask of the full sequence lengths: torch makes a plain one."""
    if not is_causal or mask is not None or not isinstance(query, DTensor) or min(query.ndim, key.ndim) < 2:
        return NotImplemented
    causal_mask = torch.full((query.shape[-2], key.shape[-2]), -torch.inf, dtype=query.dtype, device=query.device).triu(1)
    return aten._scaled_dot_product_attention_math(
        query, key, value, constant(causal_mask, query), dropout, False, *rest, **options
    )


def ctc_loss(name: str) -> Callable[..., Any]:
    """Return an override of one overload of ``ctc_loss`` with mean reduction, which torch divides by a plain tensor."""
    overload = overload_named(name)

    def compute_mean_loss(
        x: Any,
        targets: Any,
        input_lengths: Any,
        target_lengths: Any,
        blank: int = 0,
        reduction: int = 1,
        zero_infinity: bool = False,
    ) -> Any:
        """Return the mean of the losses, each divided by its target length, which is a plain number."""
        if reduction != 1 or not isinstance(x, DTensor) or isinstance(target_lengths, DTensor):
            return NotImplemented
        losses = overload(x, targets, input_lengths, target_lengths, blank, 0, zero_infinity)
        counts = torch.as_tensor(target_lengths, dtype=losses.dtype, device=losses.device).clamp_min(1).reshape(losses.shape)
        return (losses / checked_constant(counts, x, "ctc_loss")).mean()

    return compute_mean_loss


def cross_entropy(
    x: Any, target: Any, weight: Any = None, reduction: int = 1, ignore_index: int = -100, label_smoothing: float = 0.0
) -> Any:
    """Compute cross entropy with plain targets and class weights replicated, where torch multiplies them with DTensors."""
    if not isinstance(x, DTensor) or not (label_smoothing or target.dtype is not torch.int64):
        return NotImplemented
    if any(isinstance(value, PerRank) or (value is not None and value.requires_grad) for value in (target, weight)):
        return NotImplemented  # a replicated copy would lose the gradient; a PerRank has one value for each rank
    new_target, new_weight = (
        None if value is None else constant(value, x) if is_number(value) else checked_constant(value, x, "cross_entropy")
        for value in (target, weight)
    )
    if new_target is target and new_weight is weight:
        return NotImplemented
    return aten.cross_entropy_loss(x, new_target, new_weight, reduction, ignore_index, label_smoothing)


def _shard_like(value: DTensor, dim: int, x: DTensor, dim_of_x: int) -> DTensor:
    """Shard dim ``dim`` of a replicated state like dim ``dim_of_x`` of ``x``, so that time steps write to it in place."""
    placements = (replace(p, dim=dim) if isinstance(p, Shard) and p.dim == dim_of_x else Replicate() for p in x.placements)
    return value.redistribute(placements=[*placements])


def recurrent_with_plain_state(name: str) -> Callable[..., Any]:
    """Return an override of a recurrent operator (``lstm``, ``gru_cell``) that distributes plain initial states."""
    is_packed, is_cell = name.endswith(".data"), name.endswith("_cell")  # packed sequences have their batch sizes first
    place = 2 if is_packed else 1

    def run_with_distributed_state(x: Any, *args: Any, **options: Any) -> Any:
        """Call the recurrent operator with plain initial states replicated, or sharded along the batch like ``x``."""
        states = args[place - 1] if len(args) >= place else None
        if not isinstance(x, DTensor) or states is None:
            return NotImplemented
        old_states = states if isinstance(states, (list, tuple)) else [states]
        new_states = [checked_constant(value, x, name.removeprefix("aten::")) for value in old_states]
        if all(new is old for new, old in zip(new_states, old_states, strict=True)):
            return NotImplemented
        if not is_packed:
            batch_dim_of_x, batch_dim = (0, 0) if is_cell else (0 if args[-1] else 1, 1)
            new_states = [
                new if new is old else _shard_like(new, batch_dim, x, batch_dim_of_x)
                for new, old in zip(new_states, old_states, strict=True)
            ]
        state = new_states if isinstance(states, (list, tuple)) else new_states[0]
        return overload_named(name)(x, *args[: place - 1], state, *args[place:], **options)

    return run_with_distributed_state
