"""All-gather extensions: parameters that define what is gathered and what it becomes (float8 or int8 weights sent as such).

The protocol is that of FSDP2, for the local tensors of a sharded parameter::

    fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy) -> (inputs, metadata)
    fsdp_post_all_gather(outputs, metadata, param_dtype, *, out=None) -> (unsharded, inner_tensors) or None

``inputs`` are sent with the unit's other parameters in one row of bytes. Inputs with as many dims as the parameter are
concatenated along its sharded dim, others along their first dim. ``inner_tensors`` are the tensors besides ``outputs`` of
which ``unsharded`` is made. Their memory is freed with that of ``outputs``, and allocated again before the next
``out=unsharded``.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .....base.torch_internals import is_traceable_wrapper_subclass
from .....comm import Communicator
from .....comm.map_ranks import communicator_of
from .....comm.pack import Box
from .....errors import LayoutError, UnsupportedOperationError
from .....mesh.submesh import select_dims
from .....redistribute.executor import box_inside
from .....redistribute.flat_buffer import FlatBuffer
from .....tensor.local_tensors import local_tensors_of
from ...settings.dp_modes import MeshAxes
from ...settings.policy import MixedPrecisionPolicy
from .fsdp_param import EXTENSION_METHODS, FSDPParam, is_extended

InputSpecs = list[tuple[torch.dtype, tuple[int, ...]]]


class AllGatherExtensions:
    """All-gather of a group in which some parameters have extensions. An entry is a parameter, or one input of an extension.

    Attributes:
        inner_tensors: tensors of which unsharded values are made, besides the gathered inputs.
    """

    def __init__(
        self, fsdp_params: Sequence[FSDPParam], axes: MeshAxes, policy: MixedPrecisionPolicy, dtypes: Sequence[torch.dtype]
    ) -> None:
        self._fsdp_params, self._axes, self._policy, self._dtypes = list(fsdp_params), axes, policy, list(dtypes)
        self._is_extended = [any(map(is_extended, local_tensors_of(fsdp_param.parameter))) for fsdp_param in fsdp_params]
        self._mesh = axes.mesh._derive(*select_dims(axes.mesh, axes.shard))
        self._specs: dict[int, list[InputSpecs]] = {}  # by member: dtypes and shapes of each parameter's inputs
        self._order: list[tuple[int, int]] = []  # entries: parameter and number of the input, wider dtypes first
        self._entries: list[list[int]] = []  # by parameter: its entries
        self._metadata: dict[tuple[int, int], Any] = {}
        self._values: dict[int, Any] = {}
        self._outputs: dict[tuple[int, int], tuple[Tensor, ...]] = {}  # of parameters with several inputs, by member
        self.inner_tensors: list[Tensor] = []

    @staticmethod
    def make_if_extended(
        fsdp_params: Sequence[FSDPParam], axes: MeshAxes, policy: MixedPrecisionPolicy, dtypes: Sequence[torch.dtype]
    ) -> AllGatherExtensions | None:
        """Return the extensions of a group, None if no parameter has any."""
        return (
            AllGatherExtensions(fsdp_params, axes, policy, dtypes) if any(map(is_extended, _first_locals(fsdp_params))) else None
        )

    @staticmethod
    def are_needed(fsdp_params: Sequence[FSDPParam]) -> bool:
        """Return True if some parameter has an extension now: a program may add it until the first forward.

        Raises:
            UnsupportedOperationError: a wrapper subclass has no extension.
        """
        results = [(x, is_extended(x)) for x in _first_locals(fsdp_params)]
        for x, extended in results:
            if is_traceable_wrapper_subclass(x) and not extended:
                raise UnsupportedOperationError(
                    f"a parameter is a {type(x).__name__}, a wrapper subclass of several tensors. Data parallelism "
                    f"gathers and reduces plain tensors and would lose the others; define {' and '.join(EXTENSION_METHODS)}, "
                    "keep its tensors as parameters or buffers, or pass it in ignored_params"
                )
        return any(extended for _, extended in results)

    # --- before the all-gather ---------------------------------------------------------------------------------------
    @torch.no_grad()
    def make_inputs(self, locals_: Sequence[Any]) -> list[Any]:
        """Return the local tensors to gather: parameters, and results of ``fsdp_pre_all_gather``; ranks exchange shapes once.

        Raises:
            LayoutError: ranks have inputs that do not fit together, or other inputs than the first time.
        """
        comm = communicator_of(self._axes.mesh)
        own_specs: dict[int, list[InputSpecs]] = {}
        columns = []
        for i, local in enumerate(locals_):
            pre_all_gather = functools.partial(self._call_pre_all_gather, i)
            columns.append(comm.map(pre_all_gather, local) if self._is_extended[i] else [local])
        comm.map(lambda member, *own: own_specs.__setitem__(member, [_input_specs(x) for x in own]), *columns)
        if not self._specs:
            self._exchange_specs(comm, own_specs)
        for member, specs in own_specs.items():
            if specs != self._specs[member]:
                raise LayoutError(f"fsdp_pre_all_gather returned {specs}, and {self._specs[member]} the first time")
        return [columns[i][k] for i, k in self._order]

    def _call_pre_all_gather(self, i: int, member: int, local: Any) -> list[Tensor]:
        """Call the tensor's ``fsdp_pre_all_gather``, keep its metadata, and return the tensors to gather."""
        fsdp_param, hook = self._fsdp_params[i], local.fsdp_pre_all_gather
        size = torch.Size(fsdp_param.unsharded_layout.shape_of(member))
        count = len(inspect.signature(hook).parameters)
        if count not in (1, 5):
            raise TypeError(
                f"{type(local).__name__}.fsdp_pre_all_gather must take a mesh, or all five parameters of "
                f"{inspect.signature(_pre_all_gather_parameters)}"
            )
        arguments = (self._mesh, size, torch.empty(size, device="meta").stride(), fsdp_param.locations[0][0], self._policy)
        results, self._metadata[member, i] = hook(*arguments[:count])
        return [x.detach().view(1) if not x.ndim else x.detach() for x in results]

    def _exchange_specs(self, comm: Communicator, own_specs: dict[int, list[InputSpecs]]) -> None:
        """Exchange the dtypes and shapes of tensors to gather between ranks, and order the entries by item size."""
        self._specs = dict(own_specs)
        if not comm.holds_all:
            for member in own_specs:
                group = self._axes.mesh.members_of(self._axes.shard, member)
                self._specs |= zip(group, comm.all_gather_object(own_specs[member], self._axes.shard), strict=True)
        first = next(iter(self._specs.values()))
        for i, fsdp_param in enumerate(self._fsdp_params):
            kinds = {
                tuple((dtype, _without_dim(shape, self._concat_dim(fsdp_param, shape))) for dtype, shape in specs[i])
                for specs in self._specs.values()
            }
            if self._is_extended[i] and len(kinds) > 1:
                raise LayoutError(
                    f"the results of fsdp_pre_all_gather for {fsdp_param.locations[0][1]!r} differ between ranks in more than "
                    f"the dim along which they are concatenated: {[specs[i] for specs in self._specs.values()]}"
                )
        entries = [(i, k) for i, specs in enumerate(first) for k in range(len(specs))]
        self._order = sorted(entries, key=lambda at: -self._entry_dtype(*at).itemsize)
        self._entries = [[self._order.index((i, k)) for k in range(len(specs))] for i, specs in enumerate(first)]

    def _entry_dtype(self, i: int, k: int) -> torch.dtype:
        return next(iter(self._specs.values()))[i][k][0] if self._is_extended[i] else self._dtypes[i]

    def _concat_dim(self, fsdp_param: FSDPParam, shape: Sequence[int]) -> int:
        """Return the dim along which ranks' inputs are concatenated: the sharded dim if the input has it, else 0."""
        dim = fsdp_param.shard_dim
        return dim if dim is not None and len(shape) == len(fsdp_param.stored_layout.shape) else 0

    def make_rows(self, member: int, alignment: int) -> FlatBuffer:
        """Return the flat buffer layout of what ``member`` gathers, with the offset of each entry."""
        group = self._axes.mesh.members_of(self._axes.shard, member)
        entry_boxes = [self._entry_boxes(i, k, member, group) for i, k in self._order]
        boxes = [[each[position] for _, each in entry_boxes] for position in range(len(group))]
        is_sharded = [self._fsdp_params[i].shard_dim is not None for i, _ in self._order]
        dtypes = [self._entry_dtype(i, k) for i, k in self._order]
        return FlatBuffer.from_blocks(
            [shape for shape, _ in entry_boxes], boxes, dtypes, is_sharded, list(group).index(member), alignment
        )

    def _entry_boxes(self, i: int, k: int, member: int, group: Sequence[int]) -> tuple[tuple[int, ...], list[Box]]:
        """Return the shape of one gathered tensor, and for each rank of the group the region of it that the rank sends."""
        fsdp_param = self._fsdp_params[i]
        if not self._is_extended[i]:
            layout = fsdp_param.unsharded_layout
            return layout.shape_of(member), [box_inside(layout, member, fsdp_param.stored_layout, other) for other in group]
        if fsdp_param.shard_dim is None:
            shape = self._specs[member][i][k][1]
            return shape, [Box((0,) * len(shape), shape)] * len(group)
        sizes = [self._specs[other][i][k][1] for other in group]
        dim, boxes, start = self._concat_dim(fsdp_param, sizes[0]), [], 0
        for size in sizes:
            boxes.append(Box(tuple(start if d == dim else 0 for d in range(len(size))), size))
            start += size[dim]
        return tuple(start if d == dim else n for d, n in enumerate(sizes[0])), boxes

    # --- after the all-gather ----------------------------------------------------------------------------------------
    @torch.no_grad()
    def make_values(self, locals_: Sequence[Any], gathered: Sequence[Any]) -> list[Any]:
        """Return the unsharded parameters: the gathered tensors, or the results of ``fsdp_post_all_gather``."""
        comm, made = communicator_of(self._axes.mesh), []
        for i, local in enumerate(locals_):
            outputs = [gathered[k] for k in self._entries[i]]
            if self._is_extended[i]:
                post_all_gather = functools.partial(self._call_post_all_gather, i)
                self._values[i] = comm.map(post_all_gather, local, self._values.get(i), *outputs)
            made.append(self._values[i] if self._is_extended[i] else outputs[0])
        return made

    def _call_post_all_gather(self, i: int, member: int, local: Any, out: Tensor | None, *outputs: Tensor) -> Tensor:
        """Call the tensor's ``fsdp_post_all_gather``, and return the unsharded parameter without padding."""
        if len(outputs) > 1:
            outputs = self._copy_outputs(member, i, outputs)
        arguments = (outputs, self._metadata[member, i], self._dtypes[i])
        if out is not None:
            local.fsdp_post_all_gather(*arguments, out=out)
            return out
        value, inner = local.fsdp_post_all_gather(*arguments)
        self.inner_tensors += inner
        layout = self._fsdp_params[i].unsharded_layout
        size = layout.shape_of(member)
        if value.shape == size:
            return value
        if value.numel() < math.prod(size):
            raise LayoutError(
                f"fsdp_post_all_gather returned shape {tuple(value.shape)} for a parameter of shape {size}; return that shape"
            )
        return value.as_strided(size, torch.empty(size, device="meta").stride(), 0)  # without the padding of the last ranks

    def _copy_outputs(self, member: int, i: int, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Copy gathered ``outputs`` to tensors in separate storages, the same tensors at each call.

        A wrapper subclass that is made of them has one storage offset for all.
        """
        copies = self._outputs.get((member, i))
        if copies is None:
            copies = self._outputs[member, i] = tuple(x.clone() for x in outputs)
            self.inner_tensors += copies
        else:
            torch._foreach_copy_(list(copies), list(outputs))
        return copies


def _first_locals(fsdp_params: Sequence[FSDPParam]) -> list[Tensor]:
    return [x for fsdp_param in fsdp_params for x in local_tensors_of(fsdp_param.parameter)[:1]]


def _pre_all_gather_parameters(mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> None:
    """Do nothing; the error message reads the parameters of ``fsdp_pre_all_gather`` from this signature."""


def _input_specs(inputs: Any) -> InputSpecs:
    listed = inputs if isinstance(inputs, (list, tuple)) else [inputs]
    return [(x.dtype, tuple(x.shape)) for x in listed]


def _without_dim(shape: Sequence[int], dim: int) -> tuple[int, ...]:
    return (*shape[:dim], *shape[dim + 1 :])
