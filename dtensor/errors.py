"""Every error that the library raises by itself.

Each also derives from the builtin that plain torch would raise in that place, so ``except`` clauses written for
plain tensors keep working. What raises depends on global facts only: all ranks raise together.
"""

from __future__ import annotations


class DTensorError(RuntimeError):
    """Base of all errors raised by this library."""


class ArgumentError(DTensorError, TypeError):
    """An argument is of a type that means nothing there."""


class PlacementError(DTensorError, ValueError):
    """A placement does not fit the tensor or the mesh."""


class MeshError(DTensorError, ValueError):
    """A mesh is malformed, has no such dim, or two meshes are mixed in one operation."""


class MeshDimError(MeshError, KeyError):
    """A mesh has no dim of that name."""

    __str__ = Exception.__str__  # a KeyError's message is shown in quotes


class LayoutError(DTensorError, ValueError):
    """Shapes and layouts disagree, on one rank or across ranks."""


class UnitError(DTensorError, ValueError):
    """A module cannot be a unit of data parallelism, or cannot be distributed without another one that shares its weight."""


class ContradictionError(PlacementError, UnitError, AssertionError):
    """Two things that were said contradict each other: layouts of different numbers, a unit that is one already."""


class RuleError(DTensorError):
    """A sharding rule is malformed or does not fit the operation that it is declared for."""


class MixedTensorError(DTensorError):
    """A plain tensor was mixed with distributed ones (no TypeError: torch's binary operators would swallow it)."""


class ImplicitCommunicationError(DTensorError):
    """Communication was needed where ``explicit()`` forbids it."""


class BudgetError(DTensorError):
    """More was communicated than ``budget()`` allows; the message has the lines of the program."""


class UnsupportedOperationError(DTensorError, NotImplementedError):
    """The operation has no meaning on this layout; the message says what to do instead."""


class StyleError(UnsupportedOperationError, TypeError):
    """A parallel style does not fit the module."""


class GatherWarning(UserWarning):
    """An operator without a fitting rule gathered its operands on every rank: right, but slow."""


class CheckpointError(DTensorError):
    """A checkpoint could not be saved or loaded; all ranks raise it with the same words, and nothing was changed."""


class PlanError(DTensorError):
    """A program cannot be planned."""


class CaptureError(DTensorError):
    """A captured function does what a replay could not do again; the message names it and says what to do instead."""


class DivergenceError(DTensorError):
    """Ranks do not do the same: all of them raise this, with the same words, and no number was mixed up."""


class RankLostError(DivergenceError):
    """A rank has failed, left or been killed while others needed it; all of them raise this, with its name and last line."""
