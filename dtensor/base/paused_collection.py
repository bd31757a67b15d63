"""Paused collection: a context manager that turns the garbage collector off while modules are imported."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def pause_collection() -> Iterator[None]:
    """Turn the garbage collector off, and on again if it was on.

    An import leaves no garbage. One pass over all objects of torch takes as long as the import of this package.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
