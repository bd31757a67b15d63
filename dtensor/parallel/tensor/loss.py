"""Loss context of PyTorch, ``loss_parallel``: it changes nothing, because losses of sharded logits need no context here."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext


def loss_parallel() -> AbstractContextManager[None]:
    """Return a context that does nothing, for programs that wrap a loss as with ``torch.distributed.tensor``.

    Cross-entropy of logits that are sharded over the vocabulary is computed on the shards in any case. Its targets and class
    weights may be plain tensors that are equal on every rank of the logits' mesh, which is compared when the call is planned.
    This includes ``label_smoothing`` and class probabilities as targets.

    >>> import torch, dtensor as dt
    >>> logits = dt.zeros(3, 8, device_mesh=dt.init_device_mesh("cpu", (2,)), placements=[dt.Shard(1)])
    >>> with loss_parallel():
    ...     torch.nn.functional.cross_entropy(logits, torch.tensor([1, 7, 0])).item()
    2.0794...

    Communicates nothing and raises nothing.
    """
    return nullcontext()
