"""Deferred messages in a worker's main process: who waits, and whom a release dispatches.

`queues.py` keeps the order (priorities, then the first deferral), the times, and what was refused
last. It has no I/O and no threads of its own. `successor.py` says when the head of a queue is next,
as the nodes name this worker. `dispatch.py` gives a message to Celery once. `prefetch.py` says how
many may wait, and lets the others leave. `buckets.py` knows which of them wait for a rate limit of
Celery. `loop.py` alone knows how the pools of Celery differ. `room.py` is the consumer's step that
makes these parts and joins them. A lost connection to the broker does not end its worker.

Not here: how a refused message returns to its queue (`tasks/execution`), which message waits
without a try (`tasks/untried.py`), and the connection that brings the messages of releases
(`lock/transport`). Read `room.py` first, from `admit_received` on, then `successor.py`.
"""
