"""Tensor and sequence parallelism of one module.

``ColwiseParallel`` and ``RowwiseParallel`` are the two ways to cut a matrix (Shoeybi et al., Megatron-LM, arXiv:1909.08053):
by outputs, each rank computing some of them, or by inputs, each rank computing one term of every output's sum.
``SequenceParallel`` runs what works on each position alone on a part of the positions (Korthikanti et al., arXiv:2205.05198).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import nn

from ...base.validation import whole
from ...errors import StyleError
from ...mesh.device_mesh import DeviceMesh, as_mesh
from ...placement import Placement, Replicate, Shard
from ...tensor.distribute import replicate_own
from ...tensor.dtensor import DTensor
from .fused_weights import lay_out_parts
from .style import (
    ParallelStyle,
    after_forward,
    before_forward,
    behind,
    brought,
    checked,
    lay_out,
    local_if,
    one_dim,
    placed,
    replicate_rest,
    tensor_of,
)

Family = Literal["linear", "transposed linear", "embedding"]


def family_of(module: nn.Module) -> Family:
    """What the weight of ``module`` means: (out, in), (in, out), or (row, feature) of a table.

    Raises:
        StyleError: ``module`` has no two-dimensional weight, nor computes one.
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
    """What both cuts share. A subclass says which dim of a linear layer's weight is cut, and how all else lies.

    The methods that PyTorch's styles call and that programs override are called here with PyTorch's arguments:
    ``_partition_linear_fn``, ``_partition_embedding_fn``, ``_prepare_input_fn`` and ``_prepare_output_fn``.

    Attributes:
        desired_input_layouts: the layouts in which a linear module gets its input; an embedding gets it replicated.
    """

    desired_input_layouts: tuple[Placement, ...]
    _default_output: Placement
    _dim: int
    _bias: Placement

    def __init__(
        self, *, input_layouts: Placement | None = None, output_layouts: Placement | None = None, use_local_output: bool = True
    ) -> None:
        self.input_layouts = (checked(input_layouts, self.desired_input_layouts[0], "input_layouts", self),)
        self.output_layouts = (checked(output_layouts, self._default_output, "output_layouts", self),)
        self.use_local_output = use_local_output

    def _lay_out(self, module: nn.Module, mesh: DeviceMesh, dim: int) -> None:
        """The weight, of which ``dim`` is cut, and the bias."""
        lay_out(module, "weight", mesh, Shard(dim), self.src_data_rank)
        if behind(module, "bias"):
            lay_out(module, "bias", mesh, self._bias, self.src_data_rank)

    def _given(self, made: Any, mesh: DeviceMesh, new: bool) -> Any:
        """What the module gives of its output ``made``; ``new``: nobody else has its memory."""
        x = placed(made, mesh, positive(self.output_layouts[0], made.ndim))
        return local_if(x, self.use_local_output, mesh, new=new or x is not made)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        mesh, family = one_dim(device_mesh, self), family_of(module)
        features = _input_features(module, family)
        partition = self._partition_embedding_fn if family == "embedding" else self._partition_linear_fn
        partition("", module, mesh)
        replicate_rest(module, mesh, self.src_data_rank)
        desired = (Replicate(),) if family == "embedding" else self.desired_input_layouts
        if self._prepare_input_fn is _MatrixParallel._prepare_input_fn:
            before_forward(module, lambda x: _prepared(x, mesh, self.input_layouts[0], desired[0], features))
        else:
            prepare = self._prepare_input_fn
            module.register_forward_pre_hook(lambda mod, inputs: prepare(self.input_layouts, desired, mod, inputs, mesh))
        saves_none = type(module).forward in (nn.Linear.forward, nn.Embedding.forward) and not module._forward_hooks
        if self._prepare_output_fn is _MatrixParallel._prepare_output_fn:
            after_forward(module, lambda x: self._given(x, mesh, saves_none))
        else:
            finish, layouts, local = self._prepare_output_fn, self.output_layouts, self.use_local_output
            module.register_forward_hook(lambda mod, inputs, outputs: finish(layouts, local, mod, outputs, mesh))
        return module

    # --- named and called as in PyTorch, for subclasses ---------------------------------------------------------------
    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        """Distribute the weight and the bias of ``module``; leave a module that has no weight."""
        if behind(module, "weight"):
            self._lay_out(module, device_mesh, self._dim if family_of(module) != "transposed linear" else 1 - self._dim)

    def _partition_embedding_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        """Distribute the table of an embedding."""
        self._lay_out(module, device_mesh, 1 - self._dim)

    @staticmethod
    def _prepare_input_fn(
        input_layouts: Sequence[Placement],
        desired_input_layouts: Sequence[Placement],
        mod: nn.Module,
        inputs: Any,
        device_mesh: Any,
    ) -> Any:
        """Return the first of ``inputs`` as a DTensor in ``desired_input_layouts``."""
        features = _input_features(mod, family_of(mod))
        return _prepared(inputs[0], as_mesh(device_mesh), input_layouts[0], desired_input_layouts[0], features)

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Sequence[Placement], use_local_output: bool, mod: nn.Module, outputs: Any, device_mesh: Any
    ) -> Any:
        """Return the DTensor ``outputs`` in ``output_layouts``, or its local tensor where ``use_local_output`` asks for that."""
        mesh = as_mesh(device_mesh)
        return local_if(placed(outputs, mesh, positive(output_layouts[0], outputs.ndim)), use_local_output, mesh)


class ColwiseParallel(_MatrixParallel):
    """Cuts a ``Linear`` (or any module with such a weight) by outputs, an ``Embedding`` by features.

    Args:
        input_layouts: how a plain input lies, default ``Replicate()``.
        output_layouts: how the output shall lie, default ``Shard(-1)``: no communication in forward.
        use_local_output: return this rank's piece instead of a DTensor.
        parts: of how many matrices of one size the weight is made by outputs: 2 where ``gate, up = fused(x).chunk(2, -1)``, 3
            where queries, keys and values are one. Each is cut by itself: a rank has columns of all of them. What is kept is
            their stack, ``(parts, out / parts, in)``, under ``module.parametrizations.weight``; ``module.weight`` and
            ``state_dict()`` show the one of the model. The parts of a DTensor that is given (``chunk``, ``split``, slices) are
            there; to read it otherwise gathers it.

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
        StyleError, MeshError, PlacementError: a module without such a weight, or whose weight is not of so many parts; a mesh of
            several dims, layouts that are none.
    """

    desired_input_layouts = (Replicate(),)
    _default_output = Shard(-1)
    _dim = 0
    _bias = Shard(0)

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        parts: int = 1,
    ) -> None:
        super().__init__(input_layouts=input_layouts, output_layouts=output_layouts, use_local_output=use_local_output)
        if (count := whole(parts, "ColwiseParallel(parts=)")) < 1:
            raise StyleError(f"ColwiseParallel(parts=) takes the number of fused matrices, at least 1, got {count}")
        if count > 1 and self._prepare_output_fn is not _MatrixParallel._prepare_output_fn:
            raise StyleError(
                f"{type(self).__name__} overrides _prepare_output_fn, which does not get the number of parts and cannot return "
                "the columns of every part: use parts=1, or override _apply"
            )
        self.parts = count

    def _lay_out(self, module: nn.Module, mesh: DeviceMesh, dim: int) -> None:
        if self.parts == 1:
            super()._lay_out(module, mesh, dim)
            return
        lay_out_parts(module, "weight", mesh, dim, self.parts, self.src_data_rank)
        if behind(module, "bias"):
            lay_out_parts(module, "bias", mesh, 0, self.parts, self.src_data_rank)

    def _given(self, made: Any, mesh: DeviceMesh, new: bool) -> Any:
        """In parts each rank has its piece of each; what else is asked for is moved there."""
        if self.parts == 1 or positive(self.output_layouts[0], made.ndim) != Shard(made.ndim - 1):
            return super()._given(made, mesh, new)
        if not self.use_local_output:
            return made
        stack = made.unflatten(-1, (self.parts, -1))
        return local_if(placed(stack, mesh, Shard(stack.ndim - 1)), True, mesh).flatten(-2)


class RowwiseParallel(_MatrixParallel):
    """Cuts a ``Linear`` (or any module with such a weight) by inputs, an ``Embedding`` by rows of the table.

    Args:
        input_layouts: how a plain input lies, default ``Shard(-1)`` (give ``Replicate()`` for the tokens of an embedding).
        output_layouts: how the output shall lie, default ``Replicate()`` (one all-reduce); ``Shard(d)`` is one reduce-scatter.
        use_local_output: return this rank's piece instead of a DTensor.

    A forward costs the collective that ``output_layouts`` says, a backward nothing, or an all-gather where that is ``Shard``.

    >>> import torch, dtensor as dt
    >>> from dtensor.parallel import parallelize_module
    >>> mesh = dt.init_device_mesh("cpu", (2,))
    >>> linear = parallelize_module(torch.nn.Linear(4, 3), mesh, RowwiseParallel(use_local_output=False))
    >>> linear.weight.placements, linear.bias.placements, linear(torch.ones(5, 2)).layout
    ((Shard(dim=1),), (Replicate(),), float32[5, 3] on (0=R))

    Raises:
        StyleError, MeshError, PlacementError: as :class:`ColwiseParallel`.
    """

    desired_input_layouts = (Shard(-1),)
    _default_output = Replicate()
    _dim = 1
    _bias = Replicate()


class SequenceParallel(ParallelStyle):
    """Runs a norm or dropout on a part of the sequence; its parameters are replicated.

    A plain input counts as this rank's part; a DTensor is brought to ``Shard(sequence_dim)``, which is how the output lies.

    Args:
        sequence_dim: the tensor dim that is cut.
        use_local_output: return this rank's piece instead of a DTensor.

    No communication for an input that lies so; a backward reduces the gradients of the parameters.

    >>> import torch, dtensor as dt
    >>> from dtensor.parallel import parallelize_module
    >>> mesh = dt.init_device_mesh("cpu", (2,))
    >>> norm = parallelize_module(torch.nn.LayerNorm(4), mesh, SequenceParallel())
    >>> norm(torch.ones(2, 3, 4)).layout
    float32[2, 6, 4] on (0=S(1))

    Raises:
        MeshError: a mesh of several dims.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        self.sequence_sharding = (Shard(sequence_dim),)
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        mesh, sharding = one_dim(device_mesh, self), self.sequence_sharding
        self._replicate_module_fn("", module, mesh)
        replicate_rest(module, mesh, self.src_data_rank)
        if self._prepare_input_fn is SequenceParallel._prepare_input_fn:
            before_forward(module, lambda x: _sharded_sequence(x, mesh, sharding[0]))
        else:
            prepare = self._prepare_input_fn
            module.register_forward_pre_hook(lambda mod, inputs: prepare(sharding, mod, inputs, mesh))
        if self._prepare_output_fn is SequenceParallel._prepare_output_fn:
            after_forward(module, lambda x: local_if(_sharded_sequence(x, mesh, sharding[0]), self.use_local_output, mesh))
        else:
            finish, local = self._prepare_output_fn, self.use_local_output
            module.register_forward_hook(lambda mod, inputs, outputs: finish(local, mod, outputs, mesh))
        return module

    # --- named and called as in PyTorch, for subclasses ---------------------------------------------------------------
    def _replicate_module_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        """Replicate the parameters and buffers of ``module``."""
        replicate_own(module, device_mesh, self.src_data_rank)

    @staticmethod
    def _prepare_input_fn(sequence_sharding: Sequence[Placement], mod: nn.Module, inputs: Any, device_mesh: Any) -> Any:
        """Return the first of ``inputs`` as a DTensor that is sharded by ``sequence_sharding``."""
        return _sharded_sequence(inputs[0], as_mesh(device_mesh), sequence_sharding[0])

    @staticmethod
    def _prepare_output_fn(use_local_output: bool, mod: nn.Module, outputs: Any, device_mesh: Any) -> Any:
        """Return ``outputs``, or its local tensor where ``use_local_output`` asks for that."""
        return local_if(outputs, use_local_output, as_mesh(device_mesh))


def _sharded_sequence(x: Any, mesh: DeviceMesh, sharding: Placement) -> DTensor:
    """Return ``x`` sharded by ``sharding``; a plain ``x`` is this rank's piece."""
    return brought(x, mesh, sharding, positive(sharding, x.ndim))


def _prepared(x: Any, mesh: DeviceMesh, given: Placement, wanted: Placement, features: int | None) -> Any:
    """Return the input ``x`` under ``wanted``. A plain ``x`` has the placement ``given``; ``features``: its global last size."""
    last = isinstance(given, Shard) and given.dim in (-1, x.ndim - 1)
    return brought(x, mesh, given, positive(wanted, x.ndim), features if last else None)


def _input_features(module: nn.Module, family: Family) -> int | None:
    weight = tensor_of(module, "weight")
    assert weight is not None
    return {"linear": int(weight.shape[1]), "transposed linear": int(weight.shape[0])}.get(family)


def positive(placement: Placement, ndim: int) -> Placement:
    """As layouts spell it, so that equal placements compare equal."""
    if isinstance(placement, Shard) and placement.dim < 0:
        return Shard(placement.dim + ndim, placement.sizes, placement.level)
    return placement
