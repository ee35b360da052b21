"""One delivery of a message, in any process: what it is, what it carries, where it came from.

Read `delivery.py` first: facts and questions of one delivery, its run id, which counts how often a
broker has dead-lettered it, and what is kept of it beside the message. `header.py` is what a
message carries of its lock. Both have no I/O.
`route.py` finds the queue of a message and the way back to it, and lets a worker's consumer say
through which queue each delivery came. `republish.py` publishes a message again, whole.
`acknowledge.py` has greenlets acknowledge in turn. What becomes of a delivery is decided in
`tasks/execution/`.
"""
