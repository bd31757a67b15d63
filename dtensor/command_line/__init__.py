"""Command line: what the commands of ``python -m dtensor`` share: worker processes, progress lines and tables."""
