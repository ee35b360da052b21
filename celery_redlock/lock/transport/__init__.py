"""A RESP client for several servers: one ordered connection to each node, commands to all of them.

Read `nodes.py` first: it writes to all nodes, waits, and calls the handlers of the replies.

- `nodes.py`: `Nodes`: commands to all nodes: `Nodes.broadcast` and `Nodes.scatter` write,
  `Nodes.wait` waits until a round is decided, `Nodes.query` returns the replies. `Nodes.drain`
  reads late replies and drops connections with an overdue reply. `Nodes` also sends a script again
  with its source to a server that does not know its digest (NOSCRIPT).
- `node.py`: `Node`, `Gate`: one node's connection: reconnects with backoff, and drops a node that
  is overdue. `Gate` decides which connections are used.
- `connection.py`: `Connection`, `RedisConnection`, `PubSub`: writes and reads bytes; keeps the
  commands in flight.
- `command.py`: `Command`, `Round`, `Handler`, `ReplyReader`: RESP, requests and the handlers of
  their replies; a round is one request to several nodes. `Script` calls a Lua script by its digest.
- `poller.py`: `Poller`, `PollerPool`: waits for the sockets of all nodes. The poll object itself,
  also under gevent, is in `platform/threads.py`.
- `subscriber.py`: `Subscriber`: subscribes to channels of one node, in a thread of its own.
- `address.py`: `Address`, `RedisAddress`, `parse_address`: URLs, TLS, Sentinels; connects and logs
  in, and says why that failed. The scheme chooses the kind of node: another kind (`lock/postgres`)
  has an address of its own.
- `credentials.py`: `redact_url`, `login_error`, `make_provider`: what logs show of a URL and of a
  failed login; the credential provider that a URL names.

Not here: votes, locks, keys, and which server may vote (`lock/server`). This folder imports only
`lock/platform` and the errors.
"""
