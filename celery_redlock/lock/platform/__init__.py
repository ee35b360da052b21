"""What the lock uses of the interpreter and the operating system: time, threads, wake-ups.

Not here: sockets, servers and locks. This folder imports nothing else of the package. Read
`clock.py` first: a `Platform` is one value, so that a simulation can pass its own.

- `threads.py`: threads, locks that are only tried, queues of jobs, timers, and poll objects and
  wakers, also under gevent, whose hub must not see a closed descriptor.
- `forks.py`: what is reset in a forked child, also in one that C code forked.
- `coroutines.py`: an asyncio task that waits for the lock, and the threads that work for it.
"""
