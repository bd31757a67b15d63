"""Linear algebra (linalg): decompositions and solutions of matrices. The last dims are unsharded, batches and columns are
factors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...base.memory_order import contiguous_stride, dense_stride
from ..bind_pattern import factors_of_pattern
from ..call import Call, Meta
from ..declare import along, blockwise, kernel_rule
from ..declared_factors import by
from ..kernel_context import At, KernelContext
from ..notation import parse_notation
from ..partial_rules import linear
from ..rule import Factors, Kernel


def run_in_global_order(at: KernelContext, matrix: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a factorization on each rank's matrices, in the memory order of the global tensor (a kernel).

    It factors the transpose of a real contiguous matrix, and its gradient reads the global order to know which.
    """
    global_layout = at.call.operands[0]
    dense = torch.empty_strided(global_layout.shape, global_layout.stride, device="meta").is_contiguous()

    def order_block(_: At, block: Tensor) -> Tensor:
        """Copy one rank's matrices into the memory order of the global tensor, if they have another one."""
        if dense or block.shape[-1] < 2:
            return block.contiguous()
        return block.mT.contiguous().mT if block.is_contiguous() else block

    return at.call.func.overloadpacket(at.map(order_block, matrix), *args, **kwargs)


# operators of one matrix
blockwise("cholesky cholesky_inverse", "... [m] [n] -> ... [m] [n]")
blockwise("linalg_matrix_exp", "... [m] [n] -> ... [m] [n]", as_laid_out=True)
blockwise("linalg_inv_ex linalg_cholesky_ex", "... [m] [n] -> ... [m] [n], ...")
blockwise("linalg_qr", "... [m] [n] -> ... [m] [n], ... [m] [n]")
blockwise("_linalg_svd", "... [m] [n] -> ... [m] [n], ... [m], ... [m] [n]")
blockwise("_linalg_eigh linalg_eig", "... [m] [n] -> ... [m], ... [m] [n]")
blockwise("_linalg_eigvals", "... [m] [n] -> ... [m]")
blockwise("_linalg_det", "... [m] [n] -> ..., ... [m] [n], ... [m]", run=run_in_global_order)
blockwise("_linalg_slogdet", "... [m] [n] -> ..., ..., ... [m] [n], ... [m]", run=run_in_global_order)
blockwise("linalg_lu", "... [m] [n] -> ... [m] [n], ... [m] [n], ... [m] [n]")
blockwise("linalg_lu_factor_ex linalg_ldl_factor_ex", "... [m] [n] -> ... [m] [n], ... [m], ...")


def householder_metas(call: Call) -> tuple[Meta, ...]:
    """Return the metas of ``geqrf``, for which torch has no meta kernel: matrices by columns, as in LAPACK."""
    *stack, m, n = shape = call.shape(0)
    dtype, least, rows = call.operands[0].dtype, (*stack, min(m, n)), len(stack)
    factors = Meta(tuple(shape), dense_stride(shape, [*range(rows), rows + 1, rows]), dtype)
    return factors, Meta(least, contiguous_stride(least), dtype)


blockwise("geqrf", "... [m] [n] -> ... [m] [n], ... [m]", metas=householder_metas)

# operators of factored matrices
blockwise("lu_unpack", "... [m] [n], ... [k] -> ... [m] [n], ... [m] [n], ... [m] [n]")
blockwise("linalg_householder_product", "... [m] [n], ... [k] -> ... [m] [n]")
blockwise("linalg_pinv.atol_rtol_tensor", "... [m] [n], ..., ... -> ... [n] [m]")

# it raises for failures: all ranks read the replicated infos, so that all raise
blockwise("_linalg_check_errors", "[s*] ->")


# columns ``k`` of the right-hand side are independent; with ``left=False`` its rows are
def declare_left_right(names: str, left: str, **options: Any) -> None:
    patterns = {True: left, False: left.replace("[j] k", "k [j]")}
    blockwise(names, by("left", patterns), **options)


def lu_solve_block(*args: Any, **kwargs: Any) -> Tensor:
    """Solve on one rank's block with conjugation resolved: torch is lazy only for non-empty blocks, so ranks would differ."""
    return torch.ops.aten.linalg_lu_solve(*args, **kwargs).resolve_conj()


blockwise("cholesky_solve", "... [j] k, ... [i] [j] -> ... [j] k")
blockwise("linalg_ldl_solve", "... [i] [j], ... [i], ... [j] k -> ... [j] k")
declare_left_right("linalg_solve_triangular", "... [i] [j], ... [j] k -> ... [j] k")
declare_left_right("linalg_lu_solve", "... [i] [j], ... [i], ... [j] k -> ... [j] k", local=lu_solve_block)
declare_left_right("ormqr", "... [m] [n], ... [t], ... [j] k -> ... [j] k")
blockwise("triangular_solve", "... [j] k, ... [i] [j] -> ... [j] k, ... [i] [j]", sums={"k": "R"})  # it returns the matrix too


def solve_factors(call: Call) -> Factors | None:
    """Return the factors of ``_linalg_solve_ex``, for right-hand sides that are vectors or matrices.

    LU, pivots and info lack the columns and the batch dims that only the right-hand sides have. There they are replicated.
    """
    a, b = call.shape(0), call.shape(1)
    vector = len(b) == 1 or (len(b) == len(a) - 1 and b == a[:-1])
    right = "... [j]" if vector else "... [j] k" if call["left"] else "... k [j]"
    factors = factors_of_pattern(parse_notation(f"... [i] [j], {right} -> {right}, ... [i] [j], ... [i], ..."), call, None)
    if factors is None:
        return None
    missing = {name for name in factors.sizes if any((name,) not in dims for dims in factors.results)} - factors.unsharded
    return replace(factors, kernels=dict.fromkeys(missing, Kernel(run_in_global_order, joint=True)))


kernel_rule("_linalg_solve_ex", solve_factors, run=run_in_global_order)

along("linalg_cross", partials=linear("self", "other"))
