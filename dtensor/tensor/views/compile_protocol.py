"""Remote views in compiled programs: what one is a view of, and how."""

from __future__ import annotations

from typing import Any

import torch

from ...base.modes import MODES
from ...propagation.op_schema import operator_of
from ..autograd import grad_layout
from ..compile_protocol import Flatten
from ..dtensor import DTensor, wrap
from .lazy_view import Origin, RemoteView, chain_of, plan_of, views_of


def _flatten(view: RemoteView) -> tuple[list[str], tuple[Any, ...]]:
    root, links = chain_of(view)
    ways = tuple((o.operator.func, tuple(o.args[1:]), tuple(o.kwargs.items()), place) for o, place in links)
    return ["_root"], (view._layout, MODES.explicit, MODES.implicit_replication, root._layout, ways)


def _unflatten(pieces: dict[str, torch.Tensor], constants: tuple[Any, ...], size: Any, stride: Any) -> Any:
    view = wrap(pieces["_root"], constants[3])
    view.__dict__["_counted"] = _NOBODY  # who else has this memory is not known: it is computed whenever it is read
    for func, others, options, place in constants[4]:
        operator, args, kwargs = operator_of(func), (view, *others), dict(options)
        made = views_of(Origin(view, operator, args, kwargs, plan_of(operator, args, kwargs)))
        view = made[place] if isinstance(made, list) else made
    return view


def _as_any_tangent(view: RemoteView) -> DTensor:
    """A gradient is no view."""
    layout = grad_layout(view._layout, None)
    return wrap(layout.block_beside(view._root, layout.mesh.current_member()), layout)


with torch.inference_mode():
    _NOBODY = torch.empty(0, device="cpu")  # of inference mode: without a version


def install_view_flattening() -> None:
    """Define on remote views what ``torch.compile`` asks of a tensor subclass."""
    RemoteView.__tensor_flatten__ = Flatten(_flatten, "_root")
    RemoteView.__tensor_unflatten__ = staticmethod(_unflatten)
    RemoteView.__coerce_tangent_metadata__ = _as_any_tangent  # type: ignore[assignment]  # of views alone
