"""``replicate``: data parallelism with whole parameters on every rank; gradients are averaged in buckets while backward runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..group_meshes import mesh_or_world
from .adopt import Axes, Managed, adopt, onto_one_mesh
from .buffers import Buffers
from .fully_shard import add_methods, check_callable, check_policy
from .group import Group
from .policy import MixedPrecisionPolicy
from .unit import Unit, unit_of

_DEFAULT_PRECISION = MixedPrecisionPolicy()
_MEBIBYTE = 1024 * 1024
_FIRST_BUCKET_BYTES = _MEBIBYTE  # the first gradients of backward start to travel early


class ReplicatedModule:
    """What a replicated module can do besides what it could before."""

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Whether backward averages gradients. If not they are held and join those of the next backward that does."""
        unit = unit_of(self)  # type: ignore[arg-type]  # a mixin of modules
        assert unit is not None
        unit.sync = requires_gradient_sync

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward does not average gradients: for all but the last pass of a step that accumulates several."""
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.set_requires_gradient_sync(True)


def replicate(
    module: nn.Module,
    mesh: Any = None,
    *,
    mp_policy: MixedPrecisionPolicy = _DEFAULT_PRECISION,
    bucket_cap_mb: float = 25,
    ignored_modules: Iterable[nn.Module] = (),
    ignored_params: Iterable[nn.Parameter] | None = None,
) -> Any:
    """``module``, in place, its parameters (and buffers) those of the first rank, everywhere; each rank runs it on its own batch.

    Gradients are averaged over all dims of ``mesh``, one all-reduce per bucket, in an order that does not depend on what a rank
    used: a parameter that this rank did not use gets the others' average, one that no rank used keeps its ``.grad``. Buffers that
    forward writes in training are the first rank's afterwards. With all ranks in one process the batch is a ``per_rank([...])``;
    a batch that is a DTensor over ``mesh`` gives the global loss and its gradient.

    Args:
        mesh: default the one entered by ``with mesh:``, else all ranks.
        mp_policy: dtypes to compute and to reduce in.
        bucket_cap_mb: mebibytes of gradients per bucket.
        ignored_modules, ignored_params: left as they are.

    >>> import dtensor as dt
    >>> mesh = dt.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    >>> model = replicate(torch.nn.Linear(3, 1), mesh)
    >>> with model.no_sync():
    ...     model(dt.per_rank([torch.ones(1, 3), torch.zeros(1, 3)])).sum().backward()
    >>> model.weight.grad is None
    True
    >>> model(dt.per_rank([torch.ones(1, 3), torch.zeros(1, 3)])).sum().backward()
    >>> model.weight.grad.placements, model.weight.grad.full_tensor()
    ((Replicate(),), tensor([[1., 1., 1.]]))
    """
    check_policy(mp_policy)
    check_callable(module, "replicate")
    if not bucket_cap_mb > 0:
        raise ValueError(f"bucket_cap_mb is a number of mebibytes above 0, got {bucket_cap_mb!r}")
    mesh = mesh_or_world(mesh)
    axes = Axes(mesh, (), tuple(range(mesh.ndim)))
    ignored = {p for inner in ignored_modules for p in inner.parameters()} | set(ignored_params or ())
    managed = adopt(module, axes, ignored)
    onto_one_mesh(managed, mesh)
    groups = [Group(bucket, axes, mp_policy) for bucket in buckets(managed, bucket_cap_mb * _MEBIBYTE)]
    unit = Unit([module], groups, Buffers(list(module.modules()), axes), axes, mp_policy)
    unit.in_order = True
    unit.keep_after_forward = True
    add_methods(module, ReplicatedModule, "Replicated")
    return module


def buckets(managed: list[Managed], limit: float) -> list[list[Managed]]:
    """Parameters in the order in which backward is expected to reach them, cut where a bucket is full."""
    result: list[list[Managed]] = []
    filled, cap = 0.0, min(limit, _FIRST_BUCKET_BYTES)
    for m in reversed(managed):
        if not result or filled + m.whole.max_local_nbytes > cap:
            cap = limit if result else cap
            result.append([])
            filled = 0.0
        result[-1].append(m)
        filled += m.whole.max_local_nbytes
    return result
