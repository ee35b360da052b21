"""How a worker's main process releases the locks of pool processes that were killed.

For pools that fork. Not here: what a release sends to the nodes (`lock/engine/releaser.py`).
Read `reaper.py` first: it waits for the exit of each child and releases what the child's journal
still names. `journal.py` is that journal, in memory shared by the two processes. `forks.py` has the
hooks of a fork and what one process knows of its children: also whether one has exited.
"""
