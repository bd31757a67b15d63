"""The whole table: what :mod:`table` and :mod:`training` say, by what is expected of it."""

from __future__ import annotations

import table
import training

DIFFERENT = table.DIFFERENT | training.DIFFERENT
RAISING = table.RAISING | training.RAISING
DEADLY = table.DEADLY | training.DEADLY
HEALTHY = table.HEALTHY | training.HEALTHY | table.SLOW | training.SLOW
FAILING = table.FAILING
ONLY_STRICT = table.ONLY_STRICT | training.ONLY_STRICT
PROGRAMS = DIFFERENT | RAISING | DEADLY | HEALTHY | FAILING
