"""Pointwise operators, one name on a line, grouped by how partial values pass through them.

A strategy holds for all values, or it is not here: ``f(sum of addends) = sum of f(addend)`` for linear ``f``, ``f(max(a, b)) =
max(f(a), f(b))`` for non-decreasing ``f`` that keeps NaN. A product is linear in partial values if the other factor is finite,
``0 * inf`` being NaN, and a quotient if the divisor is not zero (``"sum,finite -> sum"``). (``add`` has no ``"sum,R -> sum"``:
the replicated operand would be counted once per rank. Propagation turns it into a partial sum first, which costs nothing.) A
strategy holds only if the dtypes keep its algebra: see ``propagation/strategy_table.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...placement import REDUCE_OPS
from ..declare import pointwise
from ..declared_factors import by
from ..kernel_context import on_each_rank
from ..op_traits import declare_traits
from ..partial_rules import copies, falling, forgets, linear, monotone, on_floats, one_of

# --- no partial value passes --------------------------------------------------------------------------------------------
pointwise(
    """
    abs
    acos
    acosh
    __and__
    angle
    asin
    atan2
    atanh
    bitwise_and
    bitwise_not
    bitwise_or
    bitwise_xor
    celu
    clip
    copysign
    cos
    cosh
    digamma
    elu
    erfinv
    float_power
    fmax
    fmin
    fmod
    frac
    frexp
    gcd
    ge
    gelu
    gt
    hardshrink
    hardsigmoid
    hardswish
    heaviside
    hypot
    i0
    __iand__
    igamma
    igammac
    __ior__
    isfinite
    isinf
    isnan
    isneginf
    isposinf
    __ixor__
    lcm
    ldexp
    le
    leaky_relu
    lgamma
    log
    log10
    log1p
    log2
    logaddexp
    logaddexp2
    logical_and
    logical_not
    logical_or
    logical_xor
    logit
    lt
    max.other
    min.other
    mish
    mvlgamma
    nan_to_num
    nextafter
    __or__
    polygamma
    pow
    _prelu_kernel
    reciprocal
    rsqrt
    selu
    sgn
    sign
    signbit
    silu
    sin
    sinc
    softplus
    softshrink
    sqrt
    square
    tan
    threshold
    true_divide
    xlogy
    __xor__
    """
)
pointwise(
    """
    special_airy_ai
    special_bessel_j0
    special_bessel_j1
    special_bessel_y0
    special_bessel_y1
    special_chebyshev_polynomial_t
    special_chebyshev_polynomial_u
    special_chebyshev_polynomial_v
    special_chebyshev_polynomial_w
    special_entr
    special_erfcx
    special_hermite_polynomial_h
    special_hermite_polynomial_he
    special_i0e
    special_i1
    special_i1e
    special_laguerre_polynomial_l
    special_legendre_polynomial_p
    special_log_ndtr
    special_modified_bessel_i0
    special_modified_bessel_i1
    special_modified_bessel_k0
    special_modified_bessel_k1
    special_ndtri
    special_scaled_modified_bessel_k0
    special_scaled_modified_bessel_k1
    special_shifted_chebyshev_polynomial_t
    special_shifted_chebyshev_polynomial_u
    special_shifted_chebyshev_polynomial_v
    special_shifted_chebyshev_polynomial_w
    special_spherical_bessel_j0
    special_xlog1py
    special_zeta
    """
)
pointwise("floor_divide remainder", plain=("other",))  # strides, as unravel_index makes them
pointwise("eq ne", plain=("other",))  # tensors that torch makes for the comparison, as in causal masks

# --- maxima and minima: non-decreasing, NaN kept ------------------------------------------------------------------------
pointwise(
    """
    asinh
    atan
    ceil
    deg2rad
    erf
    exp
    exp2
    expm1
    floor
    hardtanh
    rad2deg
    relu
    relu6
    round
    sigmoid
    sinh
    tanh
    trunc
    """,
    partials=monotone,
)
pointwise("erfc", partials=falling)
pointwise("clamp", partials=("max,R,R -> max", "min,R,R -> min", "max,R -> max", "min,R -> min"))
pointwise("clamp_min maximum", partials=("max,max -> max", "max,R -> max", "R,max -> max", "min,R -> min"))
pointwise("clamp_max minimum", partials=("min,min -> min", "min,R -> min", "R,min -> min", "max,R -> max"))
pointwise(
    "bitwise_right_shift __rshift__ __irshift__", partials=("max,R -> max", "min,R -> min")
)  # a quotient that is rounded down

# --- sums and means: linear ---------------------------------------------------------------------------------------------
# A finite shift keeps the order of floats (an infinite one makes NaN of addends of the other infinity); integers
# wrap around, and a step other than 1 may reverse the order. The mean of equal constants is the constant.
SHIFT = ("sum,sum -> sum", "avg,avg -> avg", "avg,R -> avg", "R,avg -> avg")
GROWS_IN_BOTH = on_floats("max,finite -> max", "finite,max -> max", "min,finite -> min", "finite,min -> min")
GROWS_IN_FIRST = on_floats("max,finite -> max", "min,finite -> min", "finite,max -> min", "finite,min -> max")
GROWS_IN_OTHER = on_floats("finite,max -> max", "finite,min -> min", "max,finite -> min", "min,finite -> max")
pointwise("add", partials=(*SHIFT, GROWS_IN_BOTH))
pointwise("sub", partials=(*SHIFT, GROWS_IN_FIRST))
pointwise("rsub", partials=(*SHIFT, GROWS_IN_OTHER))
pointwise("complex", partials=SHIFT)
pointwise("neg", partials=(linear(), on_floats(*falling)))
pointwise("conj_physical _conj_physical _conj", partials=linear())
# a lazily negated local would be read without its sign below __torch_dispatch__
pointwise("_neg_view", partials=linear(), local=torch.neg)
pointwise("mul", partials=(linear("self", "other"), "product,product -> product"))
pointwise("div", partials=by("rounding_mode", {None: ("sum,nonzero -> sum", "avg,nonzero -> avg")}))
pointwise("polar", partials=linear("abs"))  # sines of infinity are NaN
# a product with a power of two, modulo 2 ** bits
pointwise("bitwise_left_shift __lshift__ __ilshift__", partials="sum,R -> sum")
pointwise("lerp", partials=("sum,sum,finite -> sum", "avg,avg,finite -> avg", "avg,R,finite -> avg", "R,avg,finite -> avg"))
pointwise(
    "addcmul",
    partials=(
        "sum,sum,finite -> sum",
        "sum,finite,sum -> sum",
        "avg,avg,finite -> avg",
        "avg,finite,avg -> avg",
        "avg,R,R -> avg",
        "R,avg,finite -> avg",
        "R,finite,avg -> avg",
    ),
)
pointwise("addcdiv", partials="avg,R,R -> avg")

# gradients: linear in the incoming one, where the derivative is never infinite
pointwise(
    """
    gelu_backward
    hardsigmoid_backward
    hardswish_backward
    hardtanh_backward
    leaky_relu_backward
    mish_backward
    silu_backward
    softplus_backward
    softshrink_backward
    threshold_backward
    """,
    partials=linear("grad_output"),
)
pointwise("hardshrink_backward", partials=linear("grad_out"))
pointwise("native_dropout_backward", partials=("sum,finite -> sum", "avg,finite -> avg"))
# products with operands of unknown values
pointwise(
    """
    elu_backward
    log_sigmoid_backward
    logit_backward
    _prelu_kernel_backward
    rrelu_with_noise_backward
    sigmoid_backward
    tanh_backward
    """
)


@on_each_rank
def log_sigmoid_with_buffer(x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ``log_sigmoid_forward`` with a buffer of the operand's shape also on accelerators, which save none."""
    out, saved = torch.ops.aten.log_sigmoid_forward(x)
    return out, saved if saved.shape == x.shape else x.new_empty(()).expand(x.shape)


pointwise("log_sigmoid_forward", local=log_sigmoid_with_buffer)

# --- choices and copies: element k of the result is an operand's element, the same one in every addend ------------------
pointwise("where", partials=one_of("self", "other"))
pointwise(
    # no "avg,R,R -> avg": the fill value is often the smallest number, and the sum of two of them is infinite
    "masked_fill",
    partials=(*(f"{op},R,{op} -> {op}" for op in REDUCE_OPS), "max,R,R -> max", "min,R,R -> min"),
)
pointwise("clone positive _to_copy alias alias_copy lift lift_fresh lift_fresh_copy zero", partials=copies)
pointwise("copy", partials=(*(f"{op},{op} -> {op}" for op in REDUCE_OPS), forgets), plain=("src",))
declare_traits("clone copy new_empty_strided", stores_gradient=True)
declare_traits("add_", accumulates_gradient=True)
pointwise("fill zeros_like ones_like empty_like full_like", partials=forgets)

# --- optimizer steps over lists, element by element ---------------------------------------------------------------------
pointwise("_fused_adam _fused_adamw _fused_sgd _fused_adagrad")
declare_traits("_fused_adam _fused_adamw _fused_sgd _fused_adagrad", per_element=True, reads_flat=True)
