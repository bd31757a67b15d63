"""All-gather extensions: tensor-subclass parameters with ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``, which gather small
dtypes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from compare_with_one_device import assert_same_training
from gloo_processes import run_gloo
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

import dtensor as dt
from dtensor import Replicate, Shard
from dtensor.debug import CommDebugMode
from dtensor.errors import DTensorError, LayoutError, UnsupportedOperationError
from dtensor.parallel import ColwiseParallel, CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard, parallelize_module, replicate

aten = torch.ops.aten
CLASS_PRESERVING_OPS = {
    aten.slice.Tensor,
    aten.detach.default,
    aten.clone.default,
    aten._to_copy.default,
    aten.empty_like.default,
}


class Wrapped(Tensor):
    """Weight in full precision: views and copies have this class, and computed results are plain tensors."""

    _inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        made = Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device, requires_grad=inner.requires_grad
        )
        made._inner = inner.detach()
        return made

    def __init__(self, inner: Tensor) -> None:
        pass

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        bare = tree_map(lambda x: x._inner if isinstance(x, Wrapped) else x, (args, kwargs or {}))
        made = func(*bare[0], **bare[1])
        if func._schema.name.endswith("_"):
            return args[0]
        return tree_map(lambda x: cls(x) if isinstance(x, Tensor) else x, made) if func in CLASS_PRESERVING_OPS else made

    def __tensor_flatten__(self) -> Any:
        return ["_inner"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["_inner"])


def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows as int8 values and one scale for each row."""
    scale = rows.abs().amax(1).clamp(min=1e-12) / 127
    return (rows / scale[:, None]).round().to(torch.int8), scale


class Int8PerRow(Wrapped):
    """Weight that is gathered as int8 values and a scale for each row, and dequantized after the gather."""

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        assert mesh.ndim <= 1
        assert outer_stride == (outer_size[1], 1)
        assert isinstance(module, nn.Module)
        return quantize_rows(self._inner), outer_size

    def fsdp_post_all_gather(self, outputs: Any, size: Any, dtype: torch.dtype, *, out: Tensor | None = None) -> Any:
        numbers, scale = outputs
        assert numbers.shape == size
        assert numbers.dtype == torch.int8
        values = numbers.to(dtype) * scale[:, None].to(dtype)
        if out is not None:
            out.copy_(values)
            return None
        return values, (values,)


class LazyInt8(Wrapped):
    """Weight that is gathered as int8 values with a constant scale, and dequantized by each operation."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return ((self._inner * 64).round().clamp(-128, 127).to(torch.int8),), 1 / 64

    def fsdp_post_all_gather(self, outputs: Any, scale: float, dtype: torch.dtype, *, out: Any = None) -> Any:
        if out is not None:
            assert isinstance(out, ScaledInt8)
            return None
        return ScaledInt8(outputs[0], scale, dtype), outputs


class ScaledInt8(Tensor):
    """Tensor of int8 values times a scale, which each operation dequantizes."""

    _bytes: Tensor
    _scale: float

    @staticmethod
    def __new__(cls, numbers: Tensor, scale: float, dtype: torch.dtype) -> Any:
        made = Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=dtype, device=numbers.device)
        made._bytes, made._scale = numbers, scale
        return made

    def __init__(self, numbers: Tensor, scale: float, dtype: torch.dtype) -> None:
        pass

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.detach.default, aten.t.default):
            return cls(func(args[0]._bytes), args[0]._scale, args[0].dtype)

        def numbers(x: Any) -> Any:
            return x._bytes.to(x.dtype) * x._scale if isinstance(x, ScaledInt8) else x

        return func(*tree_map(numbers, args), **tree_map(numbers, kwargs or {}))

    def __tensor_flatten__(self) -> Any:
        return ["_bytes"], (self._scale, self.dtype)

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["_bytes"], *context)


class PaddedBfloat16(Wrapped):
    """Weight that is gathered as bfloat16, with shards padded to the size of the first rank's, as PyTorch requires."""

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        rows = -(-outer_size[0] // mesh.size())
        return (nn.functional.pad(self._inner, (0, 0, 0, rows - self.shape[0])).bfloat16(),), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Tensor | None = None) -> Any:
        if out is not None:
            with torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(outputs[0][: out.shape[0]])
            return None
        made = outputs[0].to(dtype)
        return made, (made,)


def gathered_values(kind: Any, weight: Tensor) -> Tensor:
    """Return the weight values after the gather of a parameter of class ``kind``."""
    if kind is Int8PerRow:
        numbers, scale = quantize_rows(weight)
        return numbers.to(weight.dtype) * scale[:, None]
    return (weight * 64).round().clamp(-128, 127) / 64 if kind is LazyInt8 else weight.bfloat16().to(weight.dtype)


class Linear(nn.Linear):
    """Linear layer that computes with the gathered values and passes gradients to the full-precision weight."""

    kind: Any = None

    def forward(self, x: Tensor) -> Tensor:
        passed = self.weight + (gathered_values(self.kind, self.weight.detach()) - self.weight.detach())
        return nn.functional.linear(x, passed, self.bias)


def make_models(kind: Any) -> tuple[nn.Sequential, nn.Sequential]:
    """Return a model with weights of class ``kind``, and a plain model with the same values."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    alone = copy.deepcopy(model)
    for ours, theirs in zip(model, alone, strict=True):
        if isinstance(ours, nn.Linear):
            ours.weight = nn.Parameter(kind(ours.weight.detach()))
            theirs.__class__, theirs.kind = Linear, kind
    return model, alone


def whole(x: Any) -> Tensor:
    full = x.detach().full_tensor()
    full = full.shards[0] if isinstance(full, dt.PerRank) else full
    return full._inner if isinstance(full, Wrapped) else full


def train_both(kind: Any, shape: tuple[int, ...], checkpointed: bool = False, **options: Any) -> dict[str, int]:
    """Compare two steps of SGD with those of the plain model, and return the collectives of a step."""
    mesh = dt.init_device_mesh("cpu", shape, mesh_dim_names=("replica", "dp")[-len(shape) :])
    model, alone = make_models(kind)
    fully_shard(model[2], mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    local = model[2].weight._local
    assert all(isinstance(x, kind) for x in getattr(local, "shards", [local]))

    def batch(step: int) -> tuple[Any, Tensor]:
        x = torch.randn(mesh.size(), 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        return dt.map_ranks(lambda at: x[(at[0] * shape[-1] + at[1]) if len(at) > 1 else at[0]].clone(), mesh=mesh), x

    call = (lambda own: checkpoint(model, own, use_reentrant=False)) if checkpointed else None
    return assert_same_training(
        model, alone, lambda m: torch.optim.SGD(m.parameters(), lr=0.1), map(batch, range(2)), call, whole
    )


CASES = [(kind, shape) for kind in (Int8PerRow, LazyInt8, PaddedBfloat16) for shape in ((2,), (3,), (2, 2))]


@pytest.mark.parametrize(("kind", "shape"), CASES)
def test_training_with_gathered_small_dtypes_equals_plain_model(kind: Any, shape: tuple[int, ...]) -> None:
    counts = train_both(kind, shape)
    assert counts["all_gather"] == 3  # two units in forward and the inner one in backward, as without extensions


@pytest.mark.parametrize(
    "options",
    [
        {"reshard_after_forward": False},
        {"reshard_after_forward": 2},
        {"offload_policy": CPUOffloadPolicy()},
        {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float64)},
    ],
    ids=str,
)
def test_all_gather_extensions_with_unit_options_train_like_plain_model(options: dict[str, Any]) -> None:
    train_both(Int8PerRow, (4,), **options)
    train_both(LazyInt8, (4,), **options)


def test_checkpointed_all_gather_extensions_train_like_plain_model() -> None:
    train_both(Int8PerRow, (2,), checkpointed=True)


@pytest.mark.gloo
def test_all_gather_extensions_train_like_plain_model_on_process_groups() -> None:
    run_gloo(_train_two_kinds, 3)


class NeverUnflattened(Int8PerRow):
    """Subclass that must not be built by ``__tensor_unflatten__``."""

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        raise AssertionError


@pytest.mark.gloo
def test_subclass_tensors_have_values_of_the_source_rank_on_process_groups() -> None:
    run_gloo(_check_source_rank, 2)


def _check_source_rank() -> None:
    mesh = dt.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    rank = mesh.get_local_rank()
    given = torch.arange(15.0).reshape(5, 3) + rank
    layer = nn.Linear(3, 5, bias=False)
    layer.weight = nn.Parameter(NeverUnflattened(given.clone()))
    fully_shard(layer, mesh=mesh)
    assert torch.equal(layer.weight._local._inner, torch.arange(15.0).reshape(5, 3)[3 * rank :][:3])
    for source in (0, 1, None):
        made = dt.distribute_tensor(TwoTensor(given, -given), mesh, [Shard(0)], src_data_rank=source).to_local()
        kept = torch.arange(15.0).reshape(5, 3)[3 * rank :][:3] + (rank if source is None else source)
        assert isinstance(made, TwoTensor)
        assert torch.equal(made.a, kept)
        assert torch.equal(made.b, -kept)
    with pytest.raises(LayoutError, match="TwoTensor"):
        dt.distribute_tensor(TwoTensor(given, given.clone()) if rank else given, mesh, [Shard(0)])


def _train_two_kinds() -> None:
    for kind in (Int8PerRow, LazyInt8):
        assert train_both(kind, (3,))["all_gather"] == 3


def test_all_gather_of_int8_weights_sends_a_quarter_of_the_bytes() -> None:
    mesh, sent = dt.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), {}
    for kind in (None, LazyInt8):
        layer = nn.Linear(64, 64, bias=False)
        if kind is not None:
            layer.weight = nn.Parameter(kind(layer.weight.detach()))
        fully_shard(layer, mesh=mesh)
        layer(torch.ones(2, 64))
        with CommDebugMode() as comm:
            layer(torch.ones(2, 64))
        layer.reshard()
        with CommDebugMode() as comm:
            layer(torch.ones(2, 64))
        sent[kind] = comm.get_comm_bytes()["all_gather"]
    assert sent[LazyInt8] * 4 == sent[None]


def test_reshard_frees_the_memory_of_gathered_subclass_weights() -> None:
    mesh = dt.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    for kind in (Int8PerRow, LazyInt8):
        layer = nn.Linear(8, 6, bias=False)
        layer.weight = nn.Parameter(kind(layer.weight.detach()))
        fully_shard(layer, mesh=mesh)
        layer.unshard()
        seen = layer.weight.shards[0]
        memory = (seen._bytes if isinstance(seen, ScaledInt8) else seen).untyped_storage()
        size = memory.nbytes()
        assert size
        layer.reshard()
        assert not memory.nbytes()
        layer.unshard()
        assert memory.nbytes() == size


def test_forward_uses_in_place_updates_of_a_subclass_weight() -> None:
    mesh = dt.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    layer = nn.Linear(3, 4, bias=False)
    layer.weight = nn.Parameter(Int8PerRow(layer.weight.detach()))
    fully_shard(layer, mesh=mesh)
    before = layer(torch.ones(1, 3)).detach()
    with torch.no_grad():
        layer.weight.mul_(2)
    torch.testing.assert_close(layer(torch.ones(1, 3)).detach(), before * 2)


def test_extension_methods_set_on_plain_local_tensors_are_used() -> None:
    torch.manual_seed(0)
    model, x, seen = nn.Linear(5, 6, bias=False), torch.randn(4, 5), []
    rounded_weight = model.weight.detach().to(torch.bfloat16).float()
    fully_shard(model, mesh=dt.init_device_mesh("cpu", (2,)))

    def before(local: Tensor) -> Any:
        return lambda mesh, size, stride, module, policy: seen.append(mesh.ndim) or ((local.to(torch.bfloat16),), None)

    def after(outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Tensor | None = None) -> Any:
        if out is not None:
            out.copy_(outputs[0])
            return None
        whole = outputs[0].to(dtype)
        return whole, (outputs[0], whole)

    for local in model.weight._local_tensor.shards:
        local.fsdp_pre_all_gather, local.fsdp_post_all_gather = before(local), after
    for _ in range(2):
        found = model(x)
        torch.testing.assert_close(found, x @ rounded_weight.T)
        found.sum().backward()
    torch.testing.assert_close(model.weight.grad.full_tensor(), 2 * x.sum(0).expand(6, 5))
    assert seen == [1] * len(seen)
    assert seen


def test_all_gather_extensions_with_tensor_parallelism_equal_plain_model() -> None:
    mesh = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(nn.Linear(6, 8).double(), mesh["tp"], ColwiseParallel())
    alone = copy.deepcopy(nn.Linear(6, 8).double())
    torch.manual_seed(0)
    with torch.no_grad():
        for p in alone.parameters():
            p.copy_(torch.randn_like(p))
    weight = dt.distribute_tensor(alone.weight.detach(), mesh["tp"], [Shard(0)])
    pieces = dt.map_ranks(lambda at, x: Int8PerRow(x), weight.to_local(), mesh=mesh)
    model.weight = nn.Parameter(dt.DTensor.from_local(pieces, mesh["tp"], [Shard(0)]))
    model.bias = nn.Parameter(dt.distribute_tensor(alone.bias.detach(), mesh["tp"], [Shard(0)]))
    fully_shard(model, mesh=mesh["dp"])
    x = torch.randn(3, 6, dtype=torch.float64)
    alone.__class__, alone.kind = Linear, Int8PerRow
    expected = alone(x)
    made = model(x)
    torch.testing.assert_close(torch.cat([made.shards[0], made.shards[1]], -1), expected)
    made.square().mean().backward()
    expected.square().mean().backward()
    torch.testing.assert_close(whole(model.weight.grad) / 2, alone.weight.grad)  # the mean of each rank is over half the columns


def test_replicated_subclass_weight_is_not_gathered() -> None:
    mesh = dt.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    layer = nn.Linear(3, 4, bias=False)
    weight = layer.weight.detach().clone()
    layer.weight = nn.Parameter(Int8PerRow(layer.weight.detach()))
    layer = replicate(layer, mesh)
    assert layer.weight.placements == (Replicate(),)
    with CommDebugMode() as comm:
        made = layer(torch.ones(1, 3))
    assert not comm.get_total_counts()
    torch.testing.assert_close(made.shards[0], nn.functional.linear(torch.ones(1, 3), gathered_values(Int8PerRow, weight)))


def test_backward_that_needs_freed_subclass_weight_raises() -> None:
    mesh = dt.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 4, bias=False))
    model[1].weight = nn.Parameter(LazyInt8(model[1].weight.detach()))
    fully_shard(model[1], mesh=mesh)
    fully_shard(model, mesh=mesh)
    model[1].set_unshard_in_backward(False)
    made = model(torch.ones(1, 3)).sum()
    with pytest.raises(DTensorError, match="is not gathered in backward"):
        made.backward()


# --- errors -------------------------------------------------------------------------------------------------------------
class Half(Wrapped):
    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self._inner,), None


class WrongArguments(Int8PerRow):
    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any) -> Any:
        return (self._inner,), None


class Short(Int8PerRow):
    def fsdp_post_all_gather(self, outputs: Any, size: Any, dtype: torch.dtype, *, out: Tensor | None = None) -> Any:
        return outputs[0][:1].to(dtype), ()


class Uneven(Int8PerRow):
    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        return (self._inner[:, : self.shape[0]],), None


class Changing(Int8PerRow):
    calls = 0

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        Changing.calls += 1
        if Changing.calls > 2:
            return (self._inner,), None
        return quantize_rows(self._inner), outer_size


class Other(Wrapped):
    """Subclass without the two methods."""


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        (Half, TypeError, "fsdp_pre_all_gather only"),
        (WrongArguments, TypeError, "must take a mesh, or all five"),
        (Short, LayoutError, "returned shape"),
        (Uneven, LayoutError, "differ between ranks"),
        (Changing, LayoutError, "the first time"),
        (Other, UnsupportedOperationError, "wrapper subclass of several tensors"),
    ],
)
def test_invalid_all_gather_extensions_raise(kind: Any, error: type[Exception], words: str) -> None:
    layer = nn.Linear(3, 5, bias=False)
    layer.weight = nn.Parameter(kind(layer.weight.detach()))
    with pytest.raises(error, match=words):
        _run_two_steps(layer)


def _run_two_steps(layer: nn.Module) -> None:
    fully_shard(layer, mesh=dt.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    for _ in range(2):
        layer(torch.ones(1, 3)).sum().backward()
        layer.reshard()


def test_torch_func_of_all_gather_extension_raises() -> None:
    layer = nn.Linear(3, 4, bias=False)
    layer.weight = nn.Parameter(Int8PerRow(layer.weight.detach()))
    fully_shard(layer, mesh=dt.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    with pytest.raises(UnsupportedOperationError, match="fsdp_pre_all_gather"):
        torch.func.grad(lambda x: layer(x).sum())(torch.ones(1, 3))


def gather_two_tensor(local: Any) -> Any:
    return lambda mesh: ((local.a, local.b), None)


def rebuild_two_tensor(outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
    first, second = outputs
    if out is not None:
        assert out.a.data_ptr() == first.data_ptr()
        assert out.b.data_ptr() == second.data_ptr()
        return None
    return TwoTensor(first, second), (first, second)


@pytest.mark.parametrize("make", [fully_shard, replicate])
def test_extension_methods_set_on_two_tensor_shards_are_used(make: Any) -> None:
    """Check a ``TwoTensor`` parameter: its local tensors get the methods after sharding."""
    torch.manual_seed(0)
    layer, x = nn.Linear(5, 6, bias=False), torch.randn(4, 5)
    weight = layer.weight.detach().clone()
    layer.weight = nn.Parameter(TwoTensor(weight.clone(), 2 * weight))
    make(layer, mesh=dt.init_device_mesh("cpu", (2,)))
    with pytest.raises(UnsupportedOperationError, match="TwoTensor"):
        layer(x)
    for local in layer.weight._local_tensor.shards:
        local.fsdp_pre_all_gather, local.fsdp_post_all_gather = gather_two_tensor(local), rebuild_two_tensor
    for _ in range(2):
        found = layer(x)
        layer.reshard()
        for shard in found.shards if isinstance(found, dt.PerRank) else [found]:
            torch.testing.assert_close(shard.a, x @ weight.T)
            torch.testing.assert_close(shard.b, x @ weight.T * 2)
