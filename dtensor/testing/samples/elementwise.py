"""Samples of elementwise operators, of creation and of random operators: by schema, and by table for special arguments."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ...rules import rules
from .sample import Samples
from .sample_syntax import sample_table
from .schema_samples import DTYPES, samples_by_schema

# Operators with operands between 0.1 and 0.9.
_INSIDE = """
acos acosh asin atanh digamma erfinv float_power igamma igammac lgamma log log10 log1p log2 logaddexp logit mvlgamma polygamma pow
rsqrt special_entr special_erfcx special_log_ndtr special_ndtri special_xlog1py special_zeta sqrt xlogy
""".split()  # noqa: SIM905  a formatter would give each name a line
# torch's meta kernels give another dtype than its CPU kernels, or raise
_DTYPES = {
    "pow": (torch.float64, torch.int64, torch.complex128),
    "nan_to_num": (torch.float64, torch.int64),
    "_neg_view": (torch.float64, torch.int64, torch.complex128),
}
_ONE_SHAPE = ("_prelu_kernel", "log_sigmoid_backward")  # torch resizes other shapes, with a warning


def _by_schema() -> Samples:
    """Return samples of all pointwise operators of aten by name, made from their schemas."""
    samples_of: Samples = {}
    for full, rule in rules().items():
        namespace, _, name = full.partition("::")
        if rule.kind != "pointwise" or namespace != "aten" or name.startswith(("_fused", "empty_like")):
            continue
        low, high = (0.1, 0.9) if name in _INSIDE else (-2.0, 2.0)
        samples = samples_by_schema(name, _DTYPES.get(name, DTYPES), low=low, high=high, broadcast=name not in _ONE_SHAPE)
        samples_of[name] = [replace(sample, gradients=not name.startswith("lift")) for sample in samples]
    return samples_of


STEPS = [torch.tensor(3.0), torch.tensor(3.0)]
ADAM: dict[str, Any] = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8, "maximize": False}
SGD = {"weight_decay": 0.1, "momentum": 0.9, "lr": 0.1, "dampening": 0.0, "nesterov": False, "maximize": False}
ADAGRAD = {"lr": 0.1, "lr_decay": 0.0, "weight_decay": 0.1, "eps": 1e-8, "maximize": False}

MORE = sample_table(
    """
add: f[5, 7], f[5, 7], alpha=-2 | f[5, 7], 3, alpha=-1 | BYTES, BYTES.flip(0)
sub: f[5, 7], f[5, 7], alpha=-2 | u[5, 7], u[5, 7] | BYTES, BYTES.flip(0)
rsub: f[5, 7], {f[5, 7]/3}, alpha=-2
neg: u[5, 7] | BYTES
div: f[5, 7], f[5, 7], rounding_mode={"floor"/"trunc"} | i[5, 7], 3, rounding_mode="floor"
mul: f[5, 7], i[5, 7] | i[5, 7], 0.5 | f[5, 7], -2.0 | BYTES, BYTES.flip(0)
addcmul addcdiv: f[5, 7], f[5, 7], f[5, 7], value=-0.5
clamp: f[5, 7], {-0.5/None, 0.5/0.5, -0.5}
round: f[5, 7], decimals=1
gelu: f[5, 7], approximate="tanh"
nan_to_num: t([1.0, NAN, INF, -2.0, 0.0]), nan=0.5, posinf=9.0
where: b[5, 7], f[5, 7], f[5, 7] | b[7], f[5, 7], 2.0
copy: f[5, 7], {i[5, 7]/f[7]} | i[5, 7], b[5, 7]
_to_copy: f[5, 7], dtype={float32/int64/bool/complex128/bfloat16} | i[5, 7] * 50, dtype={float64/int8/uint8/bool} | f[5, 7].t()
clone: f[5, 7].t() | f[5, 7].t(), memory_format=torch.contiguous_format
threshold: f[5, 7], 0.1, 20.0
full_like: f[5, 7], 2.5 | f[5, 7], fill_value=1, dtype=int64
empty_like?!: f[5, 7]
new_empty?!: f[5, 6], {[5, 6]/[7]/[]}
new_empty_strided?!: f[5, 6], {[5, 6], [6, 1]/[5, 6], [1, 5]/[7], [2]}
new_zeros!: f[5, 6], {[5, 6]/[7, 2]/[]}
new_ones!: f[5, 6], [5, 6], dtype=int64 | f[5], [7]
new_full!: f[5, 6], {[5, 6], 2.5/[6, 5], 7}
_new_zeros_with_same_feature_meta!: f[5, 6], f[7, 3] | f[3, 5], f[5, 3] | f[2, {5/7}], {f[6]/f[5, 3]}, self_num_batch_dims=1
set_!: f[5, 7], f[6] | f[5, 7]
_foreach_powsum!: [f[5, 7], {f[5, 7]/f[6]}], {2/3} | [f[5, 7], f[6]]
_fused_adam!: two(f), two(f), two(f), two(p), [], STEPS, amsgrad=False, **ADAM
_fused_adamw!: two(f), two(f), two(f), two(p), two(p), STEPS, amsgrad=True, **ADAM
_fused_sgd!: two(f), two(f), two(f), is_first_step=False, **SGD
_fused_adagrad!: two(f), two(f), two(p), STEPS, **ADAGRAD
rand_like: f[{5, 7/3, 17/()/0, 3}] | f[5, 7].t(), dtype=float32
randn_like: f[{5, 7/3, 17/()/0, 3}] | f[5, 7].t()
randint_like: f[5, 7], 9 | f[5, 7], 3, 9, dtype=int64
bernoulli: p[5, 7] | p[5, 7].t()
bernoulli.p: f[5, 7], 0.3 | f[5, 7].t(), 0.5
bernoulli_.float: f[5, 7], 0.3 | torch.zeros(5, 7, dtype=bool), 0.5
normal_! uniform_! exponential_! cauchy_! log_normal_! random_!: f[{5, 7/3, 17/()/0, 3}] | f[5, 7].t()
uniform! exponential! cauchy! log_normal! random!: f[5, 7]
geometric! geometric_!: f[5, 7], 0.3
native_dropout: f[5, 7], {0.3, True/0.0, True/1.0, True/0.3, False/0.3, None}
normal.Tensor_float: f[5, 7], 2.0 | f[3, 17].t(), 0.5
normal.float_Tensor: 0.5, w[5, 7]
normal.Tensor_Tensor: f[5, 7], w[5, 7] | f[7], w[5, 1] | f[1], w[1, 1] | f[5], w[1, 1]
multinomial!: w[5, 7], {3/9, True} | w[7], 3
rrelu_with_noise!: f[5, 7], f[5, 7] * 0, 0.1, 0.4, {True/False} | f[5, 7].t(), f[7, 5] * 0, 0.1, 0.4, True
rrelu_with_noise_backward!: f[5, 7], f[5, 7], f[5, 7], 0.1, 0.4, {True/False}, False
glu: f[4, 6, 8], {0/1/-1} | f[6]
glu_backward: f[4, 3], f[4, 6], 1 | f[2, 6], f[4, 6], 0
glu_jvp!: f[4, 3], f[4, 6], f[4, 6], 1
glu_backward_jvp!: f[4, 6], f[4, 3], f[4, 6], f[4, 3], f[4, 6], 1
""",
    BYTES=torch.tensor([[100, -100, 127, -128, 0], [1, -1, 90, 50, 120]], dtype=torch.int8),
    two=lambda drawn: [drawn[5, 7], drawn[5, 7]],
    STEPS=STEPS,
    ADAM=ADAM,
    SGD=SGD,
    ADAGRAD=ADAGRAD,
)
SAMPLES: Samples = _by_schema()
for name, samples in MORE.items():
    SAMPLES.setdefault(name, []).extend(samples)
