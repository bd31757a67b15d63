"""What torch's inference without data does not know: kernels that it has no twin of, or that do otherwise than their twins.

Without these a result would have another dtype or shape than its blocks, a block would be computed with rounded indices, or every
rank would raise another error than torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import zip_longest
from typing import Any

import torch

from ...layout.layout import Layout
from ..op_traits import Ask, Given, fact
from .output_strides import as_if_empty_like, row_major, suggested_by, transformed

META = torch.device("meta")


# --- results ------------------------------------------------------------------------------------------------------------
def like(name: str) -> Callable[[Ask, Given, str], Any]:
    """Contiguous, in the shape and dtype of this argument: gradients without a meta kernel."""
    return lambda ask, given, device: torch.empty(given[name].shape, dtype=given[name].dtype, device=META)


def with_(name: str, convert: Callable[[Any, Given], Any]) -> Callable[[Ask, Given, str], Any]:
    """The operator's own inference, one argument otherwise."""
    return lambda ask, given, device: ask({**given, name: convert(given[name], given)})


def labels(target: torch.Tensor, given: Given) -> torch.Tensor:
    """The operators take labels of one byte, their meta kernels do not."""
    return target.long() if target.dtype is torch.uint8 else target


def of_input(weight: torch.Tensor | None, given: Given) -> torch.Tensor | None:
    """Results have the dtype of the input, whatever the weight has; those of the meta kernel have the wider one."""
    return None if weight is None else weight.to(given["self"].dtype)


def last_dim_only(ask: Ask, given: Given, device: str) -> Any:
    """Torch 2.11 fails on dims out of order; only the last one changes sizes, and strides have a law of their own."""
    return ask({**given, "self": given["self"].contiguous(), "dim": given["dim"][-1:]})


def of_query(ask: Ask, given: Given, device: str) -> Any:
    """Torch 2.11 takes sums of float64 for float32."""
    return [x.to(torch.promote_types(x.dtype, given["query"].dtype)) for x in ask(given)]


def scaled_product(ask: Ask, given: Given, device: str) -> Any:
    """The CPU takes any order and sizes, the meta kernel what a GPU takes."""
    if device != "cpu":
        return ask(given)
    rows, columns = given["self"], given["mat2"]
    return torch.empty(rows.shape[0], columns.shape[1], dtype=given.get("out_dtype") or rows.dtype, device=META)


def copied_view(ask: Ask, given: Given, device: str) -> Any:
    """The kernel copies what cannot be viewed, its meta kernel does not."""
    return given["self"].clone(memory_format=torch.contiguous_format).view(given["size"])


# --- refusals -----------------------------------------------------------------------------------------------------------
def of_dtypes(
    argument: str, what: str, *dtypes: torch.dtype, error: type[Exception] = RuntimeError
) -> Callable[[str, dict[str, Any]], None]:
    """An argument, if it is a tensor, has one of these dtypes."""

    def check(name: str, arguments: dict[str, Any]) -> None:
        given = arguments[argument]
        if isinstance(given, Layout) and given.dtype not in dtypes:
            raise error(f"{name}: expected {what} of dtype {' or '.join(map(str, dtypes))}, got {given.dtype}")

    return check


indices_of = partial(of_dtypes, "index", "indices")


def places(name: str, arguments: dict[str, Any]) -> None:
    """Indices are integers or masks, masks have the sizes of the dims that they stand for, the others go together."""
    shape, d, numbered = arguments["self"].shape, 0, []
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
            numbered.append(item.shape)
        else:
            raise IndexError(f"tensors used as indices must be long, int, byte or bool tensors, not {item.dtype}")
    if any(len({size for size in sizes if size != 1}) > 1 for sizes in zip_longest(*map(reversed, numbered), fillvalue=1)):
        raise IndexError(
            "shape mismatch: indexing tensors could not be broadcast together with shapes "
            f"{', '.join(map(str, map(list, numbered)))}"
        )


def of_one_dtype(second: str) -> Callable[[str, dict[str, Any]], None]:
    def check(name: str, arguments: dict[str, Any]) -> None:
        one, other = arguments["self"].dtype, arguments[second].dtype
        if one is not other:
            raise RuntimeError(f"{name}: expected tensors of the same dtype, got {one} and {other}")

    return check


def dim_in_range(name: str, arguments: dict[str, Any]) -> None:
    """``dim`` is one of ``self``, if any."""
    dim, ndim = arguments["dim"], max(1, arguments["self"].ndim)
    if dim is not None and not -ndim <= dim < ndim:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-ndim}, {ndim - 1}], but got {dim})")


def dims_there(name: str, arguments: dict[str, Any]) -> None:
    """``self`` has the dims that are named, of which a tensor of none has none, and the row that is."""
    shape = arguments["self"].shape
    for key in arguments.keys() & {"dim", "dim1", "dim2"}:
        if not -len(shape) <= arguments[key] < len(shape):
            raise IndexError(f"{name}: dim {arguments[key]} is out of range for a tensor with {len(shape)} dims")
    size, index = shape[arguments["dim"]] if "index" in arguments else 1, arguments.get("index", 0)
    if not -size <= index < size:
        raise IndexError(f"{name}: index {index} is out of range for a dim of size {size}")


def dim_below_ndim(name: str, arguments: dict[str, Any]) -> None:
    """``dim`` is not beyond those of ``self``; below them another error says so."""
    if arguments["dim"] >= arguments["self"].ndim:
        raise RuntimeError(f"{name}: expected a dim below {arguments['self'].ndim}, got {arguments['dim']}")


def weights_of_dtype(name: str, arguments: dict[str, Any]) -> None:
    """Weights and statistics have the dtype of the input, or are of single precision beside one in half."""
    dtype = arguments["input"].dtype
    given = (arguments.get(each) for each in ("weight", "bias", "running_mean", "running_var"))
    dtypes = {layout.dtype for layout in given if isinstance(layout, Layout)}
    if dtypes - {dtype} and (dtypes != {torch.float32} or dtype not in (torch.float16, torch.bfloat16)):
        raise RuntimeError(
            f"{name}: the dtypes of weights {' and '.join(sorted(map(str, dtypes)))} do not match the input's dtype {dtype}"
        )


def positive_norms(name: str, arguments: dict[str, Any]) -> None:
    """There is a norm of this order, and a largest one."""
    dim_in_range(name, arguments)
    order, largest = arguments["p"], arguments["maxnorm"]
    if not order > 0 or largest < 0:
        raise RuntimeError(f"{name}: expected p > 0 and maxnorm >= 0, got p={order} and maxnorm={largest}")


def added(
    name: str, product: Callable[[dict[str, Any]], Iterable[int]], whose: str = "the product's"
) -> Callable[[str, dict[str, Any]], None]:
    """What is added to a product expands to its sizes, which does not grow with it."""

    def check(operator: str, arguments: dict[str, Any]) -> None:
        given, sizes = arguments[name], tuple(product(arguments))
        if isinstance(given, Layout):
            fits = [own in (1, size) for own, size in zip(reversed(given.shape), reversed(sizes), strict=False)]
            if given.ndim > len(sizes) or not all(fits):
                raise RuntimeError(f"{operator}: {list(given.shape)} cannot be expanded to {whose} sizes {list(sizes)}")

    return check


def of_view(view: Callable[..., torch.Tensor]) -> Callable[[str, dict[str, Any]], None]:
    """A gradient of a view expands to that view of the input's sizes, of which the meta kernel makes zeros without asking."""
    named = ("dim", "start", "end", "step", "index", "offset", "dim1", "dim2")

    def sizes(given: dict[str, Any]) -> Iterable[int]:
        return view(torch.empty(given["input_sizes"], device=META), *(given[key] for key in named if key in given)).shape

    return added("grad_output", sizes, "the view's")


def as_large(name: str, arguments: dict[str, Any]) -> None:
    """The gradient has the output's sizes: one kernel says so, the other reads beyond its memory."""
    grad, output = arguments["grad_output"], arguments["output"]
    if grad.shape != output.shape:
        raise RuntimeError(f"{name}: the gradient has shape {list(grad.shape)}, but the output has shape {list(output.shape)}")


def close_or_not(name: str, arguments: dict[str, Any]) -> None:
    """Elements can be compared one by one: nothing is inferred of a Python value."""
    x, y = (torch.empty(given.shape, dtype=given.dtype, device=META) for given in (arguments["self"], arguments["other"]))
    torch.isclose(x, y, arguments["rtol"], arguments["atol"])


def no_bools(name: str, arguments: dict[str, Any]) -> None:
    """A sum of bools is an integer, which its own memory cannot hold: kernels have no form for it."""
    if arguments["self"].dtype is torch.bool:
        raise NotImplementedError(f"{name}: not implemented for bools in place")


def no_numbers(name: str, arguments: dict[str, Any]) -> None:
    """The meta kernel takes dims for granted."""
    if any(not x.shape for x in arguments["tensors"] if isinstance(x, Layout)):
        raise RuntimeError("zero-dimensional tensors cannot be concatenated")


def picked_from_grid(ask: Ask, given: Given, device: str) -> Any:
    """Samples and channels of the image, positions of the grid."""
    return given["self"].new_empty((*given["self"].shape[:2], *given["grid"].shape[1:-1]))


def lstm_step(ask: Ask, given: Given, device: str) -> Any:
    """Output, next state and gates; torch's twin looks for the biases' device where there are none."""
    state = given["cx"]
    return torch.empty_like(state), torch.empty_like(state), torch.empty_like(given["input_gates"])


def gru_step(ask: Ask, given: Given, device: str) -> Any:
    """The next state, and five values of each of its elements for the backward pass."""
    state = given["hx"]
    return torch.empty_like(state), state.new_empty(state.shape[0], 5 * state.shape[1])


def gru_gradients(ask: Ask, given: Given, device: str) -> Any:
    """Of both gates, the state before, and both biases."""
    grad = given["grad_hy"]
    rows, gates = grad.shape[0], 3 * grad.shape[1]
    biases = [grad.new_empty(gates) if given["has_bias"] else None for _ in range(2)]
    return grad.new_empty(rows, gates), grad.new_empty(rows, gates), torch.empty_like(grad), *biases


# --- declarations -------------------------------------------------------------------------------------------------------
fact(
    "_linalg_svd linalg_eig convolution convolution_backward nonzero_static _embedding_bag _embedding_bag_forward_only",
    by_device=True,
)
for _name in ("_fft_c2c", "_fft_r2c", "_fft_c2r"):
    fact(_name, by_device=True, infer=last_dim_only, strides=transformed(_name))
fact("multi_margin_loss_backward multilabel_margin_loss_backward fractional_max_pool3d_backward", infer=like("self"))
fact("_ctc_loss_backward", infer=like("log_probs"))
fact("cudnn_grid_sampler", infer=picked_from_grid)
fact("cudnn_grid_sampler_backward", infer=lambda ask, given, device: [torch.empty_like(given[name]) for name in ("self", "grid")])
fact("_thnn_fused_lstm_cell", infer=lstm_step)
fact("_thnn_fused_gru_cell", infer=gru_step)
fact("_thnn_fused_gru_cell_backward", infer=gru_gradients)
fact("glu_jvp", infer=like("glu"))
fact("glu_backward_jvp", infer=like("grad_x"))
fact("view_copy.default", infer=copied_view)
fact("soft_margin_loss.default huber_loss.default", infer=with_("target", lambda x, given: x.to(given["self"].dtype)))
fact("_scaled_dot_product_flash_attention_for_cpu.default", infer=of_query)
fact("nll_loss nll_loss2d nll_loss_forward nll_loss_backward nll_loss2d_backward", infer=with_("target", labels))
fact("nll_loss2d_forward", infer=with_("target", labels), strides=row_major)
fact("_scaled_mm _scaled_mm_v2", infer=scaled_product)
for _side, _other in (("l", "left"), ("r", "right")):  # the kernels shift by bools, their meta kernels do not
    for _form, _end in (("", ""), ("i", "_")):
        _same = getattr(torch.ops.aten, f"bitwise_{_other}_shift{_end}")
        fact(f"__{_form}{_side}shift__", infer=lambda ask, given, device, same=_same: ask(given, same))

_LONG, _INT = torch.int64, torch.int32
fact("index_add index_select", refuses=(indices_of(_INT, _LONG),))
fact("index_reduce", refuses=(indices_of(_INT, _LONG), dim_in_range))
fact("index_copy put", refuses=(indices_of(_LONG),))
fact("index_fill", refuses=(indices_of(_LONG, error=IndexError),), strides=as_if_empty_like("self"))
fact(
    "index.Tensor _unsafe_index.Tensor index_put.default index_put_.default _index_put_impl_.default _unsafe_index_put.default",
    refuses=(places,),
)
fact(
    "binary_cross_entropy",
    refuses=(of_one_dtype("target"),),
    infer=with_("weight", of_input),
    strides=as_if_empty_like("self"),
)
fact("masked_scatter", refuses=(of_one_dtype("source"),))
fact("slice_scatter select_scatter diagonal_scatter", refuses=(dims_there,))
fact("unique_dim unique_consecutive unique_dim_consecutive", refuses=(dim_in_range,))
fact("addmm _addmm_activation", refuses=(added("self", lambda given: (*given["mat1"].shape[:1], *given["mat2"].shape[1:])),))
fact("addmv", refuses=(added("self", lambda given: given["mat"].shape[:1]),))
fact("select_backward", refuses=(of_view(torch.Tensor.select),))
fact("slice_backward", refuses=(of_view(torch.ops.aten.slice.Tensor),))
fact("diagonal_backward", refuses=(of_view(torch.Tensor.diagonal),))
fact("_softmax_backward_data", refuses=(as_large,))
fact("_log_softmax_backward_data", refuses=(as_large,), strides=row_major)
fact("allclose", refuses=(close_or_not,))
fact("renorm", refuses=(positive_norms,))
fact("native_layer_norm native_group_norm", refuses=(weights_of_dtype,))
fact(
    "native_batch_norm _native_batch_norm_legit.default _native_batch_norm_legit.no_stats",
    refuses=(weights_of_dtype,),
    strides=suggested_by("input"),
)
fact("cat.default", refuses=(no_numbers,))
fact("cumsum_", refuses=(no_bools,))
fact("narrow_copy", refuses=(dim_below_ndim,))
fact("multinomial.out", refuses=(of_dtypes("out", "out", _LONG),))  # results are not converted
