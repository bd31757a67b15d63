"""All divergent programs: the tables of all files, by the expected outcome."""

from __future__ import annotations

import divergent_calls
import divergent_loops
import divergent_parallelism
import divergent_programs
import divergent_state_dicts
import divergent_surroundings
import divergent_training
import divergent_transfers
import rank_errors

DIFFERENT = (
    divergent_programs.DIFFERENT
    | divergent_training.DIFFERENT
    | divergent_loops.DIFFERENT
    | divergent_calls.DIFFERENT
    | divergent_transfers.DIFFERENT
    | divergent_surroundings.DIFFERENT
    | divergent_parallelism.DIFFERENT
    | divergent_state_dicts.DIFFERENT
)
RAISING = (
    divergent_programs.RAISING
    | divergent_training.RAISING
    | divergent_loops.RAISING
    | divergent_calls.RAISING
    | divergent_transfers.RAISING
    | rank_errors.RAISING
)
DEADLY = (
    divergent_programs.DEADLY
    | divergent_training.DEADLY
    | divergent_loops.DEADLY
    | divergent_transfers.DEADLY
    | rank_errors.DEADLY
)
HEALTHY = (
    divergent_programs.HEALTHY
    | divergent_training.HEALTHY
    | divergent_loops.HEALTHY
    | divergent_calls.HEALTHY
    | divergent_transfers.HEALTHY
    | rank_errors.HEALTHY
    | divergent_programs.SLOW
    | divergent_training.SLOW
)
FAILING = divergent_programs.FAILING
ONLY_STRICT = (
    divergent_programs.ONLY_STRICT
    | divergent_loops.ONLY_STRICT
    | divergent_calls.ONLY_STRICT
    | divergent_transfers.ONLY_STRICT
    | divergent_surroundings.ONLY_STRICT
)
PROGRAMS = DIFFERENT | RAISING | DEADLY | HEALTHY | FAILING
