"""Who has a unit's gathered parameters when their memory is given back: freed values keep their tensors, but what reads them
would compute with whatever is there, or end the process.

What autograd saves of them, where backward is not to gather them, is nothing, or an error says so; what the unit gives of them
(a weight, a view of one) is a copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ...base.torch_internals import is_traceable_wrapper_subclass, tree_map
from ...comm import PerRank
from ...errors import DTensorError
from ...tensor.views.block_owners import locals_of
from ...tensor.views.lazy_view import RemoteView
from .forward_uses import tensors_in
from .param_group import Group
from .unsharded_storage import Memory


def watched(groups: Sequence[Group]) -> ExitStack:
    """From now until it is closed, saved parts of the groups' gathered values are kept out of the graph."""
    gathered = _gathered(groups)

    def pack(x: Tensor) -> Any:
        return tuple(x.shape) if _lies_in(gathered, x) else x

    stack = ExitStack()
    stack.enter_context(saved_tensors_hooks(pack, _unpack))
    return stack


def outlasting(output: Any, groups: Sequence[Group]) -> tuple[Any, list[Tensor]]:
    """What a module gives, with copies of what lies in the groups' gathered values; and the tensors in it."""
    gathered, found = _gathered(groups), tensors_in(output)
    if not any(_lies_in(gathered, x) for x in found):
        return output, found
    made = tree_map(
        lambda x: x.clone() if isinstance(x, Tensor) and _lies_in(gathered, x) else x,
        output,
        is_leaf=lambda x: isinstance(x, PerRank),
    )
    return made, tensors_in(made)


def _gathered(groups: Sequence[Group]) -> list[Memory]:
    return [group.whole.memory for group in groups if not group.borrows]


def _lies_in(gathered: Sequence[Memory], x: Any) -> bool:
    while isinstance(x, RemoteView):  # its pieces are computed when they are read
        x = x._origin.base
    return any(part in memory for part in _parts(x) for memory in gathered)


def _parts(x: Any) -> Iterator[Tensor]:
    """The plain tensors that one is made of here."""
    for shard in locals_of(x):
        if is_traceable_wrapper_subclass(shard):
            for name in shard.__tensor_flatten__()[0]:  # type: ignore[attr-defined]  # such have it
                yield from _parts(getattr(shard, name))
        else:
            yield shard


def _unpack(saved: Any) -> Any:
    if not isinstance(saved, Tensor):  # but the shape of what was a parameter, or a part of one
        raise DTensorError(
            f"backward needs a parameter, or a view of one, of shape {saved}, but its unit is not gathered in "
            "backward; remove set_unshard_in_backward(False) for that unit"
        )
    return saved
