"""Products of rows that are a stack seen as one matrix, ``x.view(-1, k) @ w``, computed on the stack itself.

``torch.nn.functional.linear``, ``matmul`` and many a model fold all dims but the last into rows. Where an inner one of them is
sharded (a sequence), blocks of the stack are no blocks of rows: the view is a remote one, and to read it moves every element.
But a product acts on each row by itself, and sums over rows are sums over the stack. So the view is never read: the rows of the
product are a view of the product's stack, and seeing them as a stack again gives that stack. The same holds of stacks of
matrices, which torch folds into one dim before ``bmm``: a batch of heads that are sharded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch

from ...dispatch.dispatcher import dispatch
from ..dtensor import DTensor
from .remote_view import RemoteView

_aten = torch.ops.aten


def stack_of(rows: Any, kept: int = 1) -> DTensor | None:
    """The stack of which ``rows`` is all dims but the last ``kept`` folded into one."""
    if not isinstance(rows, RemoteView) or rows._origin.shows != "all" or rows._origin.pinned:
        return None
    base = rows._origin.base
    folded = rows.ndim == kept + 1 < base.ndim and rows.shape[-kept:] == base.shape[-kept:] and 0 not in base.shape[-kept:]
    return base if folded and not base.is_complex() else None


def matrices_of(x: Any) -> DTensor | None:
    """The stack of matrices of which ``x`` is all dims but the last two folded into one, or that turned."""
    found = stack_of(x, 2)
    if found is not None or not isinstance(x, RemoteView) or x.ndim != 3 or x._origin.pinned:
        return found
    turned = x._origin.operator.func is _aten.transpose.int and {d % 3 for d in x._origin.args[1:]} == {1, 2}
    found = stack_of(x._origin.base, 2) if turned else None
    return None if found is None else cast(DTensor, _aten.transpose.int(found, -2, -1))


def columns_of(x: Any) -> DTensor | None:
    """The stack whose rows are the columns of ``x``."""
    if not isinstance(x, RemoteView) or x.ndim != 2 or x._origin.pinned:
        return None
    func, rest = x._origin.operator.func, x._origin.args[1:]
    turned = func is _aten.t.default or (func is _aten.transpose.int and {d % 2 for d in rest} == {0, 1})
    return stack_of(x._origin.base) if turned else None


def product(x: Any, y: Any) -> Any:
    stack = stack_of(x)
    if stack is not None:
        return rows_of(_run(_aten.matmul.default, stack, y))
    columns, rows = columns_of(x), stack_of(y)
    if columns is None or rows is None or columns.shape[:-1] != rows.shape[:-1]:
        return NotImplemented
    letters = "".join(chr(ord("a") + d) for d in range(rows.ndim - 1))
    made = _run(_aten.einsum.default, f"{letters}y,{letters}z->yz", [columns, rows])
    return made if made.is_contiguous() else _aten.clone.default(made, memory_format=torch.contiguous_format)


def products(x: Any, y: Any) -> Any:
    """Of matrices one by one; those of one operand may be cut where the other's are not."""
    one, other = matrices_of(x), matrices_of(y)
    if one is None and other is None:
        return NotImplemented
    lead = (one if other is None else other).shape[:-2]  # type: ignore[union-attr]  # one of them is there
    one, other = (_aten.view.default(z, [*lead, *z.shape[1:]]) if s is None else s for z, s in ((x, one), (y, other)))
    return rows_of(_run(_aten.matmul.default, one, other), 2) if one.shape[:-2] == other.shape[:-2] else NotImplemented


def product_and_bias(bias: Any, x: Any, y: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    stack = stack_of(x)
    if stack is None or bias.ndim != 1 or type(beta) is not int or type(alpha) is not int or beta != 1 or alpha != 1:
        return NotImplemented
    return rows_of(_run(_aten.linear.default, stack, _aten.t.default(y), bias))


def total(x: Any, dim: Any, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """The sum of all rows."""
    stack = stack_of(x)
    if stack is None or list(dim or ()) not in ([0], [-2]):
        return NotImplemented
    made = _aten.sum.dim_IntList(stack, list(range(stack.ndim - 1)), False, dtype=dtype)
    return _aten.view.default(made, [1, stack.shape[-1]]) if keepdim else made


def unfolded(x: Any, shape: Any) -> Any:
    """The stack itself, where rows are seen in its shape again."""
    stack = stack_of(x, x.ndim - 1)
    if stack is None or list(shape) != list(stack.shape):
        return NotImplemented
    return _aten.alias.default(stack) if stack.is_contiguous() else _aten.view.default(stack, list(shape))


def rows_of(stack: Any, kept: int = 1) -> Any:
    return _aten.view.default(stack, [math.prod(stack.shape[:-kept]), *stack.shape[-kept:]])


def _run(func: Any, *args: Any, **kwargs: Any) -> Any:
    """An operator as it is, not the parts that torch takes it to."""
    return dispatch(DTensor, func, (), args, kwargs)


_ON_THE_STACK: dict[Any, Callable[..., Any]] = {
    _aten.mm.default: product,
    _aten.bmm.default: products,
    _aten.addmm.default: product_and_bias,
    _aten.sum.dim_IntList: total,
    _aten.view.default: unfolded,
    _aten._unsafe_view.default: unfolded,
}


def on_the_stack(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What ``func`` gives where it need not read the rows; NotImplemented elsewhere."""
    found = _ON_THE_STACK.get(func)
    return NotImplemented if found is None else found(*args, **kwargs)
