"""Samples of losses and their gradients."""

from __future__ import annotations

import torch

from .of_schema import tensor
from .sample import Builder, Sample, Samples

F = torch.float64
NONE, MEAN, SUM = 0, 1, 2


def x(*shape: int, seed: int = 0, low: float = -2.0, high: float = 2.0) -> torch.Tensor:
    return tensor(shape or (5, 7), F, seed, low, high)


def part(seed: int, *shape: int) -> torch.Tensor:
    """Strictly between 0 and 1."""
    return x(*shape, seed=seed, low=0.1, high=0.9)


def classes(*shape: int, count: int, ignored: int | None = None) -> torch.Tensor:
    drawn = torch.randint(0, count, shape, generator=torch.Generator().manual_seed(5))
    if ignored is not None:
        drawn[torch.rand(shape, generator=torch.Generator().manual_seed(6)) < 0.4] = ignored
    return drawn


def losses(*extra: float) -> list[Builder]:
    return [
        *(Sample((x(), x(seed=1), reduction, *extra), {}, f"reduction {reduction}") for reduction in (NONE, MEAN, SUM)),
        Sample((x(2, 6, 4), x(2, 6, 4, seed=1), MEAN, *extra), {}, "even"),
        Sample((tensor((), F), tensor((), F, 1), MEAN, *extra), {}, "0-d"),
        Sample((x(0, 7), x(0, 7), MEAN, *extra), {}, "empty"),
    ]


def gradients(*extra: float) -> list[Builder]:
    return [
        Sample((x(seed=2), x(), x(seed=1), NONE, *extra), {}, "none"),
        *(Sample((tensor((), F), x(), x(seed=1), reduction, *extra), {}, f"reduction {reduction}") for reduction in (MEAN, SUM)),
    ]


def likelihoods(shape: tuple[int, ...], weight: bool) -> list[Builder]:
    """Scores (N, C, ...) with targets, some ignored, all ignored, none."""
    rest, count = (shape[0], *shape[2:]), shape[1]
    weights = x(count, seed=3, low=0.5, high=2.0) if weight else None
    scores = x(*shape)
    found: list[Builder] = [
        Sample(
            (scores, classes(*rest, count=count, ignored=-100), weights, reduction, -100),
            {},
            f"reduction {reduction}",
            gradients=not weight,
        )
        for reduction in (NONE, MEAN, SUM)
    ]
    return [
        *found,
        Sample((scores, classes(*rest, count=count, ignored=2), weights, MEAN, 2), {}, "a class ignored"),
        Sample((scores, torch.full(rest, -100), weights, MEAN, -100), {}, "all ignored"),
        Sample((scores, torch.full(rest, count), weights, MEAN, -100), {}, "no class"),
        Sample((x(0, *shape[1:]), classes(0, *shape[2:], count=count), weights, MEAN, -100), {}, "empty"),
    ]


def likelihood_gradients(shape: tuple[int, ...], weight: bool) -> list[Builder]:
    rest, count = (shape[0], *shape[2:]), shape[1]
    weights = x(count, seed=3, low=0.5, high=2.0) if weight else None
    target = classes(*rest, count=count, ignored=-100)
    total = tensor((), F, 4, 1.0, 2.0)
    given = ((x(*rest, seed=2), NONE), (tensor((), F, 2), MEAN), (tensor((), F, 2), SUM))
    return [
        Sample((g, x(*shape), target, weights, reduction, -100, total), {}, f"reduction {reduction}", gradients=weights is None)
        for g, reduction in given
    ]


SAMPLES: Samples = {
    "mse_loss": losses(),
    "smooth_l1_loss": losses(0.7),
    "huber_loss": losses(0.7),
    "soft_margin_loss": losses(),
    "binary_cross_entropy": [
        *(
            Sample((part(0, 5, 7), part(1, 5, 7), None, reduction), {}, f"reduction {reduction}")
            for reduction in (NONE, MEAN, SUM)
        ),
        *(
            Sample((part(0, 5, 7), part(1, 5, 7), part(2, 7), reduction), {}, f"weight, reduction {reduction}")
            for reduction in (NONE, MEAN, SUM)
        ),
    ],
    "binary_cross_entropy_with_logits": [
        *(Sample((x(), part(1, 5, 7), None, None, reduction), {}, f"reduction {reduction}") for reduction in (NONE, MEAN, SUM)),
        *(
            Sample((x(), part(1, 5, 7), part(2, 5, 1), part(3, 7), reduction), {}, f"weights, reduction {reduction}")
            for reduction in (NONE, MEAN, SUM)
        ),
    ],
    "mse_loss_backward": gradients(),
    "smooth_l1_loss_backward": gradients(0.7),
    "huber_loss_backward": gradients(0.7),
    "soft_margin_loss_backward": gradients(),
    "binary_cross_entropy_backward": [
        Sample((tensor((), F), part(0, 5, 7), part(1, 5, 7), part(2, 7), MEAN), {}, "mean"),
        Sample((x(seed=3), part(0, 5, 7), part(1, 5, 7), None, NONE), {}, "none"),
    ],
    "nll_loss_forward": [
        *likelihoods((5, 7), False),
        *likelihoods((5, 7), True),
        Sample((x(7), torch.tensor(3), None, MEAN, -100), {}, "one row"),
        Sample((x(7), torch.tensor(3), x(7, low=0.5), SUM, 3), {}, "one row, ignored"),
    ],
    "nll_loss2d_forward": [*likelihoods((3, 5, 2, 4), False), *likelihoods((3, 5, 2, 4), True)],
    "nll_loss_backward": [*likelihood_gradients((5, 7), False), *likelihood_gradients((5, 7), True)],
    "nll_loss2d_backward": [*likelihood_gradients((3, 5, 2, 4), False), *likelihood_gradients((3, 5, 2, 4), True)],
}
