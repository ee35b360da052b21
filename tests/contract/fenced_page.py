"""What `test_fenced_page` runs with the Django lines of a page: `python -m`, in their folder.

The first argument is JSON of one entry of DATABASES, the others are lock nodes. Prints what the
task returned, what a late holder gets, and the price.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import django
from celery import Celery
from django.conf import settings
from django.core.management import call_command

GIVEN: dict[str, Any] = json.loads(sys.argv[1])
NODES = sys.argv[2:]

if GIVEN["ENGINE"].endswith("mysql"):
    import pymysql

    pymysql.install_as_MySQLdb()
sys.path.insert(0, str(Path.cwd()))
app = Celery("shop", broker="memory://")
app.set_default()  # for all threads
app.conf.redlock_nodes = NODES
app.conf.redlock_node_timeout = 7.0  # s: a busy machine may take some for a first connection
settings.configure(
    INSTALLED_APPS=["prices"],
    DATABASES={"default": GIVEN},
    DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
)
django.setup()

from django.db import connections, transaction  # noqa: E402 - needs the settings

from celery_redlock import LockLost, Redlock  # noqa: E402
from celery_redlock.django import fenced_update  # noqa: E402


def main() -> list[object]:
    from prices.models import Price
    from prices.tasks import set_price

    call_command("migrate", verbosity=0)
    call_command("makemigrations", check=True, dry_run=True, verbosity=0)
    redlock = Redlock.of(app)
    redlock.trust()
    rows = Price.objects.filter(sku="sku-7")
    rows.delete()  # of an earlier run on the same database
    rows.create(sku="sku-7", cents=0)
    with set_price.lock_for("sku-7", 1999, wait=60) as lock:
        redlock.break_lock("price:sku-7")
        with ThreadPoolExecutor() as threads:  # in this one the run would be nested
            found = [threads.submit(run, set_price).result()]
        try:
            with transaction.atomic():
                found.append(fenced_update(rows, lock, cents=1999))
        except LockLost:
            found.append("refused")
    return [*found, rows.get().cents]


def run(task: Any) -> Any:
    try:
        return task.apply(("sku-7", 999), throw=True).get()
    finally:
        connections.close_all()


if __name__ == "__main__":
    print(json.dumps(main()))
