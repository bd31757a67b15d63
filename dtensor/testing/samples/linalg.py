"""Samples of decompositions and solvers, over stacks of matrices."""

from __future__ import annotations

import torch

from .of_schema import tensor
from .sample import Sample, Samples


def x(*shape: int, seed: int = 0) -> torch.Tensor:
    return tensor(shape, torch.float64, seed)


def regular(*shape: int) -> torch.Tensor:
    return x(*shape) + 4 * torch.eye(shape[-1], dtype=torch.float64)


def definite(*shape: int) -> torch.Tensor:
    return (m := x(*shape)) @ m.mT + torch.eye(shape[-1], dtype=torch.float64)


A, S, T = regular(5, 3, 3), definite(5, 3, 3), regular(5, 3, 3).tril()
LU, PIVOTS = torch.linalg.lu_factor(A)
LD, LD_PIVOTS = torch.linalg.ldl_factor(S)
ONE = [Sample((A,)), Sample((regular(3, 3),)), Sample((regular(2, 5, 3, 3),), note="two batch dims")]
QR = torch.geqrf(x(5, 4, 3))

SAMPLES: Samples = {
    **dict.fromkeys(
        ("linalg_inv_ex", "_linalg_det", "_linalg_slogdet", "linalg_matrix_exp", "linalg_lu", "linalg_lu_factor_ex"), ONE
    ),
    **{
        name: [Sample((S,)), Sample((definite(3, 3),))]
        for name in (
            "cholesky",
            "linalg_cholesky_ex",
            "cholesky_inverse",
        )
    },
    "linalg_ldl_factor_ex": [Sample((S,), gradients=False), Sample((definite(3, 3),), gradients=False)],
    "linalg_qr": [
        Sample((x(5, 4, 3),)),
        Sample((x(5, 4, 3), "r"), note="no Q", gradients=False),
        Sample((x(5, 4, 3), "complete"), gradients=False),
    ],
    "_linalg_svd": [Sample((x(5, 4, 3), False, False), note="values only"), Sample((x(5, 4, 1),), gradients=False)],
    "_linalg_eigh": [Sample((S, "L", False), note="values only", gradients=False), Sample((S,), gradients=False)],
    "linalg_eig": [
        Sample((definite(5, 1, 1),), gradients=False)
    ],  # torch's meta kernels of eig and svd give strides that its CPU kernels do not
    "_linalg_eigvals": [Sample((S,), gradients=False)],
    "lu_unpack": [Sample((LU, PIVOTS)), Sample((LU, PIVOTS, True, False), note="no P")],
    "linalg_householder_product": [Sample((QR[0], QR[1]), gradients=False)],
    "ormqr": [Sample((QR[0], QR[1], x(5, 4, 2, seed=1)), gradients=False)],
    "linalg_pinv.atol_rtol_tensor": [
        Sample((x(5, 4, 3),)),
        Sample((x(5, 4, 3),), {"rtol": torch.full((5,), 1e-9, dtype=torch.float64)}, gradients=False),
    ],
    "_linalg_check_errors": [Sample((torch.zeros(5, dtype=torch.int32), "linalg.inv"), {"is_matrix": False})],
    "cholesky_solve": [Sample((x(5, 3, 2, seed=1), torch.linalg.cholesky(S)))],
    "linalg_solve_triangular": [
        Sample((T, x(5, 3, 2, seed=1)), {"upper": False}),
        Sample((T, x(5, 2, 3, seed=1)), {"upper": False, "left": False}),
        Sample((T[0], x(5, 3, 2, seed=1)), {"upper": False}, "batch dims broadcast"),
    ],
    "linalg_lu_solve": [Sample((LU, PIVOTS, x(5, 3, 2, seed=1))), Sample((LU, PIVOTS, x(5, 2, 3, seed=1)), {"left": False})],
    "linalg_ldl_solve": [Sample((LD, LD_PIVOTS, x(5, 3, 2, seed=1)), gradients=False)],
    "triangular_solve": [Sample((x(5, 3, 2, seed=1), T, False))],
    "_linalg_solve_ex": [
        Sample((A, x(5, 3, 2, seed=1)), gradients=False),
        Sample((A, x(5, 3, seed=1)), note="vectors", gradients=False),
        Sample((A[0], x(5, 3, 2, seed=1)), note="batch dims broadcast", gradients=False),
    ],
    "linalg_cross": [Sample((x(5, 3), x(5, 3, seed=1))), Sample((x(5, 3, 2), x(3, 2, seed=1)), {"dim": -2}, "broadcast")],
}
