"""Global shapes, strides and dtypes of results, found by running the operator without data."""

from __future__ import annotations

from typing import Any

import torch

from .layout import Layout
from .operators import Operator
from .rules.call import Meta

META = torch.device("meta")


class NotInferable(Exception):
    """The shape of a result depends on data, or the operator has no meta kernel."""


def infer(operator: Operator, arguments: dict[str, Any]) -> tuple[Any, ...]:
    """Per return value of the operator its :class:`Meta` (a list of them for a list, None for what is no tensor).

    Raises:
        NotInferable: see there. Errors that plain torch raises for wrong arguments pass through.
    """
    if operator.per_element and not operator.returns:
        return ()  # some optimizer steps have no meta kernel, and nothing is to be found out
    if operator.returns and not operator.gives_tensors:
        return (None,) * len(operator.returns)  # a Python value: it depends on data
    bound = {name: _to_meta(value) for name, value in arguments.items()}
    if bound.get("device") is not None:
        bound["device"] = META
    if bound.get("pin_memory"):
        bound["pin_memory"] = False
    try:
        result = operator.call(bound)
    except (NotImplementedError, torch._subclasses.fake_tensor.UnsupportedFakeTensorException, ZeroDivisionError) as error:
        raise NotInferable(str(error)) from error  # divisions: torch's own decompositions of means over no elements
    except RuntimeError as error:
        if "meta" in str(error).lower():
            raise NotInferable(str(error)) from error
        raise
    if result is None:
        return ()
    if len(operator.returns) == 1:
        return (_meta_of(result),)
    return tuple(_meta_of(value) for value in result)


def _to_meta(value: Any) -> Any:
    if isinstance(value, Layout):
        return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=META)
    if type(value) in (list, tuple):
        return [_to_meta(item) for item in value]
    return value


def _meta_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return Meta(tuple(value.shape), value.stride(), value.dtype)
    if isinstance(value, (list, tuple)):
        return [_meta_of(item) for item in value]
    return None
