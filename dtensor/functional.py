"""Functional: functions of torch, declared for type checkers to return a tensor of the class of their first argument.

Each name is the function of torch itself: ``dtensor.functional.gelu is torch.nn.functional.gelu``. torch declares that they
return a ``Tensor``. Here a checker knows that ``gelu(x)`` of a DTensor is a DTensor. For a plain tensor it is a ``Tensor``.

>>> import torch, dtensor as dt
>>> from dtensor import functional as F
>>> x = dt.ones(2, 3, device_mesh=dt.init_device_mesh("cpu", (2,)), placements=[dt.Shard(0)])
>>> F.layer_norm(x, (3,)).placements, F.gelu is torch.nn.functional.gelu
((Shard(dim=0),), True)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from .base.tensor_methods import TensorMethods
else:
    TensorMethods = Tensor

_P = ParamSpec("_P")
_X = TypeVar("_X", bound=TensorMethods)


class TensorFunction(Protocol[_P]):
    """The type of a function that returns a tensor of the class of its first argument."""

    @overload
    def __call__(self, input: _X, /, *args: _P.args, **kwargs: _P.kwargs) -> _X: ...
    @overload
    def __call__(self, input: Tensor, /, *args: _P.args, **kwargs: _P.kwargs) -> Tensor: ...


class SequenceFunction(Protocol[_P]):
    """The type of a function that returns a tensor of the class of the tensors in its first argument."""

    @overload
    def __call__(self, tensors: Sequence[_X], /, *args: _P.args, **kwargs: _P.kwargs) -> _X: ...
    @overload
    def __call__(self, tensors: Sequence[Tensor], /, *args: _P.args, **kwargs: _P.kwargs) -> Tensor: ...


def typed_by_first(function: Callable[Concatenate[Tensor, _P], Tensor]) -> TensorFunction[_P]:
    """Return ``function`` itself, declared to return a tensor of the class of its first argument.

    Use it for a function that this module does not have. No communication. Of a function with overloads a checker sees one.
    It raises no errors: nothing is checked at run time.

    >>> import torch
    >>> typed_by_first(torch.logdet) is torch.logdet
    True
    """
    declared: Any = function
    return declared


def _with_any_arguments(function: Callable[..., Tensor]) -> TensorFunction[...]:
    """Return ``function``, declared for type checkers to take any arguments, because it has overloads."""
    declared: Any = function
    return declared


def _typed_by_sequence(function: Callable[..., Tensor]) -> SequenceFunction[...]:
    declared: Any = function
    return declared


# --- functions of torch ------------------------------------------------------------------------------------------------
cat = _typed_by_sequence(torch.cat)
hstack = _typed_by_sequence(torch.hstack)
stack = _typed_by_sequence(torch.stack)
vstack = _typed_by_sequence(torch.vstack)
where = _with_any_arguments(torch.where)
empty_like = typed_by_first(torch.empty_like)
full_like = typed_by_first(torch.full_like)
ones_like = typed_by_first(torch.ones_like)
rand_like = typed_by_first(torch.rand_like)
randn_like = typed_by_first(torch.randn_like)
zeros_like = typed_by_first(torch.zeros_like)

# --- functions of torch.nn.functional -------------------------------------------------------------------------------
adaptive_avg_pool1d = typed_by_first(F.adaptive_avg_pool1d)
adaptive_avg_pool2d = typed_by_first(F.adaptive_avg_pool2d)
adaptive_avg_pool3d = typed_by_first(F.adaptive_avg_pool3d)
affine_grid = typed_by_first(F.affine_grid)
alpha_dropout = typed_by_first(F.alpha_dropout)
avg_pool1d = typed_by_first(F.avg_pool1d)
avg_pool2d = typed_by_first(F.avg_pool2d)
avg_pool3d = typed_by_first(F.avg_pool3d)
batch_norm = typed_by_first(F.batch_norm)
bilinear = typed_by_first(F.bilinear)
binary_cross_entropy = typed_by_first(F.binary_cross_entropy)
binary_cross_entropy_with_logits = typed_by_first(F.binary_cross_entropy_with_logits)
celu = typed_by_first(F.celu)
channel_shuffle = typed_by_first(F.channel_shuffle)
conv1d = _with_any_arguments(F.conv1d)
conv2d = _with_any_arguments(F.conv2d)
conv3d = _with_any_arguments(F.conv3d)
conv_transpose1d = typed_by_first(F.conv_transpose1d)
conv_transpose2d = typed_by_first(F.conv_transpose2d)
conv_transpose3d = typed_by_first(F.conv_transpose3d)
cosine_embedding_loss = typed_by_first(F.cosine_embedding_loss)
cosine_similarity = typed_by_first(F.cosine_similarity)
cross_entropy = typed_by_first(F.cross_entropy)
ctc_loss = typed_by_first(F.ctc_loss)
dropout = typed_by_first(F.dropout)
dropout1d = typed_by_first(F.dropout1d)
dropout2d = typed_by_first(F.dropout2d)
dropout3d = typed_by_first(F.dropout3d)
elu = typed_by_first(F.elu)
embedding = typed_by_first(F.embedding)
embedding_bag = typed_by_first(F.embedding_bag)
feature_alpha_dropout = typed_by_first(F.feature_alpha_dropout)
fold = typed_by_first(F.fold)
gaussian_nll_loss = typed_by_first(F.gaussian_nll_loss)
gelu = typed_by_first(F.gelu)
glu = typed_by_first(F.glu)
grid_sample = typed_by_first(F.grid_sample)
group_norm = typed_by_first(F.group_norm)
gumbel_softmax = typed_by_first(F.gumbel_softmax)
hardshrink = typed_by_first(F.hardshrink)
hardsigmoid = typed_by_first(F.hardsigmoid)
hardswish = typed_by_first(F.hardswish)
hardtanh = typed_by_first(F.hardtanh)
hinge_embedding_loss = typed_by_first(F.hinge_embedding_loss)
huber_loss = typed_by_first(F.huber_loss)
instance_norm = typed_by_first(F.instance_norm)
interpolate = typed_by_first(F.interpolate)
kl_div = typed_by_first(F.kl_div)
l1_loss = typed_by_first(F.l1_loss)
layer_norm = typed_by_first(F.layer_norm)
leaky_relu = typed_by_first(F.leaky_relu)
linear = typed_by_first(F.linear)
local_response_norm = typed_by_first(F.local_response_norm)
log_softmax = typed_by_first(F.log_softmax)
lp_pool1d = typed_by_first(F.lp_pool1d)
lp_pool2d = typed_by_first(F.lp_pool2d)
lp_pool3d = typed_by_first(F.lp_pool3d)
margin_ranking_loss = typed_by_first(F.margin_ranking_loss)
max_unpool1d = typed_by_first(F.max_unpool1d)
max_unpool2d = typed_by_first(F.max_unpool2d)
max_unpool3d = typed_by_first(F.max_unpool3d)
mish = typed_by_first(F.mish)
mse_loss = typed_by_first(F.mse_loss)
multi_margin_loss = typed_by_first(F.multi_margin_loss)
multilabel_margin_loss = typed_by_first(F.multilabel_margin_loss)
multilabel_soft_margin_loss = typed_by_first(F.multilabel_soft_margin_loss)
nll_loss = typed_by_first(F.nll_loss)
normalize = typed_by_first(F.normalize)
one_hot = typed_by_first(F.one_hot)
pad = typed_by_first(F.pad)
pairwise_distance = typed_by_first(F.pairwise_distance)
pdist = typed_by_first(F.pdist)
pixel_shuffle = typed_by_first(F.pixel_shuffle)
pixel_unshuffle = typed_by_first(F.pixel_unshuffle)
poisson_nll_loss = typed_by_first(F.poisson_nll_loss)
prelu = typed_by_first(F.prelu)
relu = typed_by_first(F.relu)
relu6 = typed_by_first(F.relu6)
rms_norm = typed_by_first(F.rms_norm)
rrelu = typed_by_first(F.rrelu)
scaled_dot_product_attention = typed_by_first(F.scaled_dot_product_attention)
selu = typed_by_first(F.selu)
sigmoid = typed_by_first(F.sigmoid)
silu = typed_by_first(F.silu)
smooth_l1_loss = typed_by_first(F.smooth_l1_loss)
soft_margin_loss = typed_by_first(F.soft_margin_loss)
softmax = typed_by_first(F.softmax)
softmin = typed_by_first(F.softmin)
softplus = typed_by_first(F.softplus)
softshrink = typed_by_first(F.softshrink)
softsign = typed_by_first(F.softsign)
tanh = typed_by_first(F.tanh)
tanhshrink = typed_by_first(F.tanhshrink)
threshold = typed_by_first(F.threshold)
triplet_margin_loss = typed_by_first(F.triplet_margin_loss)
triplet_margin_with_distance_loss = typed_by_first(F.triplet_margin_with_distance_loss)
unfold = typed_by_first(F.unfold)
