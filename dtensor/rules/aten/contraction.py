"""Contractions: products of matrices, their sums with a bias, and operations that are sums of products in disguise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..blockwise import blockwise, multilinear, on_each_rank
from ..call import Call
from ..facts import fact
from ..kernels import KernelContext, densely
from ..notation import parse
from ..registry import register
from ..rule import Choice, Dims, Factors, Kernel, LocalView, Rule
from ..verbs import bind, einsum, kernel_rule

einsum("mm", "m k, k n -> m n")
einsum("bmm", "b m k, b k n -> b m n")
einsum("mv", "m k, k -> m")
einsum("dot vdot", "k, k ->")
einsum("ger outer", "m, n -> m n")


def no_empty_block_beside_a_fraction(choice: Choice) -> bool:
    """torch cuts a fraction that scales integers to an integer, and refuses it where there is nothing to sum."""
    call = choice.call
    result = call.results[0]
    exact = result is None or result.dtype.is_floating_point or result.dtype.is_complex
    fraction = any(type(call.get(name, 1)) is float for name in ("beta", "alpha"))
    return exact or not fraction or all(0 not in choice.sizes(name) for name in choice.splits)


einsum("addmm", "+m n, m k, k n -> m n", when=no_empty_block_beside_a_fraction)
einsum("baddbmm", "+b m n, b m k, b k n -> b m n", when=no_empty_block_beside_a_fraction)
einsum("addbmm", "+m n, b m k, b k n -> m n", when=no_empty_block_beside_a_fraction)
einsum("addr", "+m n, m, n -> m n")


def no_empty_block_of_a_number(choice: Choice) -> bool:
    """``addmv`` of an empty matrix returns its first operand as it is, not expanded to the shape of the result."""
    result = choice.call.results[0]
    return min(*choice.sizes("m"), *choice.sizes("k")) > 0 or (result is not None and choice.call.shape(0) == result.shape)


einsum("addmv", "+m, m k, k -> m", when=no_empty_block_of_a_number)


def dotted(name: str, call: Call) -> int:
    """FLOPs where each element of the result takes all of a row of argument ``name``."""
    result = call.results[0]
    return 0 if result is None else 2 * math.prod(result.shape) * call.shape(call.names.index(name))[-1]


# the activation needs the whole sum
blockwise("_addmm_activation", "+m n, m [k], [k] n -> m n", flops=partial(dotted, "mat1"))

# a weight of one dim gives no output dim; without a bias there are two operands
WITHOUT_BIAS = tuple(row for op in ("sum", "avg") for row in (f"{op},finite -> {op}", f"finite,{op} -> {op}"))
einsum("linear", "b* k, n* k, +n* -> b* n*", partials=WITHOUT_BIAS)


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.ndim == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _gradient(of: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """``left @ right``, the gradient of a matrix, which lies in memory as that does: by columns where its columns do."""
    return torch.mm(right.t(), left.t()).t() if of.stride() == (1, of.shape[0]) else torch.mm(left, right)


def linear_gradients(x: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor, output_mask: Sequence[bool]) -> tuple[Any, ...]:
    """Gradients of input, weight and bias, those that are asked for (only mkldnn and MPS have the operator itself)."""
    rows, of_rows = _rows(x), _rows(grad)
    of_input, of_weight, of_bias = output_mask
    return (
        _gradient(rows, of_rows, weight).view(x.shape) if of_input else None,
        _gradient(weight, of_rows.t(), rows) if of_weight else None,
        of_rows.sum(0) if of_bias else None,
    )


blockwise(
    "linear_backward",
    "b* k, b* n, n k -> b* k, n k, n",
    sums={"b": "sum", "n": "sum", "k": "R"},  # the gradient of the bias does not know k
    flops=lambda call: 2 * math.prod(call.shape(0)) * call.shape(1)[-1] * sum(call["output_mask"][:2]),
    local=on_each_rank(linear_gradients),
)
fact("linear_backward", infer=lambda ask, given, device: linear_gradients(*given.values()))  # torch's forgets half of the mask


# --- matmul and einsum arrive whole in inference mode ---------------------------------------------------------------
def matmul_factors(call: Call) -> Factors:
    """Matrices, vectors, and stacks of matrices whose batch dims broadcast."""
    a, b = call.shape(0), call.shape(1)
    return _of_letters(_matmul_letters(a, b), (a, b))


def _matmul_letters(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[list[list[str]], list[str]]:
    batch = max(len(a), len(b), 2) - 2
    names = [f"b{d}" for d in range(batch)]
    left = names[batch - (len(a) - 2) :] + ["m", "k"] if len(a) > 1 else ["k"]
    right = names[batch - (len(b) - 2) :] + ["k", "n"] if len(b) > 1 else ["k"]
    return [left, right], names + ["m"] * (len(a) > 1) + ["n"] * (len(b) > 1)


def einsum_factors(call: Call) -> Factors | None:
    """Every letter of the equation is a factor; a letter twice in one operand (a diagonal) decomposes."""
    read = _letters_of(call["equation"], [len(layout.shape) for layout in call.operands])
    if read is None or any(len(set(names)) != len(names) for names in read[0]):
        return None
    return _of_letters(read, [call.shape(i) for i in range(len(call.operands))])


def _letters_of(equation: str, ndims: Sequence[int]) -> tuple[list[list[str]], list[str]] | None:
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(ndims):
        return None
    rest = max((n - len(t) + 3 for t, n in zip(terms, ndims, strict=True) if "..." in t), default=0)
    if not arrow:
        letters = [c for c in left if c.isalpha()]
        right = ("..." if rest else "") + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    spread = [_spread(t, n - len(t) + 3 if "..." in t else 0, rest) for t, n in zip(terms, ndims, strict=True)]
    if any(len(names) != n for names, n in zip(spread, ndims, strict=True)):
        return None
    return spread, _spread(right, rest, rest)


def _spread(term: str, own: int, rest: int) -> list[str]:
    before, dots, after = term.partition("...")
    return [*before, *(f".{rest - own + i}" for i in range(own if dots else 0)), *after]


def _of_letters(letters: tuple[list[list[str]], list[str]], shapes: Sequence[tuple[int, ...]]) -> Factors:
    """One factor a letter, none where a dim of size one is broadcast."""
    operands, result = letters
    sizes: dict[str, int] = {}
    for names, shape in zip(operands, shapes, strict=True):
        for name, size in zip(names, shape, strict=True):
            sizes[name] = size if sizes.get(name, 1) == 1 else sizes[name]
    dims = tuple(
        tuple((name,) if sizes[name] == size else () for name, size in zip(names, shape, strict=True))
        for names, shape in zip(operands, shapes, strict=True)
    )
    return Factors(dims, (tuple((name,) for name in result),), sizes, reduced=dict.fromkeys(sizes, "sum"))


kernel_rule("matmul", matmul_factors, partials=multilinear)


def matmul_backward_factors(call: Call) -> Factors:
    """Those of the product, whose result is the first operand here."""
    shapes = [call.shape(i) for i in range(3)]
    operands, result = _matmul_letters(*shapes[1:])
    factors = _of_letters(([result, *operands], []), shapes)
    made = zip(factors.operands[1:], call.results, strict=True)
    return replace(factors, results=tuple(dims for dims, meta in made if meta is not None))


def matmul_gradients(grad: torch.Tensor, x: torch.Tensor, y: torch.Tensor, mask: Sequence[bool]) -> tuple[Any, ...]:
    """Gradients of the operands of a product of matrices and stacks of them, those that are asked for (only nested tensors have
    the operator itself)."""
    if y.ndim == 2:
        rows, of_rows = _rows(x), _rows(grad)
        return (
            _gradient(rows, of_rows, y.t()).view(x.shape) if mask[0] else None,
            _gradient(y, rows.t(), of_rows) if mask[1] else None,
        )
    stacks = grad.shape[:-2]
    left, right, of_product = (t.expand(*stacks, *t.shape[-2:]).reshape(math.prod(stacks), *t.shape[-2:]) for t in (x, y, grad))
    return (
        torch.bmm(of_product, right.mT).view(*stacks, *x.shape[-2:]).sum_to_size(x.shape) if mask[0] else None,
        torch.bmm(left.mT, of_product).view(*stacks, *y.shape[-2:]).sum_to_size(y.shape) if mask[1] else None,
    )


kernel_rule(
    "matmul_backward",
    matmul_backward_factors,
    flops=lambda call: 2 * math.prod(call.shape(0)) * call.shape(1)[-1] * sum(call["mask"]),
    local=on_each_rank(matmul_gradients),
)
fact("matmul_backward", infer=lambda ask, given, device: matmul_gradients(*given.values()))
register("einsum", Rule(einsum_factors, multilinear, kind="einsum"))


def trilinear_factors(call: Call) -> Factors:
    """Three operands with dims of size one put in at ``expand``, multiplied, summed over ``sumdim``."""
    ndim = len(call.shape(0)) + len(call["expand1"])
    names = [[f"d{d}" for d in range(ndim) if d not in call[f"expand{i}"]] for i in (1, 2, 3)]
    kept = [f"d{d}" for d in range(ndim) if d not in call["sumdim"]]
    return _of_letters((names, kept), [call.shape(i) for i in range(3)])


register("_trilinear", Rule(trilinear_factors, multilinear, kind="einsum"))


# --- distances: every pair of rows by itself ------------------------------------------------------------------------
def same_method(call: Call, view: LocalView) -> dict[str, Any]:
    """The way to compute Euclidean distances that the whole matrices would take (matrix products from 26 rows on)."""
    if call["compute_mode"] not in (None, 0):
        return {}
    return {"compute_mode": 1 if max(call.shape(0)[-2], call.shape(1)[-2]) > 25 else 2}


def distances_of_coordinates(at: KernelContext, x: Any, y: Any, p: float, mode: Any = None) -> Any:
    """The p-th powers of distances along some coordinates add up."""
    return at.all_reduce(torch.ops.aten._cdist_forward(x, y, p, 2).pow(p), "sum").pow(1 / p)


def distance_factors(call: Call) -> Factors | None:
    """Distances along blocks of coordinates: their sum (p = 1, and counts of differences, p = 0), the largest (p = inf)."""
    factors, p = bind(parse("... p m, ... r m -> ... p r"), call, None), call["p"]
    if factors is None:
        return None
    if p in (0, 1):
        return replace(factors, reduced={"m": "sum"})
    if p == math.inf:
        return replace(factors, reduced={"m": "max"})
    result = call.results[0]
    nbytes = 0 if result is None else math.prod(result.shape) * result.dtype.itemsize
    return replace(factors, kernels={"m": Kernel(distances_of_coordinates, collectives=1, nbytes=lambda call: nbytes)})


kernel_rule("_cdist_forward", distance_factors, local_args=same_method, floats_matter=True, flops=partial(dotted, "x1"))
blockwise("_euclidean_dist", "... p [m], ... r [m] -> ... p r", flops=partial(dotted, "x1"))
# with the distances given, the gradient of one coordinate needs only that coordinate
blockwise("_cdist_backward", "... p r, ... p m, ... r m, ... p r -> ... p m", sums="r")
blockwise("_pdist_forward", "[p] [m] -> [p]", as_laid_out=True)
blockwise("_pdist_backward", "[p], [p] m, [p] -> [p] m", local=densely(torch.ops.aten._pdist_backward))


# --- low precision --------------------------------------------------------------------------------------------------
def blocks_of_eight(choice: Choice) -> bool:
    """What the CUDA kernels of 8-bit products ask of every block."""
    if choice.call.mesh.device_type != "cuda":
        return True
    return all(size % 8 == 0 and size > 16 for name in choice.splits for size in choice.sizes(name))


einsum("_int_mm", "m k, k n -> m n", when=blocks_of_eight)  # int32 sums of int8 products are exact in any order


def scaled_factors(call: Call) -> Factors | None:
    """Scales are one number, or one per row and one per column; k is whole, so that sums are rounded once."""
    (m, k), (_, n) = call.shape(0), call.shape(1)
    sizes = {"m": m, "k": k, "n": n}
    own = {"self": ("m", "k"), "mat2": ("k", "n"), "scale_a": ("m", ""), "scale_b": ("", "n"), "bias": ("n",), "scale_result": ()}
    operands: list[Dims] = []
    for name, layout in zip(call.names, call.operands, strict=True):
        shape = tuple(layout.shape)
        if layout.numel == 1:
            operands.append(((),) * len(shape))
        elif len(shape) == len(own[name]) and all(size == sizes.get(d, 1) for d, size in zip(own[name], shape, strict=True)):
            operands.append(tuple((d,) if d else () for d in own[name]))
        else:
            return None  # scales by blocks
    return Factors(tuple(operands), ((("m",), ("n",)),), sizes, whole=frozenset("k"))


kernel_rule("_scaled_mm", scaled_factors, when=blocks_of_eight, flops=partial(dotted, "self"))
