"""What the lock asks of a server: its scripts, the restart guard, and what a server's errors mean.

Not here: how bytes travel (`lock/transport`), and what a client makes of replies (`lock/engine`).
Read `restart_guard.py` first: it lets a connection vote, or refuses it.
"""
