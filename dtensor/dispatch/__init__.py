"""Dispatch: look up or make the plan of an operator call, bind it to a program once, run the program."""
