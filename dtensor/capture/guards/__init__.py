"""Guards: what a captured function reads besides its arguments, and the checks that it still holds.

Discovery walks everything that the function can reach and fills a guard set. It is compared at each call.
"""
