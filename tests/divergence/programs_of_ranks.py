"""The whole table: what :mod:`table`, :mod:`training`, :mod:`loops` and :mod:`everyday` say, by what is expected of it."""

from __future__ import annotations

import everyday
import hostile
import loops
import table
import training

DIFFERENT = table.DIFFERENT | training.DIFFERENT | loops.DIFFERENT | everyday.DIFFERENT
RAISING = table.RAISING | training.RAISING | loops.RAISING | everyday.RAISING | hostile.RAISING
DEADLY = table.DEADLY | training.DEADLY | loops.DEADLY | hostile.DEADLY
HEALTHY = table.HEALTHY | training.HEALTHY | loops.HEALTHY | everyday.HEALTHY | table.SLOW | training.SLOW
FAILING = table.FAILING
ONLY_STRICT = table.ONLY_STRICT | loops.ONLY_STRICT | everyday.ONLY_STRICT
PROGRAMS = DIFFERENT | RAISING | DEADLY | HEALTHY | FAILING
