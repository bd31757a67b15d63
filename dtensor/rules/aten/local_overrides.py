"""Local overrides: torch functions that replace operators on local tensors, and the elements that views have."""

from __future__ import annotations

from typing import Any

import torch

from ...base.caches import memoize
from ...base.symbolic_sizes import hashable_sizes
from ..op_traits import declare_list_prefix, declare_traits


def _slice(x: torch.Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> torch.Tensor:
    """Slice a local tensor by indexing, in place of the slower ``aten::slice``."""
    if dim == 0:
        return x[start:end:step]
    if dim == 1:
        return x[:, start:end:step]
    return x[_sliced(dim % x.ndim, *hashable_sizes((start, end, step)))]


@memoize(4096)
def _sliced(dim: int, start: int | None, end: int | None, step: int) -> tuple[slice, ...]:
    return (*(slice(None),) * dim, slice(start, end, step))


def _to_copy(x: torch.Tensor, *, layout: Any = None, pin_memory: Any = None, **options: Any) -> torch.Tensor:
    """Convert a local tensor by ``Tensor.to``, in place of the slower ``aten::_to_copy``."""
    if layout in (None, torch.strided) and not pin_memory:
        return x.to(copy=True, **options)
    return torch.ops.aten._to_copy(x, layout=layout, pin_memory=pin_memory, **options)


# Torch's functions differ from the schema (argument order, packed lists, defaults), or mean something else.
declare_traits(
    "arange full empty zeros ones rand randn randint normal linspace logspace scalar_tensor tensor empty_like full_like",
    local_function=None,
)
declare_traits(
    "index_put index_put_ _index_put_impl_ _unsafe_index _unsafe_index_put where index norm split to set_", local_function=None
)
declare_traits("data requires_grad_ is_same_size", local_function=None)
declare_traits("slice", local_function=_slice, view_kind="slice")
declare_traits("_to_copy", local_function=_to_copy)
declare_traits("select unbind", view_kind="slice")
declare_traits("_reshape_alias", view_kind="all", needs_strides=True)
declare_traits("view.default", view_kind="all", needs_strides=True)
declare_traits("view view_as_complex view_as_real", needs_strides=True)
declare_traits("squeeze unsqueeze", view_kind="all")
declare_traits("_conj _neg_view", view_kind="mirror")
# Composites write through it into `out=`, although its schema does not declare a view.
declare_traits("_unsafe_view", is_view=True, view_kind="all")
declare_list_prefix("_foreach_")
for _name in ("add", "sub", "mul", "div"):
    declare_traits(f"_foreach_{_name}.Scalar _foreach_{_name}.ScalarList", takes_tensors=True)
    declare_traits(f"_foreach_{_name}_.Scalar _foreach_{_name}_.ScalarList", takes_tensors=True)
