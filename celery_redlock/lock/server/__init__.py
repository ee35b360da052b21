"""What the lock asks of a server: its scripts, the restart guard, and what a server's errors mean.

Read `restart_guard.py` first: it admits a connection, or refuses it.

- `restart_guard.py`: `RestartGuard`: lets a server vote only if it has missed no grant. It refuses
  a server that another one has replaced since. `RestartGuard._refuse_same_server` refuses two nodes
  that are one server. `RestartGuard.wall` is the median of the nodes' clocks.
- `handshake.py`: `handshake`, `ServerInfo`: the first commands on a new connection: it loads the
  scripts and records the server's run id. `eviction_policy`: whether a full server deletes keys.
- `tenures.py`: `Tenure`, `Tenures`: which server served under which address and since when; which
  of the records that nodes keep of each other count.
- `requests.py`: `Requests`, `load_script`: the scripts, and the requests that call them.
- `error_hints.py`: `hint_of`, `is_misconfigured`, `strip_args`: what a server's error means:
  whether it ends by itself, and what an operator must do. Arguments are cut out of the text,
  because a token is a secret.
- `rights.py`: `NODE_RIGHTS`, `ACL_RULES`, `denied_right`: the rights (ACL) that a node's user
  needs.
- `admin.py`: `ask_each`, `trust_nodes`, `names_on`: commands of operators, each on a new
  connection.
- `lua/`: the scripts. `grant.lua` votes for a lock, and `permit.lua` for one permit of a lock with
  several holders. `renew.lua` renews and reclaims, `release.lua` deletes, `fence.lua` reads the
  fencing counter and sets a broken one. `take.lua`, `cancel.lua` and `record.lua` are for the
  starts of a rate. `register.lua` keeps who waits, and `announce.lua` names the next. `break.lua`
  breaks a lock, `unique.lua` is the compare-and-set of a claim, `newest.lua` keeps the order of
  sends that replace each other. `marker.lua` reads that a run is over. `guard.lua` begins the grace
  period of a restarted server, and `trust.lua` ends it. `vote.lua`, `permits.lua`, `starts.lua` and
  `tenure.lua` have the functions that others share.

Not here: how bytes travel (`lock/transport`), how a client handles replies (`lock/engine`), and how
the words of a failed login are cut (`transport/credentials.py`).
"""
