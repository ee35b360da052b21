"""One PostgreSQL server as the lock node. Nothing imports this folder unless an address names it.

Read `pipeline.py` first: it turns words into calls of the functions in `schema.sql`, and results
into replies.

- `pipeline.py`: `Pipeline`: calls in flight on one libpq connection, in order, each its own
  transaction; cancels overdue calls, and survives a pooler.
- `address.py`: `PostgresAddress`, `PostgresDialled`, `address_of`: connects by libpq, the only part
  of psycopg that this folder uses.
- `connection.py`: `PostgresConnection`: what a node writes to and reads from.
- `pubsub.py`: `PostgresPubSub`: hears messages (LISTEN and NOTIFY).
- `confirm.py`: `confirm`, `confirm_async`: locks the rows of a lock in the body's own transaction,
  so that no other client takes the lock over before its end.
- `schema.py`: `create_schema`, `schema_sql`, `doubts_of`: makes or updates the schema; says which
  settings of the server could lose locks.
- `removal.py`: `drop_schema`, `schema_uses`: drops the schema, unless something of it is in use.
- `errors.py`: `error_of`, `is_fatal`, `is_not_replicated`: what an error of PostgreSQL means, in
  the words of `lock/server/error_hints.py`.
- `schema.sql`: what the node does: the Lua scripts of `lock/server`, over two tables.

Not here: votes and leases. They are the same for each kind of node (`lock/engine`, `lock/model`).
"""
