"""Decompositions and solutions of matrices: the last dims are whole, stacks and columns of right-hand sides are factors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...base.memory_order import contiguous_stride, dense_in
from ..call import Call, Meta
from ..declare import along, bind, blockwise, kernel_rule
from ..kernel_context import At, KernelContext
from ..notation import parse
from ..notation_rules import by
from ..partial_rules import linear
from ..rule import Factors, Kernel


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
blockwise("_linalg_check_errors", "[s*] ->")


# columns ``k`` of the right-hand side are worked on by themselves; with ``left=False`` its rows are
def on_either_side(names: str, left: str, **options: Any) -> None:
    patterns = {True: left, False: left.replace("[j] k", "k [j]")}
    blockwise(names, by("left", patterns), **options)


def solved(*args: Any, **kwargs: Any) -> Tensor:
    """Torch leaves a conjugation to be carried out, but not of a block without elements: ranks would differ."""
    return torch.ops.aten.linalg_lu_solve(*args, **kwargs).resolve_conj()


blockwise("cholesky_solve", "... [j] k, ... [i] [j] -> ... [j] k")
blockwise("linalg_ldl_solve", "... [i] [j], ... [i], ... [j] k -> ... [j] k")
on_either_side("linalg_solve_triangular", "... [i] [j], ... [j] k -> ... [j] k")
on_either_side("linalg_lu_solve", "... [i] [j], ... [i], ... [j] k -> ... [j] k", local=solved)
on_either_side("ormqr", "... [m] [n], ... [t], ... [j] k -> ... [j] k")
blockwise("triangular_solve", "... [j] k, ... [i] [j] -> ... [j] k, ... [i] [j]", sums={"k": "R"})  # gives the matrix too


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

along("linalg_cross", partials=linear("self", "other"))
