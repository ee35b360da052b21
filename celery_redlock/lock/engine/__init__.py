"""How one process acquires, renews and releases.

Not here: how bytes travel (`lock/transport`), what a server is told (`lock/server`), and the
arithmetic of leases (`lock/model`). Read `acquirer.py` first, then `renewer.py` and `releaser.py`;
`session.py` builds the parts, and no other file knows it. `rounds.py` turns replies into votes and
leases, `watchdog.py` calls the renewer, `outbox.py` keeps what a node is still to be told.
"""
