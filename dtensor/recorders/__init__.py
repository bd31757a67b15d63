"""Recorders: objects that record the operators, collectives and memory of a run, for reports and tests."""
