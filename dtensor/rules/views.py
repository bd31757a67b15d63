"""Operations that only rename, split, merge, drop or repeat dims."""

from __future__ import annotations

from typing import Any

from .call import Call
from .rule import Dims, Factors, LocalView
from .verbs import local_size, view


def same(call: Call) -> Factors:
    """The result looks like the operand."""
    dims, sizes = _own(call)
    return Factors((dims,), (dims,), sizes)


def transposed(call: Call) -> Factors:
    """Two dims change places; ``t`` of fewer than two dims changes nothing."""
    dims, sizes = _own(call)
    if len(dims) < 2:
        return Factors((dims,), (dims,), sizes)
    a, b = (call.dims(name, len(dims))[0] if name in call.arguments else default for name, default in (("dim0", 0), ("dim1", 1)))
    moved = list(dims)
    moved[a], moved[b] = dims[b], dims[a]
    return Factors((dims,), (tuple(moved),), sizes)


def permuted(call: Call) -> Factors:
    dims, sizes = _own(call)
    return Factors((dims,), (tuple(dims[d] for d in call.dims("dims", len(dims))),), sizes)


def unsqueezed(call: Call) -> Factors:
    dims, sizes = _own(call)
    d = call["dim"] % (len(dims) + 1)
    return Factors((dims,), ((*dims[:d], (), *dims[d:]),), sizes)


def squeezed(call: Call) -> Factors:
    """Dims of size one vanish (those picked, where given)."""
    dims, sizes = _own(call)
    shape = call.shape(0)
    picked = call.dims("dim", len(dims)) if "dim" in call.arguments else range(len(dims))
    gone = {d for d in picked if shape[d] == 1}
    own = tuple(() if d in gone else dim for d, dim in enumerate(dims))
    return Factors((own,), (tuple(dim for d, dim in enumerate(dims) if d not in gone),), sizes)


def expanded(call: Call) -> Factors:
    """New leading dims, and dims of size one repeated, carry no factor."""
    dims, sizes = _own(call)
    shape, result = call.shape(0), call.results[0]
    assert result is not None
    first = len(result.shape) - len(shape)
    own = tuple(dim if result.shape[first + d] == shape[d] else () for d, dim in enumerate(dims))
    return Factors((own,), (((),) * first + own,), sizes)


def reshaped(call: Call) -> Factors:
    """Dims split and merge; each run of dims with equal products shares factors."""
    result = call.results[0]
    assert result is not None
    own, other, sizes, whole = factors_of_reshape(call.shape(0), result.shape)
    return Factors((own,), (other,), sizes, whole)


def factors_of_reshape(old: tuple[int, ...], new: tuple[int, ...]) -> tuple[Dims, Dims, dict[str, int], frozenset[str]]:
    """Common factors of two shapes with the same elements in the same order, and the factors that are not common.

    >>> factors_of_reshape((6, 5), (2, 3, 5))[:2]
    ((('f0', 'f1'), ('f2',)), (('f0',), ('f1',), ('f2',)))
    >>> sorted(factors_of_reshape((4, 9), (2, 3, 6))[3])
    ['w1', 'w2', 'w3', 'w4']
    """
    sizes: dict[str, int] = {}
    whole: list[str] = []
    left: list[list[str]] = [[] for _ in old]
    right: list[list[str]] = [[] for _ in new]

    def name(prefix: str, size: int) -> str:
        made = f"{prefix}{len(sizes)}"
        sizes[made] = size
        return made

    def opaque(side: list[list[str]], d: int, size: int) -> None:
        made = name("w", size)
        side[d].append(made)
        whole.append(made)

    if 0 in old:  # nothing to place: only dims that agree from the front keep their factor
        for d in range(min(len(old), len(new))):
            if old[d] != new[d]:
                break
            made = name("f", old[d])
            left[d].append(made)
            right[d].append(made)
        return tuple(map(tuple, left)), tuple(map(tuple, right)), sizes, frozenset()

    olds, news = ([d for d, size in enumerate(shape) if size != 1] for shape in (old, new))
    i = j = 0
    a, b = (old[olds[0]], new[news[0]]) if olds and news else (1, 1)  # what is left of the current dims
    while i < len(olds) and j < len(news):
        small, large = min(a, b), max(a, b)
        if large % small == 0:
            made = name("f", small)
            left[olds[i]].append(made)
            right[news[j]].append(made)
            a, b = a // small, b // small
        else:  # a run whose boundaries interleave (4 x 6 as 6 x 4) has no common factor
            opaque(left, olds[i], a)
            opaque(right, news[j], b)
            while a != b:
                if a < b:
                    i += 1
                    a *= old[olds[i]]
                    opaque(left, olds[i], old[olds[i]])
                else:
                    j += 1
                    b *= new[news[j]]
                    opaque(right, news[j], new[news[j]])
            a = b = 1
        if a == 1:
            i += 1
            a = old[olds[i]] if i < len(olds) else 1
        if b == 1:
            j += 1
            b = new[news[j]] if j < len(news) else 1
    return tuple(map(tuple, left)), tuple(map(tuple, right)), sizes, frozenset(whole)


def _own(call: Call) -> tuple[Dims, dict[str, int]]:
    shape = call.shape(0)
    return tuple((f"d{d}",) for d in range(len(shape))), {f"d{d}": size for d, size in enumerate(shape)}


def expand_size(call: Call, at: LocalView) -> dict[str, Any]:
    """The local size of the result; -1 keeps what it stands for."""
    return {"size": at.results[0]}


view("detach detach_copy", same)
view("transpose t transpose_copy t_copy", transposed)
view("permute permute_copy", permuted)
view("unsqueeze unsqueeze_copy", unsqueezed)
view("squeeze squeeze_copy", squeezed)
view("expand expand_copy", expanded, local_args=expand_size)
view("view _unsafe_view view_copy", reshaped, local_args=local_size("size"))
