"""Library of rules: importing this module registers every rule of the library. A family is a file of this folder."""

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

for _family in sorted(found.name for found in iter_modules([str(Path(__file__).parent)])):
    if _family != "library":
        import_module(f".{_family}", __package__)
