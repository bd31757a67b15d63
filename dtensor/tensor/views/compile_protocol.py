"""Remote views in compiled programs: what one is a view of, and how."""

from __future__ import annotations

from typing import Any

import torch

from ...base.modes import MODES
from ...propagation.op_schema import operator_of
from ..autograd import grad_layout
from ..compile_protocol import FlattenMethod
from ..dtensor import DTensor, wrap
from .lazy_view import Origin, RemoteView, make_views, plan_of, trace_to_base


def _flatten_view(view: RemoteView) -> tuple[list[str], tuple[Any, ...]]:
    root, links = trace_to_base(view)
    ways = tuple((o.operator.func, tuple(o.args[1:]), tuple(o.kwargs.items()), place) for o, place in links)
    return ["_root"], (view._layout, MODES.explicit, MODES.implicit_replication, root._layout, ways)


def _unflatten_view(pieces: dict[str, torch.Tensor], constants: tuple[Any, ...], size: Any, stride: Any) -> Any:
    view = wrap(pieces["_root"], constants[3])
    view.__dict__["_counted"] = _UNCOUNTED  # who else has this memory is not known: it is computed whenever it is read
    for func, others, options, place in constants[4]:
        operator, args, kwargs = operator_of(func), (view, *others), dict(options)
        made = make_views(Origin(view, operator, args, kwargs, plan_of(operator, args, kwargs)))
        view = made[place] if isinstance(made, list) else made
    return view


def _view_to_tangent_layout(view: RemoteView) -> DTensor:
    """A gradient is no view."""
    layout = grad_layout(view._layout, None)
    return wrap(layout.block_beside(view._root, layout.mesh.current_member()), layout)


with torch.inference_mode():
    _UNCOUNTED = torch.empty(0, device="cpu")  # of inference mode: without a version


def install_view_flattening() -> None:
    """Define on remote views what ``torch.compile`` asks of a tensor subclass."""
    RemoteView.__tensor_flatten__ = FlattenMethod(_flatten_view, "_root")
    RemoteView.__tensor_unflatten__ = staticmethod(_unflatten_view)
    RemoteView.__coerce_tangent_metadata__ = _view_to_tangent_layout  # type: ignore[assignment]  # of views alone
