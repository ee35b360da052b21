"""How a worker's main process releases the locks of pool processes that were killed.

For pools that fork. Not here: what a release sends to the nodes (`lock/engine/releaser.py`). Read
`reaper.py` first: the hooks of a fork (what it waits for, what parent and child forget), what a
process knows of its children, and the thread that waits for the exit of each child and releases
what the child's journal still names. `journal.py` is that journal, in memory shared by the two
processes.
"""
