"""Importing this module registers every rule of the library: a family is a file beside it."""

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

for _family in sorted(found.name for found in iter_modules([str(Path(__file__).parent)])):
    if _family != "library":
        import_module(f".{_family}", __package__)
