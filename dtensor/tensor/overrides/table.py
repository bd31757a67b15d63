"""Table of overrides: each operator that this library computes above autograd, and the function that computes it.

:func:`install_overrides` registers the table; the package root calls it once. A function returns NotImplemented for calls that
torch's own kernel computes rightly. See :mod:`.register` for the mechanism.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...rules.aten.contraction import linear_gradients, matmul_gradients
from . import chunk_of_stack, constants, linear_matmul, plain_buffers, sequences, sparse
from .as_strided import as_strided
from .data_swap import OPERATOR as DATA_SWAP
from .data_swap import has_compatible_data
from .register import HAS_REDISPATCH, register_kernel, register_override

_COPIED_INTO_OUT = (
    "aten::msort.out",
    "aten::log_sigmoid.out",
    "aten::linalg_det.out",
    "aten::linalg_cholesky.out",
    "aten::linalg_eigvalsh.out",
    "aten::linalg_ldl_factor.out",
    "aten::linalg_lu_factor.out",
    "aten::linalg_inv.out",
    "aten::inverse.out",
    "aten::linalg_matrix_power.out",
    "aten::matrix_power.out",
    "aten::linalg_slogdet.out",
    "aten::slogdet.out",
    "aten::linalg_svdvals.out",
)
_RECURRENT = (
    *(f"aten::{name}.{kind}" for kind in ("input", "data") for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")),
    *(f"aten::{name}_cell" for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")),
)
_RANK_OUT = ("out", "out_tol_tensor", "atol_rtol_tensor_out", "atol_rtol_float_out")

OVERRIDES: dict[str, Callable[..., Any]] = {
    # torch computes these through pointers or plain buffers
    "aten::one_hot": plain_buffers.one_hot,
    "aten::matmul.out": plain_buffers.matmul_out,
    "aten::fill_diagonal_": plain_buffers.fill_diagonal,
    "aten::tensor_split.tensor_indices_or_sections": plain_buffers.tensor_split,
    "torch_nn::_linear_cross_entropy_batch_chunked_no_reduction": plain_buffers.linear_cross_entropy,
    **{name: plain_buffers.copied_into_out(name) for name in _COPIED_INTO_OUT},
    **{
        name: plain_buffers.on_reduced_operands(name)
        for name in ("aten::linalg_matrix_rank.tol_tensor", "aten::linalg_matrix_rank.atol_rtol_tensor")
    },
    **{f"aten::linalg_matrix_rank.{overload}": plain_buffers.matrix_rank_out for overload in _RANK_OUT},
    # torch makes plain constants in these
    "aten::combinations": constants.combinations,
    "aten::vander": constants.vander,
    "aten::linalg_matrix_power": constants.matrix_power,
    "aten::matrix_power": constants.matrix_power,
    "aten::istft": constants.istft,
    "aten::_scaled_dot_product_attention_math": constants.causal_attention,
    "aten::cross_entropy_loss": constants.cross_entropy,
    **{name: constants.recurrent_with_plain_state(name) for name in _RECURRENT},
    **{name: constants.ctc_loss(name) for name in ("aten::ctc_loss.IntList", "aten::ctc_loss.Tensor")},
    # sequences of different lengths
    "aten::pad_sequence": sequences.pad_sequence,
    "aten::_pack_padded_sequence": sequences.pack_padded,
    "aten::_pad_packed_sequence": sequences.pad_packed,
    # torch returns sparse tensors
    "aten::embedding_sparse_backward": sparse.embedding_sparse_backward,
    "aten::_gather_sparse_backward": sparse.gather_sparse_backward,
    **{name: sparse.of_full_tensors(name) for name in sparse.CONSTRUCTORS},
    **{
        name: sparse.embedding_bag_with_dense_gradient(name)
        for name in ("aten::embedding_bag", "aten::embedding_bag.padding_idx")
    },
    # chunks of a fused projection
    "aten::split.Tensor": chunk_of_stack.split,
    "aten::split_with_sizes": chunk_of_stack.split_with_sizes,
}
OVERRIDES_WITH_REDISPATCH: dict[str, Callable[..., Any]] = {  # not composite: they need torch 2.13
    "aten::prod": plain_buffers.prod,
    "aten::prod.dim_int": plain_buffers.prod,
    "aten::_fft_r2c": plain_buffers.fft_r2c,
    "aten::diagonal_scatter": plain_buffers.diagonal_scatter,
    "aten::as_strided": as_strided,
}
STACK_OVERRIDES: dict[str, Callable[..., Any]] = {
    "aten::slice.Tensor": chunk_of_stack.slice_of,
    "aten::select.int": chunk_of_stack.select,
    "aten::index.Tensor": chunk_of_stack.index,
}
"""Indexing of flattened stacks. Registered once a parameter is stored as a stack: each slice of a program pays for them."""


def install_overrides() -> None:
    """Register all overrides but those of ``STACK_OVERRIDES``."""
    for name, function in OVERRIDES.items():
        register_override(name, function)
    register_kernel(DATA_SWAP, has_compatible_data)
    if HAS_REDISPATCH:
        for name, function in OVERRIDES_WITH_REDISPATCH.items():
            register_override(name, function)
        linear_matmul.keep_undecomposed("linear", "linear_backward", linear_gradients, linear_matmul.is_linear_supported)
        linear_matmul.keep_undecomposed("matmul", "matmul_backward", matmul_gradients, linear_matmul.is_matmul_supported)


def install_stack_overrides() -> None:
    """Register ``STACK_OVERRIDES`` at the first call."""
    while STACK_OVERRIDES:
        register_override(*STACK_OVERRIDES.popitem())
