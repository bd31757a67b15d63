"""Mode stack: values that are set inside of a ``with`` block, for the thread or task that entered it and for its backward
passes.

[Note: Scope of a mode]
- A block is visible in the ``contextvars`` context that entered it, and in contexts that are copied from that one inside of the
  block.
- A block that ends removes only itself, in whatever order blocks end. Contexts that were copied before keep their view of it.
- A block that is left in another context than it was entered (another task, the garbage collector) ends in all contexts.
- A backward pass sees the blocks of the thread that started it, also in autograd's threads for accelerators. Torch copies
  thread-local objects to those threads. So with several tasks in one thread, autograd sees the blocks of the last task that
  entered or left one.
"""

from __future__ import annotations

import ctypes
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from threading import get_ident
from typing import Any, Generic, ParamSpec, TypeVar, cast

from ..base.torch_internals import graph_task, is_kept_in_thread, keep_in_thread, kept_in_thread
from ..errors import ArgumentError

T = TypeVar("T")
D = TypeVar("D")
P = ParamSpec("P")
R = TypeVar("R")


class ModeBlock(Generic[T]):
    """Entered ``with`` block of a mode.

    Attributes:
        ended: True once the block was left in another context than it was entered: it counts in no context any more.
        token: the ``contextvars`` token of entering, None once the block was left.
    """

    __slots__ = ("_live", "ended", "token", "value")
    token: Any

    def __init__(self, value: T, live: set[int]) -> None:
        self.value, self.ended, self._live = value, False, live
        live.add(id(self))

    def __del__(self) -> None:
        self._live.discard(id(self))


class ModeStack(Generic[T]):
    """Mode: the values of the blocks that are entered, outermost first. See [Note: Scope of a mode].

    Attributes:
        held: the ids of all blocks that exist in any context. An empty set proves that no block is entered, at the cost of one
            truth test.
    """

    __slots__ = ("_blocks", "_thread_key", "held")

    def __init__(self, name: str) -> None:
        self.held: set[int] = set()
        self._blocks: ContextVar[tuple[ModeBlock[T], ...]] = ContextVar(name, default=())
        self._thread_key = f"dtensor.{name}"

    def __bool__(self) -> bool:
        """Return True if a block is entered in this context."""
        return bool(self.held) and bool(self._visible_blocks())

    def values(self) -> tuple[T, ...]:
        """Return the values of the blocks that are entered in this context."""
        return tuple(block.value for block in self._visible_blocks()) if self.held else ()

    def last(self, default: D) -> T | D:
        """Return the value of the innermost block that is entered in this context, else ``default``."""
        here = self._visible_blocks() if self.held else ()
        return here[-1].value if here else default

    def assign(self, value: T) -> bool:
        """Replace the value of the innermost block. Return False if no block is entered."""
        here = self._visible_blocks() if self.held else ()
        if here:
            here[-1].value = value
        return bool(here)

    @contextmanager
    def entered(self, value: T) -> Iterator[None]:
        """Enter a block with ``value`` for the duration of a ``with`` block."""
        block = self.enter(value)
        try:
            yield
        finally:
            self.leave(block)

    def enter(self, value: T) -> ModeBlock[T]:
        """Enter a block that :meth:`leave` ends, for objects that define ``__enter__`` and ``__exit__`` themselves."""
        block = ModeBlock(value, self.held)
        block.token = self._blocks.set((*self._blocks.get(), block))
        self._publish_to_autograd()
        return block

    def leave(self, block: ModeBlock[T]) -> None:
        """End ``block`` in this context, or in all contexts if another context entered it."""
        now, token, block.token = self._blocks.get(), block.token, None
        try:
            self._blocks.reset(token)  # raises if another context entered the block
        except ValueError:
            block.ended = True
        self._blocks.set(tuple(other for other in now if other is not block and not other.ended))
        self._publish_to_autograd()

    def leave_last(self, entered: list[ModeBlock[T]]) -> None:
        """End and remove one block of ``entered``: the last one that is entered in this context, else the last of the list."""
        block = next((block for block in reversed(entered) if self.is_entered(block)), entered[-1])
        entered.remove(block)
        self.leave(block)

    def is_entered(self, block: ModeBlock[T]) -> bool:
        """Return True if ``block`` is entered in this context."""
        return block in self._visible_blocks()

    def _visible_blocks(self) -> list[ModeBlock[T]]:
        own = self._blocks.get()
        return [block for block in (*self._blocks_of_backward_caller(), *own) if not block.ended]

    # --- propagation into autograd's threads: torch has no public API for it -------------------------------------------------
    def _publish_to_autograd(self) -> None:
        _keep_in_thread(self._thread_key, (get_ident(), self._blocks.get()))

    def _blocks_of_backward_caller(self) -> tuple[ModeBlock[T], ...]:
        """Return the blocks of the thread that started this backward pass; none outside of one, or in that thread itself."""
        if graph_task() == -1 or not is_kept_in_thread(self._thread_key):
            return ()
        thread, blocks = kept_in_thread(self._thread_key)
        return () if thread == get_ident() else blocks


def _steals_reference() -> bool:
    """Return True if ``keep_in_thread`` releases a reference that it never took, as in torch 2.11."""
    probe = object()
    before = sys.getrefcount(probe)
    _increase_refcount(probe)
    keep_in_thread("dtensor", probe)
    return sys.getrefcount(probe) == before + 1


def _increase_refcount(x: Any) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(x))


_STEALS_REFERENCE = _steals_reference()


def _keep_in_thread(name: str, x: Any) -> None:
    """Keep ``x`` in thread-local storage as ``name``, with an extra reference where torch takes one over."""
    if _STEALS_REFERENCE:
        _increase_refcount(x)
    keep_in_thread(name, x)


class ReusableContext:
    """Context manager that can be entered once, or a decorator that runs each call of a function inside of a new block."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make
        self._context: AbstractContextManager[None] | None = None

    def __enter__(self) -> None:
        """Enter a new context; raise RuntimeError if one was entered before."""
        if self._context is not None:
            raise RuntimeError(
                "this context manager was entered before and can be entered once; call the function that "
                "returned it again for each `with`"
            )
        self._context = self._make()
        self._context.__enter__()

    def __exit__(self, *exc_info: Any) -> bool | None:
        assert self._context is not None, "__exit__ comes after __enter__"
        return self._context.__exit__(*exc_info)

    def __call__(self, fn: Callable[P, R]) -> Callable[P, R]:
        """Wrap a function or coroutine function so that each call runs inside of a new block."""
        if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
            raise ArgumentError(
                f"{fn.__name__} is a generator function; as a decorator the block would end before the generator "
                f"runs. Use `with` inside of {fn.__name__} instead"
            )
        if inspect.iscoroutinefunction(fn):

            async def await_in_block(*args: P.args, **kwargs: P.kwargs) -> Any:
                with self._make():
                    return await fn(*args, **kwargs)

            return cast("Callable[P, R]", wraps(fn)(await_in_block))

        @wraps(fn)
        def run_in_block(*args: P.args, **kwargs: P.kwargs) -> R:
            with self._make():
                return fn(*args, **kwargs)

        return run_in_block


def mode_context(fn: Callable[P, Iterator[None]]) -> Callable[P, ReusableContext]:
    """Make a mode of a generator function, like ``contextlib.contextmanager``; a call returns a :class:`ReusableContext`."""
    make = contextmanager(fn)

    @wraps(fn)
    def make_context(*args: P.args, **kwargs: P.kwargs) -> ReusableContext:
        return ReusableContext(partial(make, *args, **kwargs))

    return make_context
