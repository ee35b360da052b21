"""One PostgreSQL server as the lock node. Nothing imports this folder unless an address names it.

`schema.sql` is what the node does: the Lua scripts of `lock/server`, over two tables. Read
`pipeline.py` first: it turns words into calls of these functions, and results into replies.

- `address.py` connects by libpq, the only part of psycopg that this folder uses.
- `connection.py` is what a node writes to and reads from. `pubsub.py` hears messages.
- `schema.py` makes the schema.
"""
