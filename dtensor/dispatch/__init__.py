"""A plan is looked up or made, bound once, and run."""
