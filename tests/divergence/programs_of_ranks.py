"""The whole table: what :mod:`table`, :mod:`training` and :mod:`loops` say, by what is expected of it."""

from __future__ import annotations

import loops
import table
import training

DIFFERENT = table.DIFFERENT | training.DIFFERENT | loops.DIFFERENT
RAISING = table.RAISING | training.RAISING | loops.RAISING
DEADLY = table.DEADLY | training.DEADLY | loops.DEADLY
HEALTHY = table.HEALTHY | training.HEALTHY | loops.HEALTHY | table.SLOW | training.SLOW
FAILING = table.FAILING
ONLY_STRICT = table.ONLY_STRICT | loops.ONLY_STRICT
PROGRAMS = DIFFERENT | RAISING | DEADLY | HEALTHY | FAILING
