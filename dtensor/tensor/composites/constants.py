"""Functions of torch that make constants on their way, given them distributed.

A mask, a window, a range or a first state that torch fills in below is a plain tensor beside DTensors, and dispatch cannot know
whose it is. So it is made here, above autograd, as a replicated DTensor: the same value on every rank, no communication.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...base.caches import remembered
from ...comm import PerRank
from ...comm.cross_rank_check import same_on_all
from ...dispatch.plain_tensor_args import is_number, replicated
from ...mesh.device_mesh import DeviceMesh
from ...placement import Replicate, Shard
from ..dtensor import DTensor
from .above_autograd import overload_named, recomposed

aten = torch.ops.aten


def constant(value: Tensor, like: Any) -> Any:
    """``value``, which every rank makes alike, as a DTensor on the mesh of ``like``."""
    return replicated(value, like._layout.mesh)


def state(value: Any, like: Any, what: str) -> Any:
    """A state that may be plain: compared between ranks at the first of its shape, then taken as replicated."""
    if isinstance(value, DTensor) or is_number(value):
        return value
    _compared(like._layout.mesh, what, value.shape, value.dtype)(value)
    return constant(value, like)


@remembered(1024)
def _compared(mesh: DeviceMesh, what: str, shape: torch.Size, dtype: torch.dtype) -> Any:
    """A comparison that is made once."""
    left = [True]

    def compare(value: Tensor) -> None:
        if left:
            same_on_all(mesh, value, what)
            left.clear()

    return compare


def combinations(x: Any, r: int = 2, with_replacement: bool = False) -> Any:
    """The rows of ``x`` at the combinations of positions."""
    if not isinstance(x, DTensor) or x.ndim != 1 or r < 1:
        return NotImplemented
    return x[torch.combinations(torch.arange(x.shape[0], device=x.device), r, with_replacement)]


def vander(x: Any, n: int | None = None, increasing: bool = False) -> Any:
    """The powers of each element side by side, which torch writes into a plain tensor."""
    if not isinstance(x, DTensor) or x.ndim != 1 or (count := x.shape[0] if n is None else n) < 2:
        return NotImplemented
    powers = aten.linalg_vander(x, N=count)
    return powers if increasing else powers.flip(1)


def matrix_power(x: Any, n: int) -> Any:
    """The identity, where torch copies it from a plain one."""
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
    """With the window of ones that stands for none."""
    if window is not None or not isinstance(x, DTensor) or not x.is_complex() or n_fft < 1:
        return NotImplemented
    ones = torch.ones(win_length or n_fft, dtype=x.dtype.to_real(), device=x.device)
    return aten.istft(x, n_fft, hop_length, win_length, constant(ones, x), *rest, **options)


def causal_attention(
    query: Any, key: Any, value: Any, mask: Any = None, dropout: float = 0.0, is_causal: bool = False, *rest: Any, **options: Any
) -> Any:
    """The mask of causal attention is that of the whole sequences."""
    if not is_causal or mask is not None or not isinstance(query, DTensor) or min(query.ndim, key.ndim) < 2:
        return NotImplemented
    hidden = torch.full((query.shape[-2], key.shape[-2]), -torch.inf, dtype=query.dtype, device=query.device).triu(1)
    return aten._scaled_dot_product_attention_math(query, key, value, constant(hidden, query), dropout, False, *rest, **options)


def ctc_loss(overload: Any) -> Any:
    """The mean over targets of given lengths, which torch divides by as a plain tensor."""

    def run(x: Any, targets: Any, lengths: Any, of: Any, blank: int = 0, reduction: int = 1, zero_infinity: bool = False) -> Any:
        if reduction != 1 or not isinstance(x, DTensor) or isinstance(of, DTensor):
            return NotImplemented
        losses = overload(x, targets, lengths, of, blank, 0, zero_infinity)
        counts = torch.as_tensor(of, dtype=losses.dtype, device=losses.device).clamp_min(1).reshape(losses.shape)
        return (losses / state(counts, x, "ctc_loss")).mean()

    return run


def cross_entropy(
    x: Any, target: Any, weight: Any = None, reduction: int = 1, ignore_index: int = -100, label_smoothing: float = 0.0
) -> Any:
    """Take plain targets and class weights as replicated where torch composes the loss of products with them: with smoothed
    labels, and with class probabilities as targets."""
    if not isinstance(x, DTensor) or not (label_smoothing or target.dtype is not torch.int64):
        return NotImplemented
    if any(isinstance(given, PerRank) or (given is not None and given.requires_grad) for given in (target, weight)):
        return NotImplemented  # it would lose its gradient, or each rank has its own
    targets, scale = (None if given is None else _whole(given, x) for given in (target, weight))
    if targets is target and scale is weight:
        return NotImplemented
    return aten.cross_entropy_loss(x, targets, scale, reduction, ignore_index, label_smoothing)


def _whole(value: Tensor, like: Any) -> Any:
    return constant(value, like) if is_number(value) else state(value, like, "cross_entropy")


def _cut_alike(value: DTensor, dim: int, x: DTensor, of_x: int) -> DTensor:
    """Each rank's part of a replicated value, dim ``dim`` cut as dim ``of_x`` of ``x``: steps that write to it keep to it."""
    cuts = (replace(p, dim=dim) if isinstance(p, Shard) and p.dim == of_x else Replicate() for p in x.placements)
    return value.redistribute(placements=[*cuts])


def with_state(name: str, place: int = 1) -> None:
    """A recurrent operator whose first state (one tensor or several) may be plain, as modules make it of zeros."""

    def run(x: Any, *rest: Any, **options: Any) -> Any:
        states = rest[place - 1] if len(rest) >= place else None
        if not isinstance(x, DTensor) or states is None:
            return NotImplemented
        given = states if isinstance(states, (list, tuple)) else [states]
        taken = [state(value, x, name) for value in given]
        if all(new is old for new, old in zip(taken, given, strict=True)):
            return NotImplemented
        if not name.endswith(".data"):  # whose sequences end one after another
            of_x, own = (0, 0) if name.endswith("_cell") else (0 if rest[-1] else 1, 1)
            taken = [new if new is old else _cut_alike(new, own, x, of_x) for new, old in zip(taken, given, strict=True)]
        new = taken if isinstance(states, (list, tuple)) else taken[0]
        return overload_named(f"aten::{name}")(x, *rest[: place - 1], new, *rest[place:], **options)

    recomposed(f"aten::{name}", run)


recomposed("aten::combinations", combinations)
recomposed("aten::vander", vander)
recomposed("aten::linalg_matrix_power", matrix_power)
recomposed("aten::matrix_power", matrix_power)
recomposed("aten::istft", istft)
recomposed("aten::_scaled_dot_product_attention_math", causal_attention)
recomposed("aten::cross_entropy_loss", cross_entropy)
for _name in (
    "lstm.input",
    "gru.input",
    "rnn_tanh.input",
    "rnn_relu.input",
    "lstm_cell",
    "gru_cell",
    "rnn_tanh_cell",
    "rnn_relu_cell",
):
    with_state(_name)
for _name in ("lstm.data", "gru.data", "rnn_tanh.data", "rnn_relu.data"):
    with_state(_name, 2)
for _overload in ("IntList", "Tensor"):
    recomposed(f"aten::ctc_loss.{_overload}", ctc_loss(getattr(aten.ctc_loss, _overload)))
