"""A value is settled once: a tensor remembers the forms that operators needed it in.

An operator that needs a value in another layout than it has moves it there. The tensor keeps what was moved, for whoever needs it
so again, or in a form that is had from it for less: the next operator, the backward pass. Its placements and pieces stay what
they are. Nothing is kept of

- a parameter, which would stay whole as long as it lives (but see :func:`~dtensor.base.modes.remember`);
- a tensor whose pieces the user has (``from_local``, ``to_local``, ``data``): what is written to them is seen by no counter;
- a tensor that was written to meanwhile, under any of its views.

What is cut and was made by no recorded program (a gradient, an input, a buffer) keeps its forms until a few others have been
moved. All of this follows from the program, so it is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import local as per_thread
from typing import Any, NamedTuple

import torch

from ..base.caches import remembered
from ..base.memory_order import memory_order, outermost_first
from ..base.modes import REMEMBERED
from ..base.recorder_hooks import ACTIVE, current
from ..base.tracing import under_way
from ..layout.layout import Layout
from ..placement import Replicate
from ..propagation.op_schema import Operator
from ..redistribute import Exchange, execute, execute_many
from ..redistribute import Plan as Move
from ..redistribute import plan as plan_move
from . import wrap
from .alias_base import PARTS, home_of, keeper_of
from .grad_redistribute import bring_back
from .redistribution_cache import FORMS, LATELY, Forms, current_forms, forms_of, note_wanted, recording
from .version_counters import SHARED, shared, versions_of


class _Nested(per_thread):
    """Inside of an operator that runs as several, nobody counts what those write."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


NESTED = _Nested()


def nested(run: Callable[..., Any]) -> Callable[..., Any]:
    """``run``, inside of one operator."""

    def within(*args: Any) -> Any:
        with NESTED:
            return run(*args)

    return within


def users(x: Any) -> Any:
    """``x`` (a DTensor), whose memory the user may write to from now on without being counted."""
    own = shared(x)
    own.given = True
    for other in own.group.tensors() if own.group else ():
        other.given = True
    return x


_ALIASES = frozenset((torch.ops.aten.detach.default, torch.ops.aten.view.dtype))


def share_versions(view: Any, base: Any) -> None:
    """Count writes to ``view`` and ``base`` together: ``view`` is the same memory, and autograd does not record it as a view."""
    view.__dict__[SHARED] = shared(base)


def aliases_unseen(operator: Operator) -> bool:
    """Return True if the result is a view of the operand that autograd does not record as one."""
    return operator.func in _ALIASES


def counted_versions(x: Any) -> tuple[int, ...] | None:
    """What changes whenever the memory of ``x`` is written to; None where somebody may write and is not counted."""
    return None if shared(x).given else versions_of(home_of(x))


def moved(x: Any, move: Move, local: Any) -> Any:
    """``local``, that of ``x``, after ``move``: as it was moved before, if it was."""
    way, value, kept = _sought(x, move, local)
    return value if way is None else kept.add(execute(way, value)) if kept else execute(way, value)


def moved_together(asked: Sequence[tuple[Any, Move, Any]]) -> list[Any]:
    """As :func:`moved` for all that an operator needs (None for a tensor: it is moved for this operator alone): they are under
    way at the same time, small ones in one collective. A recording has them one by one, and packs more of them than one call's,
    but exchanges, of which it packs no more.
    """
    if under_way() or (ACTIVE and current() is not None and not all(_exchanges(move) for _, move, _ in asked)):
        return one_by_one(asked)
    sought = [_sought(x, move, local) for x, move, local in asked]
    memories = [id(kept.held) for _, _, kept in sought if kept]
    if len(set(memories)) < len(memories):  # what one was brought to may serve the other
        return one_by_one(asked)
    found = [value for _, value, _ in sought]
    going = [(k, kept, *_as_it_lies(way, value)) for k, (way, value, kept) in enumerate(sought) if way is not None]
    if not going:
        return found
    arrived = execute_many([way for *_, way, _, _ in going], [value for *_, value, _ in going], large_alone=True).wait()
    for (k, kept, *_, back), value in zip(going, arrived, strict=True):
        found[k] = kept.add(value) if kept else value.permute(back) if back else value
    return found


def _exchanges(move: Move) -> bool:
    return not move.communicates or all(type(step) is Exchange for step in move.steps)


def _as_it_lies(move: Move, local: Any) -> tuple[Move, Any, tuple[int, ...]]:
    """``move`` of ``local`` with dims as they lie in memory, so that nothing is copied to be packed, and where they have gone."""
    ends = _ends(move.src, move.dst) if move.communicates else None
    return (move, local, ()) if ends is None or not ends.order else (ends.move, local.permute(ends.order), ends.back)


def one_by_one(asked: Sequence[tuple[Any, Move, Any]]) -> list[Any]:
    return [moved(x, move, local) for x, move, local in asked]


class _Ends(NamedTuple):
    """A move with dims in the order in which they lie in memory: that order and where each has gone (() if that is theirs), the
    two layouts and those of what is kept, how it goes, and whether nothing of the source is in terms."""

    order: tuple[int, ...]
    back: tuple[int, ...]
    source: Layout
    target: Layout
    key: Layout
    wanted: Layout
    move: Move
    whole: bool


class _Place(NamedTuple):
    """Where a form of some memory is kept."""

    forms: Forms
    held: dict[Layout, Any]
    ends: _Ends
    lasting: bool

    def add(self, found: Any) -> Any:
        ends = self.ends
        held = self.forms.held.setdefault(ends.key, self.held)  # it is taken out where all that it had is gone
        held[ends.wanted] = found if ends.wanted is ends.target else found.reshape(-1)
        if self.lasting:
            LATELY.add(self.forms, ends.key, ends.wanted)
        return found.permute(ends.back) if ends.back else found


def _sought(x: Any, move: Move, local: Any) -> tuple[Move | None, Any, _Place | None]:
    """What is to be done with what, for ``local``, that of ``x``, after ``move``, and where that is kept; None and the value
    where it is there."""
    if not move.communicates or type(x) is not wrap.TENSOR or NESTED.depth:
        return move, local, None
    home, versions = home_of(x), _countable_versions(x)
    if versions is None:
        return move, local, None
    (keeper, part), recorder = keeper_of(x, home), recording()
    note_wanted(x, move.dst)
    parameter, whole = home.is_leaf and home.requires_grad, keeper is home and part is None
    if parameter and not (whole and _may_keep(home, recorder, versions)):
        bring_back(home if whole else x, not whole)
        return move, local, None
    forms, ends = forms_of(keeper, part, recorder, versions), _ends(move.src, move.dst)
    forms.brought = (part is not None and forms.brought) or bring_back(home if whole else x, not whole)
    if part is not None:
        x.__dict__[FORMS] = forms  # who has it in hand sees that something is known
    held = forms.held.setdefault(ends.key, {})
    found = held.get(ends.wanted)
    if found is None:
        way, value = _nearest(held, ends, local.permute(ends.order) if ends.order else local)
        return way, value, _Place(forms, held, ends, ends.whole and home.grad_fn is None and not parameter)
    if ends.wanted is not ends.target:
        found = found.view(ends.target.shape)
    return None, found.permute(ends.back) if ends.order else found, None


def sums_of(x: Any) -> frozenset[tuple[int, int | None]]:
    """The mesh dims over which ``x`` is in terms that have been added up before, and how the sums lie along them: along which
    dim they are cut, None if they are whole."""
    layout = x._layout
    terms = [i for i, op in enumerate(layout.partials) if op is not None]
    if not terms or NESTED.depth:
        return frozenset()
    home = home_of(x)
    asked = x is home or not home.__dict__.keys().isdisjoint((PARTS, FORMS))  # which part it is takes long to say
    keeper, part = keeper_of(x, home) if asked else (x, None)
    forms = current_forms(keeper, part, recording(), _countable_versions(x))
    if forms is None:
        return frozenset()
    order = _orders(layout)[0] or tuple(range(len(layout.shape)))
    found: set[tuple[int, int | None]] = set()
    for target in tuple(forms.held.get(_key(layout), ())):
        for i in terms:
            at = target.along(i)
            if isinstance(at, Replicate):
                found.add((i, None))
            elif isinstance(at, int) and target.shape == tuple([layout.shape[d] for d in order]):  # else a view's
                found.add((i, order[at]))
    return frozenset(found)


def _countable_versions(x: Any) -> tuple[int, ...] | None:
    """As :func:`counted_versions`; None also where nothing is to be remembered."""
    return None if REMEMBERED.held and REMEMBERED.last("") == "nothing" else counted_versions(x)


def _may_keep(leaf: Any, recorder: Any, versions: Any) -> bool:
    """Whether forms of a parameter are kept, or there already: from a forward pass until its gradient arrives."""
    hook = leaf.__dict__.get("_grad_layout")
    if hook is None:
        return False
    if not (REMEMBERED.held and REMEMBERED.last("") == "parameters" and torch.is_grad_enabled()):
        return len(hook) > 1 and hook[1] is forms_of(leaf, None, recorder, versions)
    hook[1:] = [forms_of(leaf, None, recorder, versions)]
    return True


def _nearest(held: dict[Layout, Any], ends: _Ends, local: Any) -> tuple[Move, Any]:
    """How ``local`` is had as the target has it, from whatever form is cheapest."""
    there = [_seen_as(have, value, ends.source) for have, value in tuple(held.items())]  # other threads add some
    ways = [(ends.move, local), *[(plan_move(have, ends.target), value) for have, value in filter(None, there)]]
    return min(ways, key=lambda way: way[0].cost)


@remembered(4096)
def _ends(source: Layout, target: Layout) -> _Ends:
    order, back = _orders(source)
    turned, wanted = _turned(source, order), _turned(target, order)
    whole = all(op is None for op in source.partials)
    return _Ends(order, back, turned, wanted, _key(source), _flat(wanted), plan_move(turned, wanted), whole)


@remembered(1024)
def _key(layout: Layout) -> Layout:
    """Under which the forms of a tensor of this layout are kept."""
    return _flat(_turned(layout, _orders(layout)[0]))


def _orders(layout: Layout) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The dims as they lie in memory, and where each has gone; () if that is their order, or they have none."""
    order = tuple(outermost_first(layout.stride))
    order = () if order == tuple(range(len(order))) else order
    return order, tuple(sorted(range(len(order)), key=order.__getitem__))


def _turned(layout: Layout, order: tuple[int, ...]) -> Layout:
    if not order:
        return layout
    splits, shape = [layout.splits[d] for d in order], [layout.shape[d] for d in order]
    return Layout.from_splits(layout.mesh, splits, layout.partials, shape, [layout.stride[d] for d in order], layout.dtype)


def _flat(layout: Layout) -> Layout:
    """That of the memory as it lies, where no dim is cut: whatever shape it is seen in, it is one value."""
    if any(layout.splits) or memory_order(layout.shape, layout.stride) != ():
        return layout
    return Layout.from_splits(layout.mesh, (None,), layout.partials, (layout.numel,), None, layout.dtype)


def _seen_as(have: Layout, value: Any, like: Layout) -> tuple[Layout, Any] | None:
    """A form in the shape of ``like``, if it can be seen so."""
    if have.shape == like.shape:
        return have, value
    if len(have.shape) != 1 or any(have.splits):
        return None
    seen = Layout.from_splits(have.mesh, (None,) * len(like.shape), have.partials, like.shape, None, have.dtype)
    return seen, value.view(like.shape)
