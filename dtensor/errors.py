"""Errors: every exception and warning that the library raises by itself.

Each also derives from the builtin that plain torch would raise there, so ``except`` clauses for plain tensors keep working.
What raises depends on global facts only: all ranks raise together.
"""

from __future__ import annotations


class DTensorError(RuntimeError):
    """Base of all errors raised by this library."""


class ArgumentError(DTensorError, TypeError):
    """An argument has a type without a meaning there."""


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
    """Two arguments contradict each other: layouts of different numbers, a module that is a unit already."""


class RuleError(DTensorError):
    """A sharding rule is malformed or does not fit the operation that it is declared for."""


class MixedTensorError(DTensorError):
    """A plain tensor was mixed with DTensors. (Not a TypeError, because torch's binary operators would swallow it.)"""


class ImplicitCommunicationError(DTensorError):
    """An operation needed communication, which ``explicit()`` forbids."""


class BudgetError(DTensorError):
    """More was communicated than ``budget()`` allows. The message has the lines of the program."""


class UnsupportedOperationError(DTensorError, NotImplementedError):
    """The operation has no meaning on this layout. The message says what to do instead."""


class StyleError(UnsupportedOperationError, TypeError):
    """A parallel style does not fit the module."""


class GatherWarning(UserWarning):
    """An operator without a matching rule gathered its operands on every rank: correct, but slow."""


class CheckpointError(DTensorError):
    """A checkpoint could not be saved or loaded. All ranks raise it with the same text, and nothing was changed."""


class PlanError(DTensorError):
    """A program cannot be planned."""


class CaptureError(DTensorError):
    """A captured function does something that a replay could not repeat. The message names it and says what to do instead."""


class DivergenceError(DTensorError):
    """Ranks make different calls. All of them raise this with the same text, and no result is wrong."""


class RankLostError(DivergenceError):
    """A rank failed, exited or was killed while others needed it. All others raise this with its number and last line."""
