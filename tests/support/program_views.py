"""Program views: makers of lines of random programs about memory: views of views, writes through them, and tensors whose shape
changes in place. A line that writes binds the returned value, which must be the written tensor.
"""

from __future__ import annotations

import torch
from program_lines import LineMaker, Scope, are_broadcastable

from dtensor.base.memory_order import has_overlap, memory_order

_OTHER_DTYPES = {
    torch.float64: ("int64", "int32", "float32", "complex64", "complex128"),
    torch.int64: ("float64", "int32", "int16"),
    torch.complex128: ("float64", "complex64"),
    torch.complex64: ("float32", "float64", "int64"),
    torch.float32: ("int32", "float64", "int16"),
    torch.int32: ("float32", "int64", "uint8"),
    torch.int16: ("int32", "int8"),
}


def _pick_any(scope: Scope) -> str | None:
    return scope.pick(floating=None)


def make_view_line(scope: Scope) -> str | None:
    """Return a view of the same elements with other dims, such as ``x.permute(...)``."""
    x = _pick_any(scope)
    if not x:
        return None
    value = scope.values[x]
    dims = scope.rng.sample(range(value.ndim), value.ndim)
    d = scope.pick_dim(x)
    forms = [f"{x}.permute({dims})", f"{x}.unsqueeze({d})", f"{x}.squeeze()", f"{x}[None]", f"{x}[..., None]", f"{x}[...]"]
    forms += [f"{x}.detach()", f"{x}.view_as({x})", f"{x}.view({list(value.shape)})"]
    if value.ndim:
        forms += [f"{x}.view(-1)", f"{x}.flatten()", f"{x}.transpose(0, {d})", f"{x}.movedim(0, {d})", f"{x}.squeeze({d})"]
        forms += [f"{x}.swapaxes({d}, -1)", f"{x}.mT" if value.ndim > 1 else f"{x}.view(1, -1)"]
        forms += [f"{x}.view({n}, -1)" for n in (2, 3, 5) if value.numel() % n == 0 and value.numel()]
        forms += [f"{x}.unflatten({d}, (-1, {n}))" for n in (2, 3) if value.shape[d] % n == 0 and value.shape[d]]
        forms += [f"{x}.flatten({k}, {k + 1})" for k in range(value.ndim - 1)]
    return scope.rng.choice(forms)


def make_part_view_line(scope: Scope) -> str | None:
    """Return a view of some of the elements, such as a slice or a diagonal."""
    x = scope.pick(floating=None, least=1)
    if not x or not scope.values[x].numel():
        return None
    value = scope.values[x]
    d = scope.rng.randrange(value.ndim)
    start, stop = scope.pick_slice_bounds(value.shape[d])
    lead = ":, " * d
    forms = [
        f"{x}[{lead}{start}:{stop}]",
        f"{x}[{lead}{start}::2]",
        f"{x}[{lead}{start}]",
        f"{x}[{lead}{start - value.shape[d]}]",
        f"{x}.narrow({d}, {start}, {stop - start})",
        f"{x}.unbind({d})[{start}]",
        f"{x}.chunk(2, {d})[-1]",
        f"{x}.split([{start}, {value.shape[d] - start}], {d})[1]",
        f"{x}.tensor_split(3, {d})[1]",
        f"{x}.unfold({d}, {stop - start}, {scope.rng.choice((1, 2))})",
    ]
    if value.ndim > 1:
        forms += [f"{x}.diagonal({scope.rng.randrange(-1, 3)})", f"{x}.diagonal(0, {d}, {(d + 1) % value.ndim})"]
        forms += [f"{x}[..., {start % value.shape[-1]}]", f"{x}[{start % value.shape[0]}, ..., -1]"]
    gaps = memory_order(tuple(value.shape), value.stride()) is None  # the view does not have what is in them
    if value.ndim <= 2 and value.numel() >= 6 and not x.startswith(("v", "_")) and not (gaps or value.storage_offset()):
        forms += [f"{x}.as_strided((2, 2), (2, 1))", f"{x}.as_strided((3,), (1,), {x}.storage_offset() + 1)"]
    return scope.rng.choice(forms)


def make_reinterpreted_view_line(scope: Scope) -> str | None:
    """Return a view of the same bytes in another dtype, or of the real or imaginary parts of complex numbers."""
    x = _pick_any(scope)
    if not x:
        return None
    value = scope.values[x]
    if value.is_complex():
        forms = [f"{x}.real", f"{x}.imag", f"torch.view_as_real({x})", f"{x}.conj()", f"{x}.conj().imag", f"{x}.mH"]
    else:
        forms = [f"torch.view_as_complex({x})"] * 2
    others = _OTHER_DTYPES.get(value.dtype, ())
    return scope.rng.choice(forms + [f"{x}.view(torch.{name})" for name in others if _has_no_zero(value, getattr(torch, name))])


def _has_no_zero(value: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether no element is zero, also viewed as ``dtype``: arithmetic on partial values or blocks may change a zero's
    sign."""
    try:
        return bool((value != 0).all() and (value.view(dtype) != 0).all())
    except RuntimeError:  # these strides do not allow it
        return False


def _pick_write_operand(scope: Scope, x: str) -> str:
    """Return an operand for a write to ``x``."""
    y = scope.pick_fitting(
        x, lambda a, b: are_broadcastable(a, b) and b.ndim <= a.ndim and torch.broadcast_shapes(a.shape, b.shape) == a.shape
    )
    if not y or scope.rng.random() < 0.4:
        return scope.rng.choice(("2", "1", "-1"))
    same = scope.values[y].untyped_storage().data_ptr() == scope.values[x].untyped_storage().data_ptr()
    return f"{y}.clone()" if same else y  # of overlapping ones torch says nothing


def make_write_line(scope: Scope) -> str | None:
    """Return a statement that writes to a value in place: elementwise, from a cumulative sum, or at indices."""
    x = _pick_any(scope)
    if not x or has_overlap(scope.values[x].shape, scope.values[x].stride()):
        return None
    y, value = _pick_write_operand(scope, x), scope.values[x]
    forms = [f"{x}.add_({y})", f"{x}.mul_({y})", f"{x}.sub_({y})", f"{x}.zero_()", f"{x}.fill_(3)", f"{x}.neg_()", f"{x}.mul_(2)"]
    forms += [f"torch.add({x}, {y}, out={x})", f"torch.mul({x}, 2, out={x})", f"torch._foreach_add_([{x}], 1)"]
    forms += [f"{x}.copy_({y})" if y not in ("2", "1", "-1") else f"{x}.copy_({x}.flip(0))" if value.ndim else f"{x}.fill_(1)"]
    forms += [f"{x}.square_()", f"{x}.set_({x})", f"{x}.data.add_(1)", f"{x}.detach().mul_(2)"]
    if not value.is_complex():
        forms += [f"{x}.clamp_(0, 5)", f"{x}.masked_fill_({x} > 1, 4)", f"{x}.abs_()", f"{x}.masked_fill_({x} < 0, 0)"]
        forms += [f"{x}.random_(0, 5)", f"{x}.remainder_(3)", f"torch.maximum({x}, {x}.new_ones(()), out={x})"]
        forms += [f"{x}.bernoulli_(0.5)"]
    if value.ndim:
        d = scope.pick_dim(x)
        forms += [
            f"{x}.cumsum_({d})",
            f"torch.cumsum({x}, {d}, out={x})",
            f"{x}.index_fill_({d}, {x}.new_zeros(1, dtype=torch.int64), 2)",
        ]
        forms += [f"{x}.copy_({x}.roll(1, {d}))"]
        first_twice = f"{x}.narrow({d}, 0, 1).repeat_interleave(2, {d})"
        forms += [f"{x}.index_add_({d}, {x}.new_zeros(2, dtype=torch.int64), {first_twice})"]
        forms += [f"{x}.scatter_({d}, {x}.new_zeros({[1] * value.ndim}, dtype=torch.int64), 3)"]
        forms += [
            f"{x}.index_copy_({d}, {x}.new_zeros(1, dtype=torch.int64), {x}.narrow({d}, {value.shape[d % value.ndim] - 1}, 1))"
        ] * bool(value.numel())
    if value.ndim > 1:
        k = scope.rng.randrange(-1, 2)
        forms += [f"{x}.tril_({k})", f"{x}.triu_({k})", f"{x}.fill_diagonal_(7)", f"torch.triu({x}, {k}, out={x})"]
    if value.ndim == 2:
        # torch writes outside of a block whose rows are not one after the other, as those of a column may be
        forms += [f"{x}.fill_diagonal_(7, True)"] * (value.stride() == (value.shape[1], 1))
        forms += [f"{x}.addmm_({x}.clone(), {x}.new_ones({value.shape[1]}, {value.shape[1]}))"]
    return f"_ = {scope.rng.choice(forms)}"


def make_assignment_line(scope: Scope) -> str | None:
    """Return an assignment ``x[...] = value`` or ``x[...] += 2``."""
    x = scope.pick(floating=None, least=1)
    if not x or not scope.values[x].numel() or has_overlap(scope.values[x].shape, scope.values[x].stride()):
        return None
    value = scope.values[x]
    d = scope.rng.randrange(value.ndim)
    start, stop = scope.pick_slice_bounds(value.shape[d])
    lead = ":, " * d
    places = [f"{lead}{start}", f"{lead}{start}:{stop}", f"{lead}{start}::2", "...", f"..., {start % value.shape[-1]}", "None"]
    places += [f"{lead}[{start}, {stop - 1}]", f"{lead}[{start}]", "..., None", f"{lead}{start - value.shape[d]}"]
    places += [f"{x} == 1", f"{x} != 0", f"{x}.new_zeros((), dtype=torch.int64)"]
    if value.ndim > 1:
        places += [f"{start % value.shape[0]}, -1", f"{start % value.shape[0]}, [0, {value.shape[1] - 1}]", "0, ..., None"]
    place = scope.rng.choice(places)
    if scope.rng.random() < 0.5:
        return f"{x}[{place}] = {scope.rng.choice(('3', '2', f'{x}[{place}] * 2'))}"
    return f"{x}[{place}] {scope.rng.choice(('+=', '*=', '-='))} 2"


def make_shape_change_line(scope: Scope) -> str | None:
    """Return a statement that changes the shape or the storage of a tensor object in place, such as ``x.unsqueeze_(0)``."""
    x = _pick_any(scope)
    if not x or scope.values[x].is_conj() or scope.values[x].is_neg():  # which torch carries out in the base's memory, or forgets
        return None
    value, d = scope.values[x], scope.pick_dim(x)
    forms = [
        f"{x}.unsqueeze_({d})",
        f"{x}.squeeze_()",
        f"{x}.t_()" if value.ndim < 3 else f"{x}.squeeze_()",
        f"{x}.unsqueeze_(0)",
    ]
    if value.ndim:
        forms += [f"{x}.{name}(0, {d})" for name in ("transpose_", "swapaxes_", "swapdims_")] + [f"{x}.squeeze_({d})"]
    if value.is_contiguous() and value.ndim:
        forms += [f"{x}.resize_({list(value.shape[::-1])})", f"{x}.resize_({value.numel() // 2})"]
        forms += [f"{x}.as_strided_({list(value.shape)}, {list(value.stride())})"]
    y = scope.pick_fitting(x, lambda a, b: b is not a and not b.is_conj() and not b.is_neg())  # the bits stay behind
    if y:
        forms += [f"{x}.resize_as_({y})"] * (value.is_contiguous() and scope.values[y].numel() == value.numel()) + [
            f"{x}.set_({y})"
        ]
        if scope.rng.random() < 0.3:
            return f"{x}.data = {y}"
    return f"_ = {scope.rng.choice(forms)}"


def make_computed_line(scope: Scope) -> str | None:
    """Return an expression that computes a new value from a view."""
    x = _pick_any(scope)
    return x and scope.rng.choice((f"{x} + 1", f"{x}.clone()", f"{x}.sum()", f"{x} * {x}", f"{x}.contiguous()"))


# How often each is tried.
VIEW_LINE_MAKERS: tuple[tuple[int, LineMaker], ...] = (
    (6, make_view_line),
    (7, make_part_view_line),
    (2, make_reinterpreted_view_line),
    (6, make_write_line),
    (4, make_assignment_line),
    (3, make_shape_change_line),
    (1, make_computed_line),
)
