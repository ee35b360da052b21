"""Values and arithmetic of a lock. No clock and no I/O: times are arguments.

Not here: the code that changes these values (`lock/engine`). Read `lease.py` first: one key,
for how long it is held, and its fencing token. Then read `acquisition.py`, what one acquire holds.

- `keys.py`: names on the nodes. `votes.py`: counts a round.
- `handoff.py`: what a release and a node tell of waiters.
- `options.py`: what callers ask for, and for how long a node that lost its data must not vote.
"""
