"""A RESP client for several servers: one ordered connection to each node, commands to all of them.

Not here: votes, locks, keys, and which server may vote (`lock/server`). This folder imports only
`lock/platform` and the errors. Read `nodes.py` first: it writes to all nodes, waits, and calls
the handlers of the replies.

- `node.py` reconnects, and drops a node that is overdue. `connection.py` writes and reads bytes.
- `poller.py` waits for sockets (the poll object itself, also under gevent: `platform/threads.py`).
- `subscriber.py` subscribes to channels.
- `address.py`: URLs, TLS, Sentinels; connects and logs in, and says why that failed;
  `credentials.py`: what logs show of a URL, and its provider of credentials. The scheme
  chooses the kind of node: another kind (`lock/postgres`) has an `Address` of its own.
- `command.py`: RESP, commands and their handlers, rounds.
"""
