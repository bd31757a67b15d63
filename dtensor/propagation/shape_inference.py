"""Shape inference: global shapes, strides and dtypes of results.

The operator runs without data on the meta device. If its results depend on the device, it runs on fake tensors of the mesh's
device. If the rule states how shapes of results follow from dense operands, the operator runs once for all sizes. Dtypes and the
memory order of dims do not depend on sizes other than 0 and 1. On a CPU mesh it then runs on small tensors, which takes less time
than a meta kernel in Python. The first of these kernels also imports sympy and the compiler.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import cached_property
from typing import Any

import torch

from ..base.caches import BoundedDict
from ..base.memory_order import dense_stride, memory_order
from ..base.symbolic_sizes import hashable_size, hashable_sizes, symbolic_fake_mode
from ..base.tensor_tree import as_sequence
from ..base.torch_internals import (
    FakeTensorMode,
    UnsupportedFakeTensorException,
    count_dispatch_modes,
    without_modes,
)
from ..layout.layout import Layout
from ..rules.call import Call, Meta
from ..rules.rule import Rule
from .op_schema import OperatorSchema

META, CPU = torch.device("meta"), torch.device("cpu")


class ShapeInferenceError(Exception):
    """The shape of a result depends on data, or the operator has no meta kernel."""


CachedResults = tuple[
    tuple[torch.dtype, tuple[int, ...]] | None, ...
]  # dtype and memory order of each result, None for one that is absent
_INFERENCE_CACHE: BoundedDict[Any, CachedResults | None] = BoundedDict(
    4096, "shape_inference.results"
)  # None: the results do not have the shapes that the rule states


def infer_results(operator: OperatorSchema, rule: Rule | None, call: Call) -> tuple[Any, ...]:
    """Return shape, strides and dtype of each result of a call, by the cheapest inference that applies.

    The rule's shape function and cached dtypes come first, then a CPU kernel on few elements, then
    :func:`infer_from_operator`.

    Raises:
        ShapeInferenceError: the shape of a result depends on data, or the operator has no meta kernel.
    """
    shapes: Any = None if rule is None or rule.shapes is None else _shapes_by_rule(operator, rule, call)
    key = None if shapes is None else _size_independent_key(operator, call)
    if key is not None:
        cached = _INFERENCE_CACHE.get(key, ())
        if cached == () and (cached := _infer_from_samples(operator, call, shapes)) is not None:
            _INFERENCE_CACHE.keep(key, cached)
        if cached:
            return tuple(
                [one and Meta(shape, dense_stride(shape, one[1]), one[0]) for shape, one in zip(shapes, cached, strict=True)]
            )
    metas = None if rule is None or rule.measured else _infer_from_kernel(operator, call)
    if metas is None:
        metas = infer_from_operator(operator, call.arguments)
    if key is not None and key not in _INFERENCE_CACHE:
        _INFERENCE_CACHE.keep(key, _make_cache_entry(metas, shapes))
    return metas


def _infer_from_samples(operator: OperatorSchema, call: Call, shapes: Sequence[tuple[int, ...]]) -> CachedResults | None:
    """Run the CPU kernel on small tensors of ones, and return dtype and memory order of each result.

    Equal sizes are equal in the samples, and no size is larger. Return None if the results do not have the shapes that the rule
    states, or if the kernel refuses the samples or must not run.
    """
    if not _may_run_kernel(operator, call):
        return None
    sizes = sorted({size for layout in call.operands for size in layout.shape})
    small = {1: 1} | {size: small_size for small_size, size in enumerate(sizes, 2)}
    if not {size for shape in shapes for size in shape} <= small.keys():
        return None
    metas = _run_cpu_kernel(operator, call, lambda name, value: _to_sample(name, value, small))
    if metas is None:
        return None
    return _make_cache_entry(metas, tuple([tuple([small[size] for size in shape]) for shape in shapes]))


def _infer_from_kernel(operator: OperatorSchema, call: Call) -> tuple[Any, ...] | None:
    """Run the CPU kernel on tensors of these shapes, if they have few elements, and return the metadata of its results.

    Return None if they have more elements, or if the kernel refuses the trial values or must not run.
    """
    if operator.is_view or operator.outs or not operator.gives_tensors or operator.traits.by_device:
        return None
    if not _may_run_kernel(operator, call):
        return None
    if sum(math.prod(layout.shape) for layout in call.operands) > _MAX_SAMPLE_ELEMENTS or _DATA_TAGS & set(operator.func.tags):
        return None
    return _run_cpu_kernel(operator, call, lambda _, value: _make_trial_value(value, CPU))


_MAX_SAMPLE_ELEMENTS = 1 << 12  # a kernel on as many elements takes less time than a meta kernel in Python
_DATA_TAGS = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
_REFUSALS = (RuntimeError, TypeError, LookupError, ValueError, ArithmeticError, ShapeInferenceError)


def _may_run_kernel(operator: OperatorSchema, call: Call) -> bool:
    """Return True if the CPU kernel may run for inference: on a CPU mesh, without random numbers and symbolic sizes.

    Ask this before any size is compared: a comparison specializes a symbolic size.
    """
    if call.mesh.device_type != "cpu" or operator.func.namespace != "aten" or operator.seeded or not call.operands:
        return False
    return symbolic_fake_mode(call.arguments.values()) is None


def _run_cpu_kernel(operator: OperatorSchema, call: Call, to_value: Callable[[str, Any], Any]) -> tuple[Any, ...] | None:
    """Run the CPU kernel on ``to_value(name, argument)`` for each argument, and return the metadata of its results.

    Return None if the kernel refuses these values. No dispatch mode sees it, because a recorder would record it.
    """
    try:
        with without_modes() if count_dispatch_modes() else nullcontext():
            bound = {name: to_value(name, value) for name, value in call.arguments.items()}
            return _run_inference(operator, bound, call.arguments)
    except _REFUSALS:
        return None


def _to_sample(name: str, value: Any, small: dict[int, int]) -> Any:
    """Return an argument of a call with small sizes in place of its own: a tensor of ones for a layout.

    Raises:
        KeyError: a list has a size that no operand has.
    """
    if isinstance(value, Layout):
        shape = tuple([small[size] for size in value.shape])
        stride = dense_stride(shape, memory_order(tuple(value.shape), value.stride) or ())
        return torch.empty_strided(shape, stride, dtype=value.dtype, device=CPU).fill_(1)
    if type(value) in (list, tuple):
        if name in ("dim", "dims"):
            return value
        return [small[item] if type(item) is int else _to_sample(name, item, small) for item in value]
    if isinstance(value, torch.device):
        return CPU
    return False if name == "pin_memory" else value


def _make_cache_entry(metas: tuple[Any, ...], shapes: Sequence[tuple[int, ...]]) -> CachedResults | None:
    """Return dtype and memory order of each result, or None if the results do not have the shapes that the rule states."""
    if len(metas) != len(shapes) or not all(meta is None or isinstance(meta, Meta) for meta in metas):
        return None
    entry: list[Any] = [None if meta is None else (meta.dtype, memory_order(meta.shape, meta.stride)) for meta in metas]
    matches = (
        one is None or (one[1] is not None and meta.shape == shape) for one, meta, shape in zip(entry, metas, shapes, strict=True)
    )
    return tuple(entry) if all(matches) else None


def _shapes_by_rule(operator: OperatorSchema, rule: Rule, call: Call) -> Any:
    """Return the shapes that the rule states, or None if its shape function does not apply to these operands."""
    assert rule.shapes is not None
    if operator.traits.per_element or operator.outs or operator.traits.by_device:
        return None
    for layout in call.operands:
        if (
            0 in layout.shape
            or 1 in layout.shape
            or (not layout.dense and memory_order(tuple(layout.shape), layout.stride) is None)
        ):
            return None
    return rule.shapes(call)


def _size_independent_key(operator: OperatorSchema, call: Call) -> Any:
    """Return the inference-cache key of a call, without the sizes of tensors; None if an argument cannot be part of a key."""
    key: list[Any] = [operator.name, torch.get_default_dtype()]
    for value in call.arguments.values():
        kind = type(value)
        if kind is Layout:
            key.append(_memory_order_key(value))
        elif kind is float or kind is complex:
            key.append(kind)
        elif kind is list or kind is tuple:
            kinds = set(map(type, value))
            if not kinds <= {int, bool} and kinds != {Layout}:
                return None
            key.append(tuple(map(_memory_order_key, value)) if kinds == {Layout} else tuple(value))
        elif value is None or kind in _PLAIN_TYPES:
            key.append((kind, value))
        else:
            return None
    return tuple(key)


def _memory_order_key(layout: Layout) -> Any:
    return layout.dtype, layout.ndim, () if layout.dense else memory_order(tuple(layout.shape), layout.stride)


_PLAIN_TYPES = frozenset((bool, int, str, torch.dtype, torch.device, torch.layout, torch.memory_format))


def infer_from_operator(operator: OperatorSchema, arguments: dict[str, Any]) -> tuple[Any, ...]:
    """Run an operator on tensors without data, and return the :class:`Meta` of each return value.

    For a list it is a list, for a value that is no tensor None.

    Errors that plain torch raises for wrong arguments pass through.

    Raises:
        ShapeInferenceError: the shape of a result depends on data, or the operator has no meta kernel.
    """
    fake_mode = symbolic_fake_mode(arguments.values())
    if operator.traits.per_element and not operator.returns:
        if operator.traits.element_operator is not None and fake_mode is None:  # this only checks that sizes fit
            with suppress(ShapeInferenceError):
                _run_inference(operator, {name: _to_meta_tensors(value) for name, value in arguments.items()}, arguments)
        return ()
    if operator.returns and not operator.gives_tensors:
        return (None,) * len(operator.returns)  # a Python value depends on data
    if operator.traits.by_device or fake_mode is not None:
        with fake_mode or _FAKE_MODES.fake:
            return _run_inference(operator, {name: _to_meta_tensors(value, None) for name, value in arguments.items()}, arguments)
    bound = {name: _to_meta_tensors(value) if name in operator.tensors else value for name, value in arguments.items()}
    if bound.get("device") is not None:
        bound["device"] = META
    if bound.get("pin_memory"):
        bound["pin_memory"] = False
    if not _has_only_empty_tensors(operator, arguments):
        try:
            return _run_inference(operator, bound, arguments)
        except (RuntimeError, TypeError, IndexError, ValueError):
            metas = infer_by_trial_run(operator, arguments)
            if metas is None:
                raise
            return metas
    try:
        metas = _run_inference(operator, bound, arguments)
    except (RuntimeError, TypeError, IndexError, ValueError):
        metas = ()
    if sum(math.prod(meta.shape) for meta in metas if isinstance(meta, Meta)) > _MAX_TRIAL_ELEMENTS:
        return metas
    try:
        return _run_inference(operator, {name: _to_meta_tensors(value, CPU) for name, value in arguments.items()}, arguments)
    except ShapeInferenceError:
        return metas or _run_inference(operator, bound, arguments)


def _has_only_empty_tensors(operator: OperatorSchema, arguments: dict[str, Any]) -> bool:
    """Return True if all tensors are empty and the operator may run on them to infer its results.

    Without elements the kernel costs nothing. Meta kernels often accept or refuse other empty operands than kernels do.
    """
    if operator.func.namespace != "aten" or operator.seeded or operator.mutated:
        return False
    empty = False
    for value in arguments.values():
        if isinstance(value, Layout):
            if 0 not in value.shape:
                return False
            empty = True
    return empty


_MAX_TRIAL_ELEMENTS = 1 << 16  # limits results that are made from empty operands, as by new_zeros


def infer_mismatched_outs(operator: OperatorSchema, arguments: dict[str, Any]) -> tuple[Any, ...] | None:
    """Return the results' metadata of a call with ``out=`` tensors of another shape or dtype, from a run on a few small values.

    Meta functions differ from kernels in what they refuse, how they lay out what they resize, and whether they warn. Return None
    if the tensors fit, if there is more than a little to compute, or if the operator refuses the trial values.
    """
    outs = [arguments[name] for name in operator.outs if isinstance(arguments.get(name), Layout)]
    if operator.func.namespace != "aten" or not outs or symbolic_fake_mode(arguments.values()) is not None:
        return None
    device = _trial_device(outs[0])
    if operator.seeded and (arguments.get("generator") is not None or device.type != "cpu"):
        return None
    shape_depends_on_data = torch.Tag.dynamic_output_shape in operator.func.tags
    with torch.random.fork_rng((), enabled=operator.seeded):
        try:
            if not shape_depends_on_data:
                with _FAKE_MODES.fake:  # allocates nothing if sizes determine the results
                    results = _call_without_outs(
                        operator, {name: _to_meta_tensors(value, None) for name, value in arguments.items()}
                    )
                if _outs_fit(results, outs) or sum(x.numel() for x in results) > _MAX_TRIAL_ELEMENTS:
                    return None
            if sum(math.prod(x.shape) for x in _collect_layouts(arguments)) > _MAX_TRIAL_ELEMENTS:
                return None
            results = _call_without_outs(operator, {name: _make_trial_value(value, device) for name, value in arguments.items()})
        except (RuntimeError, TypeError, IndexError, ValueError):
            return None
        if _outs_fit(results, outs, shape_depends_on_data):
            return None
        result = operator.call({name: _make_trial_value(value, device) for name, value in arguments.items()})
    return None if shape_depends_on_data else _result_metas(operator, result)


def infer_by_trial_run(operator: OperatorSchema, arguments: dict[str, Any]) -> tuple[Any, ...] | None:
    """Return the results' metadata of a call that the meta function refuses, from a run of the operator on a few values.

    What the operator raises, all ranks raise.

    Return None if it cannot run like this, or if the shapes of its results depend on data.
    """
    layouts = _collect_layouts(arguments)
    if (
        operator.func.namespace != "aten"
        or operator.seeded
        or not layouts
        or sum(math.prod(x.shape) for x in layouts) > _MAX_TRIAL_ELEMENTS
    ):
        return None
    result = operator.call({name: _make_trial_value(value, _trial_device(layouts[0])) for name, value in arguments.items()})
    if torch.Tag.dynamic_output_shape in operator.func.tags or result is None:
        return None
    return _result_metas(operator, result)


def _result_metas(operator: OperatorSchema, result: Any) -> tuple[Any, ...]:
    return tuple(map(_to_meta, (result,) if len(operator.returns) == 1 else result))


def _trial_device(layout: Layout) -> torch.device:
    """Return the device of trial values for a layout: that of its mesh, or the CPU for a meta mesh."""
    return torch.device("cpu" if layout.mesh.device_type == "meta" else layout.mesh.device_type)


def _call_without_outs(operator: OperatorSchema, bound: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    result = operator.call(bound, operator.func.overloadpacket)
    return result if isinstance(result, tuple) else (result,)


def _outs_fit(results: tuple[torch.Tensor, ...], outs: list[Layout], shape_depends_on_data: bool = False) -> bool:
    """Return True if results have the dtypes and shapes of the ``out=`` tensors. Shapes that depend on data are not compared."""
    return all(
        x.dtype == out.dtype and (shape_depends_on_data or x.shape == out.shape) for x, out in zip(results, outs, strict=False)
    )


def _collect_layouts(arguments: dict[str, Any]) -> list[Layout]:
    return [x for value in arguments.values() for x in as_sequence(value) if isinstance(x, Layout)]


def _make_trial_value(value: Any, device: torch.device) -> Any:
    """Return an argument with tensors of ones, unit matrices or integer zeros for layouts: values that most operators accept."""
    if type(value) in (list, tuple):
        return [_make_trial_value(item, device) for item in value]
    if not isinstance(value, Layout):
        return value
    storage_size = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride, strict=True))
    tensor = torch.zeros(max(0, storage_size), dtype=value.dtype, device=device).as_strided(value.shape, value.stride)
    if value.dtype.is_floating_point or value.dtype.is_complex:
        with suppress(RuntimeError):  # raised if elements share memory
            (tensor.diagonal(0, -2, -1) if value.ndim > 1 else tensor).fill_(1)
    return tensor


class _FakeModes(threading.local):
    """A fake tensor mode for each thread, because a mode remembers that one of its kernels runs."""

    @cached_property
    def fake(self) -> FakeTensorMode:
        """Return the mode of this thread. It is made at first use, because making it imports torch's compiler."""
        return FakeTensorMode()


_FAKE_MODES = _FakeModes()


def _run_inference(operator: OperatorSchema, bound: dict[str, Any], arguments: dict[str, Any]) -> tuple[Any, ...]:
    """Run an operator on ``bound``, tensors without data, and return metadata and errors as the kernels would give them."""
    outs = [name for name in operator.outs if isinstance(bound.get(name), torch.Tensor)] if operator.outs else ()
    out_shapes = {name: bound[name].shape for name in outs} if outs else None
    try:
        result = _call_inference_function(operator, bound, arguments)
    except (NotImplementedError, UnsupportedFakeTensorException, ZeroDivisionError) as error:
        raise ShapeInferenceError(str(error)) from error  # ZeroDivisionError: torch's decompositions of empty means
    except (AssertionError, KeyError) as error:
        raise RuntimeError(f"{operator.name}: {error}") from error  # the kernels raise this class
    except RuntimeError as error:
        if "meta" in str(error).lower():
            raise ShapeInferenceError(str(error)) from error
        if "zero-size dimension" in str(error) and bound.get("dim") not in (None, [], ()):
            raise IndexError(f"{operator.name}: {error}") from error  # the kernels raise this class
        raise
    if result is None:
        return ()
    values = (result,) if len(operator.returns) == 1 else result
    metas = _apply_stride_function(operator, tuple([_to_meta(value) for value in values]), bound)
    if out_shapes is None:
        return metas
    pairs = zip(operator.returns, metas, strict=False)
    resized = [isinstance(meta, Meta) and out_shapes.get(str(out), meta.shape) != meta.shape for out, meta in pairs]
    return _use_strides_of_new_results(operator, bound, metas, resized) if any(resized) else metas


def _use_strides_of_new_results(
    operator: OperatorSchema, bound: dict[str, Any], metas: tuple[Any, ...], resized: list[bool]
) -> tuple[Any, ...]:
    """Return the metas with the strides of new results for ``out=`` tensors that are resized: kernels lay both out alike."""
    try:
        result = operator.call(bound, operator.func.overloadpacket)
    except (RuntimeError, TypeError, NotImplementedError):
        return metas
    new_metas = _apply_stride_function(
        operator, tuple(_to_meta(value) for value in ((result,) if len(metas) == 1 else result)), bound
    )
    return tuple(
        Meta(meta.shape, own.stride, meta.dtype) if is_resized and isinstance(own, Meta) and own.shape == meta.shape else meta
        for meta, own, is_resized in zip(metas, new_metas, resized, strict=True)
    )


def _apply_stride_function(operator: OperatorSchema, metas: tuple[Any, ...], arguments: dict[str, Any]) -> tuple[Any, ...]:
    """Return the metas with the strides that the operator's traits state for new results."""
    stride_function = operator.traits.strides
    if stride_function is None:
        return metas
    owners_and_metas = zip(operator.returns, metas, strict=True)
    return tuple(
        [
            Meta(x.shape, hashable_sizes(stride_function(x, arguments)), x.dtype) if own is None and isinstance(x, Meta) else x
            for own, x in owners_and_metas
        ]
    )


def _call_inference_function(operator: OperatorSchema, bound: dict[str, Any], arguments: dict[str, Any]) -> Any:
    """Call the operator on tensors without data, or the function that its traits declare for inference."""
    infer = operator.traits.infer
    try:
        if infer is None:
            return operator.call(bound)
        device = next((x.mesh.device_type for x in arguments.values() if isinstance(x, Layout)), "cpu")
        return infer(operator.call, bound, device)
    except TypeError as error:
        if len(operator.outs) != 1 or "'out'" not in str(error):
            raise
    # Some of torch's meta functions in Python are registered for overloads with out= and do not take it.
    return operator.call(bound, operator.func.overloadpacket).to(bound[operator.outs[0]].dtype)


def _to_meta_tensors(value: Any, device: torch.device | None = META) -> Any:
    """Return an argument with tensors without data, on ``device`` (None: on the device of their mesh), for layouts."""
    if isinstance(value, Layout):
        return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=device or _trial_device(value))
    if type(value) in (list, tuple):
        return [_to_meta_tensors(item, device) for item in value]
    return value


def _to_meta(value: Any) -> Any:
    """Return the metadata of a result: shape, strides, dtype and offset; lists element by element."""
    if isinstance(value, torch.Tensor):
        storage_offset_bytes = hashable_size(value.storage_offset() * value.itemsize)
        return Meta(hashable_sizes(value.shape), hashable_sizes(value.stride()), value.dtype, storage_offset_bytes)
    if isinstance(value, (list, tuple)):
        return [_to_meta(item) for item in value]
    return None
