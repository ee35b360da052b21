"""How one process acquires, renews and releases.

Not here: how bytes travel (`lock/transport`), what a server is told (`lock/server`), and the
arithmetic of leases (`lock/model`). Read `acquirer.py` first, then `renewer.py` and `releaser.py`;
`rounds.py` turns replies into votes and leases. `watchdog.py` says when to renew and what is over,
`events.py` tells observers and the log. `outbox.py` keeps what a node is still to be told, and for
how long. `wait_queue.py`: who waits; `reentrancy.py`: who owns what. `session.py` builds the parts;
no other file of this folder knows it.
"""
