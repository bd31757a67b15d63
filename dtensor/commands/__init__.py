"""Commands: the tools that ``python -m dtensor`` offers as subcommands, one module for each."""
