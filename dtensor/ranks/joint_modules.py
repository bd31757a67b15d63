"""Joint modules: torch modules that look at the process or at the type of a tensor, over ``PerRank`` tensors.

The torch functions that they call do not show it: ``SyncBatchNorm`` asks for a process group, which ranks of one process do not
have. ``TransformerEncoder`` computes nested tensors, with zeros in padded rows, for plain tensors only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn

from ..base.patches import patch_applied, patch_removed
from ..errors import LayoutError
from .per_rank import SETUP_HOOKS, PerRank, over_ranks

Forward = Callable[..., Any]


def _joint_sync_batch_norm(forward: Forward, module: nn.SyncBatchNorm, x: Any) -> Any:
    """Run ``SyncBatchNorm`` in training on the batches of all ranks together, and return each rank's part of the result."""
    if type(x) is not PerRank or not module.training:
        return forward(module, x)
    if module.process_group is not None:
        raise LayoutError(
            "SyncBatchNorm(process_group=...) of per_rank tensors: the ranks of this process have no process groups. Leave "
            "process_group out, which takes the statistics of all ranks"
        )
    batches = torch.cat(x.shards)
    normalized = forward(module, PerRank([batches] * len(x.shards)))  # runs once per rank, with the rank's own weights
    sizes = [shard.shape[0] for shard in x.shards]
    return PerRank(full_batch.split(sizes)[rank] for rank, full_batch in enumerate(normalized.shards))


def _joint_transformer_encoder(
    forward: Forward,
    module: nn.TransformerEncoder,
    src: Any,
    mask: Any = None,
    src_key_padding_mask: Any = None,
    is_causal: bool | None = None,
) -> Any:
    """Run the encoder; the entire module once per rank if torch would compute nested tensors for plain inputs."""
    may_nest = type(src) is PerRank and src_key_padding_mask is not None and not module.training and module.use_nested_tensor
    if may_nest and not (torch.is_grad_enabled() and any(x.requires_grad for x in (src, *module.parameters()))):
        if any(type(x) is not nn.Parameter for x in module.parameters()):
            raise LayoutError(
                "nn.TransformerEncoder of per_rank tensors in eval() with src_key_padding_mask= computes nested tensors, which "
                "it does not with parameters of each rank's own; write TransformerEncoder(..., enable_nested_tensor=False)"
            )
        return over_ranks(forward, (module, src, mask, src_key_padding_mask, is_causal), {})
    return forward(module, src, mask, src_key_padding_mask, is_causal)


_JOINT_FORWARDS: dict[type[nn.Module], Callable[..., Any]] = {
    nn.SyncBatchNorm: _joint_sync_batch_norm,
    nn.TransformerEncoder: _joint_transformer_encoder,
}


def patch_modules() -> None:
    """Patch ``forward`` of ``SyncBatchNorm`` and ``TransformerEncoder`` so that it takes ``PerRank`` tensors."""
    for kind, joint_forward in _JOINT_FORWARDS.items():
        if not hasattr(kind.forward, "__wrapped__"):
            kind.forward = _wrap_forward(kind.forward, joint_forward)
            patch_applied(_patched_name(kind))


def unpatch_modules() -> None:
    """Restore torch's own ``forward`` of these modules."""
    for kind in _JOINT_FORWARDS:
        if hasattr(kind.forward, "__wrapped__"):
            kind.forward = kind.forward.__wrapped__
            patch_removed(_patched_name(kind))


def _wrap_forward(forward: Forward, joint_forward: Callable[..., Any]) -> Forward:
    """Return a ``forward`` that calls ``joint_forward`` with the original as its first argument."""

    @wraps(forward)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return joint_forward(forward, *args, **kwargs)

    return patched


def _patched_name(kind: type[nn.Module]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}.forward"


SETUP_HOOKS.append(patch_modules)
