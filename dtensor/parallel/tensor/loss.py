"""``loss_parallel``: plain targets beside distributed logits."""

from __future__ import annotations

from collections.abc import Iterator

from ...base.modes import PLAIN_TARGETS
from ...base.scoped import entering


@entering
def loss_parallel() -> Iterator[None]:
    """Inside, the targets and class weights of a cross-entropy may be plain tensors, the same on every rank.

    That is all that it is needed for: cross-entropy of logits that are sharded over the vocabulary is computed in shards anyway.

    >>> import torch, dtensor as dt
    >>> logits = dt.zeros(3, 8, device_mesh=dt.init_device_mesh("cpu", (2,)), placements=[dt.Shard(1)])
    >>> with loss_parallel():
    ...     torch.nn.functional.cross_entropy(logits, torch.tensor([1, 7, 0])).item()
    2.0794...
    """
    with PLAIN_TARGETS.entered(None):
        yield
