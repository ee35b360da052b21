"""What the lock asks of a server: its scripts, the restart guard, and what a server's errors mean.

Not here: how bytes travel (`lock/transport`), and what a client makes of replies (`lock/engine`).
Read `restart_guard.py` first: it lets a connection vote, or refuses it, also if another server has
served under the node's address; `tenures.py` only knows who served where. `handshake.py`: what is
asked of a new connection. `scripts.py` and `key_requests.py`: requests. `error_hints.py`: the way
out of a server's error. `admin.py`: what operators do. `lua/`: the scripts themselves.
"""
