"""The queue of a drill, and all that belongs to it on a broker: nothing else is read or written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kombu.entity import Exchange, Queue
from kombu.exceptions import OperationalError

from celery_redlock.errors import SettingsError
from celery_redlock.operate.drill.body import TASK
from celery_redlock.tasks.per_app import settings_of
from celery_redlock.tasks.recovery.ledger import BROKER_TIMEOUT, TIME_LIMITS, Ledger, decoded
from celery_redlock.tasks.recovery.survey import has_leases
from celery_redlock.tasks.settings.levels import AMQP_SCHEMES

UNUSED_FOR = 600.0  # seconds after which RabbitMQ deletes the queue of a drill that was killed
OF_UNACKED = ("unacked_key", "unacked_index_key", "unacked_mutex_key")  # options of kombu
OF_BINDINGS = ("keyprefix_queue", "keyprefix_binding_permanent")  # the second since kombu 5.7
CLOSE_WITHIN = 1.0  # seconds
# options of py-amqp: without them a frozen RabbitMQ is waited for without end
AMQP_TIME_LIMITS = {"read_timeout": BROKER_TIMEOUT, "write_timeout": BROKER_TIMEOUT}


class BrokerError(Exception):
    """The broker of a drill is away, or refuses what the drill asks of it."""


def drill_queue(app: Any, name: str) -> Queue:
    """Return the queue and its exchange. RabbitMQ deletes them if a drill was killed itself."""
    # kombu keeps when a queue expires in a key that all queues of a Redis share
    expires = None if has_leases(app) else UNUSED_FOR
    exchange = Exchange(name, "direct", auto_delete=True)  # with its queue
    return Queue(name, exchange, routing_key=name, expires=expires)


def transport_options(app: Any, queue: str) -> dict[str, Any]:
    """Return the app's options of its transport, with keys for unacknowledged messages of its own.

    Raises SettingsError for a broker that is neither Redis nor RabbitMQ: what would stay there is
    not known.
    """
    options = dict(app.conf.broker_transport_options or {})
    if has_leases(app):
        return {**options, **{name: f"{queue}_{name}" for name in OF_UNACKED}}
    driver = app.connection_for_write().transport.driver_type
    if driver not in AMQP_SCHEMES:
        hint = "a drill needs Redis or RabbitMQ, of which it can remove its own queue and keys"
        raise SettingsError("app", "broker_url", driver, hint)
    return options


class OwnQueue:
    """The queue of one drill, over connections of its own. Raises BrokerError, and soon."""

    def __init__(self, app: Any, name: str) -> None:
        self._app = app
        self._has_keys = has_leases(app)
        self.name = name
        # kombu tries for ever where it is not told how often; each server of the broker has its try
        tries = len(app.connection_for_write().alt)
        self._retries = {"max_retries": max(1, tries), "interval_start": 0.2, "interval_max": 1.0}
        limits = TIME_LIMITS if self._has_keys else AMQP_TIME_LIMITS
        options = {**transport_options(app, name), **limits, **self._retries}
        self._connection = app.connection_for_write(transport_options=options)
        self._queue = drill_queue(app, name)
        self._has_failed = False

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Raise BrokerError for each error of the broker."""
        known = *self._connection.connection_errors, *self._connection.channel_errors
        try:
            yield
        except (OperationalError, OSError, *known) as error:
            self._has_failed = True
            raise BrokerError(str(error) or type(error).__name__) from error

    def open(self) -> None:
        with self._asking():
            self._connection.ensure_connection(**self._retries)

    def send(self, message: str, resource: str, seconds: float) -> None:
        """Send one message, past the routes and the receivers of the app."""
        app = self._app
        made = app.amqp.as_task_v2(
            message, TASK, args=(resource, seconds), ignore_result=True, origin=self.name
        )
        with self._asking(), app.amqp.Producer(self._connection, auto_declare=False) as producer:
            producer.publish(
                made.body,
                exchange=self._queue.exchange,
                routing_key=self.name,
                declare=[self._queue],
                serializer=app.conf.task_serializer,
                compression=app.conf.task_compression,
                retry=True,
                retry_policy=self._retries,
                delivery_mode=2,
                headers=made.headers,
                **made.properties,
            )

    def messages(self) -> set[str]:
        """Return the ids of messages that the broker has. Of RabbitMQ it takes them off."""
        with self._asking():
            return set(self._in_keys() if self._has_keys else self._taken_off())

    def _in_keys(self) -> Iterator[str]:
        ledger, lists = self._keys()
        for _, entry in ledger.entries():
            yield json.loads(entry)[0]["headers"]["id"]
        for name in lists:
            for entry in ledger.client.lrange(name, 0, -1):
                yield json.loads(decoded(entry))["headers"]["id"]

    def _taken_off(self) -> Iterator[str]:
        queue = self._queue(self._connection.default_channel)
        while (message := queue.get(no_ack=True)) is not None:
            yield message.headers["id"]

    def _keys(self) -> tuple[Ledger, list[str]]:
        """Return the worker leases beside the queue, and the lists of the queue."""
        channel = self._connection.default_channel
        ledger = Ledger.of(channel, settings_of(self._app).prefix)
        steps = channel.priority_steps
        return ledger, [ledger.key_prefix + channel._q_for_pri(self.name, step) for step in steps]

    def remove(self) -> None:
        """Delete the queue, its exchange, and each key that belongs to it."""
        with self._asking():
            channel = self._connection.default_channel
            self._queue(channel).delete()
            self._queue.exchange(channel).delete()
            if self._has_keys:
                self._remove_keys(channel)

    def _remove_keys(self, channel: Any) -> None:
        ledger, lists = self._keys()
        # kombu itself removes no binding that another process has made
        patterns = [getattr(channel, name, "") for name in OF_BINDINGS]
        bindings = [pattern % self.name for pattern in patterns if pattern]
        others = [ledger.key_prefix + key for key in (*bindings, channel.unacked_mutex_key)]
        of_leases = ledger.leases, ledger.dead, ledger.names
        ledger.client.delete(*lists, *others, ledger.unacked, ledger.index, *of_leases)

    def close(self) -> None:
        if self._has_failed:  # RabbitMQ would be asked to agree
            self._connection.collect(CLOSE_WITHIN)
        else:
            self._connection.release()
