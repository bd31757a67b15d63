"""Functions of torch that create plain constants accept DTensors; cases for one process and for four."""

from __future__ import annotations

import inspect
import warnings
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from case_lists import (
    S0,
    S1,
    CaseList,
    R,
    assert_full_value,
    assert_raises,
    distribute_values,
    get_line_mesh,
    get_square_mesh,
    make_values,
)
from torch import nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import unpad_sequence

import dtensor as dt
from dtensor import Partial
from dtensor.dispatch.plain_tensor_args import CONSTANT_MAKERS
from dtensor.errors import MixedTensorError
from dtensor.testing import check

CASES = CaseList()
case = CASES.case


def attention(*args: Any, **options: Any) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    return nn.MultiheadAttention(8, 2, *args, add_zero_attn=True, batch_first=True, dtype=torch.float64, **options)


def make_orthogonal_linear(rows: int, columns: int, orthogonal_map: str, use_trivialization: bool = True) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.Linear(columns, rows, dtype=torch.float64)
    return parametrizations.orthogonal(layer, "weight", orthogonal_map, use_trivialization=use_trivialization)


def check_module(module: nn.Module, x: torch.Tensor, placements: Any, mesh: dt.DeviceMesh) -> None:
    """Check results and gradients of a module with its parameters and buffers under the placements against one device."""
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}

    def run(x: torch.Tensor, state: dict[str, torch.Tensor]) -> Any:
        return torch.func.functional_call(module, state, (x,) * (3 if isinstance(module, nn.MultiheadAttention) else 1))

    kept = [placements[1] if x.ndim > 1 else [R] * mesh.ndim for x in state.values()]
    check(run, x, {name: x.detach() for name, x in state.items()}, mesh=mesh, placements=[placements[0], *kept])


@case
def every_declared_function_exists_in_torch() -> None:
    for module, qualified_name in CONSTANT_MAKERS:
        found: Any = import_module(module)
        for name in qualified_name.split("."):
            found = getattr(found, name)
        found = inspect.unwrap(found)
        assert (found.__globals__["__name__"], found.__code__.co_qualname) == (module, qualified_name)


@case
def attention_with_add_zero_attn_equals_one_device() -> None:
    for options in ({}, {"add_bias_kv": True}):
        for given in ([S0, R], [S1, S0], [R, Partial()]):
            check_module(attention(**options), make_values(5, 6, 8), [given, [R, R]], get_square_mesh())


@case
def attention_with_add_zero_attn_takes_dtensor_masks_and_rejects_plain_ones() -> None:
    module, x, mask = attention(), make_values(5, 6, 8), make_values(6, 6) > 0
    mask.fill_diagonal_(False)
    expected = module(x, x, x, attn_mask=mask, need_weights=False)[0]
    for name, parameter in list(module.named_parameters()):
        owner, _, own = name.rpartition(".")
        setattr(module.get_submodule(owner), own, nn.Parameter(distribute_values(parameter.detach(), R)))
    x = distribute_values(x, S0)
    assert_full_value(module(x, x, x, attn_mask=distribute_values(mask, S0), need_weights=False)[0], expected)
    assert_raises(MixedTensorError, "implicit_replication", lambda: module(x, x, x, attn_mask=mask, need_weights=False))


@case
def the_cayley_map_equals_one_device() -> None:
    for rows, columns in ((6, 6), (7, 5), (5, 7)):
        for trivial in (True, False):
            check_module(
                make_orthogonal_linear(rows, columns, "cayley", trivial), make_values(3, columns), [[S0], [S1]], get_line_mesh()
            )


@case
def a_plain_buffer_of_a_parametrization_raises() -> None:
    module = make_orthogonal_linear(6, 6, "cayley")
    original = module.parametrizations.weight  # type: ignore[union-attr, operator]
    original.original = nn.Parameter(distribute_values(original.original.detach(), S0))
    assert_raises(MixedTensorError, "implicit_replication", lambda: module.weight)


@case
def random_completion_of_an_orthogonal_base_equals_one_device() -> None:
    for orthogonal_map in ("cayley", "householder", "matrix_exp"):
        weight = make_values(7, 5, seed=3)
        layers = [nn.Linear(5, 7, dtype=torch.float64) for _ in range(2)]
        for layer, own in zip(layers, (weight, distribute_values(weight, S0)), strict=True):
            layer.weight = nn.Parameter(own)
            torch.manual_seed(1)
            parametrizations.orthogonal(layer, "weight", orthogonal_map)
        expected = layers[0].weight
        assert torch.allclose(layers[1].weight.full_tensor(), expected, atol=1e-9)  # type: ignore[operator]


@case
def a_causal_lower_right_bias_equals_one_device() -> None:
    query, key = make_values(2, 3, 4, 8) / 9, make_values(2, 3, 6, 8, seed=1) / 9
    for given in ([S0, R], [S1, S0], [dt.Shard(2), R]):
        check(
            lambda q, k: F.scaled_dot_product_attention(q, k, k, causal_lower_right(4, 6)),
            query,
            key,
            mesh=get_square_mesh(),
            placements=[given, given],
        )
    assert_raises(
        MixedTensorError,
        "implicit_replication",
        lambda: F.scaled_dot_product_attention(
            distribute_values(query, S0), distribute_values(key, S0), key, causal_lower_right(4, 6)
        ),
    )


@case
def masked_statistics_without_a_mask_equal_one_device() -> None:
    for function in (torch.masked.mean, torch.masked.var, torch.masked.std):
        for options in ({}, {"dim": 1}, {"dim": 0, "keepdim": True}):
            for given in ([S0], [S1], [Partial()]):
                check(lambda x, f=function, o=options: f(x, **o), make_values(5, 6), mesh=get_line_mesh(), placements=[given])
        assert_raises(
            MixedTensorError,
            "implicit_replication",
            lambda f=function: f(distribute_values(make_values(5, 6), S0), mask=make_values(5, 6) > 0),
        )


@case
def unpad_sequence_accepts_distributed_lengths() -> None:
    x, lengths = make_values(4, 6, 3), torch.tensor([6, 1, 3, 2])
    for got, expected in zip(
        unpad_sequence(distribute_values(x, S0), distribute_values(lengths, R), True),
        unpad_sequence(x, lengths, True),
        strict=True,
    ):
        assert_full_value(got, expected)


@case
def transformer_encoder_with_a_causal_mask_equals_one_device() -> None:
    torch.manual_seed(0)
    module = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, dtype=torch.float64), 1)
    mask = nn.Transformer.generate_square_subsequent_mask(6, dtype=torch.float64)
    x = make_values(5, 6, 8)
    expected = module(x, mask)
    dt.distribute_module(module, get_line_mesh())
    assert_full_value(module(distribute_values(x, S0), distribute_values(mask, R)), expected)


@case
def low_rank_approximations_equal_one_device() -> None:
    for given in ([S0, R], [S1, S0], [R, Partial()]):
        for shape in ((6, 7), (7, 6), (2, 6, 5)):
            for function in (torch.svd_lowrank, torch.pca_lowrank):
                check(lambda x, f=function: f(x, q=3)[1], make_values(*shape), mesh=get_square_mesh(), placements=[given])
    mean = make_values(6, 7, seed=1)
    check(
        lambda x, m: torch.svd_lowrank(x, 3, M=m)[1],
        make_values(6, 7),
        mean,
        mesh=get_square_mesh(),
        placements=[[S0, R], [R, S1]],
    )


@case
def random_constants_that_differ_between_ranks_raise_on_all_ranks() -> None:
    x = distribute_values(make_values(6, 7), S0)
    torch.manual_seed(0)
    assert_full_value(torch.svd_lowrank(x, 3)[1] * 0, torch.zeros(3, dtype=torch.float64))
    if dist.is_initialized():
        torch.manual_seed(dist.get_rank() % 2)
        assert_raises(
            MixedTensorError, r"get_approximate_basis.*differs between ranks.*manual_seed", lambda: torch.svd_lowrank(x, 3)
        )
        torch.manual_seed(0)


@case
def plain_constants_of_the_user_raise() -> None:
    x = distribute_values(make_values(5, 6), S0)
    assert_raises(MixedTensorError, "implicit_replication", lambda: x / torch.full((5, 1), 6))
    torch.masked.mean(x, 1, keepdim=True)
    assert_raises(MixedTensorError, "implicit_replication", lambda: x.sum(1, keepdim=True) / torch.full((5, 1), 6))
    assert_raises(MixedTensorError, "implicit_replication", lambda: torch.cat([x, torch.zeros(5, 1, dtype=torch.float64)], 1))


@case
def captured_svd_lowrank_draws_new_numbers_at_each_call() -> None:
    captured = dt.capture(lambda x: torch.svd_lowrank(x, 2, niter=0)[1])
    x, found = make_values(6, 7), []
    for run, given in ((captured, distribute_values(x, S0)), (lambda x: torch.svd_lowrank(x, 2, niter=0)[1], x)):
        torch.manual_seed(4)
        found.append([run(given) for _ in range(3)])
    for got, expected in zip(*found, strict=True):
        assert torch.allclose(got.full_tensor(), expected)
    assert len({tuple(expected.tolist()) for expected in found[1]}) == 3


@case
def constants_under_torch_func_grad_equal_one_device() -> None:
    module, x = attention(), make_values(5, 6, 8) / 9
    state = {name: parameter.detach() for name, parameter in module.named_parameters()}

    def loss(state: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(module, state, (x, x, x))[0].square().sum()

    expected = torch.func.grad(loss)(state, x)
    placed = {name: distribute_values(parameter, R) for name, parameter in state.items()}
    for name, got in torch.func.grad(loss)(placed, distribute_values(x, S0)).items():
        assert torch.allclose(got.full_tensor(), expected[name])


@case
def compiled_functions_run_in_one_process_and_raise_with_a_remedy_on_processes() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = torch.compile(lambda x: torch.masked.var(x, 1) * 2, backend="aot_eager")
        x = distribute_values(make_values(5, 6), S0)
        if dist.is_initialized():  # the traced program holds no call of the function, only its operators
            assert_raises(RuntimeError, "implicit_replication", lambda: run(x))
        else:
            assert_full_value(run(x), torch.masked.var(make_values(5, 6), 1) * 2)
