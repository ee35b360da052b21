"""Values and arithmetic of a lock. No clock and no I/O: times are given in.

Not here: what happens to them (`lock/engine`). Read `lease.py` first: it says for how long a lock
may be trusted; then `acquisition.py`, what one acquire holds, and `key_lease.py`, one key of it.
`grace_period.py`: for how long a node that lost its memory must not vote. `keys.py` has the names
on the nodes, `votes.py` counts a round, `fencing.py` makes tokens, `options.py` is what callers ask
for.
"""
