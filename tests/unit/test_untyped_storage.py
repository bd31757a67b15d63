"""The storage of a DTensor: how many bytes there are, and whose. To read or write through it raises; it ended the process."""

import copy
import io

import pytest
import torch

import dtensor as dt


@pytest.fixture
def x():
    return dt.distribute_tensor(torch.arange(12.0).reshape(4, 3), dt.init_device_mesh("cpu", (2,)), [dt.Shard(0)])


TOUCHES = {
    "plain.set_": lambda s: torch.zeros(4, 3).set_(s),
    "plain.set_ of a part": lambda s: torch.zeros(2).set_(s, 0, (2,), (1,)),
    "plain copies": lambda s: torch.zeros(12).untyped_storage().copy_(s),
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


@pytest.mark.parametrize("name", TOUCHES)
def test_what_reads_or_writes_a_storage_raises(x, name):
    with pytest.raises(RuntimeError, match=r"to_local\(\)\.untyped_storage|meta"):
        TOUCHES[name](x.untyped_storage())
    assert x.tolist() == torch.arange(12.0).reshape(4, 3).tolist()


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize(
    "touch", [lambda s: s.fill_(3.0), lambda s: s[0], lambda s: torch.Tensor(s), lambda s: torch.empty(0).set_(s)]
)
def test_a_typed_storage_raises_too(x, touch):
    with pytest.raises(RuntimeError, match=r"to_local\(\)\.untyped_storage|meta"):
        touch(x.storage())


def test_a_storage_tells_its_bytes_and_whose_it_is(x):
    other = x + 1
    assert x.untyped_storage().nbytes() == len(x.untyped_storage()) == 48
    assert x.untyped_storage() is x.untyped_storage()
    assert x.untyped_storage()._cdata != other.untyped_storage()._cdata
    assert x.untyped_storage().device == x.device


def test_one_whose_storage_was_asked_for_is_copied_and_saved(x):
    x.untyped_storage()
    file = io.BytesIO()
    torch.save({"x": x}, file)
    file.seek(0)
    for made in (copy.copy(x), copy.deepcopy(x), torch.load(file)["x"]):
        assert torch.equal(made.full_tensor(), x.full_tensor())
        assert made.untyped_storage() is not x.untyped_storage()


def test_a_storage_follows_a_tensor_that_is_made_another(x):
    x.untyped_storage()
    x.data = dt.distribute_tensor(torch.ones(5), x.device_mesh, [dt.Shard(0)])
    assert x.untyped_storage().nbytes() == 20


def test_a_storage_of_the_size_that_it_has_is_no_other(x):
    """The compiler asks it of tensors without elements."""
    for made in (x, x[:0]):
        storage = made.untyped_storage()
        assert storage.resize_(storage.nbytes()) is storage
