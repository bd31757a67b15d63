"""What ``torch.amp.GradScaler`` does to gradients, in terms of operations that have rules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..verbs import composed


def check_and_unscale(grads: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Gradients times ``inv_scale``, in place; ``found_inf`` (plain, one number) becomes 1 if any element is not finite.

    The largest magnitude is not finite exactly if some element is not: one reduction tells all ranks alike.
    """
    largest = torch.stack(list(torch._foreach_norm(grads, float("inf"))))
    broken: Any = largest.isfinite().all().logical_not().to(found_inf.dtype)
    whole = broken.full_tensor()
    torch.maximum(found_inf, whole, out=found_inf)
    torch._foreach_mul_(grads, inv_scale)


composed("_amp_foreach_non_finite_check_and_unscale_", check_and_unscale, "largest magnitude, product")
