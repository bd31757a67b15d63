"""What autograd saves of a unit's gathered parameters, where backward is not to gather them: nothing, or an error says so.

Freed values keep their tensors but not their memory; a backward that reads them would compute with whatever is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ...comm import shards_of
from ...errors import DTensorError
from ...tensor.dtensor import DTensor
from .param_group import Group


class _Freed:
    """Stands for a gathered parameter, or a part of one, that some operation saved for backward."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape


def watched(groups: Sequence[Group]) -> ExitStack:
    """From now until it is closed, saved parts of the groups' gathered values are kept out of the graph."""
    stores = {
        shard.untyped_storage()._cdata for group in groups if not group.borrows for x in group._full for shard in shards_of(x)
    }

    def pack(x: Tensor) -> Any:
        local = x._local if isinstance(x, DTensor) else x
        return _Freed(tuple(x.shape)) if any(s.untyped_storage()._cdata in stores for s in shards_of(local)) else x

    stack = ExitStack()
    stack.enter_context(saved_tensors_hooks(pack, _unpack))
    return stack


def _unpack(saved: Any) -> Any:
    if isinstance(saved, _Freed):
        raise DTensorError(
            f"backward needs a parameter, or a part of one, of shape {saved.shape}, of a unit that is not gathered in backward; "
            "leave set_unshard_in_backward(False) out there"
        )
    return saved
