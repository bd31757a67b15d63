"""Decompositions and solutions of matrices: the last dims are whole, stacks and columns of right-hand sides are factors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...base.memory_order import contiguous_stride, dense_in
from ..blockwise import blockwise, multilinear, plain_op
from ..call import Call, Meta
from ..kernels import At, KernelContext
from ..notation import parse
from ..registry import register
from ..rule import Dims, Factors, Kernel, Rule
from ..verbs import bind, kernel_rule


def ordered(at: KernelContext, matrix: Any, *args: Any, **kwargs: Any) -> Any:
    """The operator on blocks in the order of the whole.

    It factors the transpose of a matrix that is contiguous (a real one), and its gradient looks at the whole to know which.
    """
    whole = at.call.operands[0]
    dense = torch.empty_strided(whole.shape, whole.stride, device="meta").is_contiguous()

    def one(_: At, block: Tensor) -> Tensor:
        if dense or block.shape[-1] < 2:
            return block.contiguous()
        return block.mT.contiguous().mT if block.is_contiguous() else block

    return at.call.func.overloadpacket(at.map(one, matrix), *args, **kwargs)


# one matrix in
blockwise("cholesky cholesky_inverse", "... [m] [n] -> ... [m] [n]")
blockwise("linalg_matrix_exp", "... [m] [n] -> ... [m] [n]", as_laid_out=True)
blockwise("linalg_inv_ex linalg_cholesky_ex", "... [m] [n] -> ... [m] [n], ...")
blockwise("linalg_qr", "... [m] [n] -> ... [m] [n], ... [m] [n]")
blockwise("_linalg_svd", "... [m] [n] -> ... [m] [n], ... [m], ... [m] [n]")
blockwise("_linalg_eigh linalg_eig", "... [m] [n] -> ... [m], ... [m] [n]")
blockwise("_linalg_eigvals", "... [m] [n] -> ... [m]")
blockwise("_linalg_det", "... [m] [n] -> ..., ... [m] [n], ... [m]", run=ordered)
blockwise("_linalg_slogdet", "... [m] [n] -> ..., ..., ... [m] [n], ... [m]", run=ordered)
blockwise("linalg_lu", "... [m] [n] -> ... [m] [n], ... [m] [n], ... [m] [n]")
blockwise("linalg_lu_factor_ex linalg_ldl_factor_ex", "... [m] [n] -> ... [m] [n], ... [m], ...")


def householder_metas(call: Call) -> tuple[Meta, ...]:
    """Matrices by columns, as LAPACK has them; torch has no meta kernel."""
    *stack, m, n = shape = call.shape(0)
    dtype, least, rows = call.operands[0].dtype, (*stack, min(m, n)), len(stack)
    factors = Meta(tuple(shape), dense_in(shape, [*range(rows), rows + 1, rows]), dtype)
    return factors, Meta(least, contiguous_stride(least), dtype)


blockwise("geqrf", "... [m] [n] -> ... [m] [n], ... [m]", metas=householder_metas)

# factors in
blockwise("lu_unpack", "... [m] [n], ... [k] -> ... [m] [n], ... [m] [n], ... [m] [n]")
blockwise("linalg_householder_product", "... [m] [n], ... [k] -> ... [m] [n]")
blockwise("linalg_pinv.atol_rtol_tensor", "... [m] [n], ..., ... -> ... [n] [m]")

# tells of a failure by raising: all ranks look at all of it, so that all raise
register(
    "_linalg_check_errors", Rule(lambda call: Factors((((),) * len(call.shape(0)),), (), {}), kind="linalg", source="[...] ->")
)


def solver(names: str, pattern: str, right: int) -> None:
    """Columns ``k`` of the right-hand side (operand ``right``) are worked on by themselves; with ``left=False`` its rows are."""
    parsed = {True: parse(pattern), False: parse(pattern.replace("[j] k", "k [j]"))}

    def factors(call: Call) -> Factors | None:
        return bind(parsed[bool(call.get("left", True))], call, None)

    register(names, Rule(factors, kind="linalg", source=pattern))


solver("cholesky_solve", "... [j] k, ... [i] [j] -> ... [j] k", 0)
solver("linalg_solve_triangular", "... [i] [j], ... [j] k -> ... [j] k", 1)
solver("linalg_lu_solve", "... [i] [j], ... [i], ... [j] k -> ... [j] k", 2)
solver("linalg_ldl_solve", "... [i] [j], ... [i], ... [j] k -> ... [j] k", 2)
solver("ormqr", "... [m] [n], ... [t], ... [j] k -> ... [j] k", 2)
blockwise(
    "triangular_solve",
    "... [j] k, ... [i] [j] -> ... [j] k, ... [i] [j]",
    kernels={"k": Kernel(plain_op)},  # the second result is the matrix itself
)


def solve_factors(call: Call) -> Factors | None:
    """``_linalg_solve_ex``: the right-hand sides are a stack of vectors or of matrices; LU, pivots and info come along.

    They know neither the columns nor batch dims that only the right-hand sides have: there they are whole.
    """
    a, b = call.shape(0), call.shape(1)
    vector = len(b) == 1 or (len(b) == len(a) - 1 and b == a[:-1])
    right = "... [j]" if vector else "... [j] k" if call["left"] else "... k [j]"
    factors = bind(parse(f"... [i] [j], {right} -> {right}, ... [i] [j], ... [i], ..."), call, None)
    if factors is None:
        return None
    lacked = {name for name in factors.sizes if any((name,) not in dims for dims in factors.results)} - factors.whole
    return replace(factors, kernels=dict.fromkeys(lacked, Kernel(ordered, joint=True)))


kernel_rule("_linalg_solve_ex", solve_factors, run=ordered)


def cross_factors(call: Call) -> Factors:
    """Broadcast operands; the three components are whole."""
    ndim = max(len(call.shape(0)), len(call.shape(1)))
    sizes: dict[str, int] = {}
    for shape in (call.shape(0), call.shape(1)):
        for d, size in enumerate(shape, ndim - len(shape)):
            sizes[f"d{d}"] = size if sizes.get(f"d{d}", 1) == 1 else sizes[f"d{d}"]

    def dims(shape: tuple[int, ...]) -> Dims:
        return tuple((f"d{d}",) if sizes[f"d{d}"] == size else () for d, size in enumerate(shape, ndim - len(shape)))

    (meta,) = call.results
    assert meta is not None
    whole = frozenset((f"d{call['dim'] % ndim}",))
    return Factors((dims(call.shape(0)), dims(call.shape(1))), (dims(meta.shape),), sizes, whole)


register("linalg_cross", Rule(cross_factors, multilinear, kind="linalg", source="... [c], ... [c] -> ... [c]"))
