"""The whole table, of all files of programs, by what is expected of each."""

from __future__ import annotations

import around
import ends
import everyday
import hostile
import loops
import states
import table
import training
import units

DIFFERENT = (
    table.DIFFERENT
    | training.DIFFERENT
    | loops.DIFFERENT
    | everyday.DIFFERENT
    | hostile.DIFFERENT
    | around.DIFFERENT
    | units.DIFFERENT
    | states.DIFFERENT
)
RAISING = table.RAISING | training.RAISING | loops.RAISING | everyday.RAISING | hostile.RAISING | ends.RAISING
DEADLY = table.DEADLY | training.DEADLY | loops.DEADLY | hostile.DEADLY | ends.DEADLY
HEALTHY = (
    table.HEALTHY
    | training.HEALTHY
    | loops.HEALTHY
    | everyday.HEALTHY
    | hostile.HEALTHY
    | ends.HEALTHY
    | table.SLOW
    | training.SLOW
)
FAILING = table.FAILING
ONLY_STRICT = table.ONLY_STRICT | loops.ONLY_STRICT | everyday.ONLY_STRICT | hostile.ONLY_STRICT | around.ONLY_STRICT
PROGRAMS = DIFFERENT | RAISING | DEADLY | HEALTHY | FAILING
