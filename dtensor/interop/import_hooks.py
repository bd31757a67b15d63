"""Import hooks: run an action on a module of torch when it is imported."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from ..base.patches import patch_applied, patch_removed


def on_import(name: str, action: Callable[[ModuleType], None]) -> None:
    """Call ``action`` with the module ``name``: now if it is loaded, else right after its first import."""
    if name in sys.modules:
        action(sys.modules[name])
    else:
        sys.meta_path.insert(0, _PostImportFinder(name, action))
        patch_applied("sys.meta_path")


class _PostImportFinder(MetaPathFinder):
    """Import finder that wraps the loader of one module, so that an action runs after the module was executed."""

    def __init__(self, name: str, action: Callable[[ModuleType], None]) -> None:
        self.name, self.action = name, action

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """Return the spec of the awaited module, with a loader that runs the action after the import; None for others."""
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        patch_removed("sys.meta_path")
        spec = find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_act(module: ModuleType) -> None:
            execute(module)
            self.action(module)

        spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]  # of this one loader
        return spec
