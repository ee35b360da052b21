"""Values and arithmetic of a lock. No clock and no I/O: times are arguments.

Not here: the code that changes these values (`lock/engine`). Read `lease.py` first: all that is
known of one key on each node: how long it is held, what a lost key or a restarted server means for
that and when the key may be set again. Then read `acquisition.py`, what one acquire holds and who
relies on it.

- `fencing.py`: the fencing token, which a majority of the nodes confirms.
- `keys.py`: names on the nodes. `votes.py`: counts a round.
- `handoff.py`: what a release and a node tell of waiters, and what one that waits does next.
- `options.py`: what callers ask for, and for how long a node that lost its data must not vote.
"""
