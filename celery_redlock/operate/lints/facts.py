"""Collects the facts of an app that the rules look at."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from celery_redlock.lock.transport.address import parse_address
from celery_redlock.operate.lints.model import TRANSPORT_OPTIONS, Facts, TaskFacts
from celery_redlock.tasks.declaration import ENTRY, config_of
from celery_redlock.tasks.delivery.route import driver_of, has_quorum_queues, queue_of_send
from celery_redlock.tasks.per_app import settings_of
from celery_redlock.tasks.settings.app import AppSettings
from celery_redlock.tasks.settings.conf import one_redis
from celery_redlock.tasks.startup import locked_tasks
from celery_redlock.tasks.task import LockedTask

logger = logging.getLogger(__name__)

# Seconds: kombu's own defaults, by transport; other transports have no such timeout.
VISIBILITY_TIMEOUTS = {"redis": 3600.0, "rediss": 3600.0, "sentinel": 3600.0, "sqs": 1800.0}


def facts_of(app: Any) -> Facts:
    """Return the facts of an app with all its tasks; raises SettingsError."""
    conf = app.conf
    return Facts(
        settings=settings_of(app),
        visibility=visibility_of(conf),
        queues=tuple(app.amqp.queues),
        creates_queues=bool(conf.task_create_missing_queues),
        prefetch=conf.worker_prefetch_multiplier,
        prefetch_is_fixed=_queues_of_fixed_prefetch(app),
        drops_oldest=_queues_that_drop_oldest(app),
        names=tuple(app.tasks),
        tasks=tuple(
            _task_facts(task)
            for task in locked_tasks(app)
            if config_of(task).options.get("key") is not False
        ),
        counts=find_spec("prometheus_client") is not None,
        key_prefixes=_key_prefixes(conf),
        on_nodes=_on_nodes(conf, settings_of(app)),
    )


def _key_prefixes(conf: Any) -> dict[str, str]:
    """Return each `global_keyprefix` by the setting of its Redis."""
    found = {name: conf.get(options) or {} for name, options in TRANSPORT_OPTIONS.items()}
    given = {name: options.get("global_keyprefix") for name, options in found.items()}
    return {name: str(prefix) for name, prefix in given.items() if prefix}


def _on_nodes(conf: Any, settings: AppSettings) -> tuple[str, ...]:
    """Return which of the broker's and the result backend's settings name a lock node."""
    servers = {parse_address(node, "app", "nodes").server for node in settings.nodes}
    urls = {
        "broker_url": conf.broker_write_url or conf.broker_url,
        "result_backend": conf.result_backend,
    }
    return tuple(
        name
        for name, url in urls.items()
        if (one := one_redis(url)) and parse_address(one, "app", name).server in servers
    )


def _queues_of_fixed_prefetch(app: Any) -> tuple[str, ...]:
    """Return the queues whose deferred messages wait in a worker and use up its prefetch.

    Source: celery.worker.consumer.tasks: with any quorum queue the prefetch is each consumer's own,
    and is not raised for messages that wait; from a direct exchange RabbitMQ does not delay them.
    """
    if not has_quorum_queues(app):
        return ()
    return tuple(q.name for q in app.amqp.queues.values() if q.exchange.type == "direct")


def _queues_that_drop_oldest(app: Any) -> tuple[str, ...]:
    """Return the queues of RabbitMQ that drop their oldest message for a new one if they are full.

    Source: RabbitMQ, "Queue Length Limit": so they do by default. A policy is not seen here.
    """
    if driver_of(app) != "amqp":
        return ()
    found = []
    for queue in app.amqp.queues.values():
        given = queue.queue_arguments or {}
        limits = (queue.max_length, queue.max_length_bytes)
        is_bounded = limits != (None, None) or {"x-max-length", "x-max-length-bytes"} & {*given}
        if is_bounded and given.get("x-overflow", "drop-head") == "drop-head":
            found.append(str(queue.name))
    return tuple(found)


def _task_facts(task: LockedTask) -> TaskFacts:
    # Celery before 5.7 leaves the app's limits to the pool, and None on its tasks
    soft, hard = task.app.conf.task_soft_time_limit, task.app.conf.task_time_limit
    return TaskFacts(
        config=config_of(task),
        queue=_queue_of(task),
        acks_late=bool(task.acks_late),
        reject_on_worker_lost=bool(task.reject_on_worker_lost),
        time_limit=hard if task.time_limit is None else task.time_limit,
        soft_time_limit=soft if task.soft_time_limit is None else task.soft_time_limit,
        retries_after=task.default_retry_delay if getattr(task, "autoretry_for", ()) else None,
        takes_entry=ENTRY in type(task).__dict__,
    )


def _queue_of(task: LockedTask) -> str:
    """Return the queue of a task's own routing, the app's default queue if that is unknown."""
    try:
        return queue_of_send(task, (), {})
    except Exception as error:  # a router of the user's own, which may look at arguments
        fields = {"event": "queue_unknown", "task": task.name}
        text = "The queue of %s is unknown without its arguments: %s"
        logger.debug(text, task.name, error, extra=fields)
        return str(task.app.conf.task_default_queue)


def visibility_of(conf: Mapping[str, Any]) -> float | None:
    """Return the seconds after which the broker delivers an unacknowledged message again.

    None if it never does.
    """
    url = conf.get("broker_read_url") or conf.get("broker_url") or ""
    scheme = str(url[0] if isinstance(url, (list, tuple)) else url).partition("://")[0]
    own = VISIBILITY_TIMEOUTS.get(scheme.partition("+")[0])
    given = (conf.get("broker_transport_options") or {}).get("visibility_timeout", own)
    return None if own is None or not isinstance(given, (int, float)) else float(given)


def declared_queues(conf: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the queues in the settings, without queues that a send creates."""
    queues, default = conf.get("task_queues"), str(conf.get("task_default_queue"))
    return tuple(str(getattr(queue, "name", queue)) for queue in queues or [default])
