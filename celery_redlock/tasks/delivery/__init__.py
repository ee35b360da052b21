"""One delivery of a message, in any process: what it is, what it carries, where it came from.

Read `delivery.py` first, then `header.py`. Both have no I/O.

- `delivery.py`: `Delivery`, `RunState`, `Seen`: facts and questions of one delivery: its run id,
  its queue, whether it is expired or revoked, and what is kept of it beside the message.
- `header.py`: `LockHeader`, `Deferral`: the message header `redlock`: what a message carries of its
  lock: options, deferrals, redelivery, claim.
- `route.py`: `Route`, `queue_of`, `send_options`, `RecordQueueNames`: the queue of a message and
  the way back to it, also by RabbitMQ's delayed delivery. A worker's consumer records through which
  queue each delivery came.
- `republish.py`: `republish`, `publish`, `Requeue`, `confirming_producer`: publishes a message
  again, whole, and waits for the broker's confirmation (publisher confirm).
- `acknowledge.py`: `AcknowledgeInTurn`, `in_turn`: limits how many greenlets acknowledge at once to
  the connections of kombu's Redis channel.

Not here: what becomes of a delivery (`tasks/execution`).
"""
