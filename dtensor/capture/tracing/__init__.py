"""Tracing: write the operations of one run of a function on a tape, and refuse what a tape cannot hold."""
