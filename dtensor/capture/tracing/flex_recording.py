"""Flex recording: each call of torch's higher-order operators of ``flex_attention`` is one recorded step."""

from __future__ import annotations

from typing import Any

import torch

from ...base.patches import patch_applied


def register_flex_attention(recorder_class: Any) -> None:
    """Register how recorders, which are dispatch modes, handle the operators."""
    torch.ops.higher_order.flex_attention.py_impl(recorder_class)(_record_forward)
    torch.ops.higher_order.flex_attention_backward.py_impl(recorder_class)(_record_backward)
    patch_applied("torch.ops.higher_order.flex_attention")


def _record_forward(recorder: Any, *args: Any) -> Any:
    return _attend(*args) if recorder.paused else recorder.record_op(_attend, args, {})


def _attend(*args: Any) -> Any:
    with torch.no_grad():
        return torch.ops.higher_order.flex_attention(*args)


def _record_backward(recorder: Any, *args: Any) -> Any:
    args = ([isinstance(x, torch.Tensor) and x.requires_grad for x in args[-2]], *args)
    return _compute_gradients(*args) if recorder.paused else recorder.record_op(_compute_gradients, args, {})


def _compute_gradients(need_gradients: list[bool], *args: Any) -> Any:
    """Call the backward operator. It computes gradients of those captured tensors that require them.

    At a replay the tensors are those of ranks, which do not.
    """
    *others, captured, mask_captured = args
    captured = tuple(
        x.detach().requires_grad_() if needs_gradient else x for x, needs_gradient in zip(captured, need_gradients, strict=True)
    )
    with torch.no_grad():
        return torch.ops.higher_order.flex_attention_backward(*others, captured, tuple(mask_captured))
