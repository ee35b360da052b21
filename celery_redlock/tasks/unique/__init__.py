"""Deduplication of sends: `unique_for` publishes one message per resource and period.

A send claims a unique key on the nodes, publishes its message, and confirms. The message carries a
token, by which its run releases the key. Not here: the lock of that run (`tasks/execution`). Read
`send.py` first, then `claim.py`: the steps of one send. `rounds.py` is the compare-and-set on all
nodes, and which earlier send a quorum names; `token.py` is what a worker does with the token.
`receivers.py` puts the options of a call into its message, also without deduplication.
"""
