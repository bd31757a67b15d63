"""The memory of gathered parameters: given back without losing the tensors that lie in it, and taken again."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from ...base.recording import effect


class Memory:
    """What some tensors lie in, views of one another or not."""

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        self._inside: dict[int, tuple[Tensor, int]] = {}  # by storage a tensor in it, and its bytes
        self.add(tensors)

    def add(self, tensors: Iterable[Tensor]) -> None:
        """And these; they have their memory now."""
        for x in tensors:
            storage = x.untyped_storage()
            self._inside.setdefault(storage._cdata, (x, storage.nbytes()))

    def __contains__(self, x: Tensor) -> bool:
        return x.untyped_storage()._cdata in self._inside

    def take(self) -> None:
        """All of it is there, with whatever was in it if it was not given back."""
        for x, nbytes in self._inside.values():
            if x.untyped_storage().nbytes() == 0:
                _resize(x, nbytes)

    def give_back(self) -> None:
        """None of it is."""
        for x, _ in self._inside.values():
            _resize(x, 0)


@effect
def _resize(x: Tensor, nbytes: int) -> None:
    x.untyped_storage().resize_(nbytes)
