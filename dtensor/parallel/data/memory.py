"""The memory of gathered parameters: given back without losing the tensors that lie in it, and taken again."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, UntypedStorage


class Memory:
    """What some tensors lie in, views of one another or not."""

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        self._stores: dict[int, tuple[UntypedStorage, int]] = {}
        self.add(tensors)

    def add(self, tensors: Iterable[Tensor]) -> None:
        """And these; they have their memory now."""
        for storage in (x.untyped_storage() for x in tensors):
            self._stores.setdefault(storage._cdata, (storage, storage.nbytes()))

    def __contains__(self, x: Tensor) -> bool:
        return x.untyped_storage()._cdata in self._stores

    def take(self) -> None:
        """All of it is there, with whatever was in it if it was not given back."""
        for storage, nbytes in self._stores.values():
            if storage.nbytes() == 0:
                storage.resize_(nbytes)

    def give_back(self) -> None:
        """None of it is."""
        for storage, _ in self._stores.values():
            storage.resize_(0)
