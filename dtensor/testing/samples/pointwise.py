"""Samples of operations that act element by element: all overloads by schema, and the arguments that change the algebra."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from ...rules import rules
from .of_schema import DTYPES, samples_by_schema, tensor
from .sample import Builder, Sample, Samples

_INSIDE = [
    "acos",
    "acosh",
    "asin",
    "atanh",
    "erfinv",
    "logit",
    "log",
    "log1p",
    "log2",
    "log10",
    "lgamma",
    "digamma",
    "rsqrt",
    "sqrt",
    "pow",
    "float_power",
    "polygamma",
    "mvlgamma",
    "igamma",
    "igammac",
    "xlogy",
    "special_entr",
    "special_log_ndtr",
    "special_ndtri",
    "special_xlog1py",
    "special_zeta",
    "special_erfcx",
    "logaddexp",
]
_RANDOM_VALUES = ("empty_like",)
# torch's meta kernels tell another dtype, or refuse what its CPU kernels do
_DTYPES = {
    "pow": (torch.float64, torch.int64, torch.complex128),
    "nan_to_num": (torch.float64, torch.int64),
    "_neg_view": (torch.float64, torch.int64, torch.complex128),
}
_ONE_SHAPE = ("_prelu_kernel", "log_sigmoid_backward")  # torch resizes what does not fit, with a warning


def x(seed: int = 0, dtype: torch.dtype = torch.float64, shape: tuple[int, ...] = (5, 7)) -> torch.Tensor:
    return tensor(shape, dtype, seed)


def _extra() -> Samples:
    unsigned = partial(x, dtype=torch.uint8)
    small = torch.tensor([[100, -100, 127, -128, 0], [1, -1, 90, 50, 120]], dtype=torch.int8)
    return {
        "add": [
            Sample((x(), x(1)), {"alpha": -2}, "alpha"),
            Sample((x(), 3), {"alpha": -1}, "alpha"),
            Sample((small, small.flip(0)), {}, "wraps"),
        ],
        "sub": [
            Sample((x(), x(1)), {"alpha": -2}, "alpha"),
            Sample((unsigned(), unsigned(1)), {}, "wraps"),
            Sample((small, small.flip(0)), {}, "wraps"),
        ],
        "rsub": [Sample((x(), x(1)), {"alpha": -2}, "alpha"), Sample((x(), 3), {"alpha": -2}, "alpha")],
        "neg": [Sample((unsigned(),), {}, "wraps"), Sample((small,), {}, "wraps")],
        "div": [
            *(Sample((x(), x(1)), {"rounding_mode": mode}, str(mode)) for mode in ("floor", "trunc")),
            Sample((x(0, torch.int64), 3), {"rounding_mode": "floor"}, "integers"),
        ],
        "mul": [
            Sample((x(), x(1, torch.int64)), {}, "promotes"),
            Sample((x(0, torch.int64), 0.5), {}, "promotes"),
            Sample((x(), -2.0), {}, "a number"),
            Sample((small, small.flip(0)), {}, "wraps"),
        ],
        "addcmul": [Sample((x(), x(1), x(2)), {"value": -0.5}, "value")],
        "addcdiv": [Sample((x(), x(1), x(2)), {"value": -0.5}, "value")],
        "clamp": [
            Sample((x(), -0.5), {}, "one bound"),
            Sample((x(), None, 0.5), {}, "one bound"),
            Sample((x(), 0.5, -0.5), {}, "crossed"),
        ],
        "round": [Sample((x(),), {"decimals": 1}, "decimals")],
        "gelu": [Sample((x(),), {"approximate": "tanh"}, "tanh")],
        "nan_to_num": [Sample((torch.tensor([1.0, float("nan"), float("inf"), -2.0, 0.0]),), {"nan": 0.5, "posinf": 9.0})],
        "where": [Sample((x(0, torch.bool), x(1), x(2)), {}, ""), Sample((x(0, torch.bool, (7,)), x(1), 2.0), {}, "broadcast")],
        "copy": [
            Sample((x(), x(1, torch.int64)), {}, "dtype"),
            Sample((x(), x(1, shape=(7,))), {}, "broadcast"),
            Sample((x(0, torch.int64), x(1, torch.bool)), {}, "dtype"),
        ],
        "_to_copy": [
            *(
                Sample((x(),), {"dtype": dtype}, str(dtype))
                for dtype in (torch.float32, torch.int64, torch.bool, torch.complex128, torch.bfloat16)
            ),
            *(
                Sample((x(0, torch.int64) * 50,), {"dtype": dtype}, str(dtype))
                for dtype in (torch.float64, torch.int8, torch.uint8, torch.bool)
            ),
            Sample((x().t(),), {}, "strides"),
        ],
        "clone": [
            Sample((x().t(),), {}, "strides"),
            Sample((x().t(),), {"memory_format": torch.contiguous_format}, "contiguous"),
        ],
        "threshold": [Sample((x(), 0.1, 20.0), {}, "")],
        "full_like": [Sample((x(), 2.5), {}, ""), Sample((x(),), {"fill_value": 1, "dtype": torch.int64}, "dtype")],
        "empty_like": [Sample((x(),), {}, "", values=False, gradients=False)],
        "_fused_adam": [_fused(amsgrad=False)],
        "_fused_adamw": [_fused(amsgrad=True)],
        "_fused_sgd": [
            Sample(
                ([x(), x(1)], [x(2), x(3)], [x(4), x(5)]),
                {
                    "weight_decay": 0.1,
                    "momentum": 0.9,
                    "lr": 0.1,
                    "dampening": 0.0,
                    "nesterov": False,
                    "maximize": False,
                    "is_first_step": False,
                },
                gradients=False,
            )
        ],
        "_fused_adagrad": [
            Sample(
                ([x(), x(1)], [x(2), x(3)], [x(4).abs(), x(5).abs()], [torch.tensor(3.0), torch.tensor(3.0)]),
                {"lr": 0.1, "lr_decay": 0.0, "weight_decay": 0.1, "eps": 1e-8, "maximize": False},
                gradients=False,
            )
        ],
    }


def _fused(amsgrad: bool) -> Sample:
    pair = [[x(2 * k), x(2 * k + 1)] for k in range(5)]
    steps = [torch.tensor(3.0), torch.tensor(3.0)]
    options = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8, "amsgrad": amsgrad, "maximize": False}
    squares = [[t.abs() for t in pair[k]] for k in (3, 4)]
    return Sample((pair[0], pair[1], pair[2], squares[0], squares[1] if amsgrad else [], steps), options, gradients=False)


def _all() -> Samples:
    found: dict[str, list[Builder]] = {}
    for name, builders in _extra().items():
        found[name] = list(builders)
    for full, rule in rules().items():
        namespace, _, name = full.partition("::")
        if rule.kind == "pointwise" and namespace == "aten" and name not in _RANDOM_VALUES and not name.startswith("_fused"):
            low, high = (0.1, 0.9) if name in _INSIDE else (-2.0, 2.0)
            dtypes = _DTYPES.get(name, DTYPES)
            made = samples_by_schema(name, dtypes, low=low, high=high, broadcast=name not in _ONE_SHAPE)
            found.setdefault(name, []).extend(replace(sample, gradients=not name.startswith("lift")) for sample in made)
    return found


SAMPLES: Samples = _all()
