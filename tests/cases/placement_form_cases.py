"""Cases of placement forms: by mesh dim name, as text and by tensor dim, in one process and on four."""

from __future__ import annotations

import pytest
import torch
from case_lists import CaseList, assert_full_value, make_values
from torch import nn

import dtensor as dt
from dtensor import DTensor, Partial, Replicate, Shard
from dtensor.debug import CommDebugMode
from dtensor.errors import MeshError, PlacementError
from dtensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    ShardPlacementResult,
    fully_shard,
    parallelize_module,
)

R = Replicate()
CASES = CaseList()
case = CASES.case
LISTED = [Shard(0), Shard(1)]
FORMS = (
    {"dp": Shard(0), "tp": Shard(1)},
    {"tp": Shard(-1), "dp": Shard(-2)},
    "dp=S(0), tp=S(1)",
    " ( tp = S(1),dp=S(0) ) ",
    "S(0), S(1)",
    "[Shard(dim=0), Shard(dim=1)]",
    "float32[3, 9] on (dp=S(0), tp=S(1))",
    dt.partition("dp", "tp"),
)


def get_named_square_mesh() -> dt.DeviceMesh:
    return dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


@case
def every_function_with_placements_takes_every_form() -> None:
    mesh, x = get_named_square_mesh(), make_values(5, 8)
    listed = dt.distribute_tensor(x, mesh, LISTED)
    replicated = dt.distribute_tensor(x, mesh)
    for form in FORMS:
        made = (
            dt.distribute_tensor(x, mesh, form),
            dt.distribute_tensor(replicated, mesh, form),
            replicated.redistribute(form),
            replicated.redistribute(mesh, form),
            replicated.redistribute(placements=form),
            DTensor.from_local(listed.to_local(), mesh, form),
            DTensor.from_local(listed.to_local(), mesh, form, shape=(5, 8)),
            dt.local_map(lambda local: local.clone(), out_placements=form, in_placements=(form,))(listed),
            dt.local_map(lambda local: local.clone(), form, (form,), redistribute_inputs=True)(replicated),
            *dt.redistribute_many([replicated, replicated], form),
            *dt.redistribute_many([replicated, replicated], [form, LISTED]),
        )
        for result in made:
            assert result.placements == tuple(LISTED), form
            assert_full_value(result, x)
        assert dt.zeros(5, 8, device_mesh=mesh, placements=form).placements == tuple(LISTED)
        assert dt.Layout.of(mesh, form, (5, 8)) is dt.Layout.of(mesh, LISTED, (5, 8))


@case
def redistribute_by_name_keeps_placements_of_other_mesh_dims() -> None:
    mesh, x = get_named_square_mesh(), make_values(5, 8)
    source = dt.distribute_tensor(x, mesh, LISTED)
    for form in ({"tp": R}, "tp=R"):
        with CommDebugMode() as comm:
            gathered = source.redistribute(form)
        assert gathered.placements == (Shard(0), R)
        assert comm.get_total_counts() == 1
        assert_full_value(gathered, x)
        for other in dt.redistribute_many([source, gathered], form):
            assert other.placements == (Shard(0), R)
    assert source.redistribute({}).placements == tuple(LISTED)
    assert source.redistribute({"tp": Shard(0)}).placements == (Shard(0), Shard(0))
    assert source.redistribute(dt.partition("dp")).placements == (Shard(0), R)  # a partition says everything
    equal_mesh = dt.DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    assert source.redistribute(equal_mesh, {"tp": R}).placements == (Shard(0), R)
    line = dt.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    assert source.redistribute(line, {}).placements == (R,)


@case
def replicating_the_innermost_mesh_dim_keeps_the_blocks_of_the_outer_one() -> None:
    mesh, x = get_named_square_mesh(), make_values(10)
    uneven = dt.distribute_tensor(x, mesh, [Shard(0), Shard(0, sizes=(1, 2, 3, 4))])
    with CommDebugMode() as comm:
        gathered = uneven.redistribute({"tp": R})
    assert gathered.placements == (Shard(0, sizes=(3, 7)), R)
    assert comm.get_total_counts() == 1
    assert_full_value(gathered, x)
    outer = uneven.redistribute({"dp": R})  # the blocks of tp are not adjacent
    assert outer.placements == (R, Shard(0))
    assert_full_value(outer, x)
    nested = dt.distribute_tensor(x, mesh, dt.partition(("tp", "dp")))
    assert nested.placements == (Shard(0, level=1), Shard(0, level=0))
    assert nested.redistribute({"dp": R}).placements == (R, Shard(0))
    assert nested.redistribute({"tp": nested.placements[1]}).placements == nested.placements
    assert_full_value(nested.redistribute({"tp": R}), x)


@case
def grad_placements_by_name_default_along_other_mesh_dims() -> None:
    mesh = get_named_square_mesh()
    x = dt.distribute_tensor(make_values(4, 6), mesh, "dp=S(0), tp=R").requires_grad_()
    x.to_local(grad_placements={"tp": Partial()}).sum().backward()
    assert_full_value(x.grad, torch.full((4, 6), 2.0, dtype=torch.float64))
    x.grad = None
    x.full_tensor(grad_placements={"tp": Partial()}).sum().backward()
    assert_full_value(x.grad, torch.full((4, 6), 2.0, dtype=torch.float64))
    for form in ("tp=P(sum)", "R, P(sum)", dt.partition(unreduced="tp")):
        x.grad = None
        x.full_tensor(grad_placements=form).sum().backward()
        assert_full_value(x.grad, torch.full((4, 6), 2.0, dtype=torch.float64))
    x.grad = None
    x.redistribute({"dp": R}).sum().backward()
    assert x.grad.placements == (Shard(0), R)
    assert_full_value(x.grad, torch.ones(4, 6, dtype=torch.float64))


@case
def local_map_without_a_tuple_of_in_placements_raises() -> None:
    x = dt.distribute_tensor(make_values(4, 6), get_named_square_mesh(), LISTED)
    for form in ({"dp": Shard(0)}, "dp=S(0)", dt.partition("dp")):
        with pytest.raises(PlacementError, match="takes a tuple with an entry for each argument"):
            dt.local_map(torch.sin, form, form)(x)


@case
def an_entered_mesh_takes_placements_as_first_argument() -> None:
    mesh, x = get_named_square_mesh(), make_values(4, 6)
    with mesh:
        for form in (LISTED, *FORMS):
            assert dt.distribute_tensor(x, form).placements == tuple(LISTED)
            assert DTensor.from_local(make_values(2, 3), form).placements == tuple(LISTED)
    for form in (LISTED, *FORMS):
        with pytest.raises(MeshError, match="no device mesh"):
            dt.distribute_tensor(x, form)


@case
def from_local_by_name_exchanges_uneven_sizes() -> None:
    mesh = get_named_square_mesh()
    source = dt.distribute_tensor(make_values(5, 3), mesh, "dp=S(0)")
    for form in ({"dp": Shard(0)}, "dp=S(0)", dt.partition("dp")):
        again = DTensor.from_local(source.to_local(), mesh, form)
        assert again.layout is source.layout
        assert DTensor.from_local(source.to_local(), mesh, form, run_check=True).layout is source.layout


@case
def styles_take_every_form_of_one_placement() -> None:
    mesh, x = get_named_square_mesh()["tp"], make_values(4, 8, dtype=torch.float32)
    for to in ({"tp": Shard(0)}, "tp=S(0)", "S(0)", dt.partition("tp")):
        torch.manual_seed(0)
        plain = nn.Linear(8, 6)
        torch.manual_seed(0)
        style = ColwiseParallel(output_layouts=to, use_local_output=False)
        out = parallelize_module(nn.Linear(8, 6), mesh, style)(x)
        assert out.placements == (Shard(0),)
        torch.testing.assert_close(out.full_tensor(), plain(x))
    last = dt.partition(None, "tp")
    rows = RowwiseParallel(input_layouts=last, output_layouts="R", use_local_output=False)
    assert parallelize_module(nn.Linear(8, 6), mesh, rows)(x[:, :4]).placements == (R,)
    for to in ({"tp": Shard(1)}, "tp=S(1)", dt.partition(None, "tp")):
        plain = {"tp": R} if isinstance(to, dict) else "R"
        into = PrepareModuleInput(input_layouts=plain, desired_input_layouts=to)
        assert parallelize_module(nn.Identity(), mesh, into)(x).placements == (Shard(1),)
        out_of = PrepareModuleOutput(output_layouts=plain, desired_output_layouts=to, use_local_output=False)
        assert parallelize_module(nn.Identity(), mesh, out_of)(x).placements == (Shard(1),)
    for wrong, message in (({"dp": Shard(0)}, "its mesh dims are 'tp'"), ("S(0), R", "one placement"), ("dp=R", "'tp'")):
        with pytest.raises(PlacementError, match=message):
            parallelize_module(nn.Linear(8, 6), mesh, ColwiseParallel(output_layouts=wrong))


@case
def fully_shard_takes_every_form_of_one_placement() -> None:
    mesh = get_named_square_mesh()
    for form in ({"dp": Shard(1)}, "dp=S(1)", "S(1)", dt.partition(None, "dp")):
        layer = fully_shard(nn.Linear(4, 6, bias=False), mesh=mesh["dp"], shard_placement_fn=lambda _, form=form: form)
        assert layer.weight.placements == (Shard(1),)
        own_mesh = ShardPlacementResult(form, mesh["dp"])
        layer = fully_shard(
            nn.Linear(4, 6, bias=False), mesh=mesh.flatten("all"), shard_placement_fn=lambda _, result=own_mesh: result
        )
        assert layer.weight.placements == (Shard(1),)
    with pytest.raises(PlacementError, match="its mesh dims are 'dp'"):
        fully_shard(nn.Linear(4, 6), mesh=mesh["dp"], shard_placement_fn=lambda _: {"tp": Shard(0)})


@case
def shard_model_takes_placements_by_name() -> None:
    model = dt.shard_model(
        nn.Linear(4, 6), {"weight": dt.partition("dp", "tp"), "bias": {"tp": Shard(0)}}, mesh=get_named_square_mesh()
    )
    assert model.weight.placements == (Shard(0), Shard(1))
    assert model.bias.placements == (R, Shard(0))


@case
def captured_functions_redistribute_by_name() -> None:
    mesh, x = get_named_square_mesh(), make_values(5, 8)
    source = dt.distribute_tensor(x, mesh, LISTED)
    step = dt.capture(lambda a: (a * 2).redistribute({"tp": R}).redistribute("tp=S(0)").redistribute(dt.partition(None, "dp")))
    for _ in range(3):
        result = step(source)
        assert result.placements == (Shard(1), R)
        assert_full_value(result, x * 2)


@case
def all_ranks_raise_for_placements_that_do_not_fit() -> None:
    mesh = get_named_square_mesh()
    x = dt.distribute_tensor(make_values(4, 6), mesh, LISTED)
    wrong = (
        ({"pp": R}, "the mesh has no mesh dim 'pp'; its mesh dims are 'dp', 'tp'"),
        ("pp=R", "the mesh has no mesh dim 'pp'; its mesh dims are 'dp', 'tp'"),
        (dt.partition("pp"), "the mesh has no mesh dim 'pp'; its mesh dims are 'dp', 'tp'"),
        ("tp=R, tp=S(0)", "mesh dim 'tp' twice"),
        ("tp=R, S(0)", "with and without the name"),
        ("R", "1 placements for a mesh of 2 dims"),
        ("tp", "'tp' is not a placement"),
        ("tp=P(mine)", "not a reduction of the library"),
        ({"tp": Shard(2)}, "out of range"),
        ({"tp": 3}, "3 is not a placement"),
        ("tp=S(0@1)", "level"),
        (dt.partition(None, None, "tp"), "3 entries for a tensor of 2 dims"),
    )
    for form, message in wrong:
        for call in (
            lambda form=form: x.redistribute(form),
            lambda form=form: dt.distribute_tensor(make_values(4, 6), mesh, form),
            lambda form=form: DTensor.from_local(make_values(2, 3), mesh, form),
            lambda form=form: dt.zeros(4, 6, device_mesh=mesh, placements=form),
            lambda form=form: dt.redistribute_many([x], form),
        ):
            with pytest.raises(PlacementError, match=message):
                call()
    assert_full_value(x, make_values(4, 6))
