"""What is remembered of a memory: the forms that it was moved to, and of whom they are kept.

They are kept by the tensor that has the memory, or that has the part of it that a view shows: as long as that tensor lives.
"""

from __future__ import annotations

import weakref
from collections import deque
from threading import local as per_thread
from typing import Any

from ..base.mode_stack import Scoped
from ..base.recorder_hooks import ACTIVE, current, recorded_by, weakly
from ..layout.layout import Layout
from .alias_base import PARTS

AFRESH: Scoped[object] = Scoped("afresh")  # inside, only what was moved there since is used: what ran before does not show
WANTED = "_wanted"  # the attribute of a tensor that was moved
FORMS = "_forms"  # the attribute of a tensor that has those of its memory, its views' too


class Forms:
    """What was moved of one memory: layout that it had -> layout that it was brought to -> local. Layouts and locals are turned
    so that the dims stand as they lie in memory: a matrix and its transpose are one value.

    Attributes:
        brought: whether the gradient of who was moved first is brought back; that of a later view of the part may pass there.
        recorder: who recorded it, weakly. A recording may use only what is in it.
        versions: of the memory when it was moved; see :func:`~dtensor.dispatch.version_counters.versions_of`.
    """

    __slots__ = ("__weakref__", "brought", "held", "recorder", "versions")

    def __init__(self, recorder: Any, versions: Any) -> None:
        self.recorder, self.versions, self.brought = weakly(recorder), versions, False
        self.held: dict[Layout, dict[Layout, Any]] = {}

    def drop(self, source: Layout, target: Layout) -> None:
        """Forget a form, and the layout if nothing else is held of it."""
        held = self.held.get(source, {})
        held.pop(target, None)
        if not held:
            self.held.pop(source, None)


class Lately(per_thread):
    """By mesh, what was moved last of tensors that may live for long."""

    limit = 4

    def __init__(self) -> None:
        self.by_mesh: weakref.WeakKeyDictionary[Any, deque[tuple[Any, Layout, Layout]]] = weakref.WeakKeyDictionary()

    def add(self, forms: Forms, source: Layout, target: Layout) -> None:
        kept = self.by_mesh.setdefault(source.mesh, deque())
        kept.append((weakref.ref(forms), source, target))
        if len(kept) > self.limit:
            ref, source, target = kept.popleft()
            if (found := ref()) is not None:
                found.drop(source, target)


LATELY = Lately()


def recording() -> Any:
    """Who records, and has what is moved for itself."""
    if ACTIVE and (recorder := current()) is not None:
        return recorder
    return AFRESH.last(None) if AFRESH.held else None


def forms_of(keeper: Any, part: Any, recorder: Any, versions: Any) -> Forms:
    """The forms of a part of what the tensor shows (None: of all), which may be used or added to."""
    forms = current_forms(keeper, part, recorder, versions)
    if forms is None:
        forms = Forms(recorder, versions)
        if part is None:
            keeper.__dict__[FORMS] = forms
        else:
            known = keeper.__dict__.get(PARTS) or {}
            used = {key: kept for key, kept in known.items() if kept.versions == versions and kept.held}
            keeper.__dict__[PARTS] = {**used, part: forms}
    return forms


def current_forms(keeper: Any, part: Any, recorder: Any, versions: Any) -> Forms | None:
    """The forms that may be used: of this recorder, and of the memory as it is."""
    forms: Forms | None = keeper.__dict__.get(FORMS) if part is None else (keeper.__dict__.get(PARTS) or {}).get(part)
    return forms if forms is not None and forms.versions == versions and recorded_by(forms.recorder, recorder) else None


class Wanted:
    """The layout that it was moved to, and who recorded that, weakly."""

    __slots__ = ("layout", "recorder")

    def __init__(self, layout: Layout, recorder: Any) -> None:
        self.layout, self.recorder = layout, weakly(recorder)


def note_wanted(x: Any, layout: Layout) -> None:
    """That ``x`` was moved there; of terms others know (``settled.sums_of``)."""
    if not (x._layout.is_partial or layout.is_partial):
        x.__dict__[WANTED] = Wanted(layout, recording())
