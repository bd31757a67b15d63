"""Tensor and sequence parallelism of one module.

``ColwiseParallel`` and ``RowwiseParallel`` are the two ways to cut a matrix (Shoeybi et al., Megatron-LM, arXiv:1909.08053):
by outputs, each rank computing some of them, or by inputs, each rank computing one term of every output's sum.
``SequenceParallel`` runs what works on each position alone on a part of the positions (Korthikanti et al., arXiv:2205.05198).
"""

from __future__ import annotations

from typing import Any, Literal

from torch import nn

from ...base.validation import whole
from ...errors import StyleError
from ...mesh.device_mesh import DeviceMesh
from ...placement import Placement, Replicate, Shard
from ...tensor.dtensor import DTensor
from .stacked import lay_out_parts
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
    """What both cuts share. A subclass says which dim of a linear layer's weight is cut, and how all else lies."""

    _default_input: Placement
    _default_output: Placement
    _dim: int
    _bias: Placement

    def __init__(
        self, *, input_layouts: Placement | None = None, output_layouts: Placement | None = None, use_local_output: bool = True
    ) -> None:
        self.input_layouts = (checked(input_layouts, self._default_input, "input_layouts", self),)
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
        self._lay_out(module, mesh, self._dim if family == "linear" else 1 - self._dim)
        replicate_rest(module, mesh, self.src_data_rank)
        given = self.input_layouts[0]
        wanted = Replicate() if family == "embedding" else self._default_input

        def prepare_input(x: Any) -> Any:
            last = isinstance(given, Shard) and given.dim in (-1, x.ndim - 1)
            return brought(x, mesh, given, positive(wanted, x.ndim), features if last else None)

        saves_none = type(module).forward in (nn.Linear.forward, nn.Embedding.forward) and not module._forward_hooks

        before_forward(module, prepare_input)
        after_forward(module, lambda x: self._given(x, mesh, saves_none))
        return module


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

    _default_input = Replicate()
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

    _default_input = Shard(-1)
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
        mesh, cut = one_dim(device_mesh, self), self.sequence_sharding[0]
        replicate_rest(module, mesh, self.src_data_rank)

        def cut_sequence(x: Any) -> DTensor:
            return brought(x, mesh, cut, positive(cut, x.ndim))

        before_forward(module, cut_sequence)
        after_forward(module, lambda x: local_if(cut_sequence(x), self.use_local_output, mesh))
        return module


def _input_features(module: nn.Module, family: Family) -> int | None:
    weight = tensor_of(module, "weight")
    assert weight is not None
    return {"linear": int(weight.shape[1]), "transposed linear": int(weight.shape[0])}.get(family)


def positive(placement: Placement, ndim: int) -> Placement:
    """As layouts spell it, so that equal placements compare equal."""
    if isinstance(placement, Shard) and placement.dim < 0:
        return Shard(placement.dim + ndim, placement.sizes, placement.level)
    return placement
