"""The facts of an app that the lints look at."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from celery_redlock.lock.transport.address import parse_address
from celery_redlock.operate.lints.model import Facts, TaskFacts
from celery_redlock.tasks.declaration import ENTRY, config_of
from celery_redlock.tasks.delivery.route import has_quorum_queues
from celery_redlock.tasks.per_app import settings_of
from celery_redlock.tasks.settings.app import AppSettings
from celery_redlock.tasks.settings.conf import one_redis
from celery_redlock.tasks.startup import locked_tasks
from celery_redlock.tasks.task import LockedTask

logger = logging.getLogger(__name__)

# s: kombu's own, by transport; other transports have no such timeout
VISIBILITIES = {"redis": 3600.0, "rediss": 3600.0, "sentinel": 3600.0, "sqs": 1800.0}


# by the setting of a Redis, what `global_keyprefix` stands in
TRANSPORT_OPTIONS = {
    "broker_url": "broker_transport_options",
    "result_backend": "result_backend_transport_options",
}


def facts_of(app: Any) -> Facts:
    """Collect what `lint` looks at, from an app with all its tasks; raises SettingsError."""
    conf = app.conf
    return Facts(
        settings=settings_of(app),
        visibility=visibility_of(conf),
        queues=tuple(app.amqp.queues),
        creates_queues=bool(conf.task_create_missing_queues),
        prefetch=conf.worker_prefetch_multiplier,
        prefetch_is_fixed=_fixed(app),
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
    """Return `global_keyprefix` by the setting whose Redis it is of."""
    found = {name: conf.get(options) or {} for name, options in TRANSPORT_OPTIONS.items()}
    given = {name: options.get("global_keyprefix") for name, options in found.items()}
    return {name: str(prefix) for name, prefix in given.items() if prefix}


def _on_nodes(conf: Any, settings: AppSettings) -> tuple[str, ...]:
    """Return which of the broker and the result backend is a server that is a lock node, too."""
    timeout = settings.node_timeout
    servers = {parse_address(node, "app", "nodes", timeout).server for node in settings.nodes}
    urls = {
        "broker_url": conf.broker_write_url or conf.broker_url,
        "result_backend": conf.result_backend,
    }
    return tuple(
        name
        for name, url in urls.items()
        if (one := one_redis(url)) and parse_address(one, "app", name, timeout).server in servers
    )


def _fixed(app: Any) -> tuple[str, ...]:
    """Return the queues whose delayed messages neither RabbitMQ keeps nor a greater prefetch.

    Source: celery.worker.consumer.tasks: with any quorum queue the prefetch is each consumer's own.
    """
    if not has_quorum_queues(app):
        return ()
    return tuple(q.name for q in app.amqp.queues.values() if q.exchange.type == "direct")


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
    try:
        return task._own_queue((), {})
    except Exception as error:  # a router of the user's own, which may look at arguments
        told = {"event": "queue_unknown", "task": task.name}
        logger.debug("the queue of %s depends on its arguments: %s", task.name, error, extra=told)
        return str(task.app.conf.task_default_queue)


def visibility_of(conf: Mapping[str, Any]) -> float | None:
    """Return the s after which the broker delivers anew what is not acknowledged; None: never."""
    url = conf.get("broker_read_url") or conf.get("broker_url") or ""
    scheme = str(url[0] if isinstance(url, (list, tuple)) else url).partition("://")[0]
    own = VISIBILITIES.get(scheme.partition("+")[0])
    given = (conf.get("broker_transport_options") or {}).get("visibility_timeout", own)
    return None if own is None or not isinstance(given, (int, float)) else float(given)


def declared_queues(conf: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the queues that the settings declare, without any made by a send."""
    queues, default = conf.get("task_queues"), str(conf.get("task_default_queue"))
    return tuple(str(getattr(queue, "name", queue)) for queue in queues or [default])
