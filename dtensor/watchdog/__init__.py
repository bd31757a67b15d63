"""Watchdog of a job: logs, compares and watches what its ranks do together, and names the rank that does something else.

``flight_recorder`` has the memory-mapped files and the logs of events, ``collective_log`` the log of one group, ``host_state``
the state that each rank publishes. ``collective_hooks`` runs around each collective. ``watchdog`` is the thread that examines
waits; ``deadlock`` and ``blocked_call`` say why a wait cannot end, and ``diagnosis`` formats the error. ``levels`` has
``check_ranks``, ``post_mortem`` the reader for jobs that ended.
"""
