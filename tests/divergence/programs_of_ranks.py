"""The whole table, of all files of programs, by what is expected of each."""

from __future__ import annotations

import everyday
import hostile
import loops
import oblique
import table
import training

DIFFERENT = table.DIFFERENT | training.DIFFERENT | loops.DIFFERENT | everyday.DIFFERENT | hostile.DIFFERENT | oblique.DIFFERENT
RAISING = table.RAISING | training.RAISING | loops.RAISING | everyday.RAISING | hostile.RAISING | oblique.RAISING
DEADLY = table.DEADLY | training.DEADLY | loops.DEADLY | hostile.DEADLY | oblique.DEADLY
HEALTHY = table.HEALTHY | training.HEALTHY | loops.HEALTHY | everyday.HEALTHY | hostile.HEALTHY | oblique.HEALTHY | table.SLOW | training.SLOW
FAILING = table.FAILING
ONLY_STRICT = table.ONLY_STRICT | loops.ONLY_STRICT | everyday.ONLY_STRICT | hostile.ONLY_STRICT | oblique.ONLY_STRICT
PROGRAMS = DIFFERENT | RAISING | DEADLY | HEALTHY | FAILING
