"""What the lock asks of a server: its scripts, the restart guard, and what a server's errors mean.

Not here: how bytes travel (`lock/transport`), and how a client handles replies (`lock/engine`).
Read `restart_guard.py` first: it admits a connection, or refuses it if another server has replaced
its server, or if its server is another node's.

- `handshake.py`: the first commands on a new connection. `tenures.py`: which server served under
  which address, and which of the records that nodes keep of each other count.
- `requests.py`: the scripts, and the requests that call them.
- `lua/`: the scripts. `grant.lua` votes for a lock, `permit.lua` for one permit of a lock with
  several holders, both with `vote.lua`; `renew.lua` renews and reclaims; `release.lua` deletes.
  `guard.lua` begins the grace period of a restarted server and `trust.lua` ends it, both with
  `tenure.lua`. `register.lua` keeps who waits, `announce.lua` names the next: `release.lua` and
  `break.lua` begin with it. `marker.lua` reads that a run is over, `fence.lua` the counter.
- `rights.py`: the rights that a node's user needs. `error_hints.py`: hints for a server's errors;
  what an operator must mend. `admin.py`: commands for operators. The words of a failed login are
  cut in `transport/address.py`.
"""
