"""Colwise, rowwise and sequence parallelism of one module.

``ColwiseParallel`` and ``RowwiseParallel`` are the two ways to shard the weight of a linear layer (Shoeybi et al.,
Megatron-LM, arXiv:1909.08053). Sharded by outputs, each rank computes some of the output features. Sharded by inputs, each
rank computes one addend of every output feature. ``SequenceParallel`` runs a module that treats every position separately on
a shard of the sequence (Korthikanti et al., arXiv:2205.05198).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import nn

from ...base.validation import check_int
from ...errors import StyleError
from ...mesh.device_mesh import DeviceMesh, as_mesh
from ...placement import Placement, Replicate, Shard
from ...tensor.dtensor import DTensor
from ...tensor.modules.distribute_module import replicate_own_tensors
from .fused_weights import distribute_fused_parameter
from .style import (
    ParallelStyle,
    StylePlacement,
    distribute_parameter,
    hook_first_input,
    hook_first_output,
    make_shared_input,
    placement_or_default,
    placement_over,
    redistribute_over,
    replicate_rest,
    require_one_dim,
    source_parameters_of,
    tensor_of,
    to_local_if,
)

WeightFamily = Literal["linear", "transposed linear", "embedding"]


def weight_family_of(module: nn.Module) -> WeightFamily:
    """Return how the weight of ``module`` is stored.

    "linear": (out, in); "transposed linear": (in, out); "embedding": (row, feature).

    Raises:
        StyleError: ``module`` has no two-dimensional weight and no parametrization that computes one.
    """
    weight = tensor_of(module, "weight")
    if weight is None or weight.ndim != 2:
        raise StyleError(
            f"{type(module).__name__} has no 2-d parameter `weight` with columns or rows to shard; "
            "parallelize its submodules, or define your own ParallelStyle"
        )
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) or hasattr(module, "num_embeddings"):
        return "embedding"
    if hasattr(module, "nf") and any(
        kind.__name__ == "Conv1D" for kind in type(module).__mro__
    ):  # GPT-2's linear layer in Hugging Face models
        return "transposed linear"
    return "linear"


class _MatrixParallel(ParallelStyle):
    """Shared implementation of :class:`ColwiseParallel` and :class:`RowwiseParallel`.

    A subclass states which dim of a linear layer's weight is sharded, the placement of the bias, and the default layouts.
    Programs override ``_partition_linear_fn``, ``_partition_embedding_fn``, ``_prepare_input_fn`` and ``_prepare_output_fn``
    of PyTorch's styles. They are called here with PyTorch's arguments.

    Attributes:
        desired_input_layouts: placements to which the input of a linear module is redistributed; an embedding gets a
            replicated input.
    """

    desired_input_layouts: tuple[Placement, ...]
    _default_output_layout: Placement
    _weight_shard_dim: int
    _bias_placement: Placement

    def __init__(
        self,
        *,
        input_layouts: StylePlacement | None = None,
        output_layouts: StylePlacement | None = None,
        use_local_output: bool = True,
    ) -> None:
        self.input_layouts = (placement_or_default(input_layouts, self.desired_input_layouts[0], "input_layouts", self),)
        self.output_layouts = (placement_or_default(output_layouts, self._default_output_layout, "output_layouts", self),)
        self.use_local_output = use_local_output

    def _distribute_weight(self, module: nn.Module, mesh: DeviceMesh, dim: int) -> None:
        """Distribute the weight, sharded along ``dim``, and the bias of ``module``."""
        distribute_parameter(module, "weight", mesh, Shard(dim), self.src_data_rank)
        if source_parameters_of(module, "bias"):
            distribute_parameter(module, "bias", mesh, self._bias_placement, self.src_data_rank)

    def _finish_output(self, output: Any, mesh: DeviceMesh, placement: Placement, new: bool) -> Any:
        """Redistribute a module's output to ``placement``, and return it or its local tensor.

        Args:
            new: no other tensor shares the memory of ``output``, so its local tensor may be overwritten.
        """
        x = redistribute_over(output, mesh, with_positive_dim(placement, output.ndim))
        return to_local_if(x, self.use_local_output, mesh, new=new or x is not output)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Distribute the parameters, and register the hooks that redistribute the input and the output."""
        mesh, family = require_one_dim(device_mesh, self), weight_family_of(module)
        features = _input_features_of(module, family)
        partition = self._partition_embedding_fn if family == "embedding" else self._partition_linear_fn
        partition("", module, mesh)
        replicate_rest(module, mesh, self.src_data_rank)
        input_layouts = (placement_over(mesh, self.input_layouts[0]),)
        output_layouts = (placement_over(mesh, self.output_layouts[0]),)
        desired = (Replicate(),) if family == "embedding" else self.desired_input_layouts
        if self._prepare_input_fn is _MatrixParallel._prepare_input_fn:
            hook_first_input(module, lambda x: _prepare_input(x, mesh, input_layouts[0], desired[0], features))
        else:
            prepare = self._prepare_input_fn
            module.register_forward_pre_hook(lambda mod, inputs: prepare(input_layouts, desired, mod, inputs, mesh))
        saves_no_output = type(module).forward in (nn.Linear.forward, nn.Embedding.forward) and not module._forward_hooks
        if self._prepare_output_fn is _MatrixParallel._prepare_output_fn:
            hook_first_output(module, lambda x: self._finish_output(x, mesh, output_layouts[0], saves_no_output))
        else:
            finish, use_local = self._prepare_output_fn, self.use_local_output
            module.register_forward_hook(lambda mod, inputs, outputs: finish(output_layouts, use_local, mod, outputs, mesh))
        return module

    # --- named and called as in PyTorch, for subclasses --------------------------------------------------------------
    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        """Distribute the weight and the bias of ``module``; leave a module that has no weight."""
        if source_parameters_of(module, "weight"):
            is_transposed = weight_family_of(module) == "transposed linear"
            dim = 1 - self._weight_shard_dim if is_transposed else self._weight_shard_dim
            self._distribute_weight(module, device_mesh, dim)

    def _partition_embedding_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        """Distribute the table of an embedding."""
        self._distribute_weight(module, device_mesh, 1 - self._weight_shard_dim)

    @staticmethod
    def _prepare_input_fn(
        input_layouts: Sequence[Placement],
        desired_input_layouts: Sequence[Placement],
        mod: nn.Module,
        inputs: Any,
        device_mesh: Any,
    ) -> Any:
        """Return the first of ``inputs`` as a DTensor in ``desired_input_layouts``."""
        features = _input_features_of(mod, weight_family_of(mod))
        return _prepare_input(inputs[0], as_mesh(device_mesh), input_layouts[0], desired_input_layouts[0], features)

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Sequence[Placement], use_local_output: bool, mod: nn.Module, outputs: Any, device_mesh: Any
    ) -> Any:
        """Return the DTensor ``outputs`` under ``output_layouts``, or its local tensor if ``use_local_output``."""
        mesh = as_mesh(device_mesh)
        return to_local_if(
            redistribute_over(outputs, mesh, with_positive_dim(output_layouts[0], outputs.ndim)), use_local_output, mesh
        )


class ColwiseParallel(_MatrixParallel):
    """Shard a ``Linear`` (or any module with such a weight) by output features, an ``Embedding`` by features.

    Args:
        input_layouts: placement of a plain input, default ``Replicate()``.
        output_layouts: placement of the output, default ``Shard(-1)``: no communication in forward.
        use_local_output: return this rank's local tensor instead of a DTensor.
        parts: number of matrices of equal size that the weight fuses along its outputs: 2 where ``gate, up =
            fused(x).chunk(2, -1)``, 3 for fused queries, keys and values. Each matrix is sharded separately, so a rank has
            columns of all of them. The stored parameter is their stack, ``(parts, out / parts, in)``, under
            ``module.parametrizations.weight``. ``module.weight`` and ``state_dict()`` show the fused matrix. ``chunk``,
            ``split`` and slices of a DTensor output give the parts without communication; other reads gather it.

    >>> import torch, dtensor as dt
    >>> from dtensor.parallel import parallelize_module
    >>> mesh = dt.init_device_mesh("cpu", (2,))
    >>> linear = parallelize_module(torch.nn.Linear(3, 4), mesh, ColwiseParallel(use_local_output=False))
    >>> linear.weight.placements, linear(torch.ones(5, 3)).layout
    ((Shard(dim=0),), float32[5, 4] on (0=S(1)))
    >>> fused = parallelize_module(torch.nn.Linear(3, 8), mesh, ColwiseParallel(parts=2, use_local_output=False))
    >>> gate, up = fused(torch.ones(5, 3)).chunk(2, -1)
    >>> gate.layout, up.layout
    (float32[5, 4] on (0=S(1)), float32[5, 4] on (0=S(1)))

    Raises:
        StyleError, MeshError, PlacementError: the module has no such weight, or its size is not a multiple of ``parts``; the
            mesh has several dims; a layout is not a placement.
    """

    desired_input_layouts = (Replicate(),)
    _default_output_layout = Shard(-1)
    _weight_shard_dim = 0
    _bias_placement = Shard(0)

    def __init__(
        self,
        *,
        input_layouts: StylePlacement | None = None,
        output_layouts: StylePlacement | None = None,
        use_local_output: bool = True,
        parts: int = 1,
    ) -> None:
        super().__init__(input_layouts=input_layouts, output_layouts=output_layouts, use_local_output=use_local_output)
        if (count := check_int(parts, "ColwiseParallel(parts=)")) < 1:
            raise StyleError(f"ColwiseParallel(parts=) takes the number of fused matrices, at least 1, got {count}")
        if count > 1 and self._prepare_output_fn is not _MatrixParallel._prepare_output_fn:
            raise StyleError(
                f"{type(self).__name__} overrides _prepare_output_fn, which does not get the number of parts and cannot return "
                "the columns of every part: use parts=1, or override _apply"
            )
        self.parts = count

    def _distribute_weight(self, module: nn.Module, mesh: DeviceMesh, dim: int) -> None:
        """Distribute the weight and bias; fused parts are sharded one by one."""
        if self.parts == 1:
            super()._distribute_weight(module, mesh, dim)
            return
        distribute_fused_parameter(module, "weight", mesh, dim, self.parts, self.src_data_rank)
        if source_parameters_of(module, "bias"):
            distribute_fused_parameter(module, "bias", mesh, 0, self.parts, self.src_data_rank)

    def _finish_output(self, output: Any, mesh: DeviceMesh, placement: Placement, new: bool) -> Any:
        """Return the output; with ``parts`` > 1 and ``Shard(-1)`` each rank keeps its shard of every part."""
        if self.parts == 1 or with_positive_dim(placement, output.ndim) != Shard(output.ndim - 1):
            return super()._finish_output(output, mesh, placement, new)
        if not self.use_local_output:
            return output
        stacked = output.unflatten(-1, (self.parts, -1))
        return to_local_if(redistribute_over(stacked, mesh, Shard(stacked.ndim - 1)), True, mesh).flatten(-2)


class RowwiseParallel(_MatrixParallel):
    """Shard a ``Linear`` (or any module with such a weight) by input features, an ``Embedding`` by rows of the table.

    Args:
        input_layouts: placement of a plain input, default ``Shard(-1)``. Pass ``Replicate()`` for the tokens of an embedding.
        output_layouts: placement of the output, default ``Replicate()`` (one all-reduce); ``Shard(d)`` costs one
            reduce-scatter.
        use_local_output: return this rank's local tensor instead of a DTensor.

    Forward costs the collective of ``output_layouts``. Backward costs nothing for ``Replicate()`` and one all-gather for
    ``Shard(d)``.

    >>> import torch, dtensor as dt
    >>> from dtensor.parallel import parallelize_module
    >>> mesh = dt.init_device_mesh("cpu", (2,))
    >>> linear = parallelize_module(torch.nn.Linear(4, 3), mesh, RowwiseParallel(use_local_output=False))
    >>> linear.weight.placements, linear.bias.placements, linear(torch.ones(5, 2)).layout
    ((Shard(dim=1),), (Replicate(),), float32[5, 3] on (0=R))

    Raises:
        StyleError, MeshError, PlacementError: see :class:`ColwiseParallel`.
    """

    desired_input_layouts = (Shard(-1),)
    _default_output_layout = Replicate()
    _weight_shard_dim = 1
    _bias_placement = Replicate()


class SequenceParallel(ParallelStyle):
    """Run a norm or dropout on a shard of the sequence, with replicated parameters.

    A plain input is taken as this rank's shard. A DTensor input is redistributed to ``Shard(sequence_dim)``, which is also
    the placement of the output.

    Args:
        sequence_dim: the tensor dim that is sharded.
        use_local_output: return this rank's local tensor instead of a DTensor.

    An input with that placement needs no communication. Backward reduces the gradients of the parameters.

    >>> import torch, dtensor as dt
    >>> from dtensor.parallel import parallelize_module
    >>> mesh = dt.init_device_mesh("cpu", (2,))
    >>> norm = parallelize_module(torch.nn.LayerNorm(4), mesh, SequenceParallel())
    >>> norm(torch.ones(2, 3, 4)).layout
    float32[2, 6, 4] on (0=S(1))

    Raises:
        MeshError: the mesh has several dims.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        self.sequence_sharding = (Shard(sequence_dim),)
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Replicate the parameters, and register the hooks that shard input and output along the sequence."""
        mesh, sharding = require_one_dim(device_mesh, self), self.sequence_sharding
        self._replicate_module_fn("", module, mesh)
        replicate_rest(module, mesh, self.src_data_rank)
        if self._prepare_input_fn is SequenceParallel._prepare_input_fn:
            hook_first_input(module, lambda x: _shard_sequence(x, mesh, sharding[0]))
        else:
            prepare = self._prepare_input_fn
            module.register_forward_pre_hook(lambda mod, inputs: prepare(sharding, mod, inputs, mesh))
        if self._prepare_output_fn is SequenceParallel._prepare_output_fn:
            hook_first_output(module, lambda x: to_local_if(_shard_sequence(x, mesh, sharding[0]), self.use_local_output, mesh))
        else:
            finish, use_local = self._prepare_output_fn, self.use_local_output
            module.register_forward_hook(lambda mod, inputs, outputs: finish(use_local, mod, outputs, mesh))
        return module

    # --- named and called as in PyTorch, for subclasses --------------------------------------------------------------
    def _replicate_module_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        """Replicate the parameters and buffers of ``module``."""
        replicate_own_tensors(module, device_mesh, self.src_data_rank)

    @staticmethod
    def _prepare_input_fn(sequence_sharding: Sequence[Placement], mod: nn.Module, inputs: Any, device_mesh: Any) -> Any:
        """Return the first of ``inputs`` as a DTensor sharded by ``sequence_sharding``."""
        return _shard_sequence(inputs[0], as_mesh(device_mesh), sequence_sharding[0])

    @staticmethod
    def _prepare_output_fn(use_local_output: bool, mod: nn.Module, outputs: Any, device_mesh: Any) -> Any:
        """Return ``outputs``, or the local tensor if ``use_local_output``."""
        return to_local_if(outputs, use_local_output, as_mesh(device_mesh))


def _shard_sequence(x: Any, mesh: DeviceMesh, sharding: Placement) -> DTensor:
    """Redistribute ``x`` to ``sharding``; a plain ``x`` is this rank's shard."""
    return make_shared_input(x, mesh, sharding, with_positive_dim(sharding, x.ndim))


def _prepare_input(x: Any, mesh: DeviceMesh, input_placement: Placement, desired: Placement, features: int | None) -> Any:
    """Redistribute the input ``x`` to ``desired``.

    Args:
        input_placement: placement of a plain ``x``.
        features: global size of the last dim of ``x``, None if unknown.
    """
    last = isinstance(input_placement, Shard) and input_placement.dim in (-1, x.ndim - 1)
    return make_shared_input(x, mesh, input_placement, with_positive_dim(desired, x.ndim), features if last else None)


def _input_features_of(module: nn.Module, family: WeightFamily) -> int | None:
    """Return the number of input features of a linear module, None for an embedding."""
    weight = tensor_of(module, "weight")
    assert weight is not None
    return {"linear": int(weight.shape[1]), "transposed linear": int(weight.shape[0])}.get(family)


def with_positive_dim(placement: Placement, ndim: int) -> Placement:
    """Return ``placement`` with a non-negative tensor dim, as layouts store it, so that equal placements compare equal."""
    if isinstance(placement, Shard) and placement.dim < 0:
        return Shard(placement.dim + ndim, placement.sizes, placement.level)
    return placement
