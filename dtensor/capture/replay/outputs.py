"""Outputs of a replay: descriptions of the tensors that the function returned.

A returned tensor is a new tensor that the tape computes, an input tensor, or a view of one of these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from ...base.recorder_hooks import CrossCallState
from ...layout.layout import Layout
from ..tracing.tape import Var

ARG, ENV, GRAD = range(3)


class InputRef(NamedTuple):
    """Reference to an input tensor of a replay: ``kind`` (argument, variable or gradient) and ``number``.

    ``number`` counts the arguments (``ARG``), the tensors that the function reads otherwise (``ENV``), or the gradients of leaves
    among the latter (``GRAD``).
    """

    kind: int
    number: int


@dataclass(frozen=True, slots=True)
class ConstantOutput:
    """A Python value."""

    value: Any


@dataclass(frozen=True, slots=True)
class LocalOutput:
    """The local tensor of an input, as ``to_local`` returns it."""

    ref: InputRef


@dataclass(frozen=True, slots=True)
class ComputedOutput:
    """A tensor that the tape computes, by its number among the computed tensors."""

    number: int


@dataclass(frozen=True, slots=True)
class PerRankOutput:
    """A ``PerRank`` of computed tensors."""

    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ViewOutput:
    """A view of an input or of a computed tensor.

    ``chain`` has, for each view operation in order: the overload, the index in its results (None: a single result), the arguments
    after the first, and the keyword arguments.
    """

    root: InputRef | ComputedOutput
    chain: tuple[tuple[Any, int | None, tuple[Any, ...], dict[str, Any]], ...]


Output: TypeAlias = InputRef | ConstantOutput | LocalOutput | ComputedOutput | PerRankOutput | ViewOutput
CarriedOutput: TypeAlias = tuple[CrossCallState, tuple[Output, ...], Any]  # the library state to set, its leaves, their tree


@dataclass(frozen=True, slots=True)
class ComputedTensor:
    """A tensor that the tape computes; ``layout`` is None for a plain tensor."""

    locals: tuple[Var, ...]
    layout: Layout | None
    requires_grad: bool


def replay_views(chain: tuple[Any, ...], root: Any) -> Any:
    """Return the view of ``root`` that the recorded view operations ``chain`` make."""
    for func, place, args, kwargs in chain:
        root = func(root, *args, **kwargs)
        root = root if place is None else root[place]
    return root
