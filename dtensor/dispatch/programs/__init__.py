"""Programs: make a list of steps of a planned operator call, and run it."""
