"""The statements of the accounts, in SQLite."""

import sqlite3
from contextlib import closing

TABLE = """
CREATE TABLE IF NOT EXISTS statement
    (account TEXT PRIMARY KEY, total INT, fence BIGINT NOT NULL DEFAULT 0)
"""
ADD = """
INSERT INTO statement (account) VALUES (:account) ON CONFLICT DO NOTHING
"""
WRITE = """
UPDATE statement SET total = :total, fence = :token
WHERE account = :account AND fence < :token
"""


def write_statement(account: str, total: int, token: int) -> bool:
    """Write unless a newer holder has written; return whether it did."""
    values = {"account": account, "total": total, "token": token}
    with closing(sqlite3.connect("shop.db")) as db, db:
        db.execute(TABLE)
        db.execute(ADD, values)
        return db.execute(WRITE, values).rowcount == 1
