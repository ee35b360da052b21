"""How the messages of a dead worker come back to their queues, with kombu's Redis broker.

A worker lease is the entry by which a worker's consumer says that it lives, in the broker's own
Redis. It is named in the delivery tag of each message that the consumer has and whose run will hold
a lock. Another worker that sees a worker lease unchanged for long enough, by its own monotonic
clock, declares it dead, and moves these messages to the heads of their lists. Exclusion is the
lock's alone: a worker that was taken for dead by mistake costs a second delivery of its messages.

Read `step.py` first, the consumer's step: it joins, tags what comes, and drops what was moved.

- `tags.py`: the delivery tag, a message as it is moved, and which messages are tagged.
- `observer.py`: how an observer proves by its own clock that a worker lease is dead.
- `ledger.py`: the worker leases on the broker, by the scripts in `lua/`.
- `tries.py`: when what the broker has refused is tried again.
- `notices.py`: what the log and the signal tell of it.
- `keeper.py`: the thread that beats, observes and moves, and the question whether the lease lives.

Not here: messages whose run may hold no lock, and plain tasks. They come back after the broker's
visibility timeout, since nothing would keep a second run of theirs from the first one.
"""
