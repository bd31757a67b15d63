"""``flex_attention`` of DTensors equals that of plain tensors, in one process and on four."""

from __future__ import annotations

import flex_attention_cases
import pytest
import torch
from case_lists import distribute_values, make_case_tests
from flex_attention_cases import S1, S2, OperandSizes, attend, mask_causal
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import dtensor as dt

test_case_in_one_process, test_all_cases_on_four_processes = make_case_tests(
    flex_attention_cases, slow=("operands_of_different_layouts", "blocks_of_all_sizes")
)


@pytest.mark.parametrize("placement", [S1, S2])
def test_captured_flex_attention_is_recorded_once_and_equals_plain_torch(placement: dt.Placement) -> None:
    operands = OperandSizes().operands()
    bias, mask = (
        torch.ones(4, dtype=torch.float64),
        create_block_mask(mask_causal, None, None, 12, 12, device="cpu", BLOCK_SIZE=4),
    )
    own_bias = distribute_values(bias, dt.Shard(0)).requires_grad_()

    def step(*given: torch.Tensor) -> torch.Tensor:
        loss = attend(*given, score_mod=lambda score, b, h, i, j: score + own_bias[h] * j, block_mask=mask).square().sum()
        loss.backward()
        return loss

    captured = dt.capture(step)
    for turn in range(1, 4):
        plain = [x * turn for x in operands]
        plain_bias = bias.clone().requires_grad_()
        score_mod = lambda score, b, h, i, j, own=plain_bias: score + own[h] * j  # noqa: E731
        expected = attend(*plain, score_mod=score_mod, block_mask=mask).square().sum()
        expected.backward()
        own_bias.grad = None
        torch.testing.assert_close(captured(*(distribute_values(x, placement) for x in plain)).full_tensor(), expected)
        assert own_bias.grad is not None
        torch.testing.assert_close(own_bias.grad.full_tensor(), plain_bias.grad)
    assert captured.cache_info().recorded == 1


@pytest.mark.filterwarnings("ignore:torch.compile needs one process per rank")
def test_compiled_flex_attention_in_one_process_equals_plain_torch() -> None:
    operands = [x.float() for x in OperandSizes().operands()]
    slopes = distribute_values(torch.arange(4.0), dt.Shard(0))

    def call(*given: torch.Tensor, own: torch.Tensor = slopes) -> torch.Tensor:
        return flex_attention(*given, score_mod=lambda score, b, h, i, j: score + own[h] * j)

    compiled = torch.compile(call, backend="aot_eager")
    torch.testing.assert_close(
        compiled(*(distribute_values(x, S1) for x in operands)).full_tensor(), call(*operands, own=torch.arange(4.0))
    )
