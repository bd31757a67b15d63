"""Public names: find the package of a name that the package root lacks, without importing packages."""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from pathlib import Path

from .caches import memoize

_ROOT = Path(__file__).parents[1]


def advise_on_name(name: str, root: str, own_names: Collection[str], packages: tuple[str, ...]) -> str:
    """Return advice for a name that package ``root`` lacks: its place, or the most similar name; empty if there is none.

    Args:
        own_names: the public names of ``root``.
        packages: the public packages and modules below ``root``.
    """
    if name.startswith("_"):  # programs ask for such names to see whether they exist
        return ""
    if name in packages:
        return f"write `import {root}.{name}`"
    names_by_package = _read_public_names(packages)
    place = _find_package(name, names_by_package)
    if place is not None:
        return f"write `from {root}.{place} import {name}`"
    candidates = {each.lower(): each for names in (*names_by_package.values(), own_names) for each in names}
    for similar in get_close_matches(name.lower(), candidates, n=1, cutoff=0.75):
        candidate = candidates[similar]
        place = None if candidate in own_names else _find_package(candidate, names_by_package)
        return f"did you mean `from {root}{'' if place is None else f'.{place}'} import {candidate}`?"
    return ""


def _find_package(name: str, names_by_package: Mapping[str, frozenset[str]]) -> str | None:
    """Return the first package with the public name ``name``, None if there is none."""
    return next((package for package, names in names_by_package.items() if name in names), None)


@memoize(limit=4)
def _read_public_names(packages: tuple[str, ...]) -> Mapping[str, frozenset[str]]:
    """Return the ``__all__`` of each package. Packages precede modules, which repeat names of packages."""
    files = {package: _ROOT / package / "__init__.py" for package in packages}
    ordered = sorted(packages, key=lambda package: not files[package].exists())
    return {
        package: _read_dunder_all(files[package] if files[package].exists() else _ROOT / f"{package}.py") for package in ordered
    }


def _read_dunder_all(file: Path) -> frozenset[str]:
    """Return the names in ``__all__`` of a file; none if there is no source."""
    if not file.exists():
        return frozenset()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return frozenset(ast.literal_eval(node.value))
    return frozenset()
