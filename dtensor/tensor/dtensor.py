"""``DTensor``: a ``torch.Tensor`` subclass that represents a global tensor and stores local tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from ..base.late_binding import html_repr, resolve_late
from ..base.patches import patch_applied
from ..base.recorder_hooks import ACTIVE_RECORDERS
from ..base.torch_internals import (
    count_dispatch_modes,
    count_function_modes,
    disabled_torch_function,
    forward_ad,
    functorch_active,
    run_backward,
)
from ..base.torch_internals import foreach_supported_types as _foreach_types
from ..base.torch_internals import optimizer_supported_types as _optimizer_types
from ..base.tracing import check_not_in_graph
from ..base.validation import check_dtype, check_strided
from ..comm import PerRank
from ..comm.map_ranks import communicator_of
from ..dispatch import dispatch, distribute_like
from ..errors import DTensorError, LayoutError
from ..layout.layout import Layout
from ..layout.placement_forms import split_mesh_and_placements
from ..mesh.device_mesh import DeviceMesh, as_mesh
from ..placement import Placement, Placements, Replicate
from ..ranks.per_rank import LocalTensor, patch_torch_for
from ..ranks.per_rank_functorch import join_ranks, split_ranks, unwrap_functorch
from ..redistribute import Plan, Transit, plan, plan_between
from ..state.shared_memory import MEMORY_STATE, join_alias_groups, mark_local_exposed
from ..state.wrap import install_tensor_class, wrap_local
from . import compile_protocol, copies, host_access
from .autograd import (
    copies_for_ranks,
    from_local_recorded,
    grad_layout,
    is_recorded,
    local_grad_layout,
    redistribute_recorded,
    redistribute_to_copy,
    to_full_tensor,
    to_local_recorded,
    zeros_outside_mesh,
)
from .leaf_gradients import grad_placements_of as grad_placements_of  # placements of a leaf's gradient
from .leaf_gradients import install_grad_hook, update_hook_layout
from .local_layout import layout_of_locals
from .observers import ACTIVE_OBSERVERS, expose_local, notify_layout_read
from .printing import format_local_tensors
from .storage import storage_of

if TYPE_CHECKING:
    from ..base.tensor_methods import TensorMethods
else:
    TensorMethods = torch.Tensor

_grad_enabled, _require_grad = torch.is_grad_enabled, torch.Tensor.requires_grad_


class DTensor(TensorMethods):
    """A distributed tensor. To the program it is the global tensor: same shape, dtype, strides, values and gradients.

    Make one with :func:`distribute_tensor`, :meth:`DTensor.from_local` or a factory (``dtensor.zeros``, ...).

    >>> import dtensor as dt
    >>> mesh = dt.init_device_mesh("cpu", (2,))
    >>> x = dt.distribute_tensor(torch.arange(3.0), mesh, [dt.Shard(0)])
    >>> x
    DTensor(float32[3] on (0=S(0))
      rank 0: [0., 1.]
      rank 1: [2.])
    >>> (x * 2).sum().item()
    6.0

    Operators communicate what their rules need (see ``dtensor.explain``), and raise what plain torch raises, on every rank.
    """

    _local: Any
    _layout: Layout
    _storage_start = 0  # storage offset in the memory of the base, in elements
    __slots__ = ("_layout", "_local")
    __torch_function__ = disabled_torch_function  # the documented way to disable it

    def __new__(cls, *args: Any, **kwargs: Any) -> DTensor:
        raise DTensorError("make a DTensor with distribute_tensor(), DTensor.from_local() or dtensor.zeros(...)")

    __torch_dispatch__ = classmethod(dispatch)  # type: ignore[assignment]  # one Python frame instead of two

    # --- layout and local tensor ------------------------------------------------------------------------------
    @property
    def layout(self) -> Layout:  # type: ignore[override]  # torch's memory format attribute; a Layout equals torch.strided
        """Return the :class:`Layout`: mesh, placements and global shape, strides and dtype.

        Torch's own code gets ``torch.strided``.
        """
        if sys._getframe(1).f_globals.get("__name__", "").partition(".")[0] == "torch":
            return torch.strided  # type: ignore[return-value]  # torch reads the memory format, and looks it up in sets
        return self._layout

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Return one placement per mesh dim."""
        if ACTIVE_OBSERVERS:
            notify_layout_read(self)
        return self._layout.placements

    @property
    def device_mesh(self) -> DeviceMesh:
        """Return the mesh of the tensor."""
        return self._layout.mesh

    @property
    def _placed(self) -> tuple[DeviceMesh, tuple[Placement, ...]]:
        """Return the mesh and the placements.

        A compiled program that reads the layout is specialized on its sizes; this property has none.
        """
        return self._layout.mesh, self._layout.placements

    @property
    def _spec(self) -> Layout:
        """Return the layout, under torch's name. It has ``mesh``, ``placements`` and ``tensor_meta`` (shape, stride, dtype)."""
        return self._layout

    @property
    def _local_tensor(self) -> LocalTensor:
        """Return this rank's local tensor without gradients (those of all ranks if they are in this process)."""
        return cast(LocalTensor, patch_torch_for(expose_local(self)._local))

    # --- between local and global -------------------------------------------------------------------------------
    @staticmethod
    def from_local(
        local_tensor: torch.Tensor,
        device_mesh: Any = None,
        placements: Placements | None = None,
        *,
        run_check: bool = False,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        grad_placements: Placements | None = None,
    ) -> DTensor:
        """Return the DTensor with the local tensor ``local_tensor`` on this rank. It shares memory with it; differentiable.

        Args:
            local_tensor: this rank's local tensor. With all ranks in one process a ``per_rank([...])``; there a plain tensor is
                copied to each rank. A lazily negated tensor (``x.conj().imag``) is computed, and shares no memory. On a rank
                outside the mesh it is ignored: that rank has no elements, and gets zeros as the gradient.
            device_mesh: defaults to the mesh entered by ``with mesh:``. Placements in its place are taken as ``placements``.
            placements: in any form (``Placements``), default ``Replicate()`` on every mesh dim.
            run_check: compare shapes, dtypes and (for replicated mesh dims) values across ranks; names the offending rank.
            shape, stride: of the global tensor. With ``shape`` there is no communication. Without it, ranks exchange the sizes of
                sharded dims (one small all-gather per sharded mesh dim), so that uneven shards give the right global shape.
            grad_placements: the placements in which the gradient arrives, default ``placements`` with Partial replaced by
                Replicate. Mesh dims that placements by name leave out have the default.

        Raises:
            LayoutError: the local tensors do not fit together. PlacementError, MeshError: see :class:`Layout`.
        """
        device_mesh, placements = split_mesh_and_placements(device_mesh, placements)
        mesh = as_mesh(device_mesh)
        if isinstance(unwrap_functorch(local_tensor), DTensor):
            raise LayoutError(
                "from_local takes this rank's plain tensor, got a DTensor; use x.redistribute(...) or x.to_local() first"
            )
        plain = check_strided(local_tensor, "from_local").resolve_neg()  # below __torch_dispatch__ it is not negated
        local_tensor, comm = split_ranks(plain), communicator_of(mesh)
        layout = layout_of_locals(local_tensor, mesh, placements, shape, stride, check=run_check)
        backward = grad_layout(layout, grad_placements)
        if isinstance(local_tensor, PerRank):
            return mark_local_exposed(from_local_recorded(layout, backward, False, *local_tensor.shards))
        if comm.holds_all or is_recorded(local_tensor):
            return mark_local_exposed(
                from_local_recorded(layout, backward, comm.holds_all, *copies_for_ranks(local_tensor, layout))
            )
        return mark_local_exposed(wrap(local_tensor.detach() if comm.held else zeros_outside_mesh(local_tensor, layout), layout))

    def to_local(self, *, grad_placements: Placements | None = None) -> LocalTensor:
        """Return this rank's local tensor; differentiable, no communication.

        It is a ``per_rank`` tensor if all ranks are in this process.

        It is a view: writes to it are writes to the DTensor. All ranks must write the same to a replicated local tensor. After
        this call operators that need the DTensor in another layout redistribute it each time, because writes to local tensors are
        not counted.

        Args:
            grad_placements: the placements of the gradient that comes back, default ``placements`` with Partial replaced by
                Replicate, also for mesh dims that placements by name leave out.
                For parameters of data-parallel units it is Partial along mesh dims that shard the unit's batch. Pass
                ``[Partial()]`` if each rank uses a replicated local tensor differently, which raises ``LayoutError`` otherwise.
        """
        if ACTIVE_OBSERVERS:
            notify_layout_read(self)
        check_not_in_graph(self, "to_local()")
        mark_local_exposed(self)
        if not (self.requires_grad and _grad_enabled()) and forward_ad._current_level < 0:
            # no gradient is recorded; for torch.func transforms it is a constant
            if grad_placements is not None:
                grad_layout(self._layout, grad_placements)  # wrong placements raise also without a gradient
            # detach(): `requires_grad_` of the result must not change self._local. A recorder identifies it by identity.
            local = self._local if ACTIVE_RECORDERS else self._local.detach()
            return patch_torch_for(local) if type(local) is PerRank else local
        locals_ = to_local_recorded(self, self._layout, local_grad_layout(self, self._layout, grad_placements))
        joined: Any = join_ranks(locals_, PerRank) if type(locals_) is tuple else locals_
        return joined

    def full_tensor(self, *, grad_placements: Placements | None = None) -> torch.Tensor:
        """Return the global value as a plain tensor on every rank, with memory of its own; differentiable.

        Costs the redistribution to ``Replicate``. ``grad_placements`` as in :meth:`to_local`. In one process the result is a
        ``per_rank`` tensor if ranks differ: in the value on a submesh, or in the gradient under ``Partial``.
        """
        return to_full_tensor(self, grad_placements)

    def redistribute(
        self,
        device_mesh: Any = None,
        placements: Placements | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> DTensor:
        """Return the same global value with other placements, or on another mesh; differentiable.

        The result has memory of its own, also if the tensor has these placements (then it is a copy). So placements do not decide
        whether a write to the result changes the tensor.

        Args:
            device_mesh: default the tensor's own. All ranks of both meshes make the call, each with its ``x``. A rank outside one
                of them has no elements there. The copies on a submesh count as one value. Placements in its place are taken as
                ``placements``.
            placements: in any form (``Placements``); default all ``Replicate()``. Mesh dims that a mapping or text with names
                leaves out keep their placements; on another mesh they are replicated.
            async_op: return at once; the result waits at first use.
            forward_dtype, backward_dtype: convert to this dtype before the redistribution (forward: the result has it; backward:
                the gradient).

        >>> import dtensor as dt
        >>> mesh = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        >>> x = dt.zeros(4, 6, device_mesh=mesh, placements={"dp": dt.Shard(0), "tp": dt.Shard(1)})
        >>> x.redistribute({"tp": dt.Replicate()}).layout  # gathers along tp alone
        float32[4, 6] on (dp=S(0), tp=R)
        """
        for dtype in (forward_dtype, backward_dtype):
            if dtype is not None:
                check_dtype(dtype)
        source: Any = self if forward_dtype is None or forward_dtype == self.dtype else self.to(forward_dtype)
        target = _target_layout(source._layout, device_mesh, placements)
        if target is source._layout and source is not self and backward_dtype is None:
            return source
        if not is_recorded(source):
            return redistribute_to_copy(source, target, async_op)
        return redistribute_recorded(source, target, async_op, backward_dtype)

    def explain_redistribute(self, placements: Placements | None = None, *, device_mesh: Any = None) -> Plan | Transit:
        """Return the plan of ``redistribute(device_mesh, placements)``, to be printed. Nothing is communicated.

        It has each step, the ranks that take part, the bytes that one rank receives, peak memory and estimated time.

        >>> import dtensor as dt
        >>> x = dt.zeros(6, 4, device_mesh=dt.init_device_mesh("cpu", (2,), ("tp",)), placements=[dt.Shard(0)])
        >>> print(x.explain_redistribute([dt.Shard(1)]))
        float32[6, 4] (tp=S(0)) -> (tp=S(1)): 1 collective, 24 B received per rank, peak ... B, ...
          1. exchange over tp: (tp=S(0)) -> (tp=S(1)), 24 B/rank, ...
        """
        target = _target_layout(self._layout, device_mesh, placements)
        return plan(self._layout, target) if target.mesh == self._layout.mesh else plan_between(self._layout, target)

    # --- the interface of sharded tensors: see dtensor.sharding_spec --------------------------------------------
    def reshard(self, sharding_spec: Any) -> Any:
        """Return the same value with the sharding of ``sharding_spec``, also on other ranks; differentiable.

        All ranks of both call it.
        """
        return resolve_late("reshard")(self, sharding_spec)

    def local_shard(self) -> LocalTensor:
        """Return :meth:`to_local`, under the name of sharded tensors."""
        return self.to_local()

    def sharding_metadata(self) -> Any:
        """Return sizes, offsets, rank and device of every shard; no communication."""
        return resolve_late("sharding_metadata")(self)

    # --- autograd: gradients of leaves arrive in the layout of the leaf -----------------------------------------
    def requires_grad_(self, requires_grad: bool = True) -> DTensor:
        """Set ``requires_grad``, like ``torch.Tensor.requires_grad_``. Gradients of a leaf are redistributed to its layout."""
        _require_grad(self, requires_grad)
        if requires_grad and self.is_leaf:
            install_grad_hook(self)
        return self

    def _set_requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def backward(
        self,
        gradient: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """Compute the gradients of leaves, and add them to their ``.grad``; arguments as in ``torch.Tensor.backward``.

        ``gradient`` (the same global shape; default 1, for a tensor without dims) may have any layout. Each leaf's gradient is
        communicated to the leaf's layout, in addition to what the gradients of operators communicate.

        Raises:
            RuntimeError: on all ranks, as in torch: no gradient can be computed, or the graph was freed.

        >>> import dtensor as dt
        >>> x = dt.ones(3, device_mesh=dt.init_device_mesh("cpu", (2,)), placements=[dt.Shard(0)]).requires_grad_()
        >>> (x * 2).sum().backward()
        >>> x.grad.full_tensor(), x.grad.placements
        (tensor([2., 2., 2.]), (Shard(dim=0),))
        """
        layout = self._layout
        starts_from_one = gradient is None and inputs is None and self.requires_grad and layout.is_replicated
        starts_from_one = starts_from_one and layout.dtype.is_floating_point and not layout.shape
        if not starts_from_one or count_dispatch_modes() or count_function_modes() or functorch_active():
            torch.Tensor.backward(self, gradient, retain_graph, create_graph, inputs)
            return
        root_gradient = wrap_local(torch.ones_like(self._local), layout)  # torch would make it by an operator
        keep_graph = create_graph if retain_graph is None else retain_graph
        run_backward((self,), (root_gradient,), keep_graph, create_graph, (), allow_unreachable=True, accumulate_grad=True)

    if not TYPE_CHECKING:  # a bool
        requires_grad = property(torch.Tensor.requires_grad.__get__, _set_requires_grad)

    @property
    def data(self) -> DTensor:
        """Return a DTensor of the same memory with its own version counter.

        Autograd does not see writes to it, but views of this tensor do.
        """
        return cast(DTensor, mark_local_exposed(self)._get_data_alias().detach())

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """Set the memory of the tensor to that of ``value``, and join the aliases of both."""
        other = value if isinstance(value, DTensor) else distribute_like(value, self)
        root = self if self._base is None else self._base
        root.__dict__["_has_new_memory"] = True  # the base and its views no longer share memory, as autograd assumes
        self._adopt_memory(other)
        join_alias_groups(self, other)

    def _adopt_memory(self, other: DTensor) -> None:
        """Replace the memory and the shape of this tensor by those of ``other``; its version counter and ``_base`` stay."""
        mark_local_exposed(self)
        torch.Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        other._assign_memory_to(self)
        update_hook_layout(self)

    def _assign_memory_to(self, target: DTensor) -> None:
        """Replace the memory of ``target`` by that of this tensor."""
        target._local, target._layout, target._storage_start = self._local, self._layout, self._storage_start

    def _get_data_alias(self) -> DTensor:
        """Return the tensor that ``.data`` returns: the same memory, outside of autograd's version counting."""
        alias: DTensor | None = self.__dict__.get("_data_alias")
        if alias is None or alias._local is not self._local:
            alias = self.__dict__["_data_alias"] = torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]  # torch's stub
            alias.__dict__.pop(MEMORY_STATE, None)  # a detached tensor has its own version counter
            join_alias_groups(alias, self)
        return cast(DTensor, alias)

    # --- protocol of torch.compile: see :mod:`.compile_protocol` ---------------------------------------------------------
    __tensor_flatten__ = compile_protocol.FlattenMethod(compile_protocol.flatten_dtensor)
    __tensor_unflatten__ = staticmethod(compile_protocol.unflatten_dtensor)
    _dynamo_dynamic_indices, _dynamo_dynamic_range = compile_protocol.DynamicMarks(), compile_protocol.DynamicMarks()
    _stable_hash_for_caching = compile_protocol.make_cache_text
    __coerce_tangent_metadata__ = compile_protocol.to_tangent_layout
    __coerce_same_metadata_as_tangent__ = compile_protocol.to_expected_tangent

    # --- copies, files, prints ----------------------------------------------------------------------------------
    __copy__, __deepcopy__, __reduce_ex__ = copies.shallow_copy, copies.deep_copy, copies.reduce_for_pickle

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        """Return the items that ``torch.distributed.checkpoint`` writes; see :mod:`dtensor.checkpoint.dcp_protocol`."""
        return resolve_late("write_items")(self, fqn)

    def __create_chunk_list__(self) -> list[Any]:
        return resolve_late("chunks")(self)

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return resolve_late("shard_at")(self, index)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's code names it so, its stub does not
        tail = ", requires_grad=True" if self.requires_grad else ""
        if self.grad_fn is not None:
            tail = f", grad_fn=<{type(self.grad_fn).__name__}>"
        return f"DTensor({self._layout!r}{tail}{format_local_tensors(self)})"

    _repr_html_ = html_repr

    if not TYPE_CHECKING:  # for a checker they have the types of ``TensorMethods``
        tolist, numpy, __array__, __dlpack__, __format__ = (
            host_access.to_list,
            host_access.to_numpy,
            host_access.to_array,
            host_access.to_dlpack_capsule,
            host_access.format_text,
        )
        share_memory_, is_shared, is_pinned, pin_memory = (
            host_access.share_memory_,
            host_access.is_shared,
            host_access.is_pinned,
            host_access.pin_memory,
        )
        apply_, new, untyped_storage = host_access.apply_, host_access.new_of_shape, storage_of
        __bool__, __int__, __index__ = host_access.to_bool, host_access.to_int, host_access.to_index
        __float__, __complex__, __iter__ = host_access.to_float, host_access.to_complex, host_access.iterate_rows


def _target_layout(layout: Layout, device_mesh: Any, placements: Placements | None) -> Layout:
    """Return ``layout`` with other placements, on another mesh if one is given. ``device_mesh`` may be the placements."""
    device_mesh, placements = split_mesh_and_placements(device_mesh, placements)
    mesh = layout.mesh if device_mesh is None else as_mesh(device_mesh)
    if placements is None:
        placements = (Replicate(),) * mesh.ndim
    if mesh is layout.mesh or mesh == layout.mesh:
        return layout.replace(placements=placements)
    return Layout.of(mesh, placements, layout.shape, layout.stride, layout.dtype)


install_tensor_class(DTensor)
wrap: Callable[[Any, Layout], DTensor] = wrap_local
# Foreach operators have rules, so torch may use them for DTensors (clip_grad_norm_, optimizers).
_optimizer_types.append(DTensor)
patch_applied("torch.optim.optimizer._foreach_supported_types")
_foreach_types.append(DTensor)
patch_applied("torch.utils._foreach_utils._foreach_supported_types")
