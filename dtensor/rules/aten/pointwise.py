"""Operations that act element by element, and how partial values pass through them.

A row holds for all values, or it is not here: ``f(sum of terms) = sum of f(term)`` for linear ``f``,
``f(max(a, b)) = max(f(a), f(b))`` for non-decreasing ``f`` that keeps NaN. A product is linear in terms as long as the other
factor is finite, ``0 * inf`` being NaN, and a quotient as long as the divisor is not zero (``"sum,finite -> sum"``).
(``add`` has no ``"sum,R -> sum"``: the replicated operand would be counted once per rank. Propagation turns it into a partial
sum first, which costs nothing.) Rows hold where the dtype keeps the algebra: see ``prices``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...placement import REDUCE_OPS
from ..call import Call
from ..rule import ANY_PARTIAL, LINEAR_PARTIAL
from ..verbs import pointwise

MONOTONE = ("max -> max", "min -> min")
LINEAR_IN_FIRST = ("sum,R -> sum", "avg,R -> avg")
BILINEAR = ("sum,finite -> sum", "avg,finite -> avg", "finite,sum -> sum", "finite,avg -> avg")
SHIFT = ("sum,sum -> sum", "avg,avg -> avg", "avg,R -> avg", "R,avg -> avg")  # the mean of equal constants is the constant

# no partial value passes
pointwise(
    "abs acos acosh angle asin atanh atan2 bitwise_not bitwise_xor celu copysign cos cosh "
    "digamma elu eq erfinv float_power fmax fmin fmod frac frexp gcd ge gelu gt hardshrink hardsigmoid "
    "hardswish "
    "heaviside hypot i0 igamma igammac isfinite isinf isnan isneginf isposinf lcm ldexp le leaky_relu lgamma log log10 log1p "
    "log2 "
    "log_sigmoid_forward logaddexp logaddexp2 logical_not logical_xor logit lt mish mvlgamma nan_to_num ne nextafter "
    "polygamma "
    "pow _prelu_kernel reciprocal rsqrt selu sgn sign signbit silu sin sinc softplus softshrink sqrt square "
    "tan threshold true_divide xlogy __ixor__ __xor__ logical_and logical_or "
    "bitwise_and bitwise_or __and__ __or__ __iand__ __ior__ max.other min.other clip "
    "special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1 special_chebyshev_polynomial_t "
    "special_chebyshev_polynomial_u special_chebyshev_polynomial_v special_chebyshev_polynomial_w special_entr special_erfcx "
    "special_hermite_polynomial_h special_hermite_polynomial_he special_i0e special_i1 special_i1e special_laguerre_polynomial_l "
    "special_legendre_polynomial_p special_log_ndtr special_modified_bessel_i0 special_modified_bessel_i1 "
    "special_modified_bessel_k0 "
    "special_modified_bessel_k1 special_ndtri special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 "
    "special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v "
    "special_shifted_chebyshev_polynomial_w special_spherical_bessel_j0 special_xlog1py special_zeta"
)
pointwise("floor_divide remainder", plain=("other",))  # tables of strides, as unravel_index makes them

# non-decreasing, NaN kept
pointwise(
    "asinh atan ceil deg2rad erf exp exp2 expm1 floor hardtanh rad2deg relu relu6 round sigmoid sinh tanh trunc",
    partials=MONOTONE,
)
pointwise("erfc", partials=("max -> min", "min -> max"))
pointwise("clamp", partials=("max,R,R -> max", "min,R,R -> min", "max,R -> max", "min,R -> min"))
pointwise("clamp_min maximum", partials=("max,max -> max", "max,R -> max", "R,max -> max", "min,R -> min"))
pointwise("clamp_max minimum", partials=("min,min -> min", "min,R -> min", "R,min -> min", "max,R -> max"))

# linear. A finite shift keeps the order of floats (an infinite one makes NaN of the terms that are infinite the other way);
# integers wrap around, and a step other than 1 may turn the order about.
ORDERED = {
    "add": ("max,finite -> max", "finite,max -> max", "min,finite -> min", "finite,min -> min"),
    "sub": ("max,finite -> max", "min,finite -> min", "finite,max -> min", "finite,min -> max"),
    "rsub": ("finite,max -> max", "finite,min -> min", "max,finite -> min", "min,finite -> max"),
    "neg": ("max -> min", "min -> max"),
}


def ordered(always: tuple[str, ...], rows: tuple[str, ...]) -> Callable[[Call], tuple[str, ...]]:
    """``always``, and ``rows`` where nothing wraps around and no step is given (the plan does not know its value)."""

    def partials(call: Call) -> tuple[str, ...]:
        alpha, result = call.get("alpha", 1), call.results[0]
        floating = result is not None and result.dtype.is_floating_point
        return (*always, *rows) if floating and type(alpha) is int and alpha == 1 else always

    return partials


for _name, _rows in ORDERED.items():
    pointwise(_name, partials=ordered(LINEAR_PARTIAL if _name == "neg" else SHIFT, _rows))
pointwise("mul", partials=(*BILINEAR, "product,product -> product"))
pointwise("conj_physical _conj_physical _conj", partials=LINEAR_PARTIAL)
# a lazily negated local would be read without its sign below __torch_dispatch__
pointwise("_neg_view", partials=LINEAR_PARTIAL, local=torch.neg)
pointwise("complex", partials=SHIFT)
pointwise("polar", partials=LINEAR_IN_FIRST)  # sines of infinity are NaN
pointwise("bitwise_right_shift __rshift__ __irshift__", partials=("max,R -> max", "min,R -> min"))  # a quotient, rounded down
# a product with a power of two, modulo that of the dtype
pointwise("bitwise_left_shift __lshift__ __ilshift__", partials=("sum,R -> sum",))
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
pointwise("addcdiv", partials=("avg,R,R -> avg",))


def division(call: Call) -> tuple[str, ...]:
    """Linear in the numerator, unless it rounds."""
    return ("sum,nonzero -> sum", "avg,nonzero -> avg") if call.get("rounding_mode") is None else ()


pointwise("div", partials=division)

# choices and copies: element k of the result is one of the operands' elements, in every term alike
_SAME = tuple(f"R,{op},{op} -> {op}" for op in REDUCE_OPS)
_ONE_OF = tuple(row for op in ("avg", "max", "min") for row in (f"R,{op},R -> {op}", f"R,R,{op} -> {op}"))
pointwise("where", partials=(*_SAME, *_ONE_OF))
pointwise(
    # no "avg,R,R -> avg": what masks are filled with is often the least number, and the sum of two of those is infinite
    "masked_fill",
    partials=(*(f"{op},R,{op} -> {op}" for op in REDUCE_OPS), "max,R,R -> max", "min,R,R -> min"),
)
pointwise("clone positive _to_copy alias alias_copy lift lift_fresh lift_fresh_copy", partials=ANY_PARTIAL)
pointwise("copy", partials=tuple(f"{op},{op} -> {op}" for op in REDUCE_OPS) + tuple(f"{op},R -> R" for op in REDUCE_OPS))
pointwise("fill", partials=tuple(f"{op},R -> R" for op in REDUCE_OPS))
pointwise("zero", partials=ANY_PARTIAL)
pointwise("zeros_like ones_like empty_like full_like", partials=tuple(f"{op} -> R" for op in REDUCE_OPS))

# gradients: linear in the incoming gradient, which is operand 0, where the derivative is never infinite
pointwise(
    "gelu_backward silu_backward threshold_backward leaky_relu_backward hardtanh_backward hardsigmoid_backward "
    "hardswish_backward hardshrink_backward softshrink_backward softplus_backward mish_backward",
    partials=LINEAR_IN_FIRST,
)
pointwise("native_dropout_backward", partials=("sum,finite -> sum", "avg,finite -> avg"))
# products with operands that may hold anything
pointwise(
    "sigmoid_backward tanh_backward elu_backward logit_backward log_sigmoid_backward rrelu_with_noise_backward "
    "_prelu_kernel_backward"
)

# optimizer steps over lists: every element by itself
pointwise("_fused_adam _fused_adamw _fused_sgd _fused_adagrad")
