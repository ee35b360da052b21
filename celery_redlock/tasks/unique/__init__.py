"""Deduplication of sends: `unique_for` publishes one message per resource and period.

A send claims a unique key on the nodes, publishes its message, and confirms. The message carries a
token, by which its run releases the key. Not here: the lock of that run (`tasks/execution`). Read
`claim.py` first: the steps of one send, whether it is a duplicate (`Claim`), what a worker does
with the token (`ClaimToken`), and the mark that stops an earlier message which a later one
replaces. `rounds.py` is the compare-and-set on all nodes (`unique.lua`), which earlier send a
quorum names, and the release. `send.py` puts the token and the options of any call into the
message.
"""
