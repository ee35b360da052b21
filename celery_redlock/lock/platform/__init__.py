"""What the lock uses of the interpreter and the operating system: time, threads, wake-ups.

Not here: sockets, servers and locks. This folder imports nothing else of the package. Read
`clock.py` first: a `Platform` is one value, so that a simulation can pass its own.
"""
