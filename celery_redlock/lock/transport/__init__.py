"""A RESP client for several servers: one ordered connection a node, commands to all of them.

Not here: votes, locks, keys, and which server may be believed (`lock/server`). This folder imports
only `lock/platform` and the errors. Read `node_set.py` first, then `dispatcher.py`.
"""
