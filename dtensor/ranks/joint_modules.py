"""Joint modules: torch's modules that choose their way by the process or by the type of a tensor, over ``PerRank`` tensors.

Torch functions alone do not tell what these modules do: ``SyncBatchNorm`` asks for a process group, which ranks of one process do
not have, and ``TransformerEncoder`` computes nested tensors, with zeros in padded rows, for plain tensors only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn

from ..base.patches import changed, restored
from ..errors import LayoutError
from .per_rank import _BEFORE, PerRank, over_ranks

Forward = Callable[..., Any]


def _sync_batch_norm(forward: Forward, module: nn.SyncBatchNorm, x: Any) -> Any:
    """Return each rank's part of the normalized batches of all ranks."""
    if type(x) is not PerRank or not module.training:
        return forward(module, x)
    if module.process_group is not None:
        raise LayoutError(
            "SyncBatchNorm(process_group=...) of per_rank tensors: the ranks of this process have no process groups; leave "
            "process_group out, which takes the statistics of all ranks"
        )
    batches = torch.cat(x.shards)
    normalized = forward(module, PerRank([batches] * len(x.shards)))  # each rank's, with weights of its own
    sizes = [shard.shape[0] for shard in x.shards]
    return PerRank(whole.split(sizes)[rank] for rank, whole in enumerate(normalized.shards))


def _encoder(
    forward: Forward,
    module: nn.TransformerEncoder,
    src: Any,
    mask: Any = None,
    src_key_padding_mask: Any = None,
    is_causal: bool | None = None,
) -> Any:
    """Run the encoder once per rank where torch computes nested tensors of plain ones."""
    nested = type(src) is PerRank and src_key_padding_mask is not None and not module.training and module.use_nested_tensor
    if nested and not (torch.is_grad_enabled() and any(x.requires_grad for x in (src, *module.parameters()))):
        if any(type(x) is not nn.Parameter for x in module.parameters()):
            raise LayoutError(
                "nn.TransformerEncoder of per_rank tensors in eval() with src_key_padding_mask= computes nested tensors, which "
                "it does not with parameters of each rank's own; write TransformerEncoder(..., enable_nested_tensor=False)"
            )
        return over_ranks(forward, (module, src, mask, src_key_padding_mask, is_causal), {})
    return forward(module, src, mask, src_key_padding_mask, is_causal)


_FORWARDS: dict[type[nn.Module], Callable[..., Any]] = {nn.SyncBatchNorm: _sync_batch_norm, nn.TransformerEncoder: _encoder}


def watch_modules() -> None:
    """Have these modules take ``PerRank`` tensors."""
    for kind, way in _FORWARDS.items():
        if not hasattr(kind.forward, "__wrapped__"):
            kind.forward = _around(kind.forward, way)
            changed(_where(kind))


def leave_modules() -> None:
    """Give torch's modules their own ``forward`` again."""
    for kind in _FORWARDS:
        if hasattr(kind.forward, "__wrapped__"):
            kind.forward = kind.forward.__wrapped__
            restored(_where(kind))


def _around(forward: Forward, way: Callable[..., Any]) -> Forward:
    @wraps(forward)
    def joint(*args: Any, **kwargs: Any) -> Any:
        return way(forward, *args, **kwargs)

    return joint


def _where(kind: type[nn.Module]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}.forward"


_BEFORE.append(watch_modules)
