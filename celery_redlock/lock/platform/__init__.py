"""What the lock uses of the interpreter and the operating system: time, threads, wake-ups.

Read `clock.py` first: a `Platform` is one value, so that a simulation can pass its own.

- `clock.py`: `Platform`, `Clock`, `SystemClock`: the only source of time. `new_token` makes the
  random token of a lock's value.
- `threads.py`: `DeadlineTimer`, `Waker`, `TryLock`, `JobQueue`: real threads, also under gevent:
  timers, wake-ups, locks that are only tried, queues of jobs, poll objects (`new_poll`,
  `PollBehindHub`). `uninterruptible` marks functions that no exception may cut.
- `coroutines.py`: `ThreadPool`, `StepRunner`, `rest`: asyncio: runs the blocking steps of a
  coroutine in threads, and its pauses in the event loop.
- `forks.py`: `reset_in_children`, `check_process`, `call_at_end`: what is reset in a forked child,
  also in one that C code forked, and what a process does at its end.

Not here: sockets, servers and locks. This folder imports nothing else of the package.
"""
