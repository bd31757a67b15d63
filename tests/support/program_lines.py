"""Program lines: makers of the lines of random programs. Each picks operands among the values so far and returns one Python
statement, or None if no value fits.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from program_forms import ALONG_DIM, BINARY, FULL_REDUCTION, REDUCE, UNARY

LineMaker = Callable[["Scope"], str | None]


@dataclass(slots=True)
class Scope:
    """The values that a line of a random program may use, by name, and the random generator."""

    values: Mapping[str, torch.Tensor]
    rng: random.Random

    def pick(
        self, *, floating: bool | None = True, ndim: int | None = None, least: int = 0, dtype: torch.dtype | None = None
    ) -> str | None:
        """Return the name of a random value of the given kind, or None. The last four values are picked more often."""
        fitting = [
            name
            for name, x in self.values.items()
            if (floating is None or x.dtype.is_floating_point == floating)
            and (ndim is None or x.ndim == ndim)
            and x.ndim >= least
            and (dtype is None or x.dtype == dtype)
        ]
        if not fitting:
            return None
        return self.rng.choice(fitting[-4:] if self.rng.random() < 0.6 else fitting)

    def pick_fitting(self, name: str, fits: Callable[[torch.Tensor, torch.Tensor], bool]) -> str | None:
        """Return the name of a random value ``y`` with the dtype of the named ``x`` and with ``fits(x, y)``, or None."""
        x = self.values[name]
        fitting = [other for other, y in self.values.items() if y.dtype == x.dtype and fits(x, y)]
        return self.rng.choice(fitting) if fitting else None

    def pick_dim(self, name: str) -> int:
        ndim = self.values[name].ndim
        return self.rng.randrange(-ndim, ndim) if ndim else 0

    def pick_slice_bounds(self, size: int) -> tuple[int, int]:
        """Return the bounds of a non-empty slice."""
        start = self.rng.randrange(size)
        return start, self.rng.randrange(start + 1, size + 1)


def make_unary_line(scope: Scope) -> str | None:
    x = scope.pick()
    return x and scope.rng.choice(UNARY).format(x=x)


def make_binary_line(scope: Scope) -> str | None:
    x = scope.pick()
    y = x and scope.pick_fitting(x, are_broadcastable)
    return y and scope.rng.choice(BINARY).format(x=x, y=y)


def make_reduction_line(scope: Scope) -> str | None:
    x = scope.pick(least=1)
    return x and scope.rng.choice(REDUCE).format(x=x, d=scope.pick_dim(x))


def make_several_dims_line(scope: Scope) -> str | None:
    """Return a reduction or flip over two tensor dims."""
    x = scope.pick(least=2)
    if not x:
        return None
    dims = scope.rng.sample(range(scope.values[x].ndim), 2)
    return scope.rng.choice(
        ("{x}.sum({d})", "{x}.mean({d}, keepdim=True)", "{x}.amax({d})", "{x}.var({d})", "{x}.flip({d})")
    ).format(x=x, d=dims)


def make_along_dim_line(scope: Scope) -> str | None:
    x = scope.pick(least=1)
    return x and scope.rng.choice(ALONG_DIM).format(x=x, d=scope.pick_dim(x))


def make_full_reduction_line(scope: Scope) -> str | None:
    x = scope.pick()
    return x and scope.rng.choice(FULL_REDUCTION).format(x=x)


def make_matmul_line(scope: Scope) -> str | None:
    """Return a matrix product of two values whose contracted dims have equal size."""
    x = scope.pick(least=1)
    y = x and scope.pick_fitting(
        x,
        lambda a, b: (
            b.ndim >= 1
            and a.shape[-1] == b.shape[-2 if b.ndim > 1 else 0]
            and (min(a.ndim, b.ndim) <= 2 or are_broadcastable(a[..., 0, 0], b[..., 0, 0]))
        ),
    )
    return y and scope.rng.choice(("{x} @ {y}", "torch.matmul({x}, {y})")).format(x=x, y=y)


def make_linear_line(scope: Scope) -> str | None:
    x = scope.pick(least=1)
    w = x and scope.pick_fitting(x, lambda a, b: b.ndim == 2 and a.shape[-1] == b.shape[-1])
    return w and scope.rng.choice(
        ("F.linear({x}, {w})", "torch.einsum('...k,nk->...n', {x}, {w})", "F.linear({x}, {w}, {w}[:, 0])")
    ).format(x=x, w=w)


def make_norm_or_loss_line(scope: Scope) -> str | None:
    """Return a layer norm or RMS norm over the last dim, or a loss against the value itself."""
    x = scope.pick(least=1)
    if not x:
        return None
    n = scope.values[x].shape[-1]
    w = scope.pick_fitting(x, lambda a, b: b.ndim == 1 and b.shape[0] == n)
    weight = f", {w}, {w}" if w else ""
    return scope.rng.choice(
        (
            f"F.layer_norm({x}, ({n},){weight})",
            f"F.rms_norm({x}, ({n},))",
            f"F.mse_loss({x}, {x}.detach() * 0.5)",
            f"F.l1_loss({x}, {x}.detach() * 0.5)",
        )
    )


def make_cross_entropy_line(scope: Scope) -> str | None:
    """Return a cross-entropy loss of a matrix with integer labels, one for each row."""
    x = scope.pick(ndim=2)
    if not x:
        return None
    rows, classes = scope.values[x].shape
    labels = scope.pick(floating=False, ndim=1, dtype=torch.int64)
    if not labels or scope.values[labels].shape[0] != rows:
        return None
    return scope.rng.choice(
        (
            f"F.cross_entropy({x}, {labels} % {classes})",
            f"F.nll_loss(F.log_softmax({x}, 1), {labels} % {classes}, reduction='sum')",
        )
    )


def make_reshape_line(scope: Scope) -> str | None:
    """Return a view, reshape, expand or repeat of a value."""
    x = scope.pick(least=1)
    if not x:
        return None
    value = scope.values[x]
    dims = list(range(value.ndim))
    scope.rng.shuffle(dims)
    d = scope.pick_dim(x)
    forms = [
        f"{x}.permute({dims})",
        f"{x}.flatten()",
        f"{x}.reshape(-1)",
        f"{x}.unsqueeze({d})",
        f"{x}.movedim(0, -1)",
        f"{x}.squeeze()",
        f"{x}[None]",
        f"{x}[..., None]",
    ]
    forms += [f"{x}.t()"] * (value.ndim == 2) + [f"{x}.transpose(0, {d})"]
    forms += [f"{x}.reshape({split}, -1)" for split in (2, 3, 5) if value.numel() and value.numel() % split == 0]
    forms += [f"{x}.unflatten({d}, (2, -1))"] * (value.shape[d] % 2 == 0 and value.shape[d] > 0)
    forms += [f"{x}.flatten({k}, {k + 1})" for k in range(value.ndim - 1)]
    forms += [
        f"{x}.expand(2, {', '.join(['-1'] * value.ndim)})",
        f"{x}.repeat({', '.join(['2'] + ['1'] * (value.ndim - 1))})",
        f"{x}.repeat_interleave(2, {d})",
    ]
    return scope.rng.choice(forms)


def make_slice_line(scope: Scope) -> str | None:
    """Return a part of a value along one dim: a slice, a chunk, a diagonal or a triangle; or a padded value."""
    x = scope.pick(least=1)
    if not x or 0 in scope.values[x].shape:
        return None
    d = scope.rng.randrange(scope.values[x].ndim)
    size = scope.values[x].shape[d]
    start, stop = scope.pick_slice_bounds(size)
    lead = ":, " * d
    forms = [
        f"{x}[{lead}{start}:{stop}]",
        f"{x}[{lead}{start}]",
        f"{x}[{lead}::2]",
        f"{x}.narrow({d}, {start}, {stop - start})",
        f"{x}.select({d}, {start - size})",
        f"{x}.unbind({d})[{start}]",
        f"{x}.chunk(2, {d})[0]",
        f"{x}.split([{start}, {size - start}], {d})[1]",
        f"torch.diagonal({x})" if scope.values[x].ndim >= 2 else f"{x}[-1:]",
        f"torch.tril({x})" if scope.values[x].ndim >= 2 else f"{x}[:-1]",
        f"torch.triu({x}, 1)" if scope.values[x].ndim >= 2 else f"{x}[1:]",
        f"F.pad({x}, (1, 2))",
    ]
    return scope.rng.choice(forms)


def make_index_line(scope: Scope) -> str | None:
    """Return a value indexed by an integer tensor, gathered or scattered."""
    x = scope.pick(least=1)
    if not x or 0 in scope.values[x].shape:
        return None
    labels = scope.pick(floating=False, ndim=1, dtype=torch.int64)
    if not labels:
        return None
    d = scope.rng.randrange(scope.values[x].ndim)
    i = f"({labels} % {scope.values[x].shape[d]})"
    forms = [f"{x}[{':, ' * d}{i}]", f"{x}.index_select({d}, {i})"]
    if scope.values[x].ndim == 2:
        forms += [
            f"F.embedding({labels} % {scope.values[x].shape[0]}, {x})",
            f"{x}.gather(0, (({x} > 0.3137).long() + 1) % {scope.values[x].shape[0]})",
        ]
        forms += [f"torch.zeros_like({x}).scatter_add(0, ({x} > 0.3137).long() % {scope.values[x].shape[0]}, {x})"]
    return scope.rng.choice(forms)


def make_mask_line(scope: Scope) -> str | None:
    """Return an expression with a boolean mask of a value."""
    x = scope.pick()
    return x and scope.rng.choice(
        (
            "{x}[{x} > 0.3137]",
            "torch.nonzero({x} > 0.3137)",
            "({x} > 0.3137).any()",
            "torch.isfinite({x}).all()",
            "({x} > 0.3137).sum(0)",
        )
    ).format(x=x)


def make_concat_line(scope: Scope) -> str | None:
    """Return a ``cat`` or ``stack`` of values of fitting shapes."""
    x = scope.pick(least=1)
    if not x:
        return None
    d = scope.pick_dim(x)

    def fits(a: torch.Tensor, b: torch.Tensor) -> bool:
        return a.ndim == b.ndim and all(m == n for k, (m, n) in enumerate(zip(a.shape, b.shape, strict=True)) if k != d % a.ndim)

    y = scope.pick_fitting(x, fits)
    same = scope.pick_fitting(x, lambda a, b: a.shape == b.shape)
    return scope.rng.choice(
        (f"torch.cat([{x}, {y}], {d})", f"torch.stack([{x}, {same}], {d})", f"torch.cat([{y}, {x}, {y}], {d})")
    )


def make_integer_line(scope: Scope) -> str | None:
    """Return an elementwise expression or a reduction of an integer value."""
    x = scope.pick(floating=False, dtype=torch.int64)
    return x and scope.rng.choice(
        (
            "{x} + 1",
            "{x} * 3",
            "{x} // 2",
            "{x} % 3",
            "-{x}",
            "{x}.sum()",
            "{x} * 0.5",
            "{x} > 1",
            "{x}.max()",
            "{x}.double() * 0.1",
            "{x} << 1",
            "{x}.cumsum(0)",
        )
    ).format(x=x)


def make_in_place_line(scope: Scope) -> str | None:
    """Return a statement that writes in place to a value that an earlier line made (not to an input)."""
    made = [name for name, x in scope.values.items() if name.startswith("v") and x.dtype.is_floating_point]
    if not made:
        return None
    x = scope.rng.choice(made[-4:])
    value = scope.values[x]
    forms = [
        f"{x}.add_(1)",
        f"{x}.mul_(0.5)",
        f"{x}.neg_()",
        f"{x}.relu_()",
        f"{x}.clamp_(-0.7137)",
        f"{x}.zero_()",
        f"{x}.fill_(0.25)",
        f"{x} *= 2",
        f"{x}.masked_fill_({x} > 0.3137, 0.5)",
    ]
    y = scope.pick_fitting(
        x, lambda a, b: b.ndim <= a.ndim and are_broadcastable(a, b) and torch.broadcast_shapes(a.shape, b.shape) == a.shape
    )
    if y and y != x:
        forms += [
            f"{x}.add_({y})",
            f"{x}.copy_({y})",
            f"{x}.mul_({y})",
            f"{x} += {y}",
            f"{x}.addcmul_({y}, {y})",
            f"torch._foreach_add_([{x}], [{y}])" if value.shape == scope.values[y].shape else f"{x}.sub_({y})",
        ]
    if value.ndim and 0 not in value.shape:
        d = scope.rng.randrange(value.ndim)
        start, stop = scope.pick_slice_bounds(value.shape[d])
        lead = ":, " * d
        forms += [
            f"{x}[{lead}{start}:{stop}] = 0.5",
            f"{x}[{lead}{start}].mul_(2)",
            f"{x}[{lead}{start}:{stop}].add_(1)",
            f"{x}.select({d}, {start}).zero_()",
        ]
    if value.ndim == 2:
        forms += [f"{x}.t().mul_(2)"]
    return scope.rng.choice(forms)


def are_broadcastable(a: torch.Tensor, b: torch.Tensor) -> bool:
    return all(m == n or 1 in (m, n) for m, n in zip(reversed(a.shape), reversed(b.shape), strict=False))


# How often each is tried.
LINE_MAKERS: tuple[tuple[int, LineMaker], ...] = (
    (4, make_unary_line),
    (5, make_binary_line),
    (3, make_reduction_line),
    (1, make_several_dims_line),
    (3, make_along_dim_line),
    (1, make_full_reduction_line),
    (3, make_matmul_line),
    (2, make_linear_line),
    (1, make_norm_or_loss_line),
    (1, make_cross_entropy_line),
    (5, make_reshape_line),
    (4, make_slice_line),
    (2, make_index_line),
    (1, make_mask_line),
    (2, make_concat_line),
    (1, make_integer_line),
    (3, make_in_place_line),
)
