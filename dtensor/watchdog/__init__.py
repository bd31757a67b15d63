"""What the ranks of a job do together is taken down, compared, and watched: a rank that does something else is named.

``pages`` are mapped files that processes of one host read of each other, ``board`` the folder of them, ``chain`` the collectives
of one group, ``waits`` and ``verdict`` say why a wait will never end, ``watcher`` is the thread that asks.
"""
