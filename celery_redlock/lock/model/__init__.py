"""Values and arithmetic of a lock: options, keys, votes, leases. No clock and no I/O.

Read `lease.py` first: it says for how long a lock may be trusted.
"""
