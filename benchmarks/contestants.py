"""The app that the comparison's workers run: one task for each lock that is compared.

All bodies do the same and store when they began and ended. The locks of other packages are
configured as their documentation shows, with the same timeout; those not installed are left out.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from celery import Celery
from redis import Redis

from celery_redlock import LockedTask

BROKER = "BENCHMARK_BROKER"
NODES = "BENCHMARK_NODES"
SINGLE = "BENCHMARK_SINGLE_NODE"
TIMEOUT = 4  # s: of each lock; some packages take whole seconds only
EVENTS = "contest:events"
HOLDS = "contest:holds"
GO = "contest:go"
SECONDS = "contest:seconds"
PATIENCE = 120  # s
PLAIN = "plain"
OURS = "celery_redlock"

Body = Callable[..., None]
_began: list[float] = []  # monotonic s of the bodies that are timed, in this process


class NotAcquiredError(Exception):
    """Raised by a body whose lock gave up."""


@dataclass(frozen=True)
class Contestant:
    """A lock. package: its distribution, "" if it needs none. nodes: how many it uses.

    make: adds its task to an app, given the URLs of its nodes. waits: whether a second task of the
    key runs later, so that one send is enough.
    """

    name: str
    package: str
    nodes: int
    make: Callable[[Celery, Sequence[str]], Any]
    waits: bool = False

    @property
    def installed(self) -> str:
        """Its version; "" if it is not installed."""
        if not self.package:
            return "-"
        with contextlib.suppress(PackageNotFoundError):
            return version(self.package)
        return ""


def run(key: str, number: int, seconds: float) -> None:
    """Do nothing for a while, and store when. seconds: 0 stores nothing, for a task that is timed.

    key: what the lock is for. number: of this run, among those of the key.
    """
    if seconds == 0:
        _began.append(time.perf_counter())
        return
    _store("begin", key, number)
    try:
        time.sleep(seconds)
    except BaseException:
        _store("cut", key, number)
        raise
    _store("end", key, number)


def _store(event: str, key: str, number: int) -> None:
    _client().rpush(EVENTS, json.dumps([event, key, number, time.monotonic()]))


def plain(app: Celery, urls: Sequence[str]) -> Any:
    """Return a task without a lock."""
    return app.task(name=PLAIN, shared=False)(run)


def celery_redlock(app: Celery, urls: Sequence[str]) -> Any:
    """Return a task of this package."""
    app.conf.update(redlock_nodes=list(urls), redlock_ttl=TIMEOUT, redlock_max_ttl=TIMEOUT)
    return app.task(name=OURS, shared=False, base=LockedTask, lock_key="{key}")(run)


def celery_once(app: Celery, urls: Sequence[str]) -> Any:
    """Return a task of celery-once, locked from the send to the end of the run."""
    base = importlib.import_module("celery_once").QueueOnce
    app.conf.ONCE = {"backend": "celery_once.backends.Redis", "settings": {"url": urls[0]}}
    once = {"keys": ["key"], "timeout": TIMEOUT}
    return app.task(name="celery-once", shared=False, base=base, once=once)(run)


def celery_singleton(app: Celery, urls: Sequence[str]) -> Any:
    """Return a task of celery-singleton, locked from the send to the end of the run."""
    base = importlib.import_module("celery_singleton").Singleton
    app.conf.update(singleton_backend_url=urls[0], singleton_lock_expiry=TIMEOUT)
    decorate = app.task(name="celery-singleton", shared=False, base=base, unique_on=["key"])
    return decorate(run)


def rhubarb(app: Celery, urls: Sequence[str]) -> Any:
    """Return a task of rhubarb, locked while it runs. Its key is of the positional arguments."""
    base = importlib.import_module("rhubarb.tasks").LockableTaskWithArgs
    app.conf.update(rhubarb_backend_url=urls[0], rhubarb_task_lock_ttl=TIMEOUT)
    return app.task(name="rhubarb", shared=False, base=base)(run)


def celery_heimdall(app: Celery, urls: Sequence[str]) -> Any:
    """Return a task of celery-heimdall, locked from the send to the end of the run.

    By default, a send waits up to a second for the key, and so does each run for its own key.
    """
    base = importlib.import_module("celery_heimdall").HeimdallTask
    node = Redis.from_url(urls[0])
    task_class = type("OnOneNode", (base,), {"abstract": True, "setup_redis": lambda self: node})
    options = {
        "unique": True, "key": lambda args, kwargs: str(args[0]), "unique_timeout": TIMEOUT,
        "unique_lock_blocking": False,
    }  # fmt: skip
    return app.task(name="celery-heimdall", shared=False, base=task_class, heimdall=options)(run)


def redis_py(app: Celery, urls: Sequence[str]) -> Any:
    """Return a task whose body takes redis-py's lock, and waits for it."""

    def body(key: str, number: int, seconds: float) -> None:
        with _node(urls[0]).lock(f"redis-py:{key}", timeout=TIMEOUT):
            run(key, number, seconds)

    return app.task(name="redis-py Lock", shared=False)(body)


def cookbook(app: Celery, urls: Sequence[str]) -> Any:
    """Return a task in the manner of Celery's Task Cookbook: skipped if the key is in a cache.

    The cache's `add` is SET NX here. A run that took longer than the timeout leaves the key alone.
    """

    @contextlib.contextmanager
    def added(key: str) -> Iterator[bool]:
        cache = _node(urls[0])
        deadline = time.monotonic() + TIMEOUT * 0.9
        is_new = bool(cache.set(f"cookbook:{key}", "1", nx=True, ex=TIMEOUT))
        try:
            yield is_new
        finally:
            if is_new and time.monotonic() < deadline:
                cache.delete(f"cookbook:{key}")

    def body(key: str, number: int, seconds: float) -> None:
        with added(key) as is_new:
            if is_new:
                run(key, number, seconds)

    return app.task(name="Task Cookbook", shared=False)(body)


def pottery(app: Celery, urls: Sequence[str]) -> Any:
    """Return a task whose body takes pottery's Redlock, and waits for it."""
    make = importlib.import_module("pottery").Redlock

    def body(key: str, number: int, seconds: float) -> None:
        masters = {_node(url) for url in urls}
        with make(key=f"pottery:{key}", masters=masters, auto_release_time=TIMEOUT):
            run(key, number, seconds)

    return app.task(name="pottery", shared=False)(body)


def redlock_py(app: Celery, urls: Sequence[str]) -> Any:
    """Return a task whose body takes redlock-py's lock: three tries, then it fails."""
    make = importlib.import_module("redlock").Redlock

    def body(key: str, number: int, seconds: float) -> None:
        manager = make([_node(url) for url in urls])
        lock = manager.lock(f"redlock-py:{key}", TIMEOUT * 1000)
        if not lock:
            raise NotAcquiredError(key)
        try:
            run(key, number, seconds)
        finally:
            manager.unlock(lock)

    return app.task(name="redlock-py", shared=False)(body)


OTHERS = (
    Contestant("celery-once", "celery-once", 1, celery_once),
    Contestant("celery-singleton", "celery-singleton", 1, celery_singleton),
    Contestant("celery-heimdall", "celery-heimdall", 1, celery_heimdall),
    Contestant("rhubarb", "rhubarb", 1, rhubarb),
    Contestant("redis-py Lock", "redis", 1, redis_py, waits=True),
    Contestant("Task Cookbook", "", 1, cookbook),
    Contestant("pottery", "pottery", 3, pottery, waits=True),
    Contestant("redlock-py", "redlock-py", 3, redlock_py),
)


def build(broker: str, nodes: Sequence[str], single: str) -> tuple[Celery, dict[str, Any]]:
    """Return an app and its tasks by name.

    nodes: of the locks that use several; with one of them, the app has no tasks of other packages.
    single: the node of the locks that use one.
    """
    app = Celery("contest", broker=broker, backend=broker, set_as_current=False)
    app.conf.update(
        task_acks_late=True,
        worker_prefetch_multiplier=1,
        worker_hijack_root_logger=False,
        task_default_queue="contest",
        broker_connection_retry_on_startup=True,
    )
    tasks = {PLAIN: plain(app, nodes), OURS: celery_redlock(app, nodes)}
    if len(nodes) > 1:
        for contestant in OTHERS:
            if contestant.installed:
                tasks[contestant.name] = contestant.make(
                    app, nodes if contestant.nodes > 1 else [single]
                )

    @app.task(name="hold", shared=False)
    def hold() -> None:
        with Redis.from_url(broker) as client:
            client.rpush(HOLDS, "yes")
            client.blpop([GO], timeout=PATIENCE)

    @app.task(name="tell", shared=False)
    def tell() -> None:
        seconds = (_began[-1] - _began[0]) / (len(_began) - 1)
        _began.clear()
        with Redis.from_url(broker) as client:
            client.rpush(SECONDS, json.dumps(seconds))

    return app, {**tasks, "hold": hold, "tell": tell}


@functools.cache
def _node(url: str) -> Redis:
    return Redis.from_url(url)


@functools.cache
def _client() -> Redis:
    return Redis.from_url(os.environ[BROKER])


app, _ = build(
    os.environ.get(BROKER, "redis://localhost"),
    os.environ.get(NODES, "redis://localhost").split(),
    os.environ.get(SINGLE, "redis://localhost"),
)
