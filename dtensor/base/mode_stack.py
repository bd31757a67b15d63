"""What holds inside of a ``with`` block: for the thread or task that entered it, and for its backward passes.

The laws, of every mode of the library:

- A block is seen by the context (of ``contextvars``) that entered it and by those copied from that one meanwhile, by nobody else.
- A block that ends takes away itself and nothing more, in whatever order blocks end. What was copied keeps what it saw.
- A block that is left elsewhere than it was entered (in another task, by the garbage collector) has ended everywhere.
- A backward pass sees the blocks of whoever started it, also in the threads that autograd has for accelerators. Torch carries to
  them what a thread has put aside; so of several tasks in one thread they see the one that last entered or left a block.
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


class Block(Generic[T]):
    """One ``with`` block; ``ended``: everywhere, not only where it was entered. ``token``: says where, until it is left."""

    __slots__ = ("_held", "ended", "token", "value")
    token: Any

    def __init__(self, value: T, held: set[int]) -> None:
        self.value, self.ended, self._held = value, False, held
        held.add(id(self))

    def __del__(self) -> None:
        self._held.discard(id(self))


class Scoped(Generic[T]):
    """A mode: the values of the blocks that are entered, outermost first.

    Attributes:
        held: not empty while any context can see a block. To ask this first costs no more than a plain variable.
    """

    __slots__ = ("_blocks", "_carried", "held")

    def __init__(self, name: str) -> None:
        self.held: set[int] = set()
        self._blocks: ContextVar[tuple[Block[T], ...]] = ContextVar(name, default=())
        self._carried = f"dtensor.{name}"

    def __bool__(self) -> bool:
        """Whether one is entered here."""
        return bool(self.held) and bool(self._here())

    def values(self) -> tuple[T, ...]:
        """Of the blocks entered here."""
        return tuple(block.value for block in self._here()) if self.held else ()

    def last(self, default: D) -> T | D:
        """Of the innermost block entered here."""
        here = self._here() if self.held else ()
        return here[-1].value if here else default

    def assign(self, value: T) -> bool:
        """Give the innermost block another value; False where there is none."""
        here = self._here() if self.held else ()
        if here:
            here[-1].value = value
        return bool(here)

    @contextmanager
    def entered(self, value: T) -> Iterator[None]:
        """Inside, ``value`` is the last one."""
        block = self.enter(value)
        try:
            yield
        finally:
            self.leave(block)

    def enter(self, value: T) -> Block[T]:
        """The beginning of a block, for objects that have ``__enter__`` and ``__exit__`` themselves."""
        block = Block(value, self.held)
        block.token = self._blocks.set((*self._blocks.get(), block))
        self._put_aside()
        return block

    def leave(self, block: Block[T]) -> None:
        """Its end, anywhere."""
        now, token, block.token = self._blocks.get(), block.token, None
        try:
            self._blocks.reset(token)  # tells whether this is the context that entered it
        except ValueError:
            block.ended = True
        self._blocks.set(tuple(other for other in now if other is not block and not other.ended))
        self._put_aside()

    def leave_one(self, entered: list[Block[T]]) -> None:
        """The end of one of these, which it is taken from: the last that was entered here, if any was."""
        block = next((block for block in reversed(entered) if self.sees(block)), entered[-1])
        entered.remove(block)
        self.leave(block)

    def sees(self, block: Block[T]) -> bool:
        """Whether one is inside of this block here."""
        return block in self._here()

    def _here(self) -> list[Block[T]]:
        own = self._blocks.get()
        return [block for block in (*self._brought(), *own) if not block.ended]

    # --- into autograd's threads (private, as torch has no public way) -------------------------------------------------------
    def _put_aside(self) -> None:
        _keep(self._carried, (get_ident(), self._blocks.get()))

    def _brought(self) -> tuple[Block[T], ...]:
        """Blocks of the thread that started the backward pass, if that is another one."""
        if graph_task() == -1 or not is_kept_in_thread(self._carried):
            return ()
        thread, blocks = kept_in_thread(self._carried)
        return () if thread == get_ident() else blocks


def _takes_the_callers_reference() -> bool:
    """Whether torch lets go of what it keeps in a thread without ever having held it, as torch 2.11 does."""
    kept = object()
    before = sys.getrefcount(kept)
    _held_once_more(kept)
    keep_in_thread("dtensor", kept)
    return sys.getrefcount(kept) == before + 1


def _held_once_more(x: Any) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(x))


_TAKES = _takes_the_callers_reference()


def _keep(name: str, x: Any) -> None:
    if _TAKES:
        _held_once_more(x)
    keep_in_thread(name, x)


class Entering:
    """One ``with`` block to be entered, or a decorator of functions that run inside of one each."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make
        self._made: AbstractContextManager[None] | None = None

    def __enter__(self) -> None:
        if self._made is not None:
            raise RuntimeError(
                "this context manager was entered before and can be entered once; call the function that "
                "returned it again for each `with`"
            )
        self._made = self._make()
        self._made.__enter__()

    def __exit__(self, *raised: Any) -> bool | None:
        assert self._made is not None, "__exit__ comes after __enter__"
        return self._made.__exit__(*raised)

    def __call__(self, fn: Callable[P, R]) -> Callable[P, R]:
        if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
            raise ArgumentError(
                f"{fn.__name__} is a generator function; as a decorator the block would end before the generator "
                f"runs. Use `with` inside of {fn.__name__} instead"
            )
        if inspect.iscoroutinefunction(fn):

            async def later(*args: P.args, **kwargs: P.kwargs) -> Any:
                with self._make():
                    return await fn(*args, **kwargs)

            return cast("Callable[P, R]", wraps(fn)(later))

        @wraps(fn)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            with self._make():
                return fn(*args, **kwargs)

        return run


def entering(fn: Callable[P, Iterator[None]]) -> Callable[P, Entering]:
    """``fn``, a generator function that enters a mode, as ``contextlib.contextmanager`` makes one; see :class:`Entering`."""
    make = contextmanager(fn)

    @wraps(fn)
    def enter(*args: P.args, **kwargs: P.kwargs) -> Entering:
        return Entering(partial(make, *args, **kwargs))

    return enter
