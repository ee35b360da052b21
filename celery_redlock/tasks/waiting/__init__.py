"""Deferred messages in a worker's main process: who waits, and whom a release dispatches.

`queues.py` decides who tries next, `releases.py` how many nodes must announce a release, and
`capacity.py` how many may wait: values and a given time, no threads and no I/O. `loop.py` alone
knows how the pools of Celery differ. `dispatch.py` gives a message to Celery once, and `room.py` is
the consumer's step that ties them together. Not here: how a refused message returns to its queue
(`tasks/execution`), and the connection that brings announcements (`lock/transport`). Read `room.py`
first, from `on_release_message` on, then `dispatch.py`.
"""
