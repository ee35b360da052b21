"""A RESP client for several servers: one ordered connection a node, commands to all of them.

Not here: votes, locks, keys, and which server may be believed (`lock/server`). This folder imports
only `lock/platform` and the errors. Read `node_set.py` first: it writes to all nodes and waits.
`dispatcher.py` hands replies on, and drops a connection whose reply does not fit its command.
`node_client.py` connects again, `connection.py` writes and reads bytes, `poller.py` waits for
sockets, `subscriber.py` listens to channels. `address.py`: URLs; `encoding.py`: RESP; `command.py`,
`script.py`: what is sent.
"""
