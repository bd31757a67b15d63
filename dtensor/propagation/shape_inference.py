"""Global shapes, strides and dtypes of results.

Found by running the operator without data, on the meta device; operators whose results look different from device to device run
on fake tensors of the mesh's device instead. Where a rule says how the shapes of results follow from those of dense operands, the
operator is asked once for all sizes: dtypes, and the order of dims in memory, do not depend on sizes that are neither 0 nor 1.
"""

from __future__ import annotations

import math
import threading
from contextlib import suppress
from functools import cached_property
from typing import Any

import torch

from ..base.caches import Bounded
from ..base.memory_order import dense_in, memory_order
from ..base.symbolic_sizes import fake_mode_of, size_of, sizes
from ..base.tensor_tree import listed
from ..base.torch_internals import FakeTensorMode, UnsupportedFakeTensorException
from ..layout.layout import Layout
from ..rules.call import Call, Meta
from ..rules.rule import Rule, Shapes
from .op_schema import Operator

META, CPU = torch.device("meta"), torch.device("cpu")


class NotInferable(Exception):
    """The shape of a result depends on data, or the operator has no meta kernel."""


Answer = tuple[tuple[torch.dtype, tuple[int, ...]] | None, ...]  # dtype and memory order of each result that there is
_ANSWERS: Bounded[Any, Answer | None] = Bounded(4096, "infer.answers")  # None: the results do not look as the rule says


def results_of(operator: Operator, rule: Rule | None, call: Call) -> tuple[Any, ...]:
    """As :func:`infer`, without asking the operator where its rule and what is known of it tell.

    Raises:
        NotInferable: see :func:`infer`.
    """
    shapes = None if rule is None or rule.shapes is None else _lawful(operator, rule, call)
    key = None if shapes is None else _beside_sizes(operator, call)
    if shapes is None or key is None:
        return infer(operator, call.arguments)
    known = _ANSWERS.get(key, ())
    if known:
        return tuple([one and Meta(shape, dense_in(shape, one[1]), one[0]) for shape, one in zip(shapes, known, strict=True)])
    metas = infer(operator, call.arguments)
    if known is not None:
        _ANSWERS.keep(key, _as_told(metas, shapes))
    return metas


def _as_told(metas: tuple[Any, ...], shapes: Shapes) -> Answer | None:
    if len(metas) != len(shapes) or not all(meta is None or isinstance(meta, Meta) for meta in metas):
        return None
    told: list[Any] = [None if meta is None else (meta.dtype, memory_order(meta.shape, meta.stride)) for meta in metas]
    as_told = (
        one is None or (one[1] is not None and meta.shape == shape) for one, meta, shape in zip(told, metas, shapes, strict=True)
    )
    return tuple(told) if all(as_told) else None


def _lawful(operator: Operator, rule: Rule, call: Call) -> Any:
    """The shapes that the rule tells, for operands that the law speaks of."""
    assert rule.shapes is not None
    if operator.facts.per_element or operator.outs or operator.facts.by_device:
        return None
    for layout in call.operands:
        if (
            0 in layout.shape
            or 1 in layout.shape
            or (not layout.dense and memory_order(tuple(layout.shape), layout.stride) is None)
        ):
            return None
    return rule.shapes(call)


def _beside_sizes(operator: Operator, call: Call) -> Any:
    """What dtypes follow from: all arguments but the sizes of tensors; None where that is not told."""
    key: list[Any] = [operator.name, torch.get_default_dtype()]
    for value in call.arguments.values():
        kind = type(value)
        if kind is Layout:
            key.append(_in_memory(value))
        elif kind is float or kind is complex:
            key.append(kind)
        elif kind is list or kind is tuple:
            kinds = set(map(type, value))
            if not kinds <= {int, bool} and kinds != {Layout}:
                return None
            key.append(tuple(map(_in_memory, value)) if kinds == {Layout} else tuple(value))
        elif value is None or kind in _PLAIN:
            key.append((kind, value))
        else:
            return None
    return tuple(key)


def _in_memory(layout: Layout) -> Any:
    return layout.dtype, layout.ndim, () if layout.dense else memory_order(tuple(layout.shape), layout.stride)


_PLAIN = frozenset((bool, int, str, torch.dtype, torch.device, torch.layout, torch.memory_format))


def infer(operator: Operator, arguments: dict[str, Any]) -> tuple[Any, ...]:
    """Per return value of the operator its :class:`Meta` (a list of them for a list, None for what is no tensor).

    Raises:
        NotInferable: see there. Errors that plain torch raises for wrong arguments pass through.
    """
    mode = fake_mode_of(arguments.values())
    if operator.facts.per_element and not operator.returns:
        if operator.facts.each is not None and mode is None:  # nothing is found out but whether sizes fit
            with suppress(NotInferable):
                _run(operator, {name: _to_meta(value) for name, value in arguments.items()}, arguments)
        return ()
    if operator.returns and not operator.gives_tensors:
        return (None,) * len(operator.returns)  # a Python value: it depends on data
    if operator.facts.by_device or mode is not None:
        with mode or _MODES.fake:
            return _run(operator, {name: _to_meta(value, None) for name, value in arguments.items()}, arguments)
    bound = {name: _to_meta(value) if name in operator.tensors else value for name, value in arguments.items()}
    if bound.get("device") is not None:
        bound["device"] = META
    if bound.get("pin_memory"):
        bound["pin_memory"] = False
    if not _without_elements(operator, arguments):
        try:
            return _run(operator, bound, arguments)
        except (RuntimeError, TypeError, IndexError, ValueError):
            metas = asked(operator, arguments)
            if metas is None:
                raise
            return metas
    try:
        metas = _run(operator, bound, arguments)
    except (RuntimeError, TypeError, IndexError, ValueError):
        metas = ()
    if sum(math.prod(meta.shape) for meta in metas if isinstance(meta, Meta)) > _SMALL:
        return metas
    try:
        return _run(operator, {name: _to_meta(value, CPU) for name, value in arguments.items()}, arguments)
    except NotInferable:
        return metas or _run(operator, bound, arguments)


def _without_elements(operator: Operator, arguments: dict[str, Any]) -> bool:
    """Whether it costs nothing to ask the operator itself, which of tensors without elements often says something else than its
    meta kernel: what one refuses the other takes, or they use other words."""
    if operator.func.namespace != "aten" or operator.seeded or operator.mutated:
        return False
    empty = False
    for value in arguments.values():
        if isinstance(value, Layout):
            if 0 not in value.shape:
                return False
            empty = True
    return empty


_SMALL = 1 << 16  # elements of results that are made of nothing, as by new_zeros


def asked_with_outs(operator: Operator, arguments: dict[str, Any]) -> tuple[Any, ...] | None:
    """What the operator itself makes of ``out=`` tensors that are not of the shape or dtype of its results: kernels say otherwise
    than their meta functions what they refuse, how they lay out what they resize, and whether they warn. It is asked on a few
    numbers of its own. None: they fit, or there is more than a little to compute, or numbers like these are refused anyway.
    """
    outs = [arguments[name] for name in operator.outs if isinstance(arguments.get(name), Layout)]
    if operator.func.namespace != "aten" or not outs or fake_mode_of(arguments.values()) is not None:
        return None
    device = _device_of(outs[0])
    if operator.seeded and (arguments.get("generator") is not None or device.type != "cpu"):
        return None
    data_decide = torch.Tag.dynamic_output_shape in operator.func.tags
    with torch.random.fork_rng((), enabled=operator.seeded):
        try:
            if not data_decide:
                with _MODES.fake:  # makes nothing where the sizes alone say what comes out
                    new = _made(operator, {name: _to_meta(value, None) for name, value in arguments.items()})
                if _fit(new, outs) or sum(x.numel() for x in new) > _SMALL:
                    return None
            if sum(math.prod(x.shape) for x in _laid_out(arguments)) > _SMALL:
                return None
            new = _made(operator, {name: _of_numbers(value, device) for name, value in arguments.items()})
        except (RuntimeError, TypeError, IndexError, ValueError):
            return None
        if _fit(new, outs, data_decide):
            return None
        result = operator.call({name: _of_numbers(value, device) for name, value in arguments.items()})
    return None if data_decide else _metas_of(operator, result)


def asked(operator: Operator, arguments: dict[str, Any]) -> tuple[Any, ...] | None:
    """What the operator itself makes of a few numbers, where its meta function refuses them: what it raises, all raise.

    None: it cannot be asked, or data decide what comes out.
    """
    laid_out = _laid_out(arguments)
    if operator.func.namespace != "aten" or operator.seeded or not laid_out or sum(math.prod(x.shape) for x in laid_out) > _SMALL:
        return None
    result = operator.call({name: _of_numbers(value, _device_of(laid_out[0])) for name, value in arguments.items()})
    if torch.Tag.dynamic_output_shape in operator.func.tags or result is None:
        return None
    return _metas_of(operator, result)


def _metas_of(operator: Operator, result: Any) -> tuple[Any, ...]:
    return tuple(map(_meta_of, (result,) if len(operator.returns) == 1 else result))


def _device_of(layout: Layout) -> torch.device:
    """Where numbers of one's own are made beside tensors of this layout."""
    return torch.device("cpu" if layout.mesh.device_type == "meta" else layout.mesh.device_type)


def _made(operator: Operator, bound: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    made = operator.call(bound, operator.func.overloadpacket)
    return made if isinstance(made, tuple) else (made,)


def _fit(new: tuple[torch.Tensor, ...], outs: list[Layout], data_decide: bool = False) -> bool:
    return all(x.dtype == out.dtype and (data_decide or x.shape == out.shape) for x, out in zip(new, outs, strict=False))


def _laid_out(arguments: dict[str, Any]) -> list[Layout]:
    return [x for value in arguments.values() for x in listed(value) if isinstance(x, Layout)]


def _of_numbers(value: Any, device: torch.device) -> Any:
    """Layouts as tensors that hold ones, matrices the unit matrix, integers zeros: what most operators take."""
    if type(value) in (list, tuple):
        return [_of_numbers(item, device) for item in value]
    if not isinstance(value, Layout):
        return value
    reach = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride, strict=True))
    made = torch.zeros(max(0, reach), dtype=value.dtype, device=device).as_strided(value.shape, value.stride)
    if value.dtype.is_floating_point or value.dtype.is_complex:
        with suppress(RuntimeError):  # where elements share memory
            (made.diagonal(0, -2, -1) if value.ndim > 1 else made).fill_(1)
    return made


class _Modes(threading.local):
    """A mode for fake tensors; every thread has its own, since a mode remembers that one of its kernels runs."""

    @cached_property
    def fake(self) -> FakeTensorMode:
        """Made where it is asked for: making one imports torch's compiler."""
        return FakeTensorMode()


_MODES = _Modes()


def _run(operator: Operator, bound: dict[str, Any], arguments: dict[str, Any]) -> tuple[Any, ...]:
    outs = [name for name in operator.outs if isinstance(bound.get(name), torch.Tensor)] if operator.outs else ()
    sizes = {name: bound[name].shape for name in outs} if outs else None
    try:
        result = _result_of(operator, bound, arguments)
    except (NotImplementedError, UnsupportedFakeTensorException, ZeroDivisionError) as error:
        raise NotInferable(str(error)) from error  # divisions: torch's own decompositions of means over no elements
    except (AssertionError, KeyError) as error:
        raise RuntimeError(f"{operator.name}: {error}") from error  # what the kernels raise
    except RuntimeError as error:
        if "meta" in str(error).lower():
            raise NotInferable(str(error)) from error
        if "zero-size dimension" in str(error) and bound.get("dim") not in (None, [], ()):
            raise IndexError(f"{operator.name}: {error}") from error  # what the kernels raise
        raise
    if result is None:
        return ()
    values = (result,) if len(operator.returns) == 1 else result
    metas = _as_computed(operator, tuple([_meta_of(value) for value in values]), bound)
    if sizes is None:
        return metas
    pairs = zip(operator.returns, metas, strict=False)
    resized = [isinstance(meta, Meta) and sizes.get(str(out), meta.shape) != meta.shape for out, meta in pairs]
    return _as_new(operator, bound, metas, resized) if any(resized) else metas


def _as_new(operator: Operator, bound: dict[str, Any], metas: tuple[Any, ...], resized: list[bool]) -> tuple[Any, ...]:
    """With the strides of new results where an ``out=`` tensor takes another shape: kernels lay it out as they would those."""
    try:
        made = operator.call(bound, operator.func.overloadpacket)
    except (RuntimeError, TypeError, NotImplementedError):
        return metas
    new = _as_computed(operator, tuple(_meta_of(value) for value in ((made,) if len(metas) == 1 else made)), bound)
    return tuple(
        Meta(meta.shape, own.stride, meta.dtype) if laid_out and isinstance(own, Meta) and own.shape == meta.shape else meta
        for meta, own, laid_out in zip(metas, new, resized, strict=True)
    )


def _as_computed(operator: Operator, metas: tuple[Any, ...], given: dict[str, Any]) -> tuple[Any, ...]:
    """With the strides that a kernel gives new results."""
    law = operator.facts.strides
    if law is None:
        return metas
    owned = zip(operator.returns, metas, strict=True)
    return tuple([Meta(x.shape, sizes(law(x, given)), x.dtype) if own is None and isinstance(x, Meta) else x for own, x in owned])


def _result_of(operator: Operator, bound: dict[str, Any], arguments: dict[str, Any]) -> Any:
    infer = operator.facts.infer
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


def _to_meta(value: Any, device: torch.device | None = META) -> Any:
    """Layouts as tensors without data, on ``device`` (None: where their mesh is)."""
    if isinstance(value, Layout):
        where = device or torch.device("cpu" if value.mesh.device_type == "meta" else value.mesh.device_type)
        return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=where)
    if type(value) in (list, tuple):
        return [_to_meta(item, device) for item in value]
    return value


def _meta_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        start = size_of(value.storage_offset() * value.itemsize)
        return Meta(sizes(value.shape), sizes(value.stride()), value.dtype, start)
    if isinstance(value, (list, tuple)):
        return [_meta_of(item) for item in value]
    return None
