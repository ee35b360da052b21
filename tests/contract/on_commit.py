"""What `test_django` runs in a process whose Django has settings: `python -m` with URLs.

Prints as JSON what each scenario has found.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

import django
from celery import Celery
from django.conf import settings

settings.configure(
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
)
django.setup()

from django.db import transaction  # noqa: E402 - needs Django's settings

from celery_redlock import SettingsError  # noqa: E402
from celery_redlock.django import LockedDjangoTask  # noqa: E402
from celery_redlock.tasks.per_app import redlock_of  # noqa: E402
from tests.clients import client_of, see_executed  # noqa: E402

PATIENCE = 7.0  # s for a node's reply, on a machine that does much else
app = Celery("shop", broker="memory://")
ran: list[int] = []


@app.task(base=LockedDjangoTask, lock_unique_for=500)
def take(order: int) -> None:
    ran.append(order)


@app.task(base=LockedDjangoTask, lock_debounce=5)
def index(order: int) -> None: ...


class SoldOutError(Exception):
    """Ends a transaction."""


def left() -> tuple[int, int]:
    """Return how many claims and messages there are."""
    see_executed(redlock_of(app))
    claims = max(len(client.keys("*:unique:*")) for client in clients)
    with app.connection_for_write() as connection:
        return claims, connection.default_channel.queue_declare("celery").message_count


def rolled_back() -> Any:
    with contextlib.suppress(SoldOutError), transaction.atomic():
        take.delay_on_commit(1)
        take.apply_async_on_commit((1,))
        raise SoldOutError
    return left()


def committed() -> Any:
    with transaction.atomic():
        take.delay_on_commit(1)
        before = left()
    return before, left()


def sent_twice() -> Any:
    with transaction.atomic():
        take.delay_on_commit(1)
        take.apply_async_on_commit((1,), lock={"ttl": 40})
    return left()


def sent_with_options() -> Any:
    with transaction.atomic():
        take.apply_async_on_commit((1,), lock={"unique_for": None})
    return left()


def without_transaction() -> Any:
    take.delay_on_commit(1)
    return left()


def wrong_options() -> Any:
    wrong = {"lock": {"tll": 20}}, {"lock_ttl": 3}, {"lock": {"debounce": 5}}
    errors = []
    for options in wrong:
        with transaction.atomic():
            try:
                take.apply_async_on_commit((1,), **options)
            except SettingsError as error:
                errors.append(str(error))
    for options in ({"countdown": 3}, {"expires": 1}):
        with transaction.atomic():
            try:
                index.apply_async_on_commit((1,), **options)
            except SettingsError as error:
                errors.append(str(error))
    return errors, left()


def applied() -> Any:
    return take.apply((1,)).state, ran


SCENARIOS = (
    rolled_back, committed, sent_twice, sent_with_options, without_transaction, wrong_options,
    applied,
)  # fmt: skip

if __name__ == "__main__":
    app.conf.update(redlock_nodes=sys.argv[1:], redlock_node_timeout=PATIENCE)
    clients = [client_of(url) for url in sys.argv[1:]]
    found = {}
    for scenario in SCENARIOS:
        with app.connection_for_write() as connection:
            connection.default_channel.queue_declare("celery")
            connection.default_channel.queue_purge("celery")
        for client in clients:
            for name in client.keys("*:unique:*"):
                client.delete(name)
        found[scenario.__name__] = scenario()
    print(json.dumps(found))
    redlock_of(app).close()
