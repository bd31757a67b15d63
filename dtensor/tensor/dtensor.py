"""``DTensor``: a ``torch.Tensor`` whose global value lies in pieces over a mesh."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from ..base.late_binding import pictured, provided
from ..base.patches import changed
from ..base.recorder_hooks import ACTIVE
from ..base.torch_internals import disabled_torch_function, forward_ad
from ..base.torch_internals import foreach_supported_types as _foreach_types
from ..base.torch_internals import optimizer_supported_types as _optimizer_types
from ..base.tracing import not_in_graph
from ..base.validation import element_type, strided
from ..comm import PerRank, communicator_of
from ..dispatch.dispatcher import dispatch
from ..dispatch.plain_tensor_args import laid_out_alike
from ..dispatch.version_counters import SHARED, counted_together, users
from ..dispatch.wrap import install, wrap_local
from ..errors import DTensorError, LayoutError
from ..layout.layout import Layout
from ..mesh.device_mesh import DeviceMesh, as_mesh
from ..placement import Placement, Replicate
from ..ranks.functorch import as_one, each_rank, seen
from ..ranks.per_rank import handed_out
from ..redistribute import Plan, Transit, plan, plan_between
from . import compile_protocol, copies, host_access
from .autograd import (
    everywhere,
    from_pieces,
    grad_layout,
    is_recorded,
    move_apart,
    nothing_of,
    pieces_gradient,
    redistributed,
    to_local,
    to_whole,
)
from .leaf_gradients import grad_placements_of as grad_placements_of  # of a leaf
from .leaf_gradients import keep_grad_layout, note_layout
from .local_layout import layout_of_locals
from .observers import observed, taken_apart, tell_looked_at
from .printing import pieces
from .root_gradient import backward
from .storage import storage_of

_grad_enabled, _require_grad = torch.is_grad_enabled, torch.Tensor.requires_grad_


class DTensor(torch.Tensor):
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

    Operators communicate what their rules need (``dtensor.explain`` tells it), and raise what plain torch does, on every rank.
    """

    _local: Any
    _layout: Layout
    _begins = 0  # elements before its first, in the memory of what it is a view of
    __slots__ = ("_layout", "_local")
    __torch_function__ = disabled_torch_function  # the documented way to say none

    def __new__(cls, *args: Any, **kwargs: Any) -> DTensor:
        raise DTensorError("make a DTensor with distribute_tensor(), DTensor.from_local() or dtensor.zeros(...)")

    __torch_dispatch__ = classmethod(dispatch)  # type: ignore[assignment]  # one Python frame instead of two

    # --- what it is -------------------------------------------------------------------------------------------
    @property
    def layout(self) -> Layout:  # type: ignore[override]  # torch's memory format attribute; a Layout equals torch.strided
        """The :class:`Layout`: mesh, placements and global shape, strides and dtype (to torch's own code ``torch.strided``)."""
        if sys._getframe(1).f_globals.get("__name__", "").partition(".")[0] == "torch":
            return torch.strided  # type: ignore[return-value]  # it asks for the memory format, and looks it up in sets
        return self._layout

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement per mesh dim."""
        if observed:
            tell_looked_at(self)
        return self._layout.placements

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh that it lives on."""
        return self._layout.mesh

    @property
    def _placed(self) -> tuple[DeviceMesh, tuple[Placement, ...]]:
        """Both without sizes, of which a compiled program that asks for the layout is one."""
        return self._layout.mesh, self._layout.placements

    @property
    def _spec(self) -> Layout:
        """The layout, under torch's name: programs read its ``mesh``, ``placements``, ``tensor_meta`` (shape, stride, dtype)."""
        return self._layout

    @property
    def _local_tensor(self) -> torch.Tensor:
        """This rank's piece, no gradients (all ranks' pieces when they live in this process)."""
        return cast(torch.Tensor, handed_out(taken_apart(self)._local))

    # --- between local and global -------------------------------------------------------------------------------
    @staticmethod
    def from_local(
        local_tensor: torch.Tensor,
        device_mesh: Any = None,
        placements: Sequence[Placement] | None = None,
        *,
        run_check: bool = False,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        grad_placements: Sequence[Placement] | None = None,
    ) -> DTensor:
        """Return the DTensor that has ``local_tensor`` as this rank's piece, and shares memory with it; differentiable.

        Args:
            local_tensor: this rank's piece; with all ranks in one process a ``per_rank([...])`` (a plain tensor is all ranks'
                there, and each gets a copy). One that is lazily negated (``x.conj().imag``) is computed, and shares nothing. Of a
                rank outside the mesh it is not taken: that rank holds nothing, and gets zeros as the gradient.
            device_mesh: defaults to the mesh entered by ``with mesh:``.
            placements: default ``Replicate()`` on every mesh dim.
            run_check: compare shapes, dtypes and (for replicated mesh dims) values across ranks; names the offending rank.
            shape, stride: of the global tensor. With ``shape`` nothing is communicated. Without it, ranks exchange the sizes of
                sharded dims (one small all-gather per sharded mesh dim), so that uneven pieces give the right global shape.
            grad_placements: the placements in which the gradient arrives, default ``placements`` with Partial replaced by
                Replicate.

        Raises:
            LayoutError: pieces do not fit together. PlacementError, MeshError: see :class:`Layout`.
        """
        mesh = as_mesh(device_mesh)
        if isinstance(seen(local_tensor), DTensor):
            raise LayoutError(
                "from_local takes this rank's plain tensor, got a DTensor; use x.redistribute(...) or x.to_local() first"
            )
        plain = strided(local_tensor, "from_local").resolve_neg()  # below __torch_dispatch__ nobody would negate
        local_tensor, comm = each_rank(plain), communicator_of(mesh)
        layout = layout_of_locals(local_tensor, mesh, placements, shape, stride, check=run_check)
        backward = grad_layout(layout, grad_placements)
        if isinstance(local_tensor, PerRank):
            return users(from_pieces(layout, backward, False, *local_tensor.shards))
        if comm.holds_all or is_recorded(local_tensor):
            return users(from_pieces(layout, backward, comm.holds_all, *everywhere(local_tensor, layout)))
        return users(wrap(local_tensor.detach() if comm.held else nothing_of(local_tensor, layout), layout))

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """This rank's piece (all ranks' as a ``per_rank`` tensor when they live in this process); differentiable, no cost.

        It is a view: what is written to it is written to the DTensor. To a replicated piece all ranks must write the same.
        From now on operators that need the DTensor in another layout move it each time (nobody sees what is written to pieces).

        Args:
            grad_placements: the placements of the gradient that comes back, default ``placements`` with Partial replaced by
                Replicate; of parameters inside units of data parallelism Partial along mesh dims that cut the unit's batch.
                Give ``[Partial()]`` where each rank uses a replicated piece differently, which raises ``LayoutError`` else.
        """
        if observed:
            tell_looked_at(self)
        not_in_graph(self, "to_local()")
        users(self)
        if not (self.requires_grad and _grad_enabled()) and forward_ad._current_level < 0:  # to transforms it is a constant
            if grad_placements is not None:
                grad_layout(self._layout, grad_placements)  # wrong placements raise all the same
            # a tensor of its own: `requires_grad_` is not said of the DTensor's. (A recorder knows the piece by its identity.)
            local = self._local if ACTIVE else self._local.detach()
            return handed_out(local) if type(local) is PerRank else local
        made = to_local(self, self._layout, pieces_gradient(self, self._layout, grad_placements))
        return as_one(made, PerRank) if type(made) is tuple else made

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Return the global value as a plain tensor on every rank, with memory of its own; differentiable. Costs the
        redistribution to ``Replicate``. ``grad_placements`` as of :meth:`to_local`. In one process a ``per_rank`` tensor where
        ranks differ: in the value on a submesh, in the gradient under ``Partial``."""
        return to_whole(self, grad_placements)

    def redistribute(
        self,
        device_mesh: Any = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> DTensor:
        """The same global value under other placements, or on another mesh; differentiable.

        The result has memory of its own, also where the tensor is placed so already (that is a copy): whether a write to it shows
        elsewhere does not depend on placements.

        Args:
            device_mesh: default the tensor's own. All ranks of both meshes make the call, each with its ``x``; a rank outside
                one of them holds nothing there. The copies on a submesh count as one value.
            placements: one per mesh dim; default all ``Replicate()``.
            async_op: return at once; the result waits at first use.
            forward_dtype, backward_dtype: convert to this dtype before moving (forward: result has it; backward: the gradient).
        """
        for dtype in (forward_dtype, backward_dtype):
            if dtype is not None:
                element_type(dtype)
        source: Any = self if forward_dtype is None or forward_dtype == self.dtype else self.to(forward_dtype)
        target = _target(source._layout, device_mesh, placements)
        if target is source._layout and source is not self and backward_dtype is None:
            return source
        if not is_recorded(source):
            return move_apart(source, target, async_op)
        return redistributed(source, target, async_op, backward_dtype)

    def explain_redistribute(self, placements: Sequence[Placement] | None = None, *, device_mesh: Any = None) -> Plan | Transit:
        """What ``redistribute(device_mesh, placements)`` would do, to be printed: each step, the ranks that take part, the bytes
        that one rank receives, peak memory and estimated time. Nothing is moved.

        >>> import dtensor as dt
        >>> x = dt.zeros(6, 4, device_mesh=dt.init_device_mesh("cpu", (2,), ("tp",)), placements=[dt.Shard(0)])
        >>> print(x.explain_redistribute([dt.Shard(1)]))
        float32[6, 4] (tp=S(0)) -> (tp=S(1)): 1 collective, 24 B received per rank, peak ... B, ...
          1. exchange over tp: (tp=S(0)) -> (tp=S(1)), 24 B/rank, ...
        """
        target = _target(self._layout, device_mesh, placements)
        return plan(self._layout, target) if target.mesh == self._layout.mesh else plan_between(self._layout, target)

    # --- as sharding specs say it: see dtensor.sharded_tensor ---------------------------------------------------
    def reshard(self, sharding_spec: Any) -> Any:
        """The same value as a sharding spec cuts it, also on other ranks; differentiable. All ranks of both call it."""
        return provided("reshard")(self, sharding_spec)

    def local_shard(self) -> torch.Tensor:
        """Another name of :meth:`to_local`."""
        return self.to_local()

    def sharding_metadata(self) -> Any:
        """Sizes, offsets, rank and device of every shard; no communication."""
        return provided("sharding_metadata")(self)

    # --- leaves: gradients arrive in the leaf's own layout ------------------------------------------------------
    def requires_grad_(self, requires_grad: bool = True) -> DTensor:
        """Like ``torch.Tensor.requires_grad_``; a leaf's gradient is reduced to the leaf's layout when accumulated."""
        _require_grad(self, requires_grad)
        if requires_grad and self.is_leaf:
            keep_grad_layout(self)
        return self

    def _set_requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    backward = backward
    requires_grad = property(torch.Tensor.requires_grad.__get__, _set_requires_grad)  # type: ignore[attr-defined]  # torch's stub

    @property
    def data(self) -> torch.Tensor:
        """The same memory with a version of its own: autograd does not see what is written to it, views of this tensor do."""
        return cast(DTensor, users(self)._uncounted()).detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        given = value if isinstance(value, DTensor) else laid_out_alike(value, self)
        root = self if self._base is None else self._base
        root.__dict__["_left"] = True  # views of it, or it, no longer show the memory that autograd takes them to share
        self._become(given)
        counted_together(self, given)

    def _become(self, other: DTensor) -> None:
        """Be the memory that ``other`` is, in its shape; version counter and autograd's base stay, whatever memory that has."""
        users(self)
        torch.Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        other._share(self)
        note_layout(self)

    def _share(self, target: DTensor) -> None:
        """Make ``target`` this memory."""
        target._local, target._layout, target._begins = self._local, self._layout, self._begins

    def _uncounted(self) -> DTensor:
        apart: DTensor | None = self.__dict__.get("_apart")
        if apart is None or apart._local is not self._local:
            apart = self.__dict__["_apart"] = torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]  # torch's stub
            apart.__dict__.pop(SHARED, None)  # it was detached, and has a counter of its own
            counted_together(apart, self)
        return cast(DTensor, apart)

    # --- what torch.compile asks: see :mod:`.compile_protocol` ----------------------------------------------------------
    __tensor_flatten__ = compile_protocol.Flatten(compile_protocol.flatten)
    __tensor_unflatten__ = staticmethod(compile_protocol.unflatten)
    _dynamo_dynamic_indices, _dynamo_dynamic_range = compile_protocol.Marked(), compile_protocol.Marked()
    _stable_hash_for_caching = compile_protocol.told_apart
    __coerce_tangent_metadata__ = compile_protocol.as_any_tangent
    __coerce_same_metadata_as_tangent__ = compile_protocol.as_tangent

    # --- copies, files, prints ----------------------------------------------------------------------------------
    __copy__, __deepcopy__, __reduce_ex__ = copies.shallow, copies.deep, copies.reduced

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        """For ``torch.distributed.checkpoint``: see :mod:`dtensor.interop.dcp_protocol`."""
        return provided("write_items")(self, fqn)

    def __create_chunk_list__(self) -> list[Any]:
        return provided("chunks")(self)

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return provided("shard_at")(self, index)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # named as in torch's code, not its stub
        tail = ", requires_grad=True" if self.requires_grad else ""
        if self.grad_fn is not None:
            tail = f", grad_fn=<{type(self.grad_fn).__name__}>"
        return f"DTensor({self._layout!r}{tail}{pieces(self)})"

    _repr_html_ = pictured

    tolist, numpy, __array__, __dlpack__, __format__ = (
        host_access.tolist,
        host_access.numpy,
        host_access.array,
        host_access.dlpack,
        host_access.text,
    )
    share_memory_, is_shared, is_pinned, pin_memory = (
        host_access.share_memory_,
        host_access.is_shared,
        host_access.is_pinned,
        host_access.pin_memory,
    )
    apply_, new, untyped_storage = host_access.apply_, host_access.new, storage_of
    __bool__, __int__, __index__, __float__ = host_access.truth, host_access.integer, host_access.index, host_access.real
    __complex__, __iter__ = host_access.complex_number, host_access.rows


def _target(layout: Layout, device_mesh: Any, placements: Sequence[Placement] | None) -> Layout:
    """``layout`` under other placements, on another mesh where one is given."""
    mesh = layout.mesh if device_mesh is None else as_mesh(device_mesh)
    if placements is None:
        placements = (Replicate(),) * mesh.ndim
    if mesh is layout.mesh:
        return layout.replace(placements=placements)
    return Layout.of(mesh, placements, layout.shape, layout.stride, layout.dtype)


install(DTensor)
wrap: Callable[[Any, Layout], DTensor] = wrap_local
# Lists of DTensors have rules, so torch may take its `_foreach_` ways (clip_grad_norm_) with them as with plain tensors.
_optimizer_types.append(DTensor)
changed("torch.optim.optimizer._foreach_supported_types")
_foreach_types.append(DTensor)
changed("torch.utils._foreach_utils._foreach_supported_types")
