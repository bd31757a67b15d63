"""Replay: optimize a tape, generate code from it, and run that code instead of the function."""
