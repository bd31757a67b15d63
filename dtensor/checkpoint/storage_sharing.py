"""Tensors that lie on one memory, as tied parameters do: they take values together, or cannot."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch

from ..comm.flat_rows import flat_bytes
from ..errors import CheckpointError
from ..tensor.views.block_owners import locals_of
from .load_targets import Target

Read = Mapping[str, dict[int | None, torch.Tensor]]
_ALIGNED = 16  # bytes: no element is larger


class _Span(NamedTuple):
    """The memory of a piece of a target: in which space, its first byte and that behind its last."""

    space: tuple[object, ...]
    begin: int
    end: int
    target: Target
    number: int


def check_shared(targets: Iterable[Target], read: Read) -> None:
    """Whatever is written last to a memory, each target on it holds its own value then.

    Args:
        read: name -> what was read for the pieces.

    Raises:
        CheckpointError: the values contradict each other.
    """
    for group in _groups(targets):
        named = {span.target.name: span.target for span in group}
        values = {name: locals_of(target.assembled(read[name], torch.device("cpu"))) for name, target in named.items()}
        if not _agree(group, [values[span.target.name][span.number] for span in group]):
            raise CheckpointError(
                f"{' and '.join(map(repr, list(named)[:6]))} share memory here but have different values in the "
                "checkpoint; give each its own tensor (x.clone())"
            )


def finish(targets: Iterable[Target], read: dict[str, dict[int | None, torch.Tensor]]) -> None:
    """Hand all values over. What was one tensor on meta is one new tensor."""
    made: dict[object, Target] = {}
    for target in targets:
        first = made.setdefault(_identity(target), target)
        own = read.pop(target.name)
        if first is target:
            target.finish(own)
        else:
            target.result = first.result


def _identity(target: Target) -> object:
    x = target.asked
    if x is None or not x.is_meta:
        return target
    return target.like, x.dtype, tuple((_place(piece), piece.shape, piece.stride()) for piece in locals_of(x))


def _place(piece: torch.Tensor) -> tuple[tuple[object, ...], int]:
    """In which space a piece begins, and at which byte of it. On meta every storage is a space."""
    if piece.is_meta:
        return ("meta", piece.untyped_storage()._cdata), int(piece.storage_offset()) * piece.element_size()
    return (piece.device,), piece.data_ptr()


def _groups(targets: Iterable[Target]) -> Iterator[list[_Span]]:
    """The spans that meet others."""
    spans: dict[tuple[object, ...], list[_Span]] = {}
    for target in targets:
        for number, piece in enumerate(locals_of(target.asked) if target.asked is not None else ()):
            if piece.numel():
                space, begin = _place(piece)
                last = sum((n - 1) * step for n, step in zip(piece.shape, piece.stride(), strict=True))
                span = _Span(space, begin, begin + (last + 1) * piece.element_size(), target, number)
                spans.setdefault(space, []).append(span)
    for found in spans.values():
        group: list[_Span] = []
        for span in sorted(found, key=lambda span: span[1:3]):
            if group and span.begin >= max(each.end for each in group):
                yield from [group] if len(group) > 1 else []
                group = []
            group.append(span)
        yield from [group] if len(group) > 1 else []


def _agree(group: list[_Span], values: list[torch.Tensor]) -> bool:
    """Whether all values can be read again from a copy of the memory to which they were written."""
    start = group[0].begin // _ALIGNED * _ALIGNED
    memory = torch.zeros(
        math.ceil((max(span.end for span in group) - start) / _ALIGNED) * _ALIGNED, dtype=torch.uint8, device="cpu"
    )
    views = []
    for span, value in zip(group, values, strict=True):
        piece = locals_of(span.target.asked)[span.number]
        at = (span.begin - start) // piece.element_size()
        view = torch.empty(0, dtype=piece.dtype, device="cpu").set_(memory.untyped_storage(), at, piece.shape, piece.stride())
        stored = value.conj().resolve_conj() if piece.is_conj() else value
        view.copy_(-stored if piece.is_neg() else stored)
        views.append((view, stored))
    return all(torch.equal(flat_bytes(view.contiguous()), flat_bytes(stored.contiguous())) for view, stored in views)
