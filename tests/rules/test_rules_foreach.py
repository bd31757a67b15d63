"""Rules of foreach and fused operators, and torch optimizers: each tensor keeps its layout, and nothing is communicated."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from rule_tables import make_floats
from slow_case_marks import keep_every_nth_fast

import dtensor as dt
from dtensor import Partial, Placement, Replicate, Shard
from dtensor.comm import events
from dtensor.testing import check
from dtensor.testing.oracle import compare

R, S0, S1 = Replicate(), Shard(0), Shard(1)
SHAPES = ((5, 7), (3,), (1, 2), ())
SHARDED: list[Sequence[Placement]] = [[S0, S1], [R, S0], [S0, S0], [R, R]]
MIXED: list[Sequence[Placement]] = [[Partial(), R], [S0, R], [R, Partial("avg")], [Partial("max"), R]]


def tensors(seed: int) -> list[torch.Tensor]:
    return [make_floats(*shape, seed=seed + k, low=0.1, high=0.9) for k, shape in enumerate(SHAPES)]


FORMS = {
    "each": lambda op, x, y, z: op(x),
    "pairs": lambda op, x, y, z: op(x, y),
    "triples": lambda op, x, y, z: op(x, y, z),
    "a number": lambda op, x, y, z: op(x, 2.0),
    "numbers": lambda op, x, y, z: op(x, [0.5, 2.0, 3.0, 1.0]),
    "a tensor": lambda op, x, y, z: op(x, torch.tensor(2.0, dtype=torch.float64)),
    "triples, numbers": lambda op, x, y, z: op(x, y, z, [0.5, 2.0, 3.0, 1.0]),
    "pairs, a number": lambda op, x, y, z: op(x, y, 0.3),
    "a number first": lambda op, x, y, z: op(2.0, x),
}
# _foreach_mm needs matrices
NAMES = sorted(name for name in dir(torch) if name.startswith("_foreach_") and name != "_foreach_mm")


def accepted_forms(name: str) -> Iterator[Any]:
    """Yield functions that call the operator with each form of arguments that plain torch accepts."""
    op = getattr(torch, name)
    for form in FORMS.values():
        try:
            form(op, tensors(0), tensors(10), tensors(20))
        except (TypeError, RuntimeError):
            continue
        yield lambda x, y, z, form=form: form(op, list(x), list(y), list(z))


@pytest.mark.parametrize("name", keep_every_nth_fast(NAMES, 6))
def test_foreach_operators_on_lists_of_mixed_layouts_equal_plain_torch(name: str) -> None:
    mesh = dt.init_device_mesh("cpu", (2, 2))
    writes = name.endswith("_")
    found = 0
    for fn in accepted_forms(name):
        found += 1
        for own, other in ((SHARDED, SHARDED), (SHARDED, MIXED), (MIXED, SHARDED)):
            outcome = check(
                fn,
                tensors(0),
                tensors(10),
                tensors(20),
                mesh=mesh,
                placements=[*own, *other, *own],
                cloned=writes,
                gradients=not writes and own is other,
            )
            local = own is SHARDED and other is SHARDED
            assert not local or len(outcome.events) <= (name == "_foreach_max")  # an empty shard has no maximum
    assert found


@contextmanager
def no_communication() -> Iterator[None]:
    seen: list[events.Event] = []
    with events.listening(seen.append), warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    assert not seen, seen


OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"amsgrad": True, "weight_decay": 0.1}),
    "Adam": (torch.optim.Adam, {"weight_decay": 0.1}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr_decay": 0.1}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "Adamax": (torch.optim.Adamax, {}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "ASGD": (torch.optim.ASGD, {}),
}
FUSED = ("AdamW", "Adam", "SGD", "Adagrad")
PARAMETERS: tuple[tuple[tuple[int, ...], Sequence[Placement]], ...] = (
    ((5, 7), [S0, S1]),
    ((3,), [R, S0]),
    ((6, 2), [S0, S0]),
    ((), [R, R]),
    ((2, 3), [S1, R]),
    ((1, 4), [S0, R]),
)


def train_three_steps(name: str, mode: str, distributed: bool, steps_as_dtensors: bool = False) -> list[torch.Tensor]:
    """Return the parameters after three steps of an optimizer in mode "foreach", "fused" or "one by one"."""
    mesh = dt.init_device_mesh("cpu", (2, 2))
    generator = torch.Generator().manual_seed(0)

    def made(shape: tuple[int, ...], placements: Sequence[Placement]) -> torch.Tensor:
        value = torch.randn(shape, generator=generator)
        return dt.distribute_tensor(value, mesh, placements) if distributed else value

    cls, options = OPTIMIZERS[name]
    parameters = [torch.nn.Parameter(made(*each)) for each in PARAMETERS]
    optimizer = cls(parameters, lr=0.1, **options, **({"fused": True} if mode == "fused" else {"foreach": mode == "foreach"}))
    for _ in range(3):
        for parameter, each in zip(parameters, PARAMETERS, strict=True):
            parameter.grad = made(*each)
        if not distributed:
            optimizer.step()
            continue
        if steps_as_dtensors:
            for state in optimizer.state.values():
                state["step"] = dt.distribute_tensor(torch.as_tensor(state["step"]), mesh, [R, R])
            optimizer.step()
        else:
            with no_communication():
                optimizer.step()
    return parameters


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("mode", ["foreach", "fused", "one by one"])
def test_optimizer_steps_keep_placements_without_communication(name: str, mode: str) -> None:
    if mode == "fused" and name not in FUSED:
        pytest.skip("torch has no fused form of it")
    plain, distributed = train_three_steps(name, mode, False), train_three_steps(name, mode, True)
    for own, like, (_, placements) in zip(distributed, plain, PARAMETERS, strict=True):
        assert isinstance(own, dt.DTensor)
        assert own.placements == tuple(placements)
        torch.testing.assert_close(own.full_tensor(), like, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["foreach", "fused", "one by one"])
def test_adamw_with_step_counts_that_are_dtensors_equals_plain_torch(mode: str) -> None:
    plain, distributed = train_three_steps("AdamW", mode, False), train_three_steps("AdamW", mode, True, steps_as_dtensors=True)
    for own, like in zip(distributed, plain, strict=True):
        torch.testing.assert_close(own.full_tensor(), like, rtol=1e-4, atol=1e-5)


def test_fused_adamw_with_states_in_other_layouts_keeps_their_layouts() -> None:
    mesh = dt.init_device_mesh("cpu", (2, 2))
    values = [make_floats(5, 7, seed=seed).float() for seed in range(4)]
    values[3] = values[3].abs()
    layouts: list[Sequence[Placement]] = [[S0, S1], [R, R], [S1, S0], [S0, R]]
    options = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8, "amsgrad": False, "maximize": False}
    plain = [value.clone() for value in values]
    distributed = [dt.distribute_tensor(value, mesh, where) for value, where in zip(values, layouts, strict=True)]
    for p, g, m, v in (plain, distributed):
        torch._fused_adamw_([p], [g], [m], [v], [], [torch.tensor(1.0)], **options)
    for own, like, where in zip(distributed, plain, layouts, strict=True):
        assert own.placements == tuple(where)
        torch.testing.assert_close(own.full_tensor(), like)


def test_fused_sgd_with_non_contiguous_local_gradient_equals_plain_torch() -> None:
    """Check a gradient with non-contiguous local tensors: fused kernels of torch ignore strides, so it must be copied first."""
    mesh = dt.init_device_mesh("cpu", (2,))
    p, g, b = make_floats(5, 8).float(), make_floats(5, 8, seed=1).float(), make_floats(5, 8, seed=2).float()
    pieces = [dt.distribute_tensor(x, mesh, [S1]) for x in (p, b)]
    wide = dt.per_rank([torch.cat([half, half], 1)[:, :4] for half in g.chunk(2, 1)])
    grad = dt.DTensor.from_local(wide, mesh, [S1])
    options = {
        "weight_decay": 0.0,
        "momentum": 0.9,
        "lr": 0.1,
        "dampening": 0.0,
        "nesterov": False,
        "maximize": False,
        "is_first_step": False,
    }
    torch._fused_sgd_([p], [g], [b], **options)
    torch._fused_sgd_([pieces[0]], [grad], [pieces[1]], **options)
    torch.testing.assert_close(pieces[0].full_tensor(), p)


MISMATCHED_CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, y: torch._foreach_add_([y, x], [y, y]),
    "add, one tensor for all": lambda x, y: torch._foreach_add_([x], y),
    "lerp": lambda x, y: torch._foreach_lerp_([x], [y], 0.5),
    "addcmul": lambda x, y: torch._foreach_addcmul_([x], [x], [y]),
    "copy": lambda x, y: torch._foreach_copy_([x], [y]),
    "maximum": lambda x, y: torch._foreach_maximum_([x], [y]),
    "another number of scalars": lambda x, y: torch._foreach_mul_([x, y], [2.0]),
    "another dtype": lambda x, y: torch._foreach_div_([x.long()], [x]),
}


@pytest.mark.parametrize("where", [R, S0, Partial()], ids=str)
@pytest.mark.parametrize("name", MISMATCHED_CALLS)
def test_foreach_write_of_tensor_that_fits_only_a_shard_raises(name: str, where: Placement) -> None:
    def written(x: Any, y: Any) -> Any:
        MISMATCHED_CALLS[name](x := x.clone(), y)
        return x

    x = torch.arange(24.0).view(6, 4)
    outcome = compare(written, [x, x[:3]], dt.init_device_mesh("cpu", (2,)), [[where], [R]], gradients=False)
    assert outcome.same_error, outcome.problems


def test_foreach_element_reads_the_write_of_the_element_before_it() -> None:
    """Check that an operation on one list element sees the result of the one before, as in torch."""
    x, y, z = torch.arange(4.0), torch.ones(4), torch.full((4,), 10.0)
    for where, other in ((S0, S0), (S0, R), (Partial(), Partial())):
        a, b, c = [
            dt.distribute_tensor(one, dt.init_device_mesh("cpu", (2,)), [at]) for one, at in ((x, where), (y, other), (z, S0))
        ]
        torch._foreach_add_([a, b], [c, a])
        assert torch.equal(b.full_tensor(), y + x + z)
        torch._foreach_mul_([a, b], [b, a])
        assert torch.equal(a.full_tensor(), (x + z) * (y + x + z))
        assert torch.equal(b.full_tensor(), (x + z) * (y + x + z) ** 2)


OVERLAPPING: dict[str, Callable[[Any], list[Any]]] = {
    "a tensor and its row": lambda x: [x, x[0]],
    "rows, then the tensor": lambda x: [x[1:3], x[4], x],
    "a tensor and its column": lambda x: [x, x[:, 1]],
    "a tensor twice, and flat": lambda x: [x, x, x.view(-1)],
    "windows": lambda x: [x[:3], x[2:]],
    "disjoint rows": lambda x: list(x.unbind(0)),
}


@pytest.mark.parametrize("parts", OVERLAPPING)
def test_foreach_writes_to_elements_that_share_memory_equal_plain_torch(parts: str) -> None:
    def program(x: Any) -> Any:
        x = x.clone()
        torch._foreach_add_(OVERLAPPING[parts](x), 1.0)
        torch._foreach_sqrt_(OVERLAPPING[parts](x))
        torch._foreach_mul_(OVERLAPPING[parts](x), [2.0, 3.0, 4.0, 5.0, 6.0][: len(OVERLAPPING[parts](x))])
        torch._foreach_lerp_(OVERLAPPING[parts](x), [each * 2 for each in OVERLAPPING[parts](x)], 0.5)
        return x

    x = torch.arange(1.0, 31).view(5, 6)
    for shape, layouts in (((2,), ([R], [S0], [Shard(1)], [Partial()])), ((2, 2), ([S0, Shard(1)], [S0, S0], [Partial(), S0]))):
        for placements in layouts:
            check(program, x, mesh=dt.init_device_mesh("cpu", shape), placements=[placements], gradients=False)
