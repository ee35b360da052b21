"""How one process acquires, renews and releases.

Not here: how bytes travel (`lock/transport`), what is sent to a server (`lock/server`), and the
arithmetic of leases (`lock/model`). Read `acquirer.py` first, then `renewer.py` and `releaser.py`.

- `releaser.py` also removes what a late request leaves behind, and keeps releases for nodes that
  are away.
- `rounds.py` turns replies into votes and leases, `permits.py` for a lock with several holders.
- `watchdog.py` renews in time and checks deadlines. `renewer.py` also has a majority of the nodes
  confirm a fencing token (`lock/model/fencing.py`).
- `events.py` writes the log, and sends the records of the public signals.
- `callers.py`: who waits for a lock. `inbox.py`: what the nodes know of it, and say.
- `core.py`: what all of these use. `session.py` is the core with the parts: builds and ends them,
  and knows who calls. No other file of this folder imports it.
"""
