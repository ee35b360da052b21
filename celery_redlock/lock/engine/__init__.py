"""How one process acquires, renews and releases: its rounds over the nodes, and its threads.

Not here: what a server means (`lock/server`), and how bytes travel (`lock/transport`). Read
`rounds.py` first: it turns replies into votes and leases.
"""
