"""How the messages of a dead worker come back to their queues, with kombu's Redis broker.

A worker lease is the entry by which a worker's consumer says that it lives (heartbeat), in the
broker's own Redis. It is named in the delivery tag of each message that the consumer has and whose
run will hold a lock. Another worker that sees a worker lease unchanged for long enough, by its own
monotonic clock, declares it dead, and moves these messages to the heads of their lists. Exclusion
is the lock's alone: a worker that was taken for dead by mistake costs a second delivery of its
messages.

Read `step.py` first.

- `step.py`: `RecoverMessages`: the consumer's step: it joins with a worker lease, tags what comes,
  and drops what was moved. `read_each_reply` has a channel read what kombu has popped, even if its
  prefetch is used up.
- `tags.py`: `DeliveryTag`, `may_be_moved`, `moved`: the delivery tag, which messages are tagged,
  and a message as it is moved.
- `observer.py`: `Observer`: how a worker proves by its own clock that a worker lease is dead
  (failure detector).
- `ledger.py`: `Ledger`, `ledger_beside`: the worker leases on the broker. The scripts are in
  `lua/`: `beat.lua`, `declare_dead.lua`, `move.lua`, `recall.lua`, `try_push.lua`.
- `keeper.py`: `Keeper`, `still_owned`: the thread that beats, observes and moves, and whether the
  worker lease still lives.
- `tries.py`: `Tries`: when what the broker has refused is tried again, with a pause that doubles
  (backoff).
- `notices.py`: `Notices`: what the log and the signal tell of it, each fact once.
- `survey.py`: `Survey`, `LeaseReport`, `Unacknowledged`, `open_survey`: for operators: what lies
  unacknowledged on a broker, and when it is back.

Not here: messages whose run may hold no lock, and plain tasks. They come back after the broker's
visibility timeout, since nothing would keep a second run of theirs from the first one.
"""
