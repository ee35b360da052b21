"""Deferred messages in a worker's main process: who waits, and which message a release dispatches.

Read `room.py` first, from `admit_received` on, then `successor.py`.

- `room.py`: `WaitingRoom`, `admit_received`: the consumer's step that makes the other parts and
  joins them. A lost connection to the broker does not end its worker.
- `successor.py`: `Successor`: whether the head of a queue is next on its lock, as a release names
  this worker or the nodes answer its question.
- `queues.py`: `MessageQueues`, `WaitingMessage`, `RefusalHistory`, `WaitingTimes`: the order
  (priorities, then the first deferral), the times, and the last refusals. It has no I/O and no
  threads of its own.
- `dispatch.py`: `Dispatcher`: gives a message to Celery once: at its ETA, at its own retry, or at a
  release.
- `prefetch.py`: `Prefetch`, `capacity`: how many messages may wait, and the prefetch count of the
  consumer. `Prefetch._evict_last` evicts the message above the capacity that is needed last.
- `held.py`: `HeldMessages`: messages whose format this release does not know.
- `buckets.py`: `Buckets`: which messages wait in Celery's token buckets for a `rate_limit`.
- `loop.py`: `EventLoop`: one event loop for kombu's hub, greenlets and timer threads. It alone
  knows how the pools of Celery differ.

Not here: how a refused message returns to its queue (`tasks/execution`), which message waits
without a try (`tasks/untried.py`), and the connection that brings the messages of releases
(`lock/transport`).
"""
