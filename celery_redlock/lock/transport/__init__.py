"""A RESP client for several servers: one ordered connection to each node, commands to all of them.

Not here: votes, locks, keys, and which server may vote (`lock/server`). This folder imports only
`lock/platform` and the errors. Read `nodes.py` first: it writes to all nodes, waits, and calls
the handlers of the replies.

- `node.py` reconnects, `connection.py` writes and reads bytes.
- `poller.py` waits for sockets, `subscriber.py` subscribes to channels.
- `address.py`: URLs. `command.py`: RESP, and what is sent.
"""
