"""Lines of random programs: each maker picks operands among the values so far and returns one Python statement, or None."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from program_forms import ALONG, BINARY, REDUCE, UNARY, WHOLE

Make = Callable[["Scope"], str | None]


@dataclass(slots=True)
class Scope:
    """The values that a line may use, and the random generator."""

    values: Mapping[str, torch.Tensor]
    rng: random.Random

    def pick(
        self, *, floating: bool | None = True, ndim: int | None = None, least: int = 0, dtype: torch.dtype | None = None
    ) -> str | None:
        """Pick a value of that kind, later ones more often."""
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

    def like(self, name: str, fits: Callable[[torch.Tensor, torch.Tensor], bool]) -> str | None:
        """Pick another floating value of a shape that fits the first."""
        x = self.values[name]
        fitting = [other for other, y in self.values.items() if y.dtype == x.dtype and fits(x, y)]
        return self.rng.choice(fitting) if fitting else None

    def dim(self, name: str) -> int:
        ndim = self.values[name].ndim
        return self.rng.randrange(-ndim, ndim) if ndim else 0

    def span(self, size: int) -> tuple[int, int]:
        """Return the bounds of a non-empty slice."""
        start = self.rng.randrange(size)
        return start, self.rng.randrange(start + 1, size + 1)


def unary(s: Scope) -> str | None:
    x = s.pick()
    return x and s.rng.choice(UNARY).format(x=x)


def binary(s: Scope) -> str | None:
    x = s.pick()
    y = x and s.like(x, broadcastable)
    return y and s.rng.choice(BINARY).format(x=x, y=y)


def reduction(s: Scope) -> str | None:
    x = s.pick(least=1)
    return x and s.rng.choice(REDUCE).format(x=x, d=s.dim(x))


def several_dims(s: Scope) -> str | None:
    x = s.pick(least=2)
    if not x:
        return None
    dims = s.rng.sample(range(s.values[x].ndim), 2)
    return s.rng.choice(("{x}.sum({d})", "{x}.mean({d}, keepdim=True)", "{x}.amax({d})", "{x}.var({d})", "{x}.flip({d})")).format(
        x=x, d=dims
    )


def along(s: Scope) -> str | None:
    x = s.pick(least=1)
    return x and s.rng.choice(ALONG).format(x=x, d=s.dim(x))


def whole(s: Scope) -> str | None:
    x = s.pick()
    return x and s.rng.choice(WHOLE).format(x=x)


def product(s: Scope) -> str | None:
    x = s.pick(least=1)
    y = x and s.like(
        x,
        lambda a, b: (
            b.ndim >= 1
            and a.shape[-1] == b.shape[-2 if b.ndim > 1 else 0]
            and (min(a.ndim, b.ndim) <= 2 or broadcastable(a[..., 0, 0], b[..., 0, 0]))
        ),
    )
    return y and s.rng.choice(("{x} @ {y}", "torch.matmul({x}, {y})")).format(x=x, y=y)


def linear(s: Scope) -> str | None:
    x = s.pick(least=1)
    w = x and s.like(x, lambda a, b: b.ndim == 2 and a.shape[-1] == b.shape[-1])
    return w and s.rng.choice(
        ("F.linear({x}, {w})", "torch.einsum('...k,nk->...n', {x}, {w})", "F.linear({x}, {w}, {w}[:, 0])")
    ).format(x=x, w=w)


def normed(s: Scope) -> str | None:
    x = s.pick(least=1)
    if not x:
        return None
    n = s.values[x].shape[-1]
    w = s.like(x, lambda a, b: b.ndim == 1 and b.shape[0] == n)
    weight = f", {w}, {w}" if w else ""
    return s.rng.choice(
        (
            f"F.layer_norm({x}, ({n},){weight})",
            f"F.rms_norm({x}, ({n},))",
            f"F.mse_loss({x}, {x}.detach() * 0.5)",
            f"F.l1_loss({x}, {x}.detach() * 0.5)",
        )
    )


def entropy(s: Scope) -> str | None:
    x = s.pick(ndim=2)
    if not x:
        return None
    rows, classes = s.values[x].shape
    labels = s.pick(floating=False, ndim=1, dtype=torch.int64)
    if not labels or s.values[labels].shape[0] != rows:
        return None
    return s.rng.choice(
        (
            f"F.cross_entropy({x}, {labels} % {classes})",
            f"F.nll_loss(F.log_softmax({x}, 1), {labels} % {classes}, reduction='sum')",
        )
    )


def view(s: Scope) -> str | None:
    x = s.pick(least=1)
    if not x:
        return None
    value = s.values[x]
    dims = list(range(value.ndim))
    s.rng.shuffle(dims)
    d = s.dim(x)
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
    return s.rng.choice(forms)


def slices(s: Scope) -> str | None:
    x = s.pick(least=1)
    if not x or 0 in s.values[x].shape:
        return None
    d = s.rng.randrange(s.values[x].ndim)
    size = s.values[x].shape[d]
    start, stop = s.span(size)
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
        f"torch.diagonal({x})" if s.values[x].ndim >= 2 else f"{x}[-1:]",
        f"torch.tril({x})" if s.values[x].ndim >= 2 else f"{x}[:-1]",
        f"torch.triu({x}, 1)" if s.values[x].ndim >= 2 else f"{x}[1:]",
        f"F.pad({x}, (1, 2))",
    ]
    return s.rng.choice(forms)


def index(s: Scope) -> str | None:
    x = s.pick(least=1)
    if not x or 0 in s.values[x].shape:
        return None
    labels = s.pick(floating=False, ndim=1, dtype=torch.int64)
    if not labels:
        return None
    d = s.rng.randrange(s.values[x].ndim)
    i = f"({labels} % {s.values[x].shape[d]})"
    forms = [f"{x}[{':, ' * d}{i}]", f"{x}.index_select({d}, {i})"]
    if s.values[x].ndim == 2:
        forms += [
            f"F.embedding({labels} % {s.values[x].shape[0]}, {x})",
            f"{x}.gather(0, (({x} > 0.3137).long() + 1) % {s.values[x].shape[0]})",
        ]
        forms += [f"torch.zeros_like({x}).scatter_add(0, ({x} > 0.3137).long() % {s.values[x].shape[0]}, {x})"]
    return s.rng.choice(forms)


def masked(s: Scope) -> str | None:
    x = s.pick()
    return x and s.rng.choice(
        (
            "{x}[{x} > 0.3137]",
            "torch.nonzero({x} > 0.3137)",
            "({x} > 0.3137).any()",
            "torch.isfinite({x}).all()",
            "({x} > 0.3137).sum(0)",
        )
    ).format(x=x)


def joined(s: Scope) -> str | None:
    x = s.pick(least=1)
    if not x:
        return None
    d = s.dim(x)

    def fits(a: torch.Tensor, b: torch.Tensor) -> bool:
        return a.ndim == b.ndim and all(m == n for k, (m, n) in enumerate(zip(a.shape, b.shape, strict=True)) if k != d % a.ndim)

    y = s.like(x, fits)
    same = s.like(x, lambda a, b: a.shape == b.shape)
    return s.rng.choice((f"torch.cat([{x}, {y}], {d})", f"torch.stack([{x}, {same}], {d})", f"torch.cat([{y}, {x}, {y}], {d})"))


def integers(s: Scope) -> str | None:
    x = s.pick(floating=False, dtype=torch.int64)
    return x and s.rng.choice(
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


def in_place(s: Scope) -> str | None:
    """Return a statement that writes in place; it writes only to values that lines have made."""
    made = [name for name, x in s.values.items() if name.startswith("v") and x.dtype.is_floating_point]
    if not made:
        return None
    x = s.rng.choice(made[-4:])
    value = s.values[x]
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
    y = s.like(x, lambda a, b: b.ndim <= a.ndim and broadcastable(a, b) and torch.broadcast_shapes(a.shape, b.shape) == a.shape)
    if y and y != x:
        forms += [
            f"{x}.add_({y})",
            f"{x}.copy_({y})",
            f"{x}.mul_({y})",
            f"{x} += {y}",
            f"{x}.addcmul_({y}, {y})",
            f"torch._foreach_add_([{x}], [{y}])" if value.shape == s.values[y].shape else f"{x}.sub_({y})",
        ]
    if value.ndim and 0 not in value.shape:
        d = s.rng.randrange(value.ndim)
        start, stop = s.span(value.shape[d])
        lead = ":, " * d
        forms += [
            f"{x}[{lead}{start}:{stop}] = 0.5",
            f"{x}[{lead}{start}].mul_(2)",
            f"{x}[{lead}{start}:{stop}].add_(1)",
            f"{x}.select({d}, {start}).zero_()",
        ]
    if value.ndim == 2:
        forms += [f"{x}.t().mul_(2)"]
    return s.rng.choice(forms)


def broadcastable(a: torch.Tensor, b: torch.Tensor) -> bool:
    return all(m == n or 1 in (m, n) for m, n in zip(reversed(a.shape), reversed(b.shape), strict=False))


# How often each is tried.
MAKERS: tuple[tuple[int, Make], ...] = (
    (4, unary),
    (5, binary),
    (3, reduction),
    (1, several_dims),
    (3, along),
    (1, whole),
    (3, product),
    (2, linear),
    (1, normed),
    (1, entropy),
    (5, view),
    (4, slices),
    (2, index),
    (1, masked),
    (2, joined),
    (1, integers),
    (3, in_place),
)
