"""``loss_parallel``: plain targets beside distributed logits."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext


def loss_parallel() -> AbstractContextManager[None]:
    """What programs for ``torch.distributed.tensor`` say around a loss; nothing here has to be told.

    Cross-entropy of logits that are sharded over the vocabulary is computed in shards anyway, and its targets and class weights
    may be plain tensors, the same on every rank of the logits' mesh (compared when the call is planned), also with
    ``label_smoothing`` and with class probabilities as targets.

    >>> import torch, dtensor as dt
    >>> logits = dt.zeros(3, 8, device_mesh=dt.init_device_mesh("cpu", (2,)), placements=[dt.Shard(1)])
    >>> with loss_parallel():
    ...     torch.nn.functional.cross_entropy(logits, torch.tensor([1, 7, 0])).item()
    2.0794...

    It communicates nothing and raises nothing by itself.
    """
    return nullcontext()
