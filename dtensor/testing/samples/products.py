"""Samples of products, distances, decompositions and solvers of matrices, and of Fourier transforms."""

from __future__ import annotations

import torch

from .sample import Samples
from .sample_syntax import sample_table
from .schema_samples import make_tensor

PRODUCTS = sample_table("""
mm: {f/i/c}[5, 6], {f/i/c}[6, 7] | f[6, 5].t(), f[7, 6].t() | f[5, 0], f[0, 7] | f[1, 6], f[6, 1]
bmm: {f/i}[5, 2, 6], {f/i}[5, 6, 7]
mv: {f/i}[5, 6], {f/i}[6]
dot: {f/i/c}[6], {f/i/c}[6]
vdot: {f/c}[6], {f/c}[6]
ger outer: f[5], f[7]
addmm: f[{5, 7/7/()}], f[5, 6], f[6, 7] | f[5, 1], f[5, 6], f[6, 7], beta=0.5, alpha=-2.0 | i[7], i[5, 6], i[6, 7], beta=3
baddbmm: f[5, 2, 7], f[5, 2, 6], f[5, 6, 7], beta=0.5 | f[7], f[5, 2, 6], f[5, 6, 7]
addbmm: f[2, 7], f[5, 2, 6], f[5, 6, 7], beta=0.5, alpha=2.0
addmv: f[5], f[5, 6], f[6], beta=0.5 | f[()], f[5, 6], f[6]
addr: f[5, 7], f[5], f[7], alpha=-2.0 | f[7], f[5], f[7]
_addmm_activation: f[7], f[5, 6], f[6, 7], use_gelu=True | f[5, 7], f[5, 6], f[6, 7]
_grouped_mm: !s[7, 8], s[3, 8, 12], offs=t([3, 3, 7], dtype=int32)
_int_mm: below(5, -4)[5, 6].char(), below(5, -4)[6, 7].char()
_scaled_mm: !s[16, 32].to(float8_e4m3fn), s[32, 16].t().contiguous().to(float8_e4m3fn).t(), t(0.5), t(2.0), out_dtype=float32
linear: f[5, 2, 6], f[7, 6], f[7] | i[5, 6], i[7, 6] | f[6], f[7, 6], f[7] | f[5, 6], f[6]
matmul: f[3, 5, 2, 6], f[5, 6, 7] | f[5, 1, 2, 6], f[3, 6, 7] | f[{6/5, 6}], f[6] | i[5, 6], i[6, 7]
einsum: "bij, bjk -> bik", [f[5, 2, 6], f[5, 6, 3]] | "bsd,dhe->bhse", [f[5, 2, 6], f[6, 3, 7]]
 | "...ij,jk->...ik", [f[5, 2, 6], f[6, 7]]
 | "ij,jk", [f[5, 6], f[6, 7]] | "ij->j", [f[5, 6]] | "ii->i", [f[5, 5]] | "i,j,k->kij", [f[5], f[6], f[7]]
 | "...a,...a->...", [f[5, 1, 6], f[7, 6]]
_trilinear: f[5, 6], f[7, 6, 3], f[5, 3], [1, 3], [0], [1, 2], [2, 3] | f[5, 6], f[5, 6], f[5, 6], [], [], [], [1]
_cdist_forward: f[5, 3], f[6, 3], {2.0/0.0/1.0/2.5/INF}, None | f[2, 5, 3], f[2, 6, 3], 1.0, None | f[30, 3], f[6, 3], 2.0, None
_euclidean_dist: f[5, 3], f[6, 3]
_cdist_backward!: f[5, 6], (a := f[5, 3]), (b := f[6, 3]), 2.0, torch.cdist(a, b)
_pdist_forward: f[5, 3], 2.0
_pdist_backward!: f[10], (a := f[5, 3]), 2.0, torch.pdist(a)
linalg_cross: f[5, 3], f[5, 3] | f[5, 3, 2], f[3, 2], dim=-2
""")


def regular_matrix(*shape: int) -> torch.Tensor:
    return make_tensor(shape) + 4 * torch.eye(shape[-1], dtype=torch.float64)


def definite_matrix(*shape: int) -> torch.Tensor:
    return (m := make_tensor(shape)) @ m.mT + torch.eye(shape[-1], dtype=torch.float64)


A, S = regular_matrix(5, 3, 3), definite_matrix(5, 3, 3)

# torch's meta kernels of eig and svd give strides that its CPU kernels do not
LINALG = sample_table(
    """
linalg_inv_ex _linalg_det _linalg_slogdet linalg_matrix_exp linalg_lu linalg_lu_factor_ex: {A/A[0]/regular_matrix(2, 5, 3, 3)}
cholesky linalg_cholesky_ex cholesky_inverse: {S/definite_matrix(3, 3)}
linalg_ldl_factor_ex!: {S/definite_matrix(3, 3)}
linalg_qr: f[5, 4, 3] | !f[5, 4, 3], {"r"/"complete"}
geqrf!: f[{3, 5, 4/4, 5}]
_linalg_svd: f[5, 4, 3], False, False | !f[5, 4, 1]
_linalg_eigh!: S{, "L", False/}
linalg_eig!: definite_matrix(5, 1, 1)
_linalg_eigvals!: S
lu_unpack: *LU{/, True, False}
linalg_householder_product!: *QR
ormqr!: *QR, f[5, 4, 2]
linalg_pinv.atol_rtol_tensor: f[5, 4, 3] | !f[5, 4, 3], rtol=torch.full((5,), 1e-9, dtype=float64)
_linalg_check_errors: torch.zeros(5, dtype=int32), "linalg.inv", is_matrix=False
cholesky_solve: f[5, 3, 2], torch.linalg.cholesky(S)
linalg_solve_triangular: {T, f[5, 3, 2]/T, f[5, 2, 3], left=False/T[0], f[5, 3, 2]}, upper=False
linalg_lu_solve: *LU, {f[5, 3, 2]/f[5, 2, 3], left=False}
linalg_ldl_solve!: *LD, f[5, 3, 2]
triangular_solve: f[5, 3, 2], T, False
_linalg_solve_ex!: {A, f[5, 3, 2]/A, f[5, 3]/A[0], f[5, 3, 2]}
""",
    A=A,
    S=S,
    T=A.tril(),
    LU=torch.linalg.lu_factor(A),
    LD=torch.linalg.ldl_factor(S),
    QR=torch.geqrf(make_tensor((5, 4, 3))),
    regular_matrix=regular_matrix,
    definite_matrix=definite_matrix,
)

FFT = sample_table("""
_fft_r2c: f[5, 6, 7], {[2], 0/[0, 1], 1}, True | f[5, 6], [1], 0, False
_fft_c2r: c[5, 6, 4], [2], 2, 7 | c[5, 4], [0, 1], 2, 6
_fft_c2c: c[5, 6, 7], [1], 0, True | c[5, 6], [0, 1], 2, False
""")

SAMPLES: Samples = PRODUCTS | LINALG | FFT
