"""The whole table, of all files of programs, by what is expected of each."""

from __future__ import annotations

import around
import everyday
import hostile
import loops
import table
import training

DIFFERENT = table.DIFFERENT | training.DIFFERENT | loops.DIFFERENT | everyday.DIFFERENT | hostile.DIFFERENT | around.DIFFERENT
RAISING = table.RAISING | training.RAISING | loops.RAISING | everyday.RAISING | hostile.RAISING | around.RAISING
DEADLY = table.DEADLY | training.DEADLY | loops.DEADLY | hostile.DEADLY | around.DEADLY
HEALTHY = (
    table.HEALTHY
    | training.HEALTHY
    | loops.HEALTHY
    | everyday.HEALTHY
    | hostile.HEALTHY
    | around.HEALTHY
    | table.SLOW
    | training.SLOW
)
FAILING = table.FAILING
ONLY_STRICT = table.ONLY_STRICT | loops.ONLY_STRICT | everyday.ONLY_STRICT | hostile.ONLY_STRICT | around.ONLY_STRICT
PROGRAMS = DIFFERENT | RAISING | DEADLY | HEALTHY | FAILING
