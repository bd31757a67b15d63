"""Samples of reducing operators, of scans along a dim, and of sorting and selection."""

from __future__ import annotations

import torch

from .sample import Samples
from .sample_syntax import sample_table
from .schema_samples import make_tensor

INF, NAN = float("inf"), float("nan")
SPECIAL = torch.tensor([[1, NAN, 3, NAN, 0], [2, 5, 5, -1, 5], [INF, 1, INF, 0, -INF]], dtype=torch.float64)
TIES = torch.tensor([[3, 1, 3, 2, 3, 0], [1, 1, 1, 1, 1, 1], [0, 7, 0, 7, 0, 7]])
MASKED = torch.tensor([[0.5, -INF, 1, -INF, 2], [-INF] * 5, [0, 1, 2, 3, INF]], dtype=torch.float64)
EDGES = torch.tensor([-1.0, 0, 0.5, 2], dtype=torch.float64)


def rare_true(*shape: int) -> torch.Tensor:
    """Return a bool tensor, most of its elements False."""
    return make_tensor(shape, torch.float64, 3, 0.0, 1.0) > 0.9


def distinct_values(*shape: int) -> torch.Tensor:
    """Return a tensor of distinct values: torch does not define which of equal values is chosen."""
    count = torch.Size(shape).numel()
    return (torch.randperm(count, generator=torch.Generator().manual_seed(0)).double() / 8 - 2).view(shape)


REDUCTIONS = sample_table(
    """
sum: f[5, 6, 7]{/, dim=[0]/, dim=[-1], keepdim=True/, dim=[0, 2]/, dim=[0, 1, 2], keepdim=True} | {i/b/c}[5, 6, 7]{/, dim=[0]}
 | f[0, 7]{/, dim=[0]/, dim=[-1], keepdim=True} | {f/i}[{5, 7/()/3}] | f[5, 7], dtype=float32 | f[5, 7], []
nansum: f[5, 6, 7]{/, dim=[0]/, dim=[-1], keepdim=True/, dim=[0, 2]/, dim=[0, 1, 2], keepdim=True}
 | f[0, 7]{/, dim=[0]/, dim=[-1], keepdim=True} | SPECIAL
mean: f[5, 6, 7]{/, dim=[0]/, dim=[-1], keepdim=True/, dim=[0, 2]/, dim=[0, 1, 2], keepdim=True} | c[5, 6, 7]{/, dim=[0]}
 | f[0, 7]{/, dim=[0]/, dim=[-1], keepdim=True} | i[5, 7], dtype=float64 | h[5, 7]
prod: {f/i/b}[{5, 7/()/3}] | {f/i}[5, 6, 7], {dim=0/dim=-1, keepdim=True}
count_nonzero: {f/i/b}[{5, 7/()/3}] | f[5, 6, 7], {0/[0, 2]}
any: {f/i/b}[{5, 7/()/3}] | f[5, 7], [] | t([0, 3, 0], dtype=uint8) | torch.zeros(0, 4), dim=0
 | rare_true(5, 6, 7){/, dim=[0]/, dim=[-1], keepdim=True/, dim=[0, 2]/, dim=[0, 1, 2], keepdim=True}
 | rare_true(5, 6, 7), {dim=0/dim=-1, keepdim=True}
all: {f/i/b}[{5, 7/()/3}] | f[5, 7], [] | torch.zeros(0, 4), dim=0
 | ~rare_true(5, 6, 7){/, dim=[0]/, dim=[-1], keepdim=True/, dim=[0, 2]/, dim=[0, 1, 2], keepdim=True}
 | ~rare_true(5, 6, 7), {dim=0/dim=-1, keepdim=True}
_is_any_true: rare_true(5, 7)
_is_all_true: ~rare_true(5, 7)
amax amin: f[5, 6, 7]{/, dim=[0]/, dim=[-1], keepdim=True/, dim=[0, 2]/, dim=[0, 1, 2], keepdim=True} | {i/b}[5, 6, 7]{/, dim=[0]}
 | f[0, 7], [1] | SPECIAL, [1] | TIES, [0]
max min: {f/i}[{5, 7/()/3}] | SPECIAL
aminmax: {f/i}[{5, 7/()/3}] | f[5, 6, 7], {dim=1/dim=0, keepdim=True}
max.dim min.dim: {f/i}[5, 6, 7], {dim=0/dim=-1, keepdim=True} | {TIES/SPECIAL/rare_true(3, 6)}, 1 | f[()], 0
max.dim_max!: f[5, 7], 1, max=0 * f[5], max_values=0 * i[5]
min.dim_min!: f[5, 7], 1, min=0 * f[5], min_indices=0 * i[5]
argmax argmin: {f/i}[5, 6, 7], {dim=None/dim=0/dim=-1, keepdim=True} | {TIES/TIES.t()/SPECIAL} | SPECIAL, 1
median: {f/i}[{5, 7/()/3}] | f[5, 6, 7], 1
nanmedian: f[{5, 7/()/3}] | SPECIAL, 1
mode: TIES, {1/0, keepdim=True}
kthvalue: f[5, 7], {2/2, 0, keepdim=True}
var.correction std.correction var_mean.correction std_mean.correction:
  f[5, 6, 7]{/, dim=[0]/, dim=[-1], keepdim=True/, dim=[0, 2]/, dim=[0, 1, 2], keepdim=True} | c[5, 6, 7]{/, dim=[0]}
 | f[5, 6], dim=[0], correction={0/2/0.5} | !f[5, 6], dim=[0], correction={5/7} | h[5, 7], [1] | 1e6 + f[5, 7], [1] | f[1, 7], [0]
linalg_vector_norm: {f/c}[5, 6, 7], {2/1/0/3/0.5/-1/INF/-INF} | {f/c}[5, 6, 7], {2/INF}, {dim=[0]/dim=[0, 2], keepdim=True}
linalg__powsum: {f/c}[5, 6, 7], {2/1/3} | f[5, 6, 7], {2}, {dim=[0]/dim=[0, 2], keepdim=True}
norm: f[5, 7] | f[5, 7], {3/2, [0]/None, [1], True/1, [0], True, dtype=float32}
dist: f[5, 7], f[5, 7], {2/1/3/INF} | f[5, 7], f[7]
logsumexp: f[5, 6, 7], {[0]/[-1], True/[0, 2]/[0, 1, 2], True} | f[0, 7], {[0]/[-1], True} | SPECIAL, [1]
 | torch.full((3, 5), -INF), [1]
hash_tensor: f[5, 7], {[]/[1], keepdim=True/[0, 1]} | below(99)[11], [0]
renorm: f[5, 6, 7], {2, 0/1, 1/3, -1}, 1.5 | f[5, 6], 2, 0, 100.0
item: f[()] | i[1, 1]
_local_scalar_dense: f[()] | i[1, 1]
equal: (x := f[5, 7]), x | f[5, 7], f[{5, 7/7}] | SPECIAL, SPECIAL
allclose: (x := f[5, 7]), x | f[5, 7], f[{5, 7/7}]
""",
    SPECIAL=SPECIAL,
    TIES=TIES,
    rare_true=rare_true,
)

ALONG = sample_table(
    """
cumsum: {f/i/b/c}[5, 7], {0/-1} | f[5, 7], 0, dtype=float32 | f[()], 0 | h[5, 7], 0
cumprod: {f/i}[5, 7], {0/-1}
logcumsumexp: f[5, 7], {0/-1}
cummax cummin: {f/i}[5, 7], {0/-1} | {TIES/SPECIAL}, 1
softmax log_softmax: f[5, 7], 1 | i[5, 7], 0, dtype=float64
_softmax _log_softmax: f[5, 6, 7], {0/1/-1}, False | MASKED, {0/1}, False | f[()], 0, False | h[5, 7], 1, False
 | f[0, 7], 1, False
_softmax_backward_data _log_softmax_backward_data: f[5, 6, 7], f[5, 6, 7], {0/1/-1}, float64 | f[()], f[()], 0, float64
_safe_softmax: f[5, 7], {0/-1} | MASKED, 1
sort: f[5, 6, 7], {0/2} | {distinct_values(17)/f[()]/f[0]/below(4)[13], descending=True/b[9]} | !ODD
sort.stable: f[5, 6, 7], stable=True, dim={0/2} | {distinct_values(17)/f[()]/f[0]/b[9]}, stable=True | !ODD, stable=True
 | f[7, 5].round(), stable=True, dim=0, descending=True | below(4)[13], stable=True, descending=True
topk: distinct_values(5, 7, 6), 3, {0/1} | distinct_values(5, 7), {7, 1, False/0, 1} | f[5, 7].round(), 2, 1
 | distinct_values(17), 4 | below(99)[17], 4
 | f[()], 1
histc: f[5, 7], {6, -1.5, 1.0/6} | torch.ones(5, dtype=float64), 4 | f[0, 3], 4
histogram!: f[5, 7], {4/4, range=[-1.0, 1.0], density=True/EDGES, weight=w[5, 7]}
bincount: below(6)[9] | !below(6)[9], f[9], minlength=8 | below(6)[9], below(5)[9] | below(6)[0], minlength=3 | t([1, -1, 2])
_unique2: below(4)[9, 2], True, False, True | below(4)[9], True, True, True | f[5, 3]
_unique: below(4)[9, 2] | below(4)[9], True, True
unique_dim: below(2)[9, 2], 0, True, True, True | below(2)[3, 5], -1
unique_consecutive: below(2)[9, 2], {True, True/False, True, 0} | below(2)[9]
unique_dim_consecutive: below(2)[9, 2], 0, True, True | below(2)[3, 5], 1
isin: below(9)[5, 6], below(9, seed=1)[7]{/, invert=True} | below(9)[5], 3 | 3, below(9)[5] | (x := f[5, 3]), x[:2]
 | below(6)[5, 3], below(6, seed=1)[2, 3]{/, invert=True}
nonzero: {below(2)[5, 6]/b[7]/f[3, 4, 5].round()/f[()]/b[0, 3]/torch.zeros(4, 3)}
nonzero_static: below(2)[5, 6], {size=40/size=4, fill_value=0}
""",
    TIES=TIES,
    SPECIAL=SPECIAL,
    MASKED=MASKED,
    EDGES=EDGES,
    distinct_values=distinct_values,
    ODD=torch.tensor([3.0, NAN, -0.0, 0.0, INF, 3.0, -INF, NAN, 0.0]),
)
SAMPLES: Samples = REDUCTIONS | ALONG
