"""Flex attention cases: outputs, log-sums and gradients of DTensors are those of one device, for combinations of layouts.

On the CPU torch refuses gradients of queries, keys and values, though its operator computes them. The cases skip this check.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
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
    make_per_rank,
)
from torch import nn
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

import dtensor as dt
from dtensor import DTensor, Partial, Placement, Shard
from dtensor.errors import ImplicitCommunicationError, MeshError, MixedTensorError

CASES = CaseList()
case = CASES.case
S2, S3 = Shard(2), Shard(3)
MaskMod = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class OperandSizes:
    """Sizes of the operands: batch, heads, key heads, queries, keys, head dims; and the batch size of keys, if another."""

    batch: int = 2
    heads: int = 4
    key_heads: int = 4
    queries: int = 12
    keys: int = 12
    dims: tuple[int, int] = (8, 8)
    key_batch: int | None = None

    def operands(self) -> list[torch.Tensor]:
        """Return queries, keys and values in the memory order of a projection: batch, sequence, heads, dims."""
        key_batch, generator = self.key_batch or self.batch, torch.Generator().manual_seed(0)
        shapes = (
            (self.batch, self.queries, self.heads, self.dims[0]),
            (key_batch, self.keys, self.key_heads, self.dims[0]),
            (key_batch, self.keys, self.key_heads, self.dims[1]),
        )
        return [torch.randn(shape, dtype=torch.float64, generator=generator).transpose(1, 2) for shape in shapes]


@dataclass
class AttentionProgram:
    """A call of ``flex_attention``. ``score_mod`` and ``mask_mod`` are made of captured tensors, which may be distributed."""

    sizes: OperandSizes = field(default_factory=OperandSizes)
    score_mod: Callable[[torch.Tensor], Any] = lambda bias: None
    mask_mod: MaskMod | None = None
    mask_sizes: tuple[int | None, int | None] = (None, None)
    rows_per_block: int = 4

    def run(self, operands: Sequence[torch.Tensor], bias: torch.Tensor) -> list[torch.Tensor]:
        """Run forward and backward; return output, log-sums, and the gradients of the operands and of the captured tensor."""
        block_mask = None
        if self.mask_mod is not None:
            lengths = self.sizes.queries, self.sizes.keys
            block_mask = create_block_mask(
                self.mask_mod, *self.mask_sizes, *lengths, device="cpu", BLOCK_SIZE=self.rows_per_block
            )
        out, aux = attend(
            *operands,
            score_mod=self.score_mod(bias),
            block_mask=block_mask,
            enable_gqa=self.sizes.heads != self.sizes.key_heads,
            return_aux=AuxRequest(lse=True),
        )
        loss = out.square().sum() + torch.where(aux.lse.isinf(), torch.zeros_like(aux.lse), aux.lse).sum()
        loss.backward()
        return [out, aux.lse, *(x.grad for x in (*operands, bias) if x.grad is not None)]

    @functools.cached_property
    def expected(self) -> list[torch.Tensor]:
        """Return the results on one device, which take longer: torch traces the call with Dynamo."""
        return self.run([x.requires_grad_() for x in self.sizes.operands()], self.bias().requires_grad_())

    def bias(self) -> torch.Tensor:
        return torch.randn(self.sizes.heads, self.sizes.keys, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def compare(
        self, mesh: dt.DeviceMesh, placements: Sequence[Sequence[Placement]], captured: Sequence[Placement] | None
    ) -> Any:
        """Assert results of distributed operands equal to one device's. ``captured``: placements of the captured tensor, None if
        it is plain.
        """
        operands, expected = self.sizes.operands(), self.expected
        distributed = [dt.distribute_tensor(x, mesh, own).requires_grad_() for x, own in zip(operands, placements, strict=True)]
        own_bias = self.bias() if captured is None else dt.distribute_tensor(self.bias(), mesh, captured)
        found = self.run(distributed, own_bias.requires_grad_())
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_full_value(one, other) if isinstance(one, DTensor) else torch.testing.assert_close(one, other)
        assert (found[0].shape, found[0].stride()) == (expected[0].shape, expected[0].stride())
        for x in (*distributed, own_bias):
            assert x.grad is None or not isinstance(x, DTensor) or x.grad.placements == x.placements
        return found[0]


def attend(*args: Any, **options: Any) -> Any:
    with mock.patch.object(flex, "_validate_device"), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # without torch.compile, as intended here
        return flex_attention(*args, **options)


def make_bias_score_mod(bias: torch.Tensor) -> Any:
    return lambda score, b, h, i, j: score * (h + 1) + bias[h, j] * (b + 1) + (i - j)


def mask_causal(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i >= j


def by_head(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i * (b + 1) >= j - h


# --- layouts ----------------------------------------------------------------------------------------------------------
@case
def every_placement_on_a_1d_mesh_equals_one_device() -> None:
    program = AttentionProgram(score_mod=make_bias_score_mod)
    for placement in (S0, S1, S2, S3, R):
        for captured in (None, [S0]):
            out = program.compare(get_line_mesh(), [[placement]] * 3, captured)
            assert placement == S3 or out.placements == (placement,)


@case
def every_placement_on_a_2d_mesh_equals_one_device() -> None:
    program = AttentionProgram(OperandSizes(batch=3, heads=6, key_heads=3), make_bias_score_mod, by_head, (3, 6))
    for placements in itertools.product((S0, S1, S2, R), repeat=2):
        program.compare(get_square_mesh(), [placements] * 3, [S0, R])


@case
def operands_of_different_layouts() -> None:
    program = AttentionProgram(
        OperandSizes(batch=3, heads=6, key_heads=2, queries=5, keys=9, dims=(8, 4)), make_bias_score_mod, mask_causal
    )
    for placements in itertools.product((S0, S1, S2, R), repeat=2):
        program.compare(get_square_mesh(), [placements, [R, S1], [S2, S3]], None)


@case
def grouped_and_uneven_heads() -> None:
    for heads, key_heads in ((6, 3), (6, 1), (8, 2)):
        program = AttentionProgram(OperandSizes(heads=heads, key_heads=key_heads), make_bias_score_mod)
        for placement in (S0, S1, S2):
            program.compare(get_line_mesh(), [[placement]] * 3, None)


@case
def empty_shards() -> None:
    for sizes in (OperandSizes(batch=1), OperandSizes(heads=1, key_heads=1), OperandSizes(queries=3)):
        program = AttentionProgram(sizes, make_bias_score_mod, by_head, (sizes.batch, sizes.heads), rows_per_block=2)
        for placement in (S0, S1, S2):
            program.compare(get_line_mesh(), [[placement]] * 3, [S1])


@case
def keys_with_batch_size_1() -> None:
    program = AttentionProgram(OperandSizes(batch=4, key_batch=1), make_bias_score_mod, by_head, (4, None))
    for placement in (S0, S1, S2, R):
        program.compare(get_line_mesh(), [[placement], [R], [S1]], None)


@case
def blocks_of_all_sizes() -> None:
    for rows in (3, 4, 128):
        for mask_mod in (by_head, lambda b, h, i, j: i > j):
            program = AttentionProgram(mask_mod=mask_mod, mask_sizes=(2, 4), rows_per_block=rows)
            for placement in (S0, S1, S2):
                program.compare(get_line_mesh(), [[placement]] * 3, None)


@case
def queries_stay_sharded_where_blocks_allow() -> None:
    for queries, rows, stays in ((16, 4, True), (16, 2, True), (16, 128, True), (12, 2, False)):
        program = AttentionProgram(OperandSizes(queries=queries), mask_mod=mask_causal, rows_per_block=rows)
        assert (program.compare(get_line_mesh(), [[S2]] * 3, None).placements == (S2,)) is stays


@case
def partial_operands_are_reduced() -> None:
    q, k, v = OperandSizes().operands()
    terms = DTensor.from_local(make_per_rank(lambda rank: v * (rank + 1) / 10), get_line_mesh(), [Partial()], shape=v.shape)
    assert_full_value(attend(distribute_values(q, S1), distribute_values(k, S1), terms), attend(q, k, v))
    assert_full_value(attend(terms, distribute_values(k, S1), distribute_values(v, S1)), attend(v, k, v))


# --- captured tensors -------------------------------------------------------------------------------------------------
class _Slopes(nn.Module):
    def __init__(self, slopes: torch.Tensor) -> None:
        super().__init__()
        self.slopes = nn.Parameter(slopes)

    def forward(self, score: torch.Tensor, b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
        return score + self.slopes[h] * (i - j)


def _add_slopes(slopes: Any, score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return score + slopes["slopes"][0][h] * (i - j)


@case
def score_mods_with_tensors_in_modules_and_containers() -> None:
    operands, slopes = OperandSizes().operands(), torch.arange(4.0, dtype=torch.float64)
    module, own = _Slopes(slopes), _Slopes(distribute_values(slopes, S0))
    for placement in (S0, S1, S2):
        for parameter in (module.slopes, own.slopes):
            parameter.grad = None
        given = [distribute_values(x, placement) for x in operands]
        attend(*operands, score_mod=module).square().sum().backward()
        attend(*given, score_mod=own).square().sum().backward()
        assert_full_value(own.slopes.grad, module.slopes.grad)
        in_container = functools.partial(_add_slopes, {"slopes": [distribute_values(slopes, S0)]})
        assert_full_value(attend(*given, score_mod=in_container), attend(*operands, score_mod=module))


@case
def block_masks_of_captured_tensors() -> None:
    operands = OperandSizes().operands()
    documents = torch.tensor([[0] * 5 + [1] * 7, [0] * 2 + [1] * 9 + [2]])

    def same_document(own: torch.Tensor) -> MaskMod:
        return lambda b, h, i, j: (own[b, i] == own[b, j]) & (i >= j)

    def make_mask(own: torch.Tensor) -> Any:
        return create_block_mask(same_document(own), 2, None, 12, 12, device="cpu", BLOCK_SIZE=4)

    expected = attend(*operands, block_mask=make_mask(documents))
    for placement in (S0, S1, S2, R):
        given = [distribute_values(x, placement) for x in operands]
        assert_full_value(attend(*given, block_mask=make_mask(documents)), expected)
        own = distribute_values(documents, S0)
        assert_raises(MixedTensorError, "implicit_replication", lambda own=own: make_mask(own))
        with dt.implicit_replication():
            mask = make_mask(own)
        assert_full_value(attend(*given, block_mask=mask), expected)


# --- errors and modes -------------------------------------------------------------------------------------------------
@case
def invalid_calls_raise() -> None:
    q, k, v = OperandSizes().operands()
    given = [distribute_values(x, S1) for x in (q, k, v)]
    assert_raises(MixedTensorError, "flex_attention mixes DTensors with plain", lambda: attend(given[0], k, v))
    assert_raises(MixedTensorError, "flex_attention mixes DTensors with plain", lambda: attend(q, *given[1:]))
    assert_raises(MeshError, "different meshes", lambda: attend(given[0], distribute_values(k, S1, R), given[2]))
    assert_raises(NotImplementedError, "backward on CPU", lambda: flex_attention(given[0].requires_grad_(), *given[1:]))
    assert_raises(
        ValueError, "same number of heads", lambda: attend(given[0], *(distribute_values(x[:, :2], S1) for x in (k, v)))
    )
    with dt.implicit_replication():
        assert_full_value(attend(given[0], k, v), attend(q, k, v))


@case
def calls_that_need_communication_raise_under_explicit() -> None:
    operands, slopes = OperandSizes().operands(), distribute_values(torch.arange(4.0, dtype=torch.float64), S0)
    heads, rows = ([distribute_values(x, placement) for x in operands] for placement in (S1, S2))
    with dt.explicit():
        attend(*heads)
        assert_raises(ImplicitCommunicationError, "flex_attention would communicate", lambda: attend(*rows))
        assert_raises(
            ImplicitCommunicationError,
            "gather a captured tensor",
            lambda: attend(*heads, score_mod=lambda score, b, h, i, j: score + slopes[h]),
        )


@case
def a_call_without_gradients_and_one_under_autocast() -> None:
    operands = [x.float() for x in OperandSizes().operands()]
    for mode in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16)):
        with mode:
            expected = flex_attention(*operands)
            found = flex_attention(*(distribute_values(x, S1) for x in operands))
        assert found.dtype is expected.dtype
        assert_full_value(found, expected)
