"""Parameters that say themselves what of them is gathered, and what it becomes: float8 or int8 weights that travel as such.

The protocol is FSDP2's, of the tensors that a sharded parameter is made of::

    fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy) -> (inputs, metadata)
    fsdp_post_all_gather(outputs, metadata, param_dtype, *, out=None) -> (whole, inner) or None

``inputs`` go with the unit's other parameters in one row of bytes. Those that have as many dims as the parameter are joined along
the dim that it is cut along, others along their first. What ``whole`` is made of besides ``outputs`` stands in ``inner``: its
memory is given back with theirs, and taken again before the next ``out=whole``.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...base.torch_internals import is_traceable_wrapper_subclass
from ...comm import Communicator, communicator_of
from ...comm.pack import Box
from ...errors import LayoutError, UnsupportedOperationError
from ...mesh.submesh import picked
from ...redistribute.executor import inside
from ...redistribute.flat_buffer import Rows
from ...tensor.views.block_owners import locals_of
from .dp_modes import Axes
from .managed import HOOKS, Managed, is_extended
from .policy import MixedPrecisionPolicy

Told = list[tuple[torch.dtype, tuple[int, ...]]]


class Extensions:
    """What a group gathers, some of whose parameters have the methods: entries, a parameter or an input of one each.

    Attributes:
        inner: what wholes are made of besides the gathered inputs.
    """

    def __init__(
        self, managed: Sequence[Managed], axes: Axes, policy: MixedPrecisionPolicy, dtypes: Sequence[torch.dtype]
    ) -> None:
        self._managed, self._axes, self._policy, self._dtypes = list(managed), axes, policy, list(dtypes)
        self._own = [any(map(is_extended, locals_of(m.parameter))) for m in managed]
        self._mesh = axes.mesh._derive(*picked(axes.mesh, axes.shard))
        self._told: dict[int, list[Told]] = {}  # by member: of each parameter's inputs
        self._order: list[tuple[int, int]] = []  # entries: parameter and number of the input, wider dtypes first
        self._entries: list[list[int]] = []  # of each parameter
        self._metadata: dict[tuple[int, int], Any] = {}
        self._wholes: dict[int, Any] = {}
        self._outputs: dict[tuple[int, int], tuple[Tensor, ...]] = {}  # of parameters with several inputs, by member
        self.inner: list[Tensor] = []

    @staticmethod
    def of(
        managed: Sequence[Managed], axes: Axes, policy: MixedPrecisionPolicy, dtypes: Sequence[torch.dtype]
    ) -> Extensions | None:
        """None: no parameter has the methods."""
        return Extensions(managed, axes, policy, dtypes) if any(map(is_extended, _first_of_each(managed))) else None

    @staticmethod
    def among(managed: Sequence[Managed]) -> bool:
        """Whether some parameter has the methods, when it is to be computed with: until then it may be given them.

        Raises:
            UnsupportedOperationError: one made of several tensors has none.
        """
        found = [(x, is_extended(x)) for x in _first_of_each(managed)]
        for x, extended in found:
            if is_traceable_wrapper_subclass(x) and not extended:
                raise UnsupportedOperationError(
                    f"a parameter is a {type(x).__name__}, a wrapper subclass of several tensors. Data parallelism "
                    f"gathers and reduces plain tensors and would lose the others; define {' and '.join(HOOKS)}, keep "
                    "its tensors as parameters or buffers, or pass it in ignored_params"
                )
        return any(extended for _, extended in found)

    # --- before ------------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def inputs(self, locals_: Sequence[Any]) -> list[Any]:
        """The locals of all entries. The first time ranks tell each other the sizes of theirs: one small exchange.

        Raises:
            LayoutError: ranks have inputs that do not fit together, or others than the first time.
        """
        comm = communicator_of(self._axes.mesh)
        said: dict[int, list[Told]] = {}
        columns = []
        for i, local in enumerate(locals_):
            columns.append([local] if not self._own[i] else comm.map(lambda member, x, i=i: self._before(member, i, x), local))
        comm.map(lambda member, *own: said.__setitem__(member, [_told(x) for x in own]), *columns)
        if not self._told:
            self._learn(comm, said)
        for member, told in said.items():
            if told != self._told[member]:
                raise LayoutError(f"fsdp_pre_all_gather returned {told}, and {self._told[member]} the first time")
        return [columns[i][k] for i, k in self._order]

    def _before(self, member: int, i: int, local: Any) -> list[Tensor]:
        m, hook = self._managed[i], local.fsdp_pre_all_gather
        size = torch.Size(m.compute.shape_of(member))
        count = len(inspect.signature(hook).parameters)
        if count not in (1, 5):
            raise TypeError(
                f"{type(local).__name__}.fsdp_pre_all_gather must take a mesh, or all five parameters of "
                f"{inspect.signature(_pre)}"
            )
        given = (self._mesh, size, torch.empty(size, device="meta").stride(), m.places[0][0], self._policy)
        found, self._metadata[member, i] = hook(*given[:count])
        return [x.detach().view(1) if not x.ndim else x.detach() for x in found]

    def _learn(self, comm: Communicator, said: dict[int, list[Told]]) -> None:
        """What each member of the groups here gathers."""
        self._told = dict(said)
        if not comm.holds_all:
            for member in said:
                group = self._axes.mesh.members_of(self._axes.shard, member)
                self._told |= zip(group, comm.all_gather_object(said[member], self._axes.shard), strict=True)
        first = next(iter(self._told.values()))
        for i, m in enumerate(self._managed):
            kinds = {
                tuple((dtype, _rest(shape, self._dim(m, shape))) for dtype, shape in told[i]) for told in self._told.values()
            }
            if self._own[i] and len(kinds) > 1:
                raise LayoutError(
                    f"the results of fsdp_pre_all_gather for {m.places[0][1]!r} differ between ranks in more than the "
                    f"dim along which they are concatenated: {[told[i] for told in self._told.values()]}"
                )
        entries = [(i, k) for i, told in enumerate(first) for k in range(len(told))]
        self._order = sorted(entries, key=lambda at: -self._dtype(*at).itemsize)
        self._entries = [[self._order.index((i, k)) for k in range(len(told))] for i, told in enumerate(first)]

    def _dtype(self, i: int, k: int) -> torch.dtype:
        return next(iter(self._told.values()))[i][k][0] if self._own[i] else self._dtypes[i]

    def _dim(self, m: Managed, shape: Sequence[int]) -> int:
        return m.cut if m.cut is not None and len(shape) == len(m.stored.shape) else 0

    def rows(self, member: int, alignment: int) -> Rows:
        """Where the entries stand in what is gathered, as one member sees it."""
        group = self._axes.mesh.members_of(self._axes.shard, member)
        placed = [self._placed(i, k, member, group) for i, k in self._order]
        boxes = [[each[position] for _, each in placed] for position in range(len(group))]
        cut = [self._managed[i].cut is not None for i, _ in self._order]
        dtypes = [self._dtype(i, k) for i, k in self._order]
        return Rows.of_blocks([shape for shape, _ in placed], boxes, dtypes, cut, list(group).index(member), alignment)

    def _placed(self, i: int, k: int, member: int, group: Sequence[int]) -> tuple[tuple[int, ...], list[Box]]:
        m = self._managed[i]
        if not self._own[i]:
            whole = m.compute
            return whole.shape_of(member), [inside(whole, member, m.stored, other) for other in group]
        if m.cut is None:
            shape = self._told[member][i][k][1]
            return shape, [Box((0,) * len(shape), shape)] * len(group)
        sizes = [self._told[other][i][k][1] for other in group]
        dim, boxes, start = self._dim(m, sizes[0]), [], 0
        for size in sizes:
            boxes.append(Box(tuple(start if d == dim else 0 for d in range(len(size))), size))
            start += size[dim]
        return tuple(start if d == dim else n for d, n in enumerate(sizes[0])), boxes

    # --- after -------------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def wholes(self, locals_: Sequence[Any], gathered: Sequence[Any]) -> list[Any]:
        """The whole parameters, of the entries gathered."""
        comm, made = communicator_of(self._axes.mesh), []
        for i, local in enumerate(locals_):
            outputs = [gathered[k] for k in self._entries[i]]
            if self._own[i]:
                after: Callable[..., Tensor] = lambda member, x, out, *own, i=i: self._after(member, i, x, out, own)  # noqa: E731
                self._wholes[i] = comm.map(after, local, self._wholes.get(i), *outputs)
            made.append(self._wholes[i] if self._own[i] else outputs[0])
        return made

    def _after(self, member: int, i: int, local: Any, out: Tensor | None, outputs: tuple[Tensor, ...]) -> Tensor:
        if len(outputs) > 1:
            outputs = self._apart(member, i, outputs)
        given = (outputs, self._metadata[member, i], self._dtypes[i])
        if out is not None:
            local.fsdp_post_all_gather(*given, out=out)
            return out
        whole, inner = local.fsdp_post_all_gather(*given)
        self.inner += inner
        layout = self._managed[i].compute
        size = layout.shape_of(member)
        if whole.shape == size:
            return whole
        if whole.numel() < math.prod(size):
            raise LayoutError(f"fsdp_post_all_gather returned shape {tuple(whole.shape)} for a parameter of shape {size}")
        return whole.as_strided(size, torch.empty(size, device="meta").stride(), 0)  # without what padded the last ranks'

    def _apart(self, member: int, i: int, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Each in memory of its own, the same every time: a tensor made of several says one storage offset for all."""
        kept = self._outputs.get((member, i))
        if kept is None:
            kept = self._outputs[member, i] = tuple(x.clone() for x in outputs)
            self.inner += kept
        else:
            torch._foreach_copy_(list(kept), list(outputs))
        return kept


def _first_of_each(managed: Sequence[Managed]) -> list[Tensor]:
    return [x for m in managed for x in locals_of(m.parameter)[:1]]


def _pre(mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> None:
    """The arguments of ``fsdp_pre_all_gather``."""


def _told(inputs: Any) -> Told:
    listed = inputs if isinstance(inputs, (list, tuple)) else [inputs]
    return [(x.dtype, tuple(x.shape)) for x in listed]


def _rest(shape: Sequence[int], dim: int) -> tuple[int, ...]:
    return (*shape[:dim], *shape[dim + 1 :])
