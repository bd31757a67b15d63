"""Meta kernels: corrections of torch's inference without data, for kernels that it lacks or contradicts.

Without these, a result would have another dtype or shape than its blocks, a block would be computed with rounded indices, or
ranks would raise another error than torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import zip_longest
from typing import Any

import torch

from ...layout.layout import Layout
from ..op_traits import MetaArguments, RunInference, declare_traits
from .output_strides import make_empty_like_strides, make_fft_strides, make_suggested_strides, row_major

META = torch.device("meta")


# --- results of inference -----------------------------------------------------------------------------------------------
def make_like_argument_inference(name: str) -> Callable[[RunInference, MetaArguments, str], Any]:
    """Return an inference of results in the shape and dtype of argument ``name``, for gradients without a meta kernel."""
    return lambda default, arguments, device: torch.empty(arguments[name].shape, dtype=arguments[name].dtype, device=META)


def make_converting_inference(
    name: str, convert: Callable[[Any, MetaArguments], Any]
) -> Callable[[RunInference, MetaArguments, str], Any]:
    """Return an inference that converts argument ``name`` and then runs the operator's own inference."""
    return lambda default, arguments, device: default({**arguments, name: convert(arguments[name], arguments)})


def convert_byte_labels(target: torch.Tensor, arguments: MetaArguments) -> torch.Tensor:
    """Convert byte labels to int64. The loss operators accept them, their meta kernels do not."""
    return target.long() if target.dtype is torch.uint8 else target


def convert_to_input_dtype(weight: torch.Tensor | None, arguments: MetaArguments) -> torch.Tensor | None:
    """Convert a loss's weight to the dtype of the input, which the result has; the meta kernel would infer the wider dtype."""
    return None if weight is None else weight.to(arguments["self"].dtype)


def infer_last_dim(default: RunInference, arguments: MetaArguments, device: str) -> Any:
    """Infer a Fourier transform from its last dim, which alone changes size. Torch 2.11 fails on dims that are out of order."""
    return default({**arguments, "self": arguments["self"].contiguous(), "dim": arguments["dim"][-1:]})


def infer_sums_in_query_dtype(default: RunInference, arguments: MetaArguments, device: str) -> Any:
    """Infer the results of CPU attention, with log-sums in float64 for float64 queries, where torch 2.11 infers float32."""
    return [x.to(torch.promote_types(x.dtype, arguments["query"].dtype)) for x in default(arguments)]


def infer_scaled_mm(default: RunInference, arguments: MetaArguments, device: str) -> Any:
    """Infer the result of ``_scaled_mm`` on CPU in any strides and sizes; the meta kernel accepts only those of GPUs."""
    if device != "cpu":
        return default(arguments)
    rows, columns = arguments["self"], arguments["mat2"]
    return torch.empty(rows.shape[0], columns.shape[1], dtype=arguments.get("out_dtype") or rows.dtype, device=META)


def infer_view_copy(default: RunInference, arguments: MetaArguments, device: str) -> Any:
    """Infer the result of ``view_copy``: the kernel copies what cannot be viewed, its meta kernel raises."""
    return arguments["self"].clone(memory_format=torch.contiguous_format).view(arguments["size"])


# --- checks that kernels make and meta kernels do not -------------------------------------------------------------------
def require_dtypes(
    argument: str, what: str, *dtypes: torch.dtype, error: type[Exception] = RuntimeError
) -> Callable[[str, dict[str, Any]], None]:
    """Return a check that raises ``error`` if argument ``argument`` is a tensor of another dtype than these."""

    def check_argument_dtype(name: str, arguments: dict[str, Any]) -> None:
        """Raise if the tensor argument has none of the required dtypes."""
        value = arguments[argument]
        if isinstance(value, Layout) and value.dtype not in dtypes:
            raise error(f"{name}: expected {what} of dtype {' or '.join(map(str, dtypes))}, got {value.dtype}")

    return check_argument_dtype


require_index_dtypes = partial(require_dtypes, "index", "indices")


def check_indices(name: str, arguments: dict[str, Any]) -> None:
    """Raise unless the indices of ``index`` fit: integers or masks, masks of the size of their dims, others that broadcast."""
    shape, d, index_shapes = arguments["self"].shape, 0, []
    for item in arguments["indices"]:
        if not isinstance(item, Layout):
            d += 1
        elif item.dtype in (torch.bool, torch.uint8):
            if shape[d : d + len(item.shape)] != item.shape:
                differs = next(k for k, n in enumerate(item.shape) if shape[d + k : d + k + 1] != (n,))
                raise IndexError(
                    f"The shape of the mask {list(item.shape)} at index {differs} does not match the shape of the indexed tensor "
                    f"{list(shape)} at index {d + differs}"
                )
            d += len(item.shape)
        elif item.dtype in (torch.int64, torch.int32):
            d += 1
            index_shapes.append(item.shape)
        else:
            raise IndexError(f"tensors used as indices must be long, int, byte or bool tensors, not {item.dtype}")
    if any(len({size for size in sizes if size != 1}) > 1 for sizes in zip_longest(*map(reversed, index_shapes), fillvalue=1)):
        raise IndexError(
            "shape mismatch: indexing tensors could not be broadcast together with shapes "
            f"{', '.join(map(str, map(list, index_shapes)))}"
        )


def require_same_dtype(second: str) -> Callable[[str, dict[str, Any]], None]:
    """Return a check that raises if ``self`` and argument ``second`` have different dtypes."""

    def check_same_dtype(name: str, arguments: dict[str, Any]) -> None:
        """Raise if ``self`` and the second argument have different dtypes."""
        one, other = arguments["self"].dtype, arguments[second].dtype
        if one is not other:
            raise RuntimeError(f"{name}: expected tensors of the same dtype, got {one} and {other}")

    return check_same_dtype


def check_dim_in_range(name: str, arguments: dict[str, Any]) -> None:
    """Raise unless argument ``dim`` is None or a dim of ``self``."""
    dim, ndim = arguments["dim"], max(1, arguments["self"].ndim)
    if dim is not None and not -ndim <= dim < ndim:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-ndim}, {ndim - 1}], but got {dim})")


def check_dims_exist(name: str, arguments: dict[str, Any]) -> None:
    """Raise unless ``self`` has the dims ``dim``, ``dim1``, ``dim2`` and the position ``index`` that the arguments name."""
    shape = arguments["self"].shape
    for key in arguments.keys() & {"dim", "dim1", "dim2"}:
        if not -len(shape) <= arguments[key] < len(shape):
            raise IndexError(f"{name}: dim {arguments[key]} is out of range for a tensor with {len(shape)} dims")
    size, index = shape[arguments["dim"]] if "index" in arguments else 1, arguments.get("index", 0)
    if not -size <= index < size:
        raise IndexError(f"{name}: index {index} is out of range for a dim of size {size}")


def check_dim_below_ndim(name: str, arguments: dict[str, Any]) -> None:
    """Raise unless argument ``dim`` is less than the number of dims of ``self``. Another check refuses negative dims."""
    if arguments["dim"] >= arguments["self"].ndim:
        raise RuntimeError(f"{name}: expected a dim below {arguments['self'].ndim}, got {arguments['dim']}")


def check_weight_dtypes(name: str, arguments: dict[str, Any]) -> None:
    """Raise unless a norm's weights and statistics have the dtype of the input, or float32 with an input in half precision."""
    dtype = arguments["input"].dtype
    values = (arguments.get(each) for each in ("weight", "bias", "running_mean", "running_var"))
    dtypes = {layout.dtype for layout in values if isinstance(layout, Layout)}
    if dtypes - {dtype} and (dtypes != {torch.float32} or dtype not in (torch.float16, torch.bfloat16)):
        raise RuntimeError(
            f"{name}: the dtypes of weights {' and '.join(sorted(map(str, dtypes)))} do not match the input's dtype {dtype}"
        )


def check_renorm(name: str, arguments: dict[str, Any]) -> None:
    """Raise unless the arguments of ``renorm`` fit: a dim of ``self``, order ``p`` positive, ``maxnorm`` not negative."""
    check_dim_in_range(name, arguments)
    order, largest = arguments["p"], arguments["maxnorm"]
    if not order > 0 or largest < 0:
        raise RuntimeError(f"{name}: expected p > 0 and maxnorm >= 0, got p={order} and maxnorm={largest}")


def require_expandable(
    name: str, product: Callable[[dict[str, Any]], Iterable[int]], whose: str = "the product's"
) -> Callable[[str, dict[str, Any]], None]:
    """Return a check that raises if tensor argument ``name`` does not expand to the sizes that ``product`` computes."""

    def check_expandable(operator: str, arguments: dict[str, Any]) -> None:
        """Raise if the addend has more dims than the sizes, or a dim that does not expand to them."""
        addend, sizes = arguments[name], tuple(product(arguments))
        if isinstance(addend, Layout):
            is_expandable = [own in (1, size) for own, size in zip(reversed(addend.shape), reversed(sizes), strict=False)]
            if addend.ndim > len(sizes) or not all(is_expandable):
                raise RuntimeError(f"{operator}: {list(addend.shape)} cannot be expanded to {whose} sizes {list(sizes)}")

    return check_expandable


def require_view_sizes(view: Callable[..., torch.Tensor]) -> Callable[[str, dict[str, Any]], None]:
    """Return a check that raises if a view's gradient does not expand to the view's sizes.

    The meta kernel makes zeros unchecked.
    """
    named = ("dim", "start", "end", "step", "index", "offset", "dim1", "dim2")

    def view_shape(arguments: dict[str, Any]) -> Iterable[int]:
        """Return the shape of the view of a tensor of ``input_sizes``."""
        return view(
            torch.empty(arguments["input_sizes"], device=META), *(arguments[key] for key in named if key in arguments)
        ).shape

    return require_expandable("grad_output", view_shape, "the view's")


def check_grad_shape(name: str, arguments: dict[str, Any]) -> None:
    """Raise unless the gradient has the shape of the output. One softmax kernel checks it, the other reads beyond its memory."""
    grad, output = arguments["grad_output"], arguments["output"]
    if grad.shape != output.shape:
        raise RuntimeError(f"{name}: the gradient has shape {list(grad.shape)}, but the output has shape {list(output.shape)}")


def check_comparable(name: str, arguments: dict[str, Any]) -> None:
    """Raise unless the operands of ``allclose`` can be compared element by element: it returns a bool, which is not inferred."""
    x, y = (torch.empty(layout.shape, dtype=layout.dtype, device=META) for layout in (arguments["self"], arguments["other"]))
    torch.isclose(x, y, arguments["rtol"], arguments["atol"])


def refuse_bools(name: str, arguments: dict[str, Any]) -> None:
    """Raise if ``self`` of an in-place ``cumsum`` has bools, which cannot hold their sum."""
    if arguments["self"].dtype is torch.bool:
        raise NotImplementedError(f"{name}: not implemented for bools in place")


def refuse_zero_dims(name: str, arguments: dict[str, Any]) -> None:
    """Raise if ``cat`` gets tensors without dims, which its meta kernel accepts."""
    if any(not x.shape for x in arguments["tensors"] if isinstance(x, Layout)):
        raise RuntimeError("zero-dimensional tensors cannot be concatenated")


def infer_grid_sample(default: RunInference, arguments: MetaArguments, device: str) -> Any:
    """Infer the result of a grid sampler: samples and channels of the image, positions of the grid."""
    return arguments["self"].new_empty((*arguments["self"].shape[:2], *arguments["grid"].shape[1:-1]))


def infer_lstm_cell(default: RunInference, arguments: MetaArguments, device: str) -> Any:
    """Infer output, next state and gates of a fused LSTM cell. Torch's meta kernel reads biases that may be absent."""
    state = arguments["cx"]
    return torch.empty_like(state), torch.empty_like(state), torch.empty_like(arguments["input_gates"])


def infer_gru_cell(default: RunInference, arguments: MetaArguments, device: str) -> Any:
    """Infer next state and workspace of a fused GRU cell: five values for each element of the state."""
    state = arguments["hx"]
    return torch.empty_like(state), state.new_empty(state.shape[0], 5 * state.shape[1])


def infer_gru_gradients(default: RunInference, arguments: MetaArguments, device: str) -> Any:
    """Infer the gradients of a fused GRU cell: of both gates, the state before, and both biases."""
    grad = arguments["grad_hy"]
    rows, gates = grad.shape[0], 3 * grad.shape[1]
    biases = [grad.new_empty(gates) if arguments["has_bias"] else None for _ in range(2)]
    return grad.new_empty(rows, gates), grad.new_empty(rows, gates), torch.empty_like(grad), *biases


# --- declarations -------------------------------------------------------------------------------------------------------
declare_traits(
    "_linalg_svd linalg_eig convolution convolution_backward nonzero_static _embedding_bag _embedding_bag_forward_only",
    by_device=True,
)
for _name in ("_fft_c2c", "_fft_r2c", "_fft_c2r"):
    declare_traits(_name, by_device=True, infer=infer_last_dim, strides=make_fft_strides(_name))
declare_traits(
    "multi_margin_loss_backward multilabel_margin_loss_backward fractional_max_pool3d_backward",
    infer=make_like_argument_inference("self"),
)
declare_traits("_ctc_loss_backward", infer=make_like_argument_inference("log_probs"))
declare_traits("cudnn_grid_sampler", infer=infer_grid_sample)
declare_traits(
    "cudnn_grid_sampler_backward",
    infer=lambda default, arguments, device: [torch.empty_like(arguments[name]) for name in ("self", "grid")],
)
declare_traits("_thnn_fused_lstm_cell", infer=infer_lstm_cell)
declare_traits("_thnn_fused_gru_cell", infer=infer_gru_cell)
declare_traits("_thnn_fused_gru_cell_backward", infer=infer_gru_gradients)
declare_traits("glu_jvp", infer=make_like_argument_inference("glu"))
declare_traits("glu_backward_jvp", infer=make_like_argument_inference("grad_x"))
declare_traits("view_copy.default", infer=infer_view_copy)
declare_traits(
    "soft_margin_loss.default huber_loss.default",
    infer=make_converting_inference("target", lambda x, arguments: x.to(arguments["self"].dtype)),
)
declare_traits("_scaled_dot_product_flash_attention_for_cpu.default", infer=infer_sums_in_query_dtype)
declare_traits(
    "nll_loss nll_loss2d nll_loss_forward nll_loss_backward nll_loss2d_backward",
    infer=make_converting_inference("target", convert_byte_labels),
)
declare_traits("nll_loss2d_forward", infer=make_converting_inference("target", convert_byte_labels), strides=row_major)
declare_traits("_scaled_mm _scaled_mm_v2", infer=infer_scaled_mm)
for _side, _other in (("l", "left"), ("r", "right")):  # the kernels accept bool shifts, their meta kernels do not
    for _form, _end in (("", ""), ("i", "_")):
        _same = getattr(torch.ops.aten, f"bitwise_{_other}_shift{_end}")
        declare_traits(f"__{_form}{_side}shift__", infer=lambda default, arguments, device, same=_same: default(arguments, same))

_LONG, _INT = torch.int64, torch.int32
declare_traits("index_add index_select", checks=(require_index_dtypes(_INT, _LONG),))
declare_traits("index_reduce", checks=(require_index_dtypes(_INT, _LONG), check_dim_in_range))
declare_traits("index_copy put", checks=(require_index_dtypes(_LONG),))
declare_traits("index_fill", checks=(require_index_dtypes(_LONG, error=IndexError),), strides=make_empty_like_strides("self"))
declare_traits(
    "index.Tensor _unsafe_index.Tensor index_put.default index_put_.default _index_put_impl_.default _unsafe_index_put.default",
    checks=(check_indices,),
)
declare_traits(
    "binary_cross_entropy",
    checks=(require_same_dtype("target"),),
    infer=make_converting_inference("weight", convert_to_input_dtype),
    strides=make_empty_like_strides("self"),
)
declare_traits("masked_scatter", checks=(require_same_dtype("source"),))
declare_traits("slice_scatter select_scatter diagonal_scatter", checks=(check_dims_exist,))
declare_traits("unique_dim unique_consecutive unique_dim_consecutive", checks=(check_dim_in_range,))
declare_traits(
    "addmm _addmm_activation",
    checks=(require_expandable("self", lambda arguments: (*arguments["mat1"].shape[:1], *arguments["mat2"].shape[1:])),),
)
declare_traits("addmv", checks=(require_expandable("self", lambda arguments: arguments["mat"].shape[:1]),))
declare_traits("select_backward", checks=(require_view_sizes(torch.Tensor.select),))
declare_traits("slice_backward", checks=(require_view_sizes(torch.ops.aten.slice.Tensor),))
declare_traits("diagonal_backward", checks=(require_view_sizes(torch.Tensor.diagonal),))
declare_traits("_softmax_backward_data", checks=(check_grad_shape,))
declare_traits("_log_softmax_backward_data", checks=(check_grad_shape,), strides=row_major)
declare_traits("allclose", checks=(check_comparable,))
declare_traits("renorm", checks=(check_renorm,))
declare_traits("native_layer_norm native_group_norm", checks=(check_weight_dtypes,))
declare_traits(
    "native_batch_norm _native_batch_norm_legit.default _native_batch_norm_legit.no_stats",
    checks=(check_weight_dtypes,),
    strides=make_suggested_strides("input"),
)
declare_traits("cat.default", checks=(refuse_zero_dims,))
declare_traits("cumsum_", checks=(refuse_bools,))
declare_traits("narrow_copy", checks=(check_dim_below_ndim,))
declare_traits("multinomial.out", checks=(require_dtypes("out", "out", _LONG),))  # the kernel does not convert results
