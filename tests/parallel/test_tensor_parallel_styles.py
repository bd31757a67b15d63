"""Tensor-parallel plans and styles: outputs and gradients equal those of the plain modules."""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare_with_one_device import assert_same_gradients, full_value
from gloo_processes import run_gloo
from torch import Tensor, nn

import dtensor as dt
from dtensor import DTensor, PerRank, Replicate, Shard
from dtensor.debug import CommDebugMode
from dtensor.errors import MeshError, MixedTensorError, PlacementError
from dtensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "examples"))
from gpt_model import GPT, Config, loss_of

# Gather fallbacks are tested for operators, not here for modules.
pytestmark = pytest.mark.filterwarnings("ignore::dtensor.errors.GatherWarning")

CONFIG = Config(vocabulary=13, context=6, width=8, heads=4, layers=2)


def tp_mesh(size: int = 2) -> dt.DeviceMesh:
    return dt.init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))


def blog_plan(local: bool) -> dict[str, ParallelStyle]:
    """Return the plan of document 002: tensor, sequence and loss parallelism of a Llama. ``local``: local tensors between
    modules."""
    inside = {"use_local_output": local}
    return {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), **inside),
        "blocks.*.attention_norm": SequenceParallel(),
        "blocks.*.attention": PrepareModuleInput(
            input_layouts=(Shard(1), Replicate(), Replicate()), desired_input_layouts=(Replicate(), Replicate(), Replicate())
        ),
        "blocks.*.attention.query": ColwiseParallel(use_local_output=False),
        "blocks.*.attention.key": ColwiseParallel(use_local_output=False),
        "blocks.*.attention.value": ColwiseParallel(use_local_output=False),
        "blocks.*.attention.out": RowwiseParallel(output_layouts=Shard(1), **inside),
        "blocks.*.feed_forward_norm": SequenceParallel(),
        "blocks.*.feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "blocks.*.feed_forward.gate": ColwiseParallel(**inside),
        "blocks.*.feed_forward.up": ColwiseParallel(**inside),
        "blocks.*.feed_forward.down": RowwiseParallel(output_layouts=Shard(1), **inside),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
    }


def llama() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = GPT(CONFIG).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) / 9)
    return model, torch.randint(13, (3, 5)), torch.randint(13, (3, 5))


def check_llama(size: int, local: bool) -> float:
    model, tokens, targets = llama()
    alone = copy.deepcopy(model)
    mesh = tp_mesh(size)
    parallelize_module(model, mesh, blog_plan(local))
    with loss_parallel():
        logits = model(tokens)
        replicated = [dt.distribute_tensor(t, mesh, [Replicate()]) for t in (targets,)]
        loss = loss_of(logits, *replicated)
        loss.backward()
    expected = loss_of(alone(tokens), targets)
    expected.backward()
    torch.testing.assert_close(loss.full_tensor(), expected)
    assert_same_gradients(model, alone)
    return loss.item()


@pytest.mark.parametrize("local", [True, False], ids=["local between modules", "distributed between modules"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_llama_under_the_documented_plan_equals_plain_model(size: int, local: bool) -> None:
    check_llama(size, local)


@pytest.mark.gloo
def test_llama_under_the_documented_plan_equals_plain_on_process_groups() -> None:
    losses = run_gloo(_check_llama_on_rank, 4, 4, True)
    assert losses == pytest.approx([check_llama(4, True)] * 4, rel=1e-12)


def _check_llama_on_rank(size: int, local: bool) -> float:
    return check_llama(size, local)


# --- plans -----------------------------------------------------------------------------------------------------------
def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4)).double()


def placements(module: nn.Module) -> dict[str, Any]:
    return {name: getattr(p, "placements", None) for name, p in module.named_parameters()}


@pytest.mark.parametrize(
    "plan",
    [
        {
            "first.0": ColwiseParallel(),
            "first.2": RowwiseParallel(),
            "second.0": ColwiseParallel(),
            "second.2": RowwiseParallel(),
        },
        {"*.0": ColwiseParallel(), "*.2": RowwiseParallel()},
        {"first": {"0": ColwiseParallel(), "2": RowwiseParallel()}, "secon?": {"0": ColwiseParallel(), "2": RowwiseParallel()}},
        {"": {"*.0": ColwiseParallel()}, "*": {"2": RowwiseParallel()}},
    ],
    ids=["names", "globs", "nested", "root"],
)
def test_names_globs_and_nested_plans_give_equal_placements(plan: Any) -> None:
    model = nn.ModuleDict({"first": mlp(), "second": mlp()})
    parallelize_module(model, tp_mesh(), plan)
    cut = {"0.weight": (Shard(0),), "0.bias": (Shard(0),), "2.weight": (Shard(1),), "2.bias": (Replicate(),)}
    assert placements(model) == {f"{name}.{key}": where for name in ("first", "second") for key, where in cut.items()}


def test_plan_without_effect_warns_and_invalid_plan_raises() -> None:
    with pytest.warns(UserWarning, match="the plan has 'thrid', but Sequential has no such submodule"):
        parallelize_module(mlp(), tp_mesh(), {"thrid": ColwiseParallel()})
    with pytest.warns(UserWarning, match="does nothing"):
        parallelize_module(mlp(), tp_mesh())
    with pytest.raises(dt.errors.PlacementError, match="is not a style"):
        parallelize_module(mlp(), tp_mesh(), "0")
    with pytest.raises(TypeError, match="mapping from module names"):
        parallelize_module(mlp(), tp_mesh(), 0)


def test_parallelize_module_uses_the_mesh_context() -> None:
    with tp_mesh():
        model = parallelize_module(mlp(), parallelize_plan={"0": ColwiseParallel()})
    assert isinstance(model[0].weight, DTensor)


def test_apply_method_of_user_defined_parallel_style_is_called() -> None:
    class ReplicateAll(ParallelStyle):
        def _apply(self, module: nn.Module, device_mesh: dt.DeviceMesh) -> nn.Module:
            return dt.distribute_module(module, device_mesh)

    assert set(placements(parallelize_module(mlp(), tp_mesh(), ReplicateAll())).values()) == {(Replicate(),)}


def test_tied_weights_stay_tied_under_a_plan() -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(7, 4), "head": nn.Linear(4, 7, bias=False)})
    model["head"].weight = model["embedding"].weight
    plan = {"embedding": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(model, tp_mesh(), plan)
    assert model["head"].weight is model["embedding"].weight
    assert model["head"].weight.placements == (Shard(0),)
    assert len(list(model.parameters())) == 1
    tokens = torch.tensor([[1, 6, 3]])
    model["head"](model["embedding"](tokens)).sum().backward()
    assert model["head"].weight.grad.placements == (Shard(0),)


def test_frozen_parameters_stay_frozen_under_a_plan() -> None:
    model = mlp()
    model[0].weight.requires_grad_(False)
    parallelize_module(model, tp_mesh(), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    assert [p.requires_grad for p in model.parameters()] == [False, True, True, True]


# --- styles ----------------------------------------------------------------------------------------------------------
def compare_with_plain(
    module: nn.Module, x: torch.Tensor, style: ParallelStyle, local: Callable[[torch.Tensor, dt.DeviceMesh], Any] | None = None
) -> Any:
    """Compare output and gradients of ``module`` under ``style`` with the plain module, and return the output."""
    mesh, alone = tp_mesh(), copy.deepcopy(module)
    parallelize_module(module, mesh, style)
    output = module(x if local is None else local(x, mesh))
    expected = alone(x)
    weights = torch.arange(expected.numel(), dtype=expected.dtype).reshape(expected.shape)
    (output * dt.distribute_tensor(weights, mesh)).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(output.full_tensor(), expected)
    assert_same_gradients(module, alone)
    return output


class Transposed(nn.Module):
    """Linear layer with a weight of shape (in, out), named as in Hugging Face models."""

    nf = 7

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 7, dtype=torch.float64))
        self.bias = nn.Parameter(torch.randn(7, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.reshape(-1, 5), self.weight).reshape(*x.shape[:-1], 7)


Transposed.__name__ = "Conv1D"


class ScaledLinear(nn.Linear):
    """Linear layer with an additional parameter."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes, dtype=torch.float64)
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


@pytest.mark.parametrize("style", [ColwiseParallel, RowwiseParallel])
@pytest.mark.parametrize(
    "make", [lambda: nn.Linear(5, 7).double(), Transposed, lambda: ScaledLinear(5, 7)], ids=["Linear", "Conv1D", "Scaled"]
)
def test_colwise_and_rowwise_linear_of_uneven_size_equal_plain_module(make: Callable[[], nn.Module], style: Any) -> None:
    given = {"input_layouts": Replicate()} if style is RowwiseParallel else {}
    output = compare_with_plain(make(), torch.randn(2, 3, 5, dtype=torch.float64), style(use_local_output=False, **given))
    assert output.placements == ((Shard(2),) if style is ColwiseParallel else (Replicate(),))


@pytest.mark.parametrize("style", [ColwiseParallel, RowwiseParallel])
def test_colwise_and_rowwise_embedding_of_uneven_size_equal_plain_module(style: Any) -> None:
    made = style(input_layouts=Replicate(), use_local_output=False)
    compare_with_plain(nn.Embedding(7, 5).double(), torch.tensor([[0, 6, 3], [3, 2, 5]]), made)


def test_plain_input_of_rowwise_layer_is_a_local_shard() -> None:
    mesh, module = tp_mesh(), nn.Linear(5, 4).double()
    alone, x = copy.deepcopy(module), torch.randn(3, 5, dtype=torch.float64)
    parallelize_module(module, mesh, RowwiseParallel())
    with CommDebugMode() as comm:
        output = module(dt.per_rank([x[:, :3].clone(), x[:, 3:].clone()]))
    assert comm.get_comm_counts() == {"all_reduce": 1}  # the global size is known from the weight
    assert isinstance(output, PerRank)
    torch.testing.assert_close(output.shards[1], alone(x))


def test_outputs_of_styles_have_the_output_layouts() -> None:
    x = torch.randn(4, 5, dtype=torch.float64)
    for layout in (Shard(0), Replicate()):
        assert compare_with_plain(
            nn.Linear(5, 6).double(), x, ColwiseParallel(output_layouts=layout, use_local_output=False)
        ).placements == (layout,)
    rowwise = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(-2), use_local_output=False)
    assert compare_with_plain(nn.Linear(5, 6).double(), x, rowwise).placements == (Shard(0),)


@pytest.mark.parametrize(
    "make", [lambda: nn.LayerNorm(4), lambda: nn.RMSNorm(4), nn.Dropout], ids=["LayerNorm", "RMSNorm", "Dropout"]
)
def test_sequence_parallel_norms_and_dropout_equal_plain_modules(make: Callable[[], nn.Module]) -> None:
    module = make().double().eval()
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn_like(p))
    x = torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True)
    output = compare_with_plain(
        module, x, SequenceParallel(), lambda x, mesh: dt.distribute_tensor(x.detach(), mesh).requires_grad_()
    )
    assert output.placements == (Shard(1),)


def test_plain_input_of_sequence_parallel_module_is_a_local_shard() -> None:
    module = parallelize_module(nn.RMSNorm(4), tp_mesh(), SequenceParallel(use_local_output=True))
    output = module(dt.per_rank([torch.ones(2, 3, 4), torch.ones(2, 2, 4)]))
    assert [tuple(shard.shape) for shard in output.shards] == [(2, 3, 4), (2, 2, 4)]


def test_colwise_module_takes_keyword_and_additional_arguments() -> None:
    class Gated(nn.Linear):
        def forward(self, x: torch.Tensor, gate: float = 1.0) -> torch.Tensor:
            return super().forward(x) * gate

    module = parallelize_module(Gated(4, 4), tp_mesh(), ColwiseParallel(use_local_output=False))
    x = torch.randn(3, 4)
    assert torch.equal(module(x, 2.0).full_tensor(), module(x=x, gate=2.0).full_tensor())


def test_styled_layers_on_a_submesh_keep_the_batch_shards_of_the_full_mesh() -> None:
    mesh = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 4, bias=False)).double()
    alone = copy.deepcopy(model)
    plan = {"0": ColwiseParallel(use_local_output=False), "1": RowwiseParallel(use_local_output=False)}
    parallelize_module(model, mesh["tp"], plan)
    for layer in model:
        whole = layer.weight.full_tensor().shards[0].detach()
        layer.weight = nn.Parameter(dt.distribute_tensor(whole, mesh, [Replicate(), *layer.weight.placements]))
    x = torch.randn(5, 4, dtype=torch.float64)
    output = model(dt.distribute_tensor(x, mesh, [Shard(0), Replicate()]))
    assert output.placements == (Shard(0), Replicate())
    torch.testing.assert_close(output.full_tensor(), alone(x))


def test_colwise_of_relu_and_on_2d_mesh_raises() -> None:
    with pytest.raises(TypeError, match="ReLU has no 2-d parameter `weight`"):
        parallelize_module(nn.ReLU(), tp_mesh(), ColwiseParallel())
    mesh = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(MeshError, match=r"mesh\['tp'\]"):
        parallelize_module(mlp(), mesh, {"0": ColwiseParallel()})


# --- boundaries ------------------------------------------------------------------------------------------------------
class ReturnsArguments(nn.Module):
    """Module that returns its arguments."""

    def forward(self, x: Any, y: Any = None, *, z: Any = None) -> tuple[Any, Any, Any]:
        return x, y, z


def test_prepare_module_input_takes_positions_keywords_and_none() -> None:
    style = PrepareModuleInput(
        input_layouts=(Replicate(), None),
        desired_input_layouts=(Shard(-1), None),
        input_kwarg_layouts={"z": Shard(0)},
        desired_input_kwarg_layouts={"z": Replicate()},
    )
    module, plain = parallelize_module(ReturnsArguments(), tp_mesh(), style), torch.ones(2)
    z = dt.per_rank([torch.zeros(2, 1), torch.ones(1, 1)])
    x, y, z = module(torch.ones(3, 5), plain, z=z)
    assert x.placements == (Shard(1),)
    assert y is plain
    assert z.placements == (Replicate(),)
    assert z.full_tensor().flatten().tolist() == [0, 0, 1]
    assert module(torch.ones(3, 5), "text", z=None)[1:] == ("text", None)


def test_prepare_module_input_with_use_local_output_gives_local_tensors() -> None:
    style = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(0), use_local_output=True)
    x, _, _ = parallelize_module(ReturnsArguments(), tp_mesh(), style)(torch.arange(3))
    assert [shard.tolist() for shard in x.shards] == [[0, 1], [2]]


def test_prepare_module_output_redistributes_outputs() -> None:
    style = PrepareModuleOutput(output_layouts=(Replicate(), None, None), desired_output_layouts=(Shard(0), None, None))
    x, y, _ = parallelize_module(ReturnsArguments(), tp_mesh(), style)(torch.arange(3), "y")
    assert [shard.tolist() for shard in x.shards] == [[0, 1], [2]]
    assert y == "y"
    single = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(0), use_local_output=False)
    assert parallelize_module(nn.Identity(), tp_mesh(), single)(torch.arange(3)).placements == (Shard(0),)


def test_prepare_module_input_output_redistributes_both() -> None:
    style = PrepareModuleInputOutput(
        input_layouts=Shard(0),
        desired_input_layouts=Replicate(),
        use_local_input=False,
        output_layouts=Replicate(),
        desired_output_layouts=Shard(1),
        use_local_output=False,
    )
    module = parallelize_module(nn.Softmax(dim=0), tp_mesh(), style)
    x = torch.randn(3, 4, requires_grad=True)
    output = module(dt.per_rank([x[:2], x[2:]]))
    assert output.placements == (Shard(1),)
    torch.testing.assert_close(output.full_tensor(), x.softmax(0))
    weights = torch.randn(3, 4)
    (output * dt.distribute_tensor(weights, tp_mesh())).sum().backward()
    expected = torch.autograd.grad((x.softmax(0) * weights).sum(), x)[0]
    torch.testing.assert_close(x.grad, expected)


def test_mismatched_input_layouts_raise() -> None:
    with pytest.raises(PlacementError, match="same length"):
        PrepareModuleInput(input_layouts=(Shard(0), None), desired_input_layouts=Replicate())
    with pytest.raises(PlacementError, match="pass both for the same arguments"):
        PrepareModuleInput(input_kwarg_layouts={"z": Shard(0)})
    module = parallelize_module(
        ReturnsArguments(), tp_mesh(), PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())
    )
    with pytest.raises(PlacementError, match=r"2 positional arguments of a module with PrepareModuleInput.*, but 1 layouts"):
        module(torch.ones(2), torch.ones(2))


@pytest.mark.parametrize("dims", [(), (3,)], ids=["rows", "pixels"])
@pytest.mark.parametrize("sharded", [0, 1])
def test_loss_parallel_takes_plain_targets_and_class_weights(dims: tuple[int, ...], sharded: int) -> None:
    mesh = tp_mesh()
    logits = torch.randn(4, 7, *dims, dtype=torch.float64, requires_grad=True)
    targets, weight = torch.randint(7, (4, *dims)), torch.rand(7, dtype=torch.float64)
    x = dt.distribute_tensor(logits, mesh, [Shard(sharded)])
    with loss_parallel():
        loss = F.cross_entropy(x, targets, weight)
    loss.backward()  # outside of the context as well
    expected = F.cross_entropy(logits, targets, weight)
    expected.backward()
    torch.testing.assert_close(loss.full_tensor(), expected)
    torch.testing.assert_close(x.grad.full_tensor(), logits.grad)
    torch.testing.assert_close(F.cross_entropy(x, targets, weight).full_tensor(), expected)  # the context is optional


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True], ids=["unweighted", "weighted"])
@pytest.mark.parametrize("soft", [False, True], ids=["labels", "probabilities"])
def test_loss_parallel_takes_plain_operands_in_all_forms(soft: bool, weighted: bool, smoothing: float) -> None:
    plain = torch.randn(4, 7, dtype=torch.float64, requires_grad=True)
    target = torch.rand(4, 7, dtype=torch.float64).softmax(1) if soft else torch.randint(7, (4,))
    weight = torch.rand(7, dtype=torch.float64) if weighted else None
    for placement, reduction in itertools.product((Shard(0), Shard(1), Replicate()), ("mean", "sum", "none")):
        options = {"label_smoothing": smoothing, "reduction": reduction}
        x = dt.distribute_tensor(plain.detach(), tp_mesh(), [placement]).requires_grad_()
        with loss_parallel():
            loss = F.cross_entropy(x, target, weight, **options)
            loss.sum().backward()
        expected = F.cross_entropy(plain, target, weight, **options)
        (gradient,) = torch.autograd.grad(expected.sum(), plain)
        torch.testing.assert_close(loss.full_tensor(), expected)
        torch.testing.assert_close(x.grad.full_tensor(), gradient)


def test_loss_parallel_with_plain_target_that_requires_grad_raises() -> None:
    x = dt.distribute_tensor(torch.randn(4, 7), tp_mesh(), [Shard(1)])
    with loss_parallel(), pytest.raises(MixedTensorError, match="plain tensor"):
        F.cross_entropy(x, torch.rand(4, 7).softmax(1).requires_grad_())


def test_cross_entropy_of_logits_sharded_over_the_vocabulary_needs_no_context() -> None:
    mesh = tp_mesh()
    logits, targets = torch.randn(4, 7, dtype=torch.float64), torch.tensor([1, 6, 0, 3])
    with loss_parallel():
        loss = F.cross_entropy(dt.distribute_tensor(logits, mesh, [Shard(1)]), dt.distribute_tensor(targets, mesh))
    torch.testing.assert_close(loss.full_tensor(), F.cross_entropy(logits, targets))


def test_distribute_module_accepts_hooks_without_module_argument() -> None:
    mesh, x = tp_mesh(), torch.ones(4, 3)
    linear = torch.nn.Linear(3, 2)
    expected = linear(x) * 2
    with pytest.warns(FutureWarning, match="input_fn"):
        made = dt.distribute_module(
            linear,
            mesh,
            input_fn=lambda inputs, mesh: (dt.distribute_tensor(inputs[0], mesh, [Shard(0)]),),
            output_fn=lambda module, outputs, mesh: outputs.full_tensor() * 2,
        )
    torch.testing.assert_close(made(x), expected)


# --- weights that are computed from other parameters -------------------------------------------------------------------
PARAMETRIZATIONS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight norm": nn.utils.parametrizations.weight_norm,
    "weight norm of columns": lambda m: nn.utils.parametrizations.weight_norm(m, dim=1),
    "weight norm of all": lambda m: nn.utils.parametrizations.weight_norm(m, dim=None),
    "spectral norm": nn.utils.parametrizations.spectral_norm,
    "orthogonal": nn.utils.parametrizations.orthogonal,
    "older weight norm": nn.utils.weight_norm,
    "older spectral norm": nn.utils.spectral_norm,
}
STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": lambda: ColwiseParallel(use_local_output=False),
    "rowwise": lambda: RowwiseParallel(input_layouts=Replicate(), use_local_output=False),
    "sequence": lambda: SequenceParallel(sequence_dim=0),
}


def _check_parametrized(kind: str, computed: str, style: str, ranks: int) -> None:
    def made() -> nn.Module:
        torch.manual_seed(0)
        return PARAMETRIZATIONS[computed](nn.Linear(7, 5) if kind == "linear" else nn.Embedding(7, 5)).double()

    plain, mesh = made(), tp_mesh(ranks)
    module = parallelize_module(made(), mesh, STYLES[style]())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, module)]
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(4, 7, generator=generator).double() if kind == "linear" else torch.randint(7, (4,), generator=generator)
        expected, found = plain(x), module(dt.distribute_tensor(x, mesh, [Replicate()]))
        torch.testing.assert_close(full_value(found), expected)
        for optimizer, y in zip(optimizers, (expected, found), strict=True):
            optimizer.zero_grad()
            y.square().sum().backward()
            optimizer.step()
    for (name, x), y in zip(plain.state_dict().items(), module.state_dict().values(), strict=True):
        assert isinstance(y, DTensor), name
        torch.testing.assert_close(full_value(y), x, msg=name)


@pytest.mark.filterwarnings("ignore:.torch.nn.utils.weight_norm:FutureWarning")
@pytest.mark.parametrize("computed", PARAMETRIZATIONS)
@pytest.mark.parametrize(("kind", "style"), [*(("linear", style) for style in STYLES), ("embedding", "rowwise")])
def test_parametrized_weights_under_styles_train_like_plain_module(kind: str, computed: str, style: str) -> None:
    _check_parametrized(kind, computed, style, 3)


def _check_all_parametrized() -> None:
    for computed in PARAMETRIZATIONS:
        _check_parametrized("linear", computed, "colwise", 2)
        _check_parametrized("embedding", computed, "rowwise", 2)


@pytest.mark.gloo
def test_parametrized_weights_train_like_plain_module_on_process_groups() -> None:
    run_gloo(_check_all_parametrized, 2)


def test_parametrization_parameters_are_sharded_like_their_weight() -> None:
    linear = PARAMETRIZATIONS["weight norm"](nn.Linear(7, 5))
    parallelize_module(linear, tp_mesh(), ColwiseParallel())
    assert {tuple(p.placements) for p in linear.parameters()} == {(Shard(0),)}
    assert linear.weight.placements == (Shard(0),)
    columns = PARAMETRIZATIONS["weight norm of columns"](nn.Linear(7, 5))
    parallelize_module(columns, tp_mesh(), ColwiseParallel())
    assert {name: p.placements for name, p in columns.named_parameters()} == {
        "bias": (Shard(0),),
        "parametrizations.weight.original0": (Replicate(),),
        "parametrizations.weight.original1": (Shard(0),),
    }


@pytest.mark.parametrize("shape", [(3, 6), (2, 3, 6)])
def test_in_place_writes_to_outputs_of_styled_layers_equal_plain_module(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Linear(5, 4))
    styled = parallelize_module(
        copy.deepcopy(plain), dt.init_device_mesh("cpu", (2,)), {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )
    x = torch.randn(shape)
    for module in (plain, styled):
        module(x).mul_(2).add_(1).sin().sum().backward()
    assert_same_gradients(styled, plain)


def test_in_place_write_to_a_saved_output_raises() -> None:
    class Squashed(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).tanh()

    styled = parallelize_module(Squashed(6, 4), dt.init_device_mesh("cpu", (2,)), ColwiseParallel())
    with pytest.raises(RuntimeError, match="modified"):
        styled(torch.randn(3, 6)).add_(1).sum().backward()


# --- styles that are derived as in PyTorch -----------------------------------------------------------------------------
class _DerivedStyles:
    """Derived styles that double inputs and outputs and record their calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        calls = self.calls

        def doubled_input(input_layouts: Any, desired: Any, mod: nn.Module, inputs: Any, mesh: Any) -> Any:
            calls.append("input")
            x = inputs[0]
            if not isinstance(x, DTensor):
                x = DTensor.from_local(x, mesh, input_layouts, run_check=False)
            if input_layouts != desired:
                x = x.redistribute(placements=desired, async_op=True)
            return x * 2

        def doubled_output(output_layouts: Any, use_local_output: bool, mod: nn.Module, outputs: Any, mesh: Any) -> Any:
            calls.append("output")
            if outputs.placements != output_layouts:
                outputs = outputs.redistribute(placements=output_layouts, async_op=True)
            return (outputs * 2).to_local() if use_local_output else outputs * 2

        class Columns(ColwiseParallel):
            _prepare_input_fn = staticmethod(doubled_input)
            _prepare_output_fn = staticmethod(doubled_output)

            def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: Any) -> None:
                calls.append("partition")
                super()._partition_linear_fn(name, module, device_mesh)

        class Rows(RowwiseParallel):
            _prepare_input_fn = staticmethod(doubled_input)
            _prepare_output_fn = staticmethod(doubled_output)

            def _partition_embedding_fn(self, name: str, module: nn.Module, device_mesh: Any) -> None:
                calls.append("partition")
                super()._partition_embedding_fn(name, module, device_mesh)

        class WholeStyle(ColwiseParallel):
            def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
                prepare = partial(doubled_input, self.input_layouts, self.desired_input_layouts)
                finish = partial(self._prepare_output_fn, self.output_layouts, self.use_local_output)
                return dt.distribute_module(module, device_mesh, self._partition_linear_fn, prepare, finish)

        class Sequence(SequenceParallel):
            @staticmethod
            def _prepare_input_fn(sequence_sharding: Any, mod: nn.Module, inputs: Any, device_mesh: Any) -> Any:
                calls.append("input")
                return SequenceParallel._prepare_input_fn(sequence_sharding, mod, (inputs[0] * 2,), device_mesh)

            @staticmethod
            def _prepare_output_fn(use_local_output: bool, mod: nn.Module, outputs: Any, device_mesh: Any) -> Any:
                calls.append("output")
                return SequenceParallel._prepare_output_fn(use_local_output, mod, outputs * 2, device_mesh)

        self.columns, self.rows, self.whole_style, self.sequence = Columns, Rows, WholeStyle, Sequence


@pytest.mark.parametrize("bias", [True, False])
def test_overridden_methods_of_derived_matrix_styles_are_called(bias: bool) -> None:
    styles, mesh, x = _DerivedStyles(), tp_mesh(2), torch.randn(3, 5, dtype=torch.float64)
    linear = nn.Linear(5, 7, bias=bias).double()
    expected = linear(x * 2) * 2
    columns = parallelize_module(copy.deepcopy(linear), mesh, styles.columns(output_layouts=Replicate(), use_local_output=False))
    torch.testing.assert_close(columns(x).full_tensor(), expected)
    assert columns.weight.placements == (Shard(0),)
    assert styles.calls == ["partition", "input", "output"]
    rows = parallelize_module(copy.deepcopy(linear), mesh, styles.rows(input_layouts=Replicate(), use_local_output=False))
    torch.testing.assert_close(rows(x).full_tensor(), expected)
    assert rows.weight.placements == (Shard(1),)
    whole_style = parallelize_module(
        copy.deepcopy(linear), mesh, styles.whole_style(output_layouts=Replicate(), use_local_output=False)
    )
    torch.testing.assert_close(whole_style(x).full_tensor(), expected / 2)


def test_overridden_methods_of_derived_embedding_style_are_called() -> None:
    styles, table = _DerivedStyles(), nn.Embedding(7, 4).double()
    styled = parallelize_module(copy.deepcopy(table), tp_mesh(2), styles.rows(input_layouts=Replicate(), use_local_output=False))
    indices = torch.tensor([0, 3, 1])
    torch.testing.assert_close(styled(indices).full_tensor(), table(indices * 2) * 2)
    assert styles.calls == ["partition", "input", "output"]


def test_overridden_methods_of_derived_sequence_style_are_called() -> None:
    styles, norm, x = _DerivedStyles(), nn.LayerNorm(4).double(), torch.randn(2, 5, 4, dtype=torch.float64)
    styled = parallelize_module(copy.deepcopy(norm), tp_mesh(2), styles.sequence())
    given = dt.distribute_tensor(x, tp_mesh(2), [Replicate()])
    torch.testing.assert_close(styled(given).full_tensor(), norm(x * 2) * 2)
    assert styles.calls == ["input", "output"]


def test_overridden_methods_of_derived_input_and_output_styles_are_called() -> None:
    class Inputs(PrepareModuleInput):
        def _prepare_input_arg(self, input: Any, mesh: Any, input_layout: Any, desired_layout: Any) -> Any:
            return super()._prepare_input_arg(input * 2, mesh, input_layout, desired_layout)

    class Outputs(PrepareModuleOutput):
        def _prepare_out_fn(self, outputs: Any, device_mesh: Any) -> Any:
            return super()._prepare_out_fn(outputs * 3, device_mesh)

    class Sum(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a + b

    mesh, a, b = tp_mesh(2), torch.randn(4, 3), torch.randn(4, 3)
    module = parallelize_module(
        Sum(),
        mesh,
        Inputs(
            input_layouts=Replicate(),
            desired_input_layouts=Shard(0),
            input_kwarg_layouts={"b": Replicate()},
            desired_input_kwarg_layouts={"b": Shard(1)},
        ),
    )
    outputs = Outputs(output_layouts=Shard(0), desired_output_layouts=Replicate(), use_local_output=False)
    parallelize_module(module, mesh, outputs)
    torch.testing.assert_close(module(a, b=b).full_tensor(), (a + b) * 2 * 3)


def test_style_with_overridden_output_method_and_parts_raises() -> None:
    with pytest.raises(dt.errors.StyleError, match="_prepare_output_fn, which does not get the number of parts"):
        _DerivedStyles().columns(parts=2)
    assert ColwiseParallel().desired_input_layouts == (Replicate(),)
    assert RowwiseParallel().desired_input_layouts == (Shard(-1),)
