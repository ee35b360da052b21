"""Deduplication of sends: `unique_for` publishes one message per resource and period.

A send claims a unique key on the nodes, publishes its message, and confirms. The message carries a
token, by which its run releases the key. Read `claim.py` first: the steps of one send.

- `claim.py`: `Claim`, `ClaimToken`, `end_claim`: claims the key or finds that the send is a
  duplicate; what a worker does with the token at the start and the end of a run.
  `ClaimToken.mark_superseded` marks the earlier message that a debounced send replaces.
- `rounds.py`: `ClaimRound`, `EarlierSend`, `ClaimRelease`, `PlainRequests`: the compare-and-set on
  all nodes (`unique.lua`), which earlier send a quorum names, and the release.
- `newest.py`: `OrderRequests`: the order of sends of which each takes the place of the queued one
  (`newest.lua`).
- `start.py`: `start_run`: no run of such a send starts after that of a later one.
- `send.py`: `send_unique`, `send_claimed`, `add_to_header`, `carry_options`: puts the token and the
  options of any call into the message; gives a duplicate the result of the earlier send.

Not here: the lock of the run (`tasks/execution`), and where a send of a locked task begins
(`tasks/sending.py`).
"""
