"""Samples of layers and losses, and of their gradients."""

from __future__ import annotations

from typing import Any

import torch

from .sample import Samples
from .sample_syntax import sample_table
from .schema_samples import make_tensor

aten = torch.ops.aten
# By number of spatial dims.
IMAGES = {"X1": make_tensor((5, 4, 7)), "X2": make_tensor((5, 4, 6, 7)), "X3": make_tensor((5, 4, 4, 5, 6))}


# --- convolutions -----------------------------------------------------------------------------------------------------------
def conv_args(
    ndim: int, *, bias: bool = True, groups: int = 1, transposed: bool = False, stride: int = 1, padding: int = 0
) -> tuple[Any, ...]:
    """Return arguments of a convolution over ``ndim`` dims."""
    positions, kernel = (7, 6, 5)[:ndim], (3, 2, 2)[:ndim]
    weight = (6, 5 if groups == 1 else 2) if transposed else (5 if groups == 1 else 6, 6 // groups)
    out = weight[1] * groups if transposed else weight[0]
    tensors = (
        make_tensor((4, 6, *positions)),
        make_tensor((*weight, *kernel), seed=1),
        make_tensor((out,), seed=2) if bias else None,
    )
    return *tensors, [stride] * ndim, [padding] * ndim, [1] * ndim, transposed, [0] * ndim, groups


def conv_backward_args(mask: list[bool], **options: bool) -> tuple[Any, ...]:
    """Return arguments of the gradient of a convolution over one dim."""
    own, weight, bias, *more = conv_args(1, **options)
    out = aten.convolution(own, weight, bias, *more)
    sizes = None if bias is None else list(bias.shape)
    return make_tensor(tuple(out.shape), seed=3), own, weight, sizes, *more, mask


CONVOLUTIONS = sample_table(
    """
convolution: *conv_args({1/2, stride=2, padding=1/3, bias=False/1, groups=3/1, groups=6, bias=False/1, transposed=True
 /1, transposed=True, groups=3})
convolution_backward!: *conv_backward_args({[True] * 3/[True, False, False], bias=False/[False, True, True]/[True] * 3, groups=3
 /[True] * 3, transposed=True/[True] * 3, transposed=True, groups=2})
""",
    conv_args=conv_args,
    conv_backward_args=conv_backward_args,
)


# --- pooling, resampling, padding ---------------------------------------------------------------------------------------------
POOLING = sample_table(
    """
max_pool{2/3}d_with_indices: X{2/3}, {2/3} * [2] | X{2/3}[0], {2/3} * [2]
max_pool{2/3}d_with_indices_backward!: like(r := aten.max_pool{2/3}d_with_indices(X{2/3}, N{2/3})), X{2/3}, N{2/3}, N{2/3},
 {2/3} * [0], {2/3} * [1], False, r[1]
avg_pool{2/3}d: X{2/3}, N{2/3} | X{2/3}, N{2/3}, {2/3} * [1], {2/3} * [1]
avg_pool{2/3}d_backward!: like(aten.avg_pool{2/3}d(X{2/3}, N{2/3})), X{2/3}, N{2/3}, N{2/3}, {2/3} * [0], False, True, None
_adaptive_avg_pool{2/3}d adaptive_max_pool{2/3}d: X{2/3}, {2/3} * [3]
_adaptive_avg_pool{2/3}d_backward!: like(aten._adaptive_avg_pool{2/3}d(X{2/3}, {2/3} * [3])), X{2/3}
adaptive_max_pool{2/3}d_backward!: like(r := aten.adaptive_max_pool{2/3}d(X{2/3}, {2/3} * [3])), X{2/3}, r[1]
max_unpool2d!: (r := aten.max_pool2d_with_indices(X2, N2))[0], r[1] % 4, [6, 6]
max_unpool3d!: (r := aten.max_pool3d_with_indices(X3, N3))[0], r[1] % 4, [4, 4, 6], N3, [0, 0, 0]
fractional_max_pool{2/3}d!: X{2/3}, N{2/3}, N{2/3}, drawn({2/3})
fractional_max_pool{2/3}d_backward!: like(r := aten.fractional_max_pool{2/3}d(X{2/3}, N{2/3}, N{2/3}, drawn({2/3}))), X{2/3},
 N{2/3},
 N{2/3}, r[1]
grid_sampler_2d: X2, f[5, 3, 2, 2] / 2, 0, 0, False
grid_sampler_3d: X3, f[5, 3, 2, 4, 3] / 2, 0, 0, False
grid_sampler_2d_backward!: f[5, 4, 3, 2], X2, f[5, 3, 2, 2] / 2, 0, 0, False, [{True/False}, True]
grid_sampler_3d_backward!: f[5, 4, 3, 2, 4], X3, f[5, 3, 2, 4, 3] / 2, 0, 0, False, [{True/False}, True]
upsample_nearest{1/2/3}d _upsample_nearest_exact{1/2/3}d: X{1/2/3}, S{1/2/3}
upsample_nearest{1/2/3}d_backward! _upsample_nearest_exact{1/2/3}d_backward!: f[5, 4, *S{1/2/3}], S{1/2/3}, X{1/2/3}.shape
upsample_linear1d: X1, S1, False
upsample_{bilinear/bicubic}2d _upsample_{bilinear/bicubic}2d_aa: X2, S2, False
upsample_trilinear3d: X3, S3, False
upsample_linear1d_backward!: f[5, 4, *S1], S1, X1.shape, False
upsample_{bilinear/bicubic}2d_backward! _upsample_{bilinear/bicubic}2d_aa_backward!: f[5, 4, *S2], S2, X2.shape, False
upsample_trilinear3d_backward!: f[5, 4, *S3], S3, X3.shape, False
{reflection/replication}_pad{1/2/3}d: X{1/2/3}, {1/2/3} * [1, 2] | X{1/2/3}[0], {1/2/3} * [1, 2]
{reflection/replication}_pad{1/2/3}d_backward!: like(aten.{reflection/replication}_pad{1/2/3}d(X{1/2/3}, {1/2/3} * [1, 2])),
 X{1/2/3},
 {1/2/3} * [1, 2]
affine_grid_generator!: f[5, 2, 3], [5, 1, 3, 4], False
im2col: {X2/X2[0]}, *WINDOW
col2im: f[{5, 24, 25/24, 25}], [6, 7], *WINDOW
""",
    **IMAGES,
    N2=[2, 2],
    N3=[2, 2, 2],
    S1=[3],
    S2=[3, 5],
    S3=[3, 5, 4],
    WINDOW=([2, 3], [1, 1], [0, 0], [1, 1]),
    drawn=lambda n: torch.rand(5, 4, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64),
)

# --- norms --------------------------------------------------------------------------------------------------------------------
NORMS = sample_table(
    """
native_layer_norm: f[5, 3, 7], [7], f[7], f[7], 1e-5 | f[5, 3, 7], [3, 7], None, None, 1e-5 | f[7], [7], f[7], None, 1e-5
 | f[5, 7].bfloat16(), [7], f[7].bfloat16(), None, 1e-5 | !s[5, 7] + 100, [7], s[7], None, 1e-5
native_layer_norm_backward!: f[5, 3, 7], (x := f[5, 3, 7]), [3, 7],
 *aten.native_layer_norm(x, [3, 7], v := f[3, 7], b := f[3, 7], 1e-5)[1:], v, b, [{True, True, True/True, False, False/False,
 True, True}]
_fused_rms_norm: f[5, 3, 7], [7], f[7], 1e-5 | f[5, 3, 7], [3, 7], None, None
native_group_norm: f[5, 6, 3], f[6], f[6], 5, 6, 3, {2/1/6}, 1e-5 | f[5, 6, 2, 3], None, None, 5, 6, 6, 3, 1e-5
native_group_norm_backward!: f[5, 6, 3], (x := f[5, 6, 3]), *aten.native_group_norm(x, v := f[6], f[6], 5, 6, 3, {2/1/3},
 1e-5)[1:], v,
 5, 6, 3, {2/1/3}, [{True, True, True/True, False, False}]
native_batch_norm: !f[5, 3, 7], f[3], f[3], f[3], w[3], True, 0.2, 1e-5 | !f[5, 3], None, None, f[3], w[3], True, 0.2, 1e-5
 | !f[5, 3, 2, 7], f[3], f[3], f[3], w[3], False, 0.2, 1e-5 | f[5, 3, 7], f[3], f[3], None, None, True, 0.1, 1e-5
_native_batch_norm_legit!: f[5, 3, 7], f[3], f[3], f[3], w[3], {True/False}, 0.2, 1e-5
_native_batch_norm_legit.no_stats: f[5, 3, 7], f[3], f[3], True, 0.1, 1e-5
_native_batch_norm_legit_no_training!: f[5, 3, 7], f[3], f[3], f[3], w[3], 0.1, 1e-5
native_batch_norm_backward!: f[5, 3, 7], (x := f[5, 3, 7]), (v := f[3]), (m := f[3]), (d := w[3]),
 *aten.native_batch_norm(x, v, None, m.clone(), d.clone(), {True/False}, 0.1, 1e-5)[1:], {True/False}, 1e-5, [True{, True,
 True/, False, False}]
_weight_norm_interface: f[5, 6, 3], {f[5, 1, 1], 0/f[1, 1, 3], 2}
_weight_norm_interface_backward!: f[5, 6, 3], (x := f[5, 6, 3]), f[5, 1, 1], x.norm(dim=(1, 2), keepdim=True), 0
""",
)


# --- attention; no local block is empty, because the operator would divide by zero ----------------------------------------
def random_mask(*shape: int) -> torch.Tensor:
    hidden = make_tensor(shape, torch.bool, 5)
    return torch.zeros(shape, dtype=torch.float64).masked_fill(hidden, -torch.inf)


def attention_grads(causal: bool = False, attn_mask: torch.Tensor | None = None, heads: int = 7) -> tuple[torch.Tensor, ...]:
    """Return a gradient of attention, its operands and its results."""
    q, k, v = make_tensor((8, heads, 10, 2)), make_tensor((8, 7, 11, 2), seed=1), make_tensor((8, 7, 11, 2), seed=2)
    out = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=attn_mask)
    return make_tensor(tuple(out[0].shape), seed=3), q, k, v, *out


ATTENTION = sample_table(
    """
_scaled_dot_product_flash_attention_for_cpu: f[8, {7/14}, 10, 2], f[8, 7, 11, 2], f[8, 7, 11, 2]
 | f[8, 7, 10, 2], f[8, 7, 11, 2], f[8, 7, 11, 2], 0.0, True
 | !f[8, 7, 10, 2], f[8, 7, 11, 2], f[8, 7, 11, 2], attn_mask={random_mask(10, 11), scale=0.5/random_mask(8, 1, 1, 11)}
_scaled_dot_product_flash_attention_for_cpu_backward!: *attention_grads({/heads=14}), 0.0, False
 | *attention_grads(True), 0.0, True
 | *attention_grads(attn_mask=random_mask(8, 1, 10, 11)), 0.0, False, attn_mask=random_mask(8, 1, 10, 11)
_fused_sdp_choice: f[8, 7, 10, 2], f[8, 7, 11, 2], f[8, 7, 11, 2]{/, dropout_p=0.5} | f[7, 10, 2], f[7, 11, 2], f[7, 11, 2]
_native_multi_head_attention!: s[3, 5, 8], s[3, 5, 8], s[3, 5, 8], 8, 2, s[24, 8], s[24], s[8, 8], s[8]{, need_weights=False/}
_transformer_encoder_layer_fwd!: s[3, 5, 8], 8, 2, s[24, 8], s[24], s[8, 8], s[8], True, False, 1e-5, s[8], s[8], s[8], s[8],
 s[6, 8], s[6], s[8, 6], s[8]
""",
    random_mask=random_mask,
    attention_grads=attention_grads,
)

# --- losses -------------------------------------------------------------------------------------------------------------------
LABELS = [[1, 3, -1, 0, 2, 5, 6], [-1, 0, 0, 0, 0, 0, 0], [0, 6, 2, -1, 1, 1, 1], [4, -1, 0, 0, 0, 0, 0], [2, 1, 0, 3, 4, 5, 6]]


def random_classes(count: int, *shape: int, ignored: int = -100) -> torch.Tensor:
    """Return random classes below ``count``. About 40 % are ``ignored``."""
    drawn = torch.randint(0, count, shape, generator=torch.Generator().manual_seed(5))
    drawn[torch.rand(shape, generator=torch.Generator().manual_seed(6)) < 0.4] = ignored
    return drawn


LOSSES = sample_table(
    """
mse_loss soft_margin_loss: f[5, 7], f[5, 7], {0/1/2} | f[2, 6, 4], f[2, 6, 4] | f[()], f[()] | f[0, 7], f[0, 7]
smooth_l1_loss huber_loss: f[5, 7], f[5, 7], {0/1/2}, 0.7 | f[2, 6, 4], f[2, 6, 4], 1, 0.7 | f[()], f[()], 1, 0.7
 | f[0, 7], f[0, 7], 1, 0.7
mse_loss_backward soft_margin_loss_backward: {f[5, 7], f[5, 7], f[5, 7], 0/f[()], f[5, 7], f[5, 7], 1/f[()], f[5, 7], f[5, 7], 2}
smooth_l1_loss_backward huber_loss_backward: f[5, 7], f[5, 7], f[5, 7], 0, 0.7 | f[()], f[5, 7], f[5, 7], {1/2}, 0.7
binary_cross_entropy: p[5, 7], p[5, 7], {None/p[7]}, {0/1/2}
binary_cross_entropy_with_logits: f[5, 7], p[5, 7], {None, None/p[5, 1], p[7]}, {0/1/2}
binary_cross_entropy_backward: f[()], p[5, 7], p[5, 7], p[7], 1 | f[5, 7], p[5, 7], p[5, 7], None, 0
nll_loss_forward: f[5, 7], random_classes(7, 5), None, {0/1/2}, -100 | !f[5, 7], random_classes(7, 5), w[7], {0/1/2}, -100
 | f[5, 7], random_classes(7, 5, ignored=2), {None/w[7]}, 1, 2 | f[5, 7], {-100/7} + 0 * i[5], {None/w[7]}, 1, -100
 | f[0, 7], below(7)[0], {None/w[7]}, 1, -100 | f[7], t(3), {None, 1, -100/w[7], 2, 3}
nll_loss2d_forward: f[3, 5, 2, 4], random_classes(5, 3, 2, 4), None, {0/1/2}, -100
 | !f[3, 5, 2, 4], random_classes(5, 3, 2, 4), w[5], {0/1/2}, -100
 | f[3, 5, 2, 4], random_classes(5, 3, 2, 4, ignored=2), {None/w[5]}, 1, 2
 | f[3, 5, 2, 4], {-100/5} + 0 * i[3, 2, 4], {None/w[5]}, 1, -100
 | f[0, 5, 2, 4], below(5)[0, 2, 4], {None/w[5]}, 1, -100
nll_loss_backward: f[5], f[5, 7], random_classes(7, 5), None, 0, -100, w[()]
 | f[()], f[5, 7], random_classes(7, 5), None, {1/2}, -100, w[()]
 | !f[5], f[5, 7], random_classes(7, 5), w[7], 0, -100, w[()] | !f[()], f[5, 7], random_classes(7, 5), w[7], {1/2}, -100, w[()]
nll_loss2d_backward: f[3, 2, 4], f[3, 5, 2, 4], random_classes(5, 3, 2, 4), None, 0, -100, w[()]
 | f[()], f[3, 5, 2, 4], random_classes(5, 3, 2, 4), None, {1/2}, -100, w[()]
 | !f[3, 2, 4], f[3, 5, 2, 4], random_classes(5, 3, 2, 4), w[5], 0, -100, w[()]
 | !f[()], f[3, 5, 2, 4], random_classes(5, 3, 2, 4), w[5], {1/2}, -100, w[()]
multi_margin_loss: f[5, 7], below(7)[5], {1, 1.0, None, 0/1, 1.0, None, 1/1, 1.0, None, 2/2, 0.5, w[7], 1} | f[7], t(3)
multi_margin_loss_backward!: f[5], f[5, 7], below(7)[5], 1, 1.0, None, 0
 | f[()], f[5, 7], below(7)[5], {1, 1.0, None, 1/1, 1.0, None, 2/2, 0.5, w[7], 1}
multilabel_margin_loss_forward!: {f[5, 7], LABELS/f[7], LABELS[0]}, {0/1/2}
multilabel_margin_loss_backward!: f[5], (x := f[5, 7]), LABELS, 0, aten.multilabel_margin_loss_forward(x, LABELS, 0)[1]
 | f[()], (x := f[5, 7]), LABELS, {1/2}, aten.multilabel_margin_loss_forward(x, LABELS, 0)[1]
_ctc_loss?: f[7, 3, 5].log_softmax(-1), {SPELLED, [7, 6, 7], [4, 2, 3]/JOINED, [7, 6, 7], [4, 2, 3], 0, True}
_ctc_loss.Tensor?: f[7, 3, 5].log_softmax(-1), {SPELLED, t([7, 6, 7]), t([4, 2, 3])/JOINED, t([7, 6, 7]), t([4, 2, 3]), 0, True}
_ctc_loss_backward!: f[3], (x := f[7, 3, 5].log_softmax(-1)), SPELLED, [7, 6, 7], [4, 2, 3], *aten._ctc_loss(x, SPELLED, [7, 6,
 7], [4, 2, 3]), 0
_ctc_loss_backward.Tensor!: f[3], (x := f[7, 3, 5].log_softmax(-1)), SPELLED, t([7, 6, 7]), t([4, 2, 3]),
 *aten._ctc_loss(x, SPELLED, [7, 6, 7], [4, 2, 3]), 0
""",
    random_classes=random_classes,
    LABELS=torch.tensor(LABELS),
    SPELLED=torch.tensor([[1, 2, 3, 4], [2, 2, 1, 1], [4, 3, 1, 1]]),
    JOINED=torch.tensor([1, 2, 3, 4, 2, 2, 4, 3, 1]),
)
SAMPLES: Samples = CONVOLUTIONS | POOLING | NORMS | ATTENTION | LOSSES
