"""Contractions: products of matrices, their sums with a bias, and other operations that are sums of products."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..bind_pattern import factors_of_pattern
from ..call import Call
from ..declare import blockwise, einsum, kernel_rule
from ..kernel_context import KernelContext, on_contiguous, on_each_rank
from ..notation import parse_notation
from ..op_traits import declare_traits
from ..partial_rules import linear
from ..registry import register
from ..rule import Dims, Factors, Kernel, LocalView, Rule, StrategyChoice

einsum("mm", "m k, k n -> m n")
einsum("bmm", "b m k, b k n -> b m n")
einsum("mv", "m k, k -> m")
einsum("dot vdot", "k, k ->")
einsum("ger outer", "m, n -> m n")


def allows_fractional_scale(choice: StrategyChoice) -> bool:
    """Return False if integers are scaled by a float and a block is empty, which torch refuses."""
    call = choice.call
    result = call.results[0]
    exact = result is None or result.dtype.is_floating_point or result.dtype.is_complex
    fraction = any(type(call.get(name, 1)) is float for name in ("beta", "alpha"))
    return exact or not fraction or all(0 not in choice.sizes(name) for name in choice.splits)


einsum("addmm", "+m n, m k, k n -> m n", when=allows_fractional_scale)
einsum("baddbmm", "+b m n, b m k, b k n -> b m n", when=allows_fractional_scale)
einsum("addbmm", "+m n, b m k, b k n -> m n", when=allows_fractional_scale)
einsum("addr", "+m n, m, n -> m n")


def allows_expanded_addend(choice: StrategyChoice) -> bool:
    """Return False if ``addmv`` would have to expand its first operand on an empty block, which torch does not do."""
    result = choice.call.results[0]
    return min(*choice.sizes("m"), *choice.sizes("k")) > 0 or (result is not None and choice.call.shape(0) == result.shape)


einsum("addmv", "+m, m k, k -> m", when=allows_expanded_addend)


def row_product_flops(name: str, call: Call) -> int:
    """Return the FLOPs of an operator in which each result element is a product with a complete row of argument ``name``."""
    result = call.results[0]
    return 0 if result is None else 2 * math.prod(result.shape) * call.shape(call.names.index(name))[-1]


# the activation needs the complete sum
blockwise("_addmm_activation", "+m n, m [k], [k] n -> m n", flops=partial(row_product_flops, "mat1"))

# a weight of one dim gives no output dim; a call without a bias has two operands
WITHOUT_BIAS = tuple(strategy for op in ("sum", "avg") for strategy in (f"{op},finite -> {op}", f"finite,{op} -> {op}"))
einsum("linear", "b* k, n* k, +n* -> b* n*", partials=WITHOUT_BIAS)


def _flatten_rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.ndim == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _matrix_gradient(of: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return ``left @ right``, the gradient of the matrix ``of``, in the memory order of that matrix."""
    return torch.mm(right.t(), left.t()).t() if of.stride() == (1, of.shape[0]) else torch.mm(left, right)


def linear_gradients(x: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor, output_mask: Sequence[bool]) -> tuple[Any, ...]:
    """Compute the requested gradients of input, weight and bias of ``linear``. Torch has the operator only for mkldnn and MPS."""
    rows, grad_rows = _flatten_rows(x), _flatten_rows(grad)
    needs_input, needs_weight, needs_bias = output_mask
    return (
        _matrix_gradient(rows, grad_rows, weight).view(x.shape) if needs_input else None,
        _matrix_gradient(weight, grad_rows.t(), rows) if needs_weight else None,
        grad_rows.sum(0) if needs_bias else None,
    )


blockwise(
    "linear_backward",
    "b* k, b* n, n k -> b* k, n k, n",
    sums={"b": "sum", "n": "sum", "k": "R"},  # the gradient of the bias has no k
    flops=lambda call: 2 * math.prod(call.shape(0)) * call.shape(1)[-1] * sum(call["output_mask"][:2]),
    local=on_each_rank(linear_gradients),
    shapes=True,
)
declare_traits(
    "linear_backward", infer=lambda default, arguments, device: linear_gradients(*arguments.values())
)  # torch's meta kernel ignores half of the mask


# --- matmul, and einsum in inference mode, are not decomposed ----------------------------------------------------------
blockwise(
    "matmul",
    "b* m k, b* k n -> b* m n | k, k -> | b* m k, k -> b* m | k, b* k n -> b* n",
    sums="*",
    partials=linear("self", "other"),
    shapes=True,
)


def matmul_gradients(grad: torch.Tensor, x: torch.Tensor, y: torch.Tensor, mask: Sequence[bool]) -> tuple[Any, ...]:
    """Compute the requested gradients of both operands of ``matmul``. Torch has the operator only for nested tensors."""
    if y.ndim == 2:
        x_gradient, weight_gradient, _ = linear_gradients(x, grad, y.t(), (*mask, False))
        return x_gradient, None if weight_gradient is None else weight_gradient.t()
    stacks = grad.shape[:-2]
    left, right, product_gradient = (
        t.expand(*stacks, *t.shape[-2:]).reshape(math.prod(stacks), *t.shape[-2:]) for t in (x, y, grad)
    )
    return (
        torch.bmm(product_gradient, right.mT).view(*stacks, *x.shape[-2:]).sum_to_size(x.shape) if mask[0] else None,
        torch.bmm(left.mT, product_gradient).view(*stacks, *y.shape[-2:]).sum_to_size(y.shape) if mask[1] else None,
    )


blockwise(
    "matmul_backward",
    "b* m n, b* m k, b* k n -> b* m k, b* k n",
    sums="*",
    flops=lambda call: 2 * math.prod(call.shape(0)) * call.shape(1)[-1] * sum(call["mask"]),
    local=on_each_rank(matmul_gradients),
    shapes=True,
)
declare_traits("matmul_backward", infer=lambda default, arguments, device: matmul_gradients(*arguments.values()))


def einsum_factors(call: Call) -> Factors | None:
    """Return the factors of ``einsum``: the letters of its equation. None (decompose) if an operand has a letter twice."""
    left, arrow, right = call["equation"].replace(" ", "").partition("->")
    if not arrow:
        once = sorted(letter for letter in set(left) if letter.isalpha() and left.count(letter) == 1)
        right = "..." * ("..." in left) + "".join(once)
    if any(term.count(letter) > 1 for term in left.split(",") for letter in term if letter.isalpha()):
        return None
    return factors_of_pattern(parse_notation(f"{_lowercase_letters(left)} -> {_lowercase_letters(right)}"), call)


def _lowercase_letters(terms: str) -> str:
    """Convert one side of an einsum equation to the notation of rules, which has lowercase letters only."""
    words = re.findall(r"\.\.\.|[A-Za-z,]", terms)
    return " ".join(word if word == word.lower() else f"{word.lower()}_" for word in words)


def partials_of_each_operand(call: Call) -> tuple[str, ...]:
    """Return strategies in which one operand is partial, for an operator that is linear in each while the others are finite."""
    count = len(call.operands)
    return tuple(
        f"{','.join(op if i == k else 'finite' for k in range(count))} -> {op}" for i in range(count) for op in ("sum", "avg")
    )


register("einsum", Rule(einsum_factors, partials_of_each_operand, kind="einsum"))


def trilinear_factors(call: Call) -> Factors | None:
    """Return the factors of ``_trilinear``, which expands three operands, multiplies them and sums over ``sumdim``."""
    dims = range(len(call.shape(0)) + len(call["expand1"]))
    terms = [" ".join(f"d{d}" for d in dims if d not in call[name]) for name in ("expand1", "expand2", "expand3", "sumdim")]
    return factors_of_pattern(parse_notation(f"{', '.join(terms[:3])} -> {terms[3]}"), call)


register("_trilinear", Rule(trilinear_factors, linear("i1", "i2", "i3"), kind="einsum"))


# --- distances of pairs of rows -------------------------------------------------------------------------------------
def local_cdist_args(call: Call, view: LocalView) -> dict[str, Any]:
    """Return the ``compute_mode`` for blocks that torch would choose for the global matrices (products from 26 rows on)."""
    if call["compute_mode"] not in (None, 0):
        return {}
    return {"compute_mode": 1 if max(call.shape(0)[-2], call.shape(1)[-2]) > 25 else 2}


def distances_of_coordinates(at: KernelContext, x: Any, y: Any, p: float, mode: Any = None) -> Any:
    """Compute distances from sharded coordinates: all-reduce the p-th powers of each rank's partial distances (a kernel)."""
    return at.all_reduce(torch.ops.aten._cdist_forward(x, y, p, 2).pow(p), "sum").pow(1 / p)


def distance_factors(call: Call) -> Factors | None:
    """Return the factors of ``_cdist_forward``.

    Sharded coordinates give partial results for p = 0, 1 and inf, else they need a kernel.
    """
    factors, p = factors_of_pattern(parse_notation("... p m, ... r m -> ... p r"), call, None), call["p"]
    if factors is None:
        return None
    if p in (0, 1):
        return replace(factors, reduced={"m": "sum"})
    if p == math.inf:
        return replace(factors, reduced={"m": "max"})
    result = call.results[0]
    nbytes = 0 if result is None else math.prod(result.shape) * result.dtype.itemsize
    return replace(factors, kernels={"m": Kernel(distances_of_coordinates, collectives=1, nbytes=lambda call: nbytes)})


kernel_rule(
    "_cdist_forward", distance_factors, local_args=local_cdist_args, floats_matter=True, flops=partial(row_product_flops, "x1")
)
blockwise("_euclidean_dist", "... p [m], ... r [m] -> ... p r", flops=partial(row_product_flops, "x1"))
# given the distances, the gradient of one coordinate needs only that coordinate
blockwise("_cdist_backward", "... p r, ... p m, ... r m, ... p r -> ... p m", sums="r")
blockwise("_pdist_forward", "[p] [m] -> [p]", as_laid_out=True)
blockwise("_pdist_backward", "[p], [p] m, [p] -> [p] m", local=on_contiguous(torch.ops.aten._pdist_backward))


# --- low precision --------------------------------------------------------------------------------------------------
def has_cuda_block_sizes(choice: StrategyChoice) -> bool:
    """Return True if every block has the sizes that CUDA kernels of 8-bit products require."""
    if choice.call.mesh.device_type != "cuda":
        return True
    return all(size % 8 == 0 and size > 16 for name in choice.splits for size in choice.sizes(name))


einsum("_int_mm", "m k, k n -> m n", when=has_cuda_block_sizes)  # int32 sums of int8 products are exact in any order


def scaled_factors(call: Call) -> Factors | None:
    """Return the factors of ``_scaled_mm``, or None for block-wise scales.

    The contracted dim is unsharded, so that sums are rounded once.
    """
    if not len(call.shape(0)) == len(call.shape(1)) == 2:
        return None  # torch raises for these
    (m, k), (_, n) = call.shape(0), call.shape(1)
    sizes = {"m": m, "k": k, "n": n}
    dims_of_argument = {
        "self": ("m", "k"),
        "mat2": ("k", "n"),
        "scale_a": ("m", ""),
        "scale_b": ("", "n"),
        "bias": ("n",),
        "scale_result": (),
    }
    operands: list[Dims] = []
    for name, layout in zip(call.names, call.operands, strict=True):
        shape = tuple(layout.shape)
        if layout.numel == 1:
            operands.append(((),) * len(shape))
        elif len(shape) == len(dims_of_argument[name]) and all(
            size == sizes.get(d, 1) for d, size in zip(dims_of_argument[name], shape, strict=True)
        ):
            operands.append(tuple((d,) if d else () for d in dims_of_argument[name]))
        else:
            return None  # scales of blocks
    return Factors(tuple(operands), ((("m",), ("n",)),), sizes, unsharded=frozenset("k"))


kernel_rule("_scaled_mm", scaled_factors, when=has_cuda_block_sizes, flops=partial(row_product_flops, "self"))
