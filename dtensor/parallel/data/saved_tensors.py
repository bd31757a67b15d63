"""What autograd saves of a unit's gathered parameters, where backward is not to gather them: nothing, or an error says so.

Freed values keep their tensors but not their memory; a backward that reads them would compute with whatever is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ...base.torch_internals import is_traceable_wrapper_subclass
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
    gathered = [group.whole.memory for group in groups if not group.borrows]

    def pack(x: Tensor) -> Any:
        return _Freed(tuple(x.shape)) if any(part in memory for part in _parts(x) for memory in gathered) else x

    stack = ExitStack()
    stack.enter_context(saved_tensors_hooks(pack, _unpack))
    return stack


def _parts(x: Any) -> Iterator[Tensor]:
    """The plain tensors that one is made of here."""
    for shard in shards_of(x._local if isinstance(x, DTensor) else x):
        if is_traceable_wrapper_subclass(shard):
            for name in shard.__tensor_flatten__()[0]:  # type: ignore[attr-defined]  # such have it
                yield from _parts(getattr(shard, name))
        else:
            yield shard


def _unpack(saved: Any) -> Any:
    if isinstance(saved, _Freed):
        raise DTensorError(
            f"backward needs a parameter, or a part of one, of shape {saved.shape}, of a unit that is not gathered in backward; "
            "leave set_unshard_in_backward(False) out there"
        )
    return saved
