"""Untyped storage of a DTensor: size and identity can be read; reads and writes of its bytes raise."""

import copy
import io

import pytest
import torch

import dtensor as dt


@pytest.fixture
def x():
    return dt.distribute_tensor(torch.arange(12.0).reshape(4, 3), dt.init_device_mesh("cpu", (2,)), [dt.Shard(0)])


ACCESSES = {
    "plain.set_": lambda s: torch.zeros(4, 3).set_(s),
    "plain.set_ with size and stride": lambda s: torch.zeros(2).set_(s, 0, (2,), (1,)),
    "copy_ to a plain storage": lambda s: torch.zeros(12).untyped_storage().copy_(s),
    "copy_": lambda s: s.copy_(torch.zeros(12).untyped_storage()),
    "fill_": lambda s: s.fill_(0),
    "resize_": lambda s: s.resize_(0),
    "share_memory_": lambda s: s.share_memory_(),
    "data_ptr": lambda s: s.data_ptr(),
    "item": lambda s: s[0],
    "set item": lambda s: s.__setitem__(0, 1),
    "tolist": lambda s: s.tolist(),
    "clone": lambda s: s.clone(),
    "pickle": lambda s: copy.deepcopy(s),
}


@pytest.mark.parametrize("name", ACCESSES)
def test_reads_and_writes_of_an_untyped_storage_raise(x, name):
    with pytest.raises(RuntimeError, match=r"to_local\(\)\.untyped_storage|meta"):
        ACCESSES[name](x.untyped_storage())
    assert x.tolist() == torch.arange(12.0).reshape(4, 3).tolist()


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize(
    "access", [lambda s: s.fill_(3.0), lambda s: s[0], lambda s: torch.Tensor(s), lambda s: torch.empty(0).set_(s)]
)
def test_reads_and_writes_of_a_typed_storage_raise(x, access):
    with pytest.raises(RuntimeError, match=r"to_local\(\)\.untyped_storage|meta"):
        access(x.storage())


def test_untyped_storage_has_size_identity_and_device(x):
    other = x + 1
    assert x.untyped_storage().nbytes() == len(x.untyped_storage()) == 48
    assert x.untyped_storage() is x.untyped_storage()
    assert x.untyped_storage()._cdata != other.untyped_storage()._cdata
    assert x.untyped_storage().device == x.device


def test_a_dtensor_can_be_copied_and_saved_after_its_storage_was_read(x):
    x.untyped_storage()
    file = io.BytesIO()
    torch.save({"x": x}, file)
    file.seek(0)
    for result in (copy.copy(x), copy.deepcopy(x), torch.load(file)["x"]):
        assert torch.equal(result.full_tensor(), x.full_tensor())
        assert result.untyped_storage() is not x.untyped_storage()


def test_untyped_storage_follows_assigned_data(x):
    x.untyped_storage()
    x.data = dt.distribute_tensor(torch.ones(5), x.device_mesh, [dt.Shard(0)])
    assert x.untyped_storage().nbytes() == 20


def test_resize_of_a_storage_to_its_own_size_returns_it(x):
    """torch.compile calls ``resize_`` for tensors without elements."""
    for result in (x, x[:0]):
        storage = result.untyped_storage()
        assert storage.resize_(storage.nbytes()) is storage
