"""How a worker's main process releases the locks of pool processes that were killed.

For pools that fork. Read `reaper.py` first.

- `reaper.py`: `ChildReaper`, `Children`, `ForkingProcess`, `ChildProcess`: the hooks of a fork,
  what a process knows of its children, and the thread that waits for the exit of each child. It
  releases what the child's journal still names.
- `journal.py`: `JournalSlot`, `JournalEntry`: that write-ahead journal, in memory shared by child
  and parent: an entry is written before the acquire request leaves.

Not here: what a release sends to the nodes (`lock/engine/releaser.py`).
"""
