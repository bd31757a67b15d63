"""Device meshes: creation, submeshes, flatten and unflatten, equality, backends by mesh dim and error messages."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
import torch.distributed as dist
from gloo_processes import run_gloo
from hypothesis import given
from hypothesis import strategies as st

import dtensor as dt
from dtensor.errors import MeshError
from dtensor.mesh.current_rank import run_as_member
from dtensor.mesh.device_mesh import DeviceMesh, as_mesh, init_device_mesh
from dtensor.mesh.submesh import unify_roots

CUBE = init_device_mesh("cpu", (2, 3, 2), mesh_dim_names=("dp", "pp", "tp"))


@pytest.mark.parametrize("ranks", [[[0, 1], [2, 3]], np.arange(4).reshape(2, 2), torch.arange(4).reshape(2, 2), ((0, 1), (2, 3))])
def test_device_mesh_takes_lists_tuples_arrays_and_tensors_of_ranks(ranks: object) -> None:
    mesh = DeviceMesh("cpu", ranks)
    assert mesh.shape == (2, 2)
    assert mesh.mesh.tolist() == [[0, 1], [2, 3]]
    assert mesh == DeviceMesh("cpu", [[0, 1], [2, 3]])


def test_numpy_integers_are_accepted_as_sizes_and_dims() -> None:
    assert DeviceMesh("cpu", np.int64(3)) == DeviceMesh("cpu", 3)
    assert init_device_mesh("cpu", (np.int64(2), 2)).shape == init_device_mesh("cpu", np.array([2, 2])).shape == (2, 2)
    assert CUBE.size(np.int64(-1)) == CUBE.size(-1)


def test_device_mesh_of_an_int_has_that_many_ranks() -> None:
    assert DeviceMesh("cpu", 3).mesh.tolist() == [0, 1, 2]
    assert init_device_mesh("cpu", (3,)) == DeviceMesh("cpu", 3)


def test_ndim_size_names_kind_and_rank_of_a_3d_mesh_are_right() -> None:
    assert CUBE.ndim == 3
    assert CUBE.size() == 12
    assert CUBE.size(1) == CUBE.size("pp") == CUBE.size(-2) == 3
    assert CUBE.mesh_dim_names == ("dp", "pp", "tp")
    assert CUBE.device_type == "cpu"
    assert CUBE.kind == "in_process"
    assert CUBE.get_rank() == 0


def test_coordinates_of_ranks_are_row_major() -> None:
    assert CUBE.coordinates[0] == (0, 0, 0)
    assert CUBE.coordinates[7] == (1, 0, 1)
    assert [CUBE.coordinates.index(c) for c in CUBE.coordinates] == list(range(12))


# --- submeshes ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("names", "ranks"),
    [
        ("tp", [0, 1]),
        ("dp", [0, 6]),
        (("dp", "tp"), [[0, 1], [6, 7]]),
        (("tp", "dp"), [[0, 6], [1, 7]]),
        (("tp", "pp", "dp"), [[[0, 6], [2, 8], [4, 10]], [[1, 7], [3, 9], [5, 11]]]),
    ],
)
def test_submesh_has_the_named_dims_in_the_given_order(names: str | tuple[str, ...], ranks: list[object]) -> None:
    sliced = CUBE[names]
    assert sliced.mesh.tolist() == ranks
    assert sliced.mesh_dim_names == ((names,) if isinstance(names, str) else names)


def test_equal_submeshes_are_one_object_or_equal() -> None:
    assert CUBE["dp", "tp"] is CUBE["dp", "tp"]
    assert CUBE["dp", "pp", "tp"] is CUBE
    assert CUBE["dp", "tp"]["tp"] == CUBE["tp"]
    assert hash(CUBE["dp", "tp"]["tp"]) == hash(CUBE["tp"])


def test_submesh_has_the_ranks_of_the_current_rank() -> None:
    with run_as_member(CUBE._root, 9):
        assert CUBE["tp"].mesh.tolist() == [8, 9]
        assert CUBE["dp"].mesh.tolist() == [3, 9]
        assert CUBE["tp"].get_local_rank() == 1
        assert CUBE.get_coordinate() == (1, 1, 1)
    assert CUBE["tp"].mesh.tolist() == [0, 1]


def test_members_of_lists_the_ranks_along_mesh_dims() -> None:
    assert CUBE.members_of((2,), 8) == (8, 9)
    assert CUBE.members_of((2, 0), 8) == (2, 8, 3, 9)
    assert CUBE["tp"].members_of((0,), 8) == (8, 9)


def test_a_submesh_spans_the_root_only_if_it_has_all_ranks() -> None:
    assert CUBE.spans_root
    assert not CUBE["tp"].spans_root
    assert init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))["b"].spans_root


# --- flatten, unflatten, concatenate --------------------------------------------------------------------------------
def test_flatten_joins_mesh_dims_and_their_names() -> None:
    flat = CUBE["dp", "tp"].flatten()
    assert flat.mesh.tolist() == [0, 1, 6, 7]
    assert flat.mesh_dim_names == ("dp_tp",)
    assert CUBE["dp_tp"] == flat
    assert CUBE["dp_tp", "pp"].shape == (4, 3)


def test_flatten_of_a_transposed_submesh_permutes_the_ranks() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    assert mesh["b", "a"].flatten("ba").mesh.tolist() == [0, 2, 1, 3]


def test_flatten_refuses_the_name_of_another_flattened_dim() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    mesh.flatten("both")
    with pytest.raises(MeshError, match="exists already"):
        mesh["b", "a"].flatten("both")


def test_unflatten_splits_a_mesh_dim_of_root_submesh_and_flattened_meshes() -> None:
    world = init_device_mesh("cpu", (12,), mesh_dim_names=("world",))
    cube = world.unflatten("world", (3, 2, 2), ("pp", "dp", "tp"))
    assert cube.mesh.tolist() == CUBE.mesh.reshape(3, 2, 2).tolist()
    assert cube["pp"].unflatten(0, (3, 1), ("a", "b")).shape == (3, 1)
    assert cube["tp", "pp"].flatten("both").unflatten("both", (2, 3), ("x", "y")).mesh.tolist() == [[0, 4, 8], [1, 5, 9]]
    assert cube["tp", "pp"].flatten("both").unflatten("both", (3, 2), ("x", "y")).mesh.tolist() == [[0, 4], [8, 1], [5, 9]]
    again = cube.unflatten("pp", (3, 1), ("a", "b"))["b", "tp"]
    assert (again.shape, again.mesh_dim_names) == ((1, 2), ("b", "tp"))
    assert init_device_mesh("cpu", (4,)).unflatten(-1, (2, 2)).mesh.tolist() == [[0, 1], [2, 3]]


def test_unflatten_refuses_wrong_sizes_and_names() -> None:
    world = init_device_mesh("cpu", (2, 4), mesh_dim_names=("a", "b"))
    for dim, sizes, names in (("b", (3, 2), ("x", "y")), ("b", (-2, -2), ("x", "y"))):
        with pytest.raises(MeshError, match="cannot be unflattened to"):
            world.unflatten(dim, sizes, names)
    for names in (None, ("x",)):
        with pytest.raises(MeshError, match="name all or none"):
            world.unflatten("b", (2, 2), names)
    with pytest.raises(MeshError, match="different names"):
        world.unflatten("b", (2, 2), ("a", "y"))


def test_concatenate_joins_submeshes_of_one_root() -> None:
    assert DeviceMesh._concatenate([CUBE["tp"], CUBE["dp"]]) == CUBE["tp", "dp"]
    with pytest.raises(MeshError, match="with different mesh dims"):
        DeviceMesh._concatenate([CUBE["tp"], CUBE["tp", "dp"]])
    with pytest.raises(MeshError, match="submeshes of one mesh"):
        DeviceMesh._concatenate([CUBE["tp"], init_device_mesh("cpu", (2,))])


def test_concatenate_joins_submeshes_of_different_unflattened_meshes() -> None:
    world = init_device_mesh("cpu", (8,), mesh_dim_names=("world",))
    data = world.unflatten(0, (1, 4, 1, 2), ("pp", "batch", "cp", "tp"))
    dense = world.unflatten(0, (1, 2, 2, 2), ("pp", "copies", "fsdp", "tp"))
    both = DeviceMesh._concatenate([dense["copies", "fsdp"], data["tp"]])
    assert (both.mesh_dim_names, both.mesh.tolist()) == (("copies", "fsdp", "tp"), [[[0, 1], [2, 3]], [[4, 5], [6, 7]]])
    assert both == DeviceMesh._concatenate([dense["copies", "fsdp"], data["tp"]])
    assert DeviceMesh._concatenate([dense["pp", "copies"], data["tp"]]).shape == (1, 2, 2)
    for one, other in ((dense["fsdp"], data["batch"]), (world.unflatten(0, (2, 4), ("a", "b"))["b"], dense["tp"])):
        with pytest.raises(MeshError, match="with different mesh dims"):
            DeviceMesh._concatenate([one, other])


@given(splits=st.lists(st.permutations([2, 3, 2, 1, 1]), min_size=2, max_size=3))
def test_unify_roots_of_unflattened_meshes_keeps_shapes_ranks_and_groups(splits: list[list[int]]) -> None:
    world = init_device_mesh("cpu", (12,))
    meshes = [world.unflatten(0, sizes) for sizes in splits]
    found = unify_roots(meshes)
    assert len({mesh._root.key for mesh in found}) in (1, len({mesh._root.key for mesh in meshes}))
    for mesh, other in zip(meshes, found, strict=True):
        assert (mesh.shape, mesh.mesh.tolist()) == (other.shape, other.mesh.tolist())
        assert all(mesh.members_of((d,), m) == other.members_of((d,), m) for d in range(5) for m in range(12))
    assert unify_roots([*found, *meshes]) == [*found, *found]


def test_a_flattened_dim_is_found_from_each_submesh_of_its_root() -> None:
    mesh = init_device_mesh("cpu", (2, 3, 2), mesh_dim_names=("dp", "pp", "tp"))
    mesh["dp", "tp"]._flatten("dp_tp")
    mesh["tp", "dp"].flatten("turned")
    for part in (mesh, mesh["tp"], mesh["pp", "dp"], mesh["dp_tp"]):
        assert part.size("dp_tp") == 4
        with run_as_member(mesh._root, 7):
            assert (part.get_local_rank("dp_tp"), part.get_local_rank("turned")) == (3, 3)
        with run_as_member(mesh._root, 6):
            assert (part.get_local_rank("dp_tp"), part.get_local_rank("turned")) == (2, 1)
        with pytest.raises(MeshError, match="process"):
            part.get_group("dp_tp")
        with pytest.raises(KeyError, match="no mesh dim 'dp_pp'"):
            part.get_group("dp_pp")
    assert pickle.loads(pickle.dumps(mesh))["dp_tp"] == mesh["dp_tp"]
    assert pickle.loads(pickle.dumps(mesh["pp"])).size("turned") == 4


def test_flatten_refuses_the_name_of_an_existing_mesh_dim() -> None:
    named = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    split = init_device_mesh("cpu", (4,), mesh_dim_names=("world",)).unflatten("world", (2, 2), ("a", "b"))
    for mesh in (named, split):
        assert mesh["a"].flatten() is mesh["a"] is mesh["a"].flatten("a")
        for part, name in ((mesh["a"], "b"), (mesh, "a"), (mesh["b", "a"], "b")):
            with pytest.raises(MeshError, match="exists already"):
                part.flatten(name)
        assert mesh["a"].flatten("c") == mesh["c"]
        with pytest.raises(MeshError, match="exists already"):
            mesh["b"].flatten("c")
        assert mesh["b"].get_local_rank("c").values == (0, 0, 1, 1)  # the refused flatten has changed nothing


def test_a_submesh_of_overlapping_dims_raises() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    mesh.flatten()
    with pytest.raises(MeshError, match="overlap"):
        mesh["a_b", "a"]


# --- equality, pickling, the default mesh ---------------------------------------------------------------------------
def test_equal_meshes_compare_and_hash_equal() -> None:
    other = init_device_mesh("cpu", (2, 3, 2), mesh_dim_names=("dp", "pp", "tp"))
    assert other == CUBE
    assert hash(other) == hash(CUBE)
    assert init_device_mesh("cpu", (2, 3, 2)) != CUBE
    assert init_device_mesh("cpu", (2, 2, 3), mesh_dim_names=("dp", "pp", "tp")) != CUBE
    assert CUBE != "mesh"


@pytest.mark.parametrize("mesh", [CUBE, CUBE["tp"], CUBE["tp", "dp"], CUBE["dp", "pp"].flatten()], ids=repr)
def test_pickle_gives_an_equal_mesh_and_deepcopy_the_same_mesh(mesh: DeviceMesh) -> None:
    assert pickle.loads(pickle.dumps(mesh)) == mesh
    assert copy.deepcopy(mesh) is mesh


def test_repr_shows_device_ranks_and_names() -> None:
    assert repr(CUBE["tp"]) == "DeviceMesh('cpu', [0, 1], mesh_dim_names=('tp',))"


def test_the_entered_mesh_is_the_default_mesh() -> None:
    with DeviceMesh("cpu", 3) as outer:
        assert as_mesh(None) is outer
        with DeviceMesh("cpu", 2) as inner:
            assert dt.zeros(4).device_mesh == inner
        assert as_mesh(None) is outer
    with pytest.raises(MeshError, match="no device mesh"):
        as_mesh(None)


def test_repr_of_a_dtensor_shows_the_ranks_of_its_mesh() -> None:
    mesh = DeviceMesh("cpu", [3, 1])
    assert mesh.ranks == (3, 1)
    x = dt.distribute_tensor(torch.arange(5.0), mesh, [dt.Shard(0)])
    assert "rank 3: [0., 1., 2.]" in repr(x)


# --- errors ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DeviceMesh("cpu", [0, 0]), "distinct"),
        (lambda: DeviceMesh("cpu", []), "at least one"),
        (lambda: DeviceMesh("cpu", [0, 1], mesh_dim_names=("a", "b")), "mesh_dim_names"),
        (lambda: DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("a", "a")), "mesh_dim_names"),
        (lambda: init_device_mesh("cpu", (2, 0)), "positive sizes"),
        (lambda: CUBE["xp"], "no mesh dim 'xp'"),
        (lambda: CUBE["dp", "dp"], "different mesh dims"),
        (lambda: CUBE[()], "needs one or several"),
        (lambda: init_device_mesh("cpu", (2,))["tp"], "no mesh dim"),
        (lambda: CUBE.size("xp"), "no mesh dim"),
        (lambda: CUBE.size(3), "out of range"),
        (lambda: CUBE.get_local_rank(), "needs a mesh dim: get_local_rank"),
        (lambda: CUBE["tp"].get_group(), "process"),
        (lambda: CUBE[0], "needs one or several"),
        (lambda: CUBE["dp", 1], "needs one or several"),
        (lambda: CUBE.size(1.0), "ints"),
        (lambda: CUBE.size(("dp", "tp")), "ints"),
        (lambda: CUBE.flatten(3), "takes a string"),
        (lambda: DeviceMesh("cpu", [-1, 0]), "distinct ints from 0"),
        (lambda: DeviceMesh("cpu", [0.5, 1.5]), "array of ranks"),
        (lambda: DeviceMesh("cpu", [[0, 1], [2]]), "array of ranks"),
        (lambda: DeviceMesh("cpu", ["a"]), "array of ranks"),
        (lambda: DeviceMesh("cpu", "01"), "array of ranks"),
        (lambda: DeviceMesh("cpu", [0, 1], mesh_dim_names=(1,)), "are strings"),
        (lambda: DeviceMesh("CPU", [0, 1]), "not a device type"),
        (lambda: DeviceMesh("", [0, 1]), "not a device type"),
        (lambda: DeviceMesh(None, [0, 1]), "not a device type"),
        (lambda: DeviceMesh("cpu:0", [0, 1]), "with index"),
        (lambda: init_device_mesh("cpu", ("2", 2)), "ints"),
        (lambda: init_device_mesh("cpu", (4.5,)), "ints"),
        (lambda: init_device_mesh("cpu", None), "ints"),
        (lambda: as_mesh("cpu"), "is not a device mesh"),
        (lambda: DeviceMesh.from_group([object()], "cpu"), "needs mesh="),
    ],
)
def test_invalid_mesh_arguments_raise_mesh_error(make: object, message: str) -> None:
    with pytest.raises(MeshError, match=message):
        make()


def test_init_device_mesh_refuses_unknown_keywords() -> None:
    with pytest.raises(TypeError, match="unexpected keyword"):
        init_device_mesh("cpu", (2,), mesh_names=("a",))


def test_an_unknown_mesh_dim_name_raises_key_error() -> None:
    for lookup in (lambda: CUBE["cp"], lambda: CUBE["dp", "cp"], lambda: CUBE.size("cp"), lambda: CUBE.get_local_rank("cp")):
        with pytest.raises(KeyError, match=r"^Invalid mesh_dim_name: DeviceMesh.* has no mesh dim 'cp'"):
            lookup()


def test_a_mesh_is_an_instance_of_torch_device_mesh() -> None:
    assert isinstance(CUBE, torch.distributed.device_mesh.DeviceMesh)
    assert as_mesh(CUBE) is CUBE
    assert copy.deepcopy(CUBE) is CUBE
    assert pickle.loads(pickle.dumps(CUBE["tp"])) == CUBE["tp"]


def test_init_device_mesh_refuses_a_device_with_an_index() -> None:
    with pytest.raises(MeshError, match="Device type with index"):
        init_device_mesh("cpu:0", (2,))


def test_get_root_mesh_of_submeshes_is_the_root_mesh() -> None:
    mesh = dt.init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
    assert mesh["tp"]._get_root_mesh() == mesh.flatten()._get_root_mesh() == mesh
    assert mesh["dp"]._get_root_mesh() == mesh


def test_get_all_submeshes_lists_the_submeshes_of_a_mesh_dim() -> None:
    mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
    assert [part.mesh.tolist() for part in mesh._get_all_submeshes("dp")] == [[0, 3], [1, 4], [2, 5]]
    assert [part.mesh.tolist() for part in mesh["tp"]._get_all_submeshes("tp")] == [[0, 1, 2], [3, 4, 5]]
    assert mesh._get_all_submeshes("tp")[1].mesh_dim_names == ("tp",)
    with pytest.raises(MeshError, match="no mesh dim 'cp'"):
        mesh._get_all_submeshes("cp")


# --- backends by mesh dim -------------------------------------------------------------------------------------------
def _check_backends_of_groups() -> None:
    import torch.testing._internal.distributed.fake_pg

    plain = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mesh, again = (dt.init_device_mesh("cpu", (2, 2), ("dp", "tp"), backend_override={"tp": "fake"}) for _ in range(2))
    assert mesh == again != plain
    assert [dist.get_backend(mesh.get_group(dim)) for dim in ("dp", "tp")] == ["gloo", "fake"]
    assert again["tp"].get_group() is mesh.get_group("tp")
    assert mesh.get_group("dp") is plain.get_group("dp")
    assert dist.get_backend(mesh.flatten().get_group()) == "gloo"
    restored = pickle.loads(pickle.dumps(mesh["tp"]))
    assert restored == mesh["tp"]
    assert dist.get_backend(restored.get_group()) == "fake"
    world = dt.init_device_mesh("cpu", (4,), backend_override={0: ("gloo", None)})
    assert world.get_group() is not dist.group.WORLD
    x = dt.distribute_tensor(torch.arange(6.0), world, [dt.Shard(0)])
    assert x.sum().item() == 15
    assert plain["dp"].get_group() is not world.get_group()
    _check_backends_of_flattened_dims()


def _check_backends_of_flattened_dims() -> None:
    """Check the backends of flattened and unflattened mesh dims."""
    mesh = dt.init_device_mesh("cpu", (2, 2), ("dp", "tp"), backend_override={"tp": "fake"})
    before = mesh.flatten("before").get_group()
    both = mesh.flatten("both", backend_override="fake")
    assert dist.get_backend(both.get_group()) == dist.get_backend(mesh["both"].get_group()) == "fake"
    assert mesh._flatten("both", backend_override="gloo") is both  # the existing mesh dim of this name
    assert dist.get_backend(before) == "gloo"
    assert hash(mesh) == hash(pickle.loads(pickle.dumps(mesh)))
    assert pickle.loads(pickle.dumps(both)) == both
    split = mesh._unflatten("dp", (2, 1), ("replica", "shard"), backend_override={"replica": ("fake", None)})
    assert [dist.get_backend(split.get_group(dim)) for dim in ("replica", "tp")] == ["fake", "fake"]
    assert dist.get_backend(split.flatten("all").get_group()) == "fake"  # over all ranks, with the backend of "both"
    parts = dt.init_device_mesh("cpu", (4,), ("world",)).unflatten(0, (2, 2), ("a", "b"), {"b": "fake"})
    assert [dist.get_backend(parts.get_group(dim)) for dim in ("a", "b")] == ["gloo", "fake"]


@pytest.mark.gloo
def test_backend_override_sets_the_backend_of_groups_on_processes() -> None:
    run_gloo(_check_backends_of_groups, 4)


def test_invalid_backend_override_raises_in_process() -> None:
    assert dt.init_device_mesh("cpu", (2, 2), backend_override={1: "gloo"}).shape == (2, 2)
    without_backends = dt.DeviceMesh("cpu", [[0, 1], [2, 3]], _init_backend=False)  # as in torch's tests
    assert without_backends == dt.init_device_mesh("cpu", (2, 2))
    for wrong, message in [
        ({"pp": "gloo"}, "names the mesh dim 'pp'"),
        ({2: "gloo"}, "names the mesh dim 2"),
        ({0: "gloo", "dp": "gloo"}, "names mesh dim 0 twice"),
        ({0: 7}, "takes the name of a backend"),
        ({0: (7, None)}, "takes the name of a backend"),
    ]:
        with pytest.raises(MeshError, match=message):
            dt.init_device_mesh("cpu", (2, 2), ("dp", "tp"), backend_override=wrong)
    mesh = dt.init_device_mesh("cpu", (2, 2), ("dp", "tp"))
    assert mesh.flatten("both", backend_override="gloo") is mesh["both"]
    with pytest.raises(MeshError, match="takes the name of a backend"):
        mesh.flatten("other", backend_override=7)
    with pytest.raises(MeshError, match="names the mesh dim 'tp'"):
        mesh.unflatten("dp", (2, 1), ("a", "b"), backend_override={"tp": "gloo"})
    with pytest.raises(MeshError, match="needs mesh_dim_name="):
        dt.init_device_mesh("cpu", (2, 2)).flatten(backend_override="gloo")
