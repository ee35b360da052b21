"""What the lock asks of a server: its scripts, the restart guard, and what a server's errors mean.

Not here: how bytes travel (`lock/transport`), and how a client handles replies (`lock/engine`).
Read `guard.py` first: it admits a connection, or refuses it if another server has replaced its
server, or if its server is another node's.

- `handshake.py`: the first commands on a new connection; which server served under which address.
- `requests.py`: the scripts, and the requests that call them.
- `lua/`: the scripts. `grant.lua` votes for a lock, `permit.lua` for one permit of a lock with
  several holders. `guard.lua` begins the grace period of a restarted server, in which both abstain.
  `announce.lua` names the next waiters: `release.lua` and `break.lua` begin with it.
- `error_hints.py`: hints for a server's errors. `admin.py`: commands for operators.
"""
