"""The Celery app that the test workers run; each body writes when it began and ended."""

from __future__ import annotations

import ast
import contextlib
import ctypes
import dataclasses
import functools
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import celery.worker.request
import redis
from celery import Celery, Task, chord, signature
from celery.backends.redis import RedisBackend
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded
from celery.signals import (
    after_task_publish,
    before_task_publish,
    task_postrun,
    task_prerun,
    task_received,
)
from kombu import Exchange, Queue, binding
from kombu.common import Broadcast

from celery_redlock import Backoff, Contention, LockedTask, LockLost, current_lock
from celery_redlock.signals import (
    LockExtendedEvent,
    LockReleasedEvent,
    lock_acquired,
    lock_deferred,
    lock_extended,
    lock_released,
    lock_skipped,
)
from celery_redlock.tasks.per_app import redlock_of

LOG = Path(os.environ.get("TEST_LOG", os.devnull))
NODES = os.environ.get("TEST_NODES", "redis://nowhere")
QUICK = Backoff(first=0.05, cap=0.5)


def topic_queues(kind: str, **options: Any) -> list[Queue]:
    """Return queues by which RabbitMQ can keep messages back, if they are quorum queues."""
    names, wide = Exchange(kind, "topic"), Exchange(f"{kind}-wide", "topic")
    plain = [Queue(name, names, routing_key=name, **options) for name in (kind, f"{kind}-other")]
    return [
        *plain,
        Queue(f"{kind}-wide", wide, routing_key="wide.#", **options),
        *overlapping_queues(kind, **options),
    ]


def overlapping_queues(kind: str, **options: Any) -> list[Queue]:
    """Return two pairs of queues, and to each pair an exchange that gives both a message."""
    news, twice = Exchange(f"{kind}-news", "topic"), Exchange(f"{kind}-twice", "direct")
    bound = [binding(news, routing_key="news.*"), binding(news, routing_key="old.*")]
    left = Queue(f"{kind}-left", news, routing_key="news.#", **options)
    right = Queue(f"{kind}-right", bindings=bound, **options)
    if options:  # to quorum queues RabbitMQ brings back what was kept by their own exchange alone
        right = Queue(f"{kind}-right", news, routing_key="news.*", **options)
    names = (f"{kind}-one", f"{kind}-two")
    return [left, right, *(Queue(name, twice, routing_key="twice", **options) for name in names)]


def odd_queues(kind: str) -> list[Queue]:
    """Return queues that refuse, pass on or forget messages, or go themselves."""
    dead = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": f"{kind}-parked"}
    full = {"x-max-length": 2, "x-overflow": "reject-publish"}
    return [
        *(Queue(name) for name in (kind, f"{kind}-deleted")),
        Queue(f"{kind}-retried", queue_arguments=dead),
        Queue(f"{kind}-bounded", queue_arguments=full),
        Queue(f"{kind}-passing", auto_delete=True),
        Queue(f"{kind}-expiring", expires=5.0),
    ]


QUEUES = {
    "celery": [Queue(name) for name in ("celery", "other", "held", "waiting")],
    "classic": [*topic_queues("classic"), Broadcast("everybody")],
    "quorum": topic_queues("quorum", queue_arguments={"x-queue-type": "quorum"}),
    "odd": odd_queues("odd"),
}
KIND = os.environ.get("TEST_QUEUES", "celery")

app = Celery("tests", set_as_default=False)
BROKER = os.environ.get("TEST_BROKER", "memory://")
app.conf.update(
    broker_url=BROKER,
    result_backend=os.environ.get("TEST_BACKEND", BROKER),
    broker_connection_retry_on_startup=True,
    worker_prefetch_multiplier=1,
    worker_cancel_long_running_tasks_on_connection_loss=False,
    task_queues=QUEUES[KIND],
    task_default_queue=KIND,
    task_create_missing_queues=True,
)
app.conf.update(json.loads(os.environ.get("TEST_CONF", "{}")))
# s: of bodies that are renewed; a stall of 5 s, below two thirds, loses no lock
TTL = max(8.0, 4 * app.conf.get("redlock_node_timeout", 0.0))

if NODES != "unset":
    app.conf.redlock_nodes = NODES.split(",")
task = functools.partial(app.task, shared=False)  # else every app made later would have them
own_key = functools.partial(task, bind=True, base=LockedTask, lock_backoff=QUICK)
locked = functools.partial(own_key, lock_key="k:{key}")
unique = functools.partial(own_key, lock_key="u:{key}", lock_unique_for=600.0)


def write(what: str, key: str, **more: Any) -> None:
    """Append a line; the system's monotonic clock is one for all processes of a machine."""
    line = {"what": what, "key": key, "at": time.monotonic(), "pid": os.getpid(), **more}
    with LOG.open("a") as log:
        log.write(json.dumps(line, default=str) + "\n")


@contextmanager
def written(key: str, **more: Any) -> Iterator[None]:
    write("begin", key, **more)
    try:
        yield
    finally:
        write("end", key)


def wait_for_file(name: str) -> None:
    end = time.monotonic() + 120
    while not LOG.with_name(name).exists() and time.monotonic() < end:
        time.sleep(0.02)


def raise_(error: BaseException) -> None:
    raise error


@locked(max_retries=0)
def work(self: Any, key: str, seconds: float = 0.05) -> int:
    assert self.lock.held
    with written(key, id=self.request.id):
        time.sleep(seconds)
    return int(self.request.retries)


worked = work.run.__func__
late = locked(name="tests.late", acks_late=True, max_retries=0)(worked)
ignored = locked(name="tests.ignored", ignore_result=True, max_retries=0)(worked)
keyed = locked(name="tests.keyed", lock_key=lambda task, args, kwargs: f"k:{args[0]}")(worked)


CROWD = 24
meeting = threading.Barrier(CROWD)


def meet(key: str) -> None:
    """End as all others do that run here: none before the last one has begun."""
    with written(key):
        meeting.wait()


@locked(name="tests.meets", acks_late=True, ignore_result=True, lock_ttl=TTL)
def meets(self: Any, key: str) -> None:
    meet(key)


@task(name="tests.meets_unlocked", acks_late=True, ignore_result=True)
def meets_unlocked(key: str) -> None:
    meet(key)


@task(acks_late=True)
def unlocked_late(key: str) -> None:
    write("begin", key)


@task(name="tests.plain")
def plain(key: str) -> None:
    write("begin", key)


def ways_to_end(self: Any, key: str) -> dict[str, Callable[[], Any]]:
    return {
        "return": lambda: "done",
        "receiver exits": lambda: "done",
        "raise": lambda: raise_(ValueError("body")),
        "ignore": lambda: raise_(Ignore()),
        "ignore, with a state": lambda: [self.update_state(state="MINE"), raise_(Ignore())],
        "reject": lambda: raise_(Reject("no", requeue=False)),
        "requeue": lambda: raise_(Reject("again", requeue=True)),
        "retry": lambda: self.retry(countdown=0.2, max_retries=3),
        "replace": lambda: self.replace(work.si(f"{key}-other")),
        "soft limit": meet_soft_limit,
        "unpicklable result": lambda: lambda: None,
    }


def meet_soft_limit() -> None:
    try:
        time.sleep(60)
    except SoftTimeLimitExceeded:
        lock = current_lock()
        write("cleaning", "soft limit", held=lock is not None and lock.held)
        raise


def end_somehow(self: Any, key: str, how: str) -> Any:
    """End in the way that is asked for, the first time; just return after that."""
    first = self.request.retries == 0 and f'"ended:{how}", "key": "{key}"' not in LOG.read_text()
    write("begin", key, how=how, retries=self.request.retries)
    write(f"ended:{how}", key)
    return ways_to_end(self, key)[how]() if first else "again"


early_end = locked(name="tests.early_end")(end_somehow)
late_end = locked(name="tests.late_end", acks_late=True)(end_somehow)
plain_end = task(bind=True, name="tests.plain_end", acks_late=True)(end_somehow)


def retry_on(self: Any, key: str) -> int:
    """Retry until there were five retries, or as many as may be."""
    write("begin", key, retries=self.request.retries)
    if self.request.retries < 5:
        raise self.retry(countdown=0.1)
    return int(self.request.retries)


retried = {most: locked(name=f"tests.retried_{most}", max_retries=most)(retry_on)
           for most in (0, 3, None)}  # fmt: skip


@task_postrun.connect
def leave(args: Any = (), **_: Any) -> None:
    """End the process in a receiver, where a message asks for that."""
    if "receiver exits" in args:
        raise SystemExit(3)


class Rude(Task):
    """A user's own base that calls super() nowhere."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        write("called", str(args))
        return self.run(*args, **kwargs)

    def before_start(self, *args: Any) -> None: ...

    on_success = after_return = before_start


class RudeThenLocked(Rude, LockedTask):
    abstract = True


class LockedThenRude(LockedTask, Rude):
    abstract = True


rude = locked(base=RudeThenLocked, name="tests.rude")(worked)
polite = locked(base=LockedThenRude, name="tests.polite")(worked)


class ClassTask(LockedTask):
    """A class-based task with autoretry, which binds `run` to the instance."""

    name = "tests.class_task"
    lock_key = "k:{key}"
    lock_backoff = QUICK
    autoretry_for = (KeyError,)
    run = worked


class_task = app.register_task(ClassTask())


class TellsAfterwards(LockedTask):
    """Writes whether its lock is held once its result is stored."""

    abstract = True

    def after_return(self, *args: Any) -> None:
        write("after", str(self.name), held=self.lock.held)


def nothing() -> None: ...


told = functools.partial(task, base=TellsAfterwards, lock_key="told:{task}")
told_early = told(name="tests.told_early")(nothing)
told_late = told(name="tests.told_late", acks_late=True)(nothing)


class Careless(LockedTask):
    """Each of its hooks fails."""

    abstract = True

    def fail(self, *args: Any, **kwargs: Any) -> None:
        write("hook", str(self.name))
        raise ValueError("hook")

    on_success = on_failure = on_retry = after_return = fail


careless_late = locked(base=Careless, name="tests.careless_late", acks_late=True)(end_somehow)


class SendsOnceAlone(LockedTask):
    """As where a user's own `apply_async` lets no second send of a message through."""

    abstract = True

    def apply_async(self, *args: Any, **options: Any) -> Any:
        write("applied", str(self.name))
        if self.request.id is not None:
            return None
        return super().apply_async(*args, **options)

    def signature_from_request(self, *args: Any, **options: Any) -> Any:
        raise RuntimeError("nothing here is to be made anew")


sent_once = locked(base=SendsOnceAlone, name="tests.sent_once")(worked)


class OfATenant(LockedTask):
    """Takes from the arguments what is not the body's, as its tenant's name."""

    abstract = True

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        self.request.tenant = kwargs.pop("_tenant", "nobody")


@locked(base=OfATenant, typing=False)
def of_a_tenant(self: Any, key: str) -> str:
    return f"{self.request.tenant}, {self.request.locale}"


@task_prerun.connect(sender=of_a_tenant)
def take_locale(task: Any = None, kwargs: Any = None, **_: Any) -> None:
    task.request.locale = kwargs.pop("_locale", "nowhere")


def last_until(self: Any, key: str, until: str = "") -> str:
    with written(key, id=self.request.id):
        if until:
            wait_for_file(until)
    return str(self.request.hostname)


until = locked(name="tests.until", lock_ttl=TTL, acks_late=True)(last_until)
plain_until = task(bind=True, name="tests.plain_until", acks_late=True)(last_until)
early_until = locked(name="tests.early_until", lock_ttl=TTL)(last_until)
plain_early_until = task(bind=True, name="tests.plain_early_until")(last_until)
hourly = functools.partial(task, bind=True, rate_limit="1/h")
plain_early_hourly = hourly(name="tests.plain_early_hourly")(last_until)
plain_hourly = hourly(name="tests.plain_hourly", acks_late=True)(last_until)


def retry_once(self: Any, key: str, until: str) -> int:
    """Write under another name and retry, the first time; then last until there is a file."""
    if not self.request.retries:
        write("begin", f"{key} before")
        raise self.retry(countdown=2)
    last_until(self, key, until)
    return int(self.request.retries)


retries_once = locked(name="tests.retries_once", lock_ttl=TTL, acks_late=True,
                      max_retries=1)(retry_once)  # fmt: skip
plain_retries_once = task(bind=True, name="tests.plain_retries_once", acks_late=True,
                          max_retries=1)(retry_once)  # fmt: skip
plain_early_retries_once = task(bind=True, name="tests.plain_early_retries_once",
                                max_retries=1)(retry_once)  # fmt: skip


@locked()
def rebuild(self: Any, key: str, until: str = "") -> str:
    last_until(self, key, until)
    return key


@locked(acks_late=True, name="tests.lasts")
def lasts(self: Any, key: str) -> str:
    last_until(self, key, key)
    return "lasted"


@locked()
def releases_early(self: Any, key: str, name: str) -> None:
    self.lock.release()
    write("released", key)
    wait_for_file(name)


@task(base=LockedTask, lock_key="k:{key}", ignore_result=True)
def crowded(key: str) -> None:
    """Run for a moment, with the delays that a task has where nobody chose any."""
    with written(key):
        time.sleep(0.01)


LONG = Backoff(first=1e7, cap=1e7)  # no test lasts so long


@locked(lock_backoff=LONG, lock_ttl=app.conf.get("redlock_max_ttl", 60))
def patient(self: Any, key: str, name: str = "") -> str:
    """Write under a name, and go on until there is a file of that name, if that is asked for."""
    with written(key, name=name):
        if name.startswith("until"):
            wait_for_file(name)
    return name


@locked(lock_ttl=TTL)
def loses(self: Any, key: str) -> str:
    write("begin", key)
    end = time.monotonic() + 60
    while self.lock.held and time.monotonic() < end:
        time.sleep(0.02)
    return "went on"


@locked(lock_ttl=TTL)
def long_work(self: Any, key: str, seconds: float) -> bool:
    with written(key):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(0.05)
            self.lock.ensure()
    return True


@locked()
def sees_its_state(self: Any, key: str) -> None:
    status = self.backend.get_task_meta(self.request.id, cache=False)["status"]
    write("state", key, status=status, held=self.lock.held)


def shows(self: Any, *args: Any, **kwargs: Any) -> None:
    """Write everything that the message carries."""
    request = self.request
    kept = ("id", "root_id", "parent_id", "group", "group_index", "chord", "chain", "callbacks",
            "errbacks", "eta", "expires", "timelimit", "retries", "reply_to", "correlation_id",
            "origin", "shadow", "argsrepr", "kwargsrepr", "ignore_result", "stamped_headers",
            "stamps", "compression", "replaced_task_nesting")  # fmt: skip
    seen = {name: getattr(request, name, None) for name in kept}
    seen["headers"] = {k: v for k, v in (request.headers or {}).items() if k != "redlock"}
    delivery = {k: v for k, v in request.delivery_info.items() if k != "redelivered"}
    deferrals = (request.get("redlock") or {}).get("deferral", {}).get("count", 0)
    seen |= {**delivery, "args": repr(args), "kwargs": repr(kwargs)}
    write("message", request.id, seen=seen, deferrals=deferrals)


shows_its_message = locked(lock_key="message", name="tests.shows_its_message")(shows)
shows_its_message_late = locked(lock_key="message", acks_late=True, name="tests.shows_late")(shows)


@task_received.connect
def note_message(request: Any = None, **_: Any) -> None:
    """Write what only the worker's main process sees of a message."""
    if request.type == shows_its_message.name:
        message = request._message
        write("received", request.id, content_type=message.content_type,
              delivery_mode=message.properties.get("delivery_mode"))  # fmt: skip


def copy(self: Any, key: str) -> None:
    info = self.request.delivery_info
    where = {name: info[name] for name in ("exchange", "routing_key")}
    write("copy", key, resource=self.lock.resource, **where)


copying = functools.partial(locked, lock_key="copied:{key}", ignore_result=True)
copied = copying(name="tests.copied")(copy)
copied_late = copying(name="tests.copied_late", acks_late=True)(copy)
OF_DELIVERIES = ("delivery_info", "delivery_tag", "application_headers")


@locked()
def shows_its_properties(self: Any, key: str) -> dict[str, Any]:
    return {
        name: value
        for name, value in self.request.properties.items()
        if name not in OF_DELIVERIES and not name.startswith("redlock_")
    }


@locked()
def shows_its_headers(self: Any, key: str) -> list[Any]:
    return [self.request.headers, self.request.get("x-own")]


@locked(lock_fencing=True)
def fenced(self: Any, key: str) -> int:
    write("token", key, token=self.lock.fencing_token)
    return int(self.lock.fencing_token)


@own_key()
def keyless(self: Any, key: str) -> str:
    return str(self.lock.resource)


@task()
def clock() -> float:
    return time.time()


@task()
def add(*numbers: Any) -> int:
    return len(numbers)


@task()
def join(parts: Any) -> str:
    """Return the results that came, in one text."""
    write("joined", str(parts))
    return "+".join(parts) if isinstance(parts, list) else f"<{parts}>"


@task()
def note(*what: Any) -> None:
    """Write that a callback was called. what: for an errback first the failed task's own."""
    write("noted", str(what[-1]))


@task()
def sends(steps: Any) -> None:
    """Send what came as an argument: a signature, or several."""
    for each in steps if isinstance(steps, list) else [steps]:
        signature(each, app=app).apply_async()


@locked(lock_key="p:{key}", lock_limit=3, lock_ttl=TTL)
def permitted(self: Any, key: str, also: str = "anybody", until: str = "") -> None:
    """Write under two names; then go on until a file of the third name is there."""
    with written(key), written(also):
        if until:
            wait_for_file(until)
        time.sleep(0.05)


@locked(lock_key="rated:{key}", lock_limit=8, lock_rate="10/s", lock_ttl=TTL)
def rated(self: Any, key: str, fails: int = 0) -> None:
    """Write when its start was counted, and end with a retry so many times."""
    (acquisition,) = self.lock.ownership.acquisitions
    write("begin", key, id=self.request.id, at=acquisition.starts[0].started_at)
    if self.request.retries < fails:
        raise self.retry(countdown=0)


@locked(
    lock_key="rated-late:{key}",
    lock_rate="2/h",
    lock_ttl=TTL,
    acks_late=True,
    reject_on_worker_lost=True,
)
def rated_late(self: Any, key: str, dies: bool) -> None:
    """Write that the body begins, and die once by SIGKILL."""
    write("begin", key, id=self.request.id)
    died = LOG.with_name(f"{key}-died")
    if dies and not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def held_until(self: Any, first: str, second: str, until: str = "") -> None:
    """Write under two names; then go on until a file of the third name is there."""
    with written(first), written(second):
        if until:
            wait_for_file(until)
        time.sleep(0.05)


visit = own_key(name="tests.visit", lock_key=["clinic:{first}", "doctor:{second}"],
                lock_limit={"clinic:{first}": 2}, lock_ttl=TTL)(held_until)  # fmt: skip
of_queue = own_key(name="tests.of_queue", lock_ttl=TTL)(held_until)
also_of_queue = own_key(name="tests.also_of_queue", lock_ttl=TTL)(held_until)


def limit_in_file(task: Any, args: Any, kwargs: Any) -> Any:
    """Return what a file says by now, in Python, of the first argument's limit."""
    write("asked", args[0])
    return ast.literal_eval(LOG.with_name(f"limit-{args[0]}").read_text())


adapts = own_key(name="tests.adapts", lock_key="adapts:{first}", lock_ttl=TTL,
                 lock_limit=limit_in_file)(held_until)  # fmt: skip
adapts_late = own_key(name="tests.adapts_late", lock_key="adapts:{first}", lock_ttl=TTL,
                      lock_limit=limit_in_file, acks_late=True)(held_until)  # fmt: skip


@locked(lock_key="p:{key}")
def shares(self: Any, key: str, also: str, together: int = 1) -> None:
    """Write under two names; how many may do so at once is the settings' matter.

    together: how many must have begun under the second name before one ends.
    """
    with written(key), written(also):
        end = time.monotonic() + 100
        while LOG.read_text().count(f'"begin", "key": "{also}"') < together:
            assert time.monotonic() < end, f"fewer than {together} runs of {also} at once"
            time.sleep(0.02)
        time.sleep(0.05)


@locked(lock_key=["k:{one}", "k:{other}"])
def transfer(self: Any, one: str, other: str) -> str:
    with written(one), written(other):
        time.sleep(0.05)
    return str(self.lock.resource)


@locked()
def takes_another(self: Any, key: str) -> None:
    with self.lock_for(f"{key} beside", wait=60):
        write("both", key)


def nest(self: Any, key: str) -> str:
    with work.lock_for(key) as again:
        write("with", key, held=again.held)
    state = work.apply((key,)).state
    write("after", key, held=self.lock.held)
    return str(state)


nests_early = locked(name="tests.nests_early")(nest)
nests_late = locked(name="tests.nests_late", acks_late=True)(nest)


def stay(self: Any, key: str, how: str = "") -> str:
    """Stay for longer than any test, or end the process at once; the second time, just return."""
    if f'"stays", "key": "{key}"' in LOG.read_text():
        write("stays again", key)
        return "again"
    write("stays", key)
    if how == "segfault":
        ctypes.string_at(0)
    elif how == "_exit":
        os._exit(7)
    elif how == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end = time.monotonic() + 240
    while time.monotonic() < end:
        write("still", key)
        time.sleep(0.05)
    return "stayed"


class NotingRequest(celery.worker.request.Request):
    """A user's own, which does not know ours."""

    def terminate(self, pool: Any, signal: Any = None) -> None:
        logging.getLogger(__name__).warning("their own request ends %s", self.id)
        super().terminate(pool, signal)


stays = locked(name="tests.stays")(stay)
stays_late = locked(name="tests.stays_late", acks_late=True, reject_on_worker_lost=True)(stay)
stays_with_own_request = locked(name="tests.stays_with_own_request", acks_late=True,
                                Request="tests.integration.app:NotingRequest")(stay)  # fmt: skip
stays_not_acked = locked(name="tests.stays_not_acked", acks_late=True,
                         acks_on_failure_or_timeout=False)(stay)  # fmt: skip
stays_retried = locked(name="tests.stays_retried", max_retries=3, retry_on_worker_lost=True,
                       default_retry_delay=0)(stay)  # fmt: skip


@locked(lock_key=["k:{one}", "k:{other}"])
def stays_with_several(self: Any, one: str, other: str, nested: str) -> None:
    with work.lock_for(nested), permitted.lock_for(nested):
        stay(self, one)


@after_task_publish.connect
def die_between(headers: Any = None, **_: Any) -> None:
    """End the whole worker as it has put a message back, where a file asks for that."""
    trap = LOG.with_name("die")
    if (headers or {}).get("redlock", {}).get("deferral") and trap.exists():
        trap.unlink()
        os.killpg(os.getpgid(0), signal.SIGKILL)


def be_cut(self: Any, key: str, seconds: float) -> None:
    write("begin", key)
    try:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(0.02)
    except BaseException as error:
        write("cut", key, by=type(error).__name__)
        raise
    write("finished", key, held=self.lock.held)


cut_early = locked(name="tests.cut_early")(be_cut)
cut_late = locked(name="tests.cut_late", acks_late=True)(be_cut)


@lock_released.connect
def tell_of_parents(sender: Any, event: LockReleasedEvent, **_: Any) -> None:
    if event.by == "parent":
        write("parent's release", event.resource, sender=sender.name, held_for=event.held_for)
        if (once := LOG.with_name("receiver exits once")).exists():
            once.unlink()
            raise SystemExit("of a receiver")


@lock_acquired.connect
@lock_deferred.connect
@lock_released.connect
@lock_skipped.connect
def tell_of_signals(sender: Any, event: Any, signal: Any, **_: Any) -> None:
    """Write each signal with its record, where a file asks for that."""
    if LOG.with_name("signals").exists():
        record = dataclasses.asdict(event)
        write(signal.name, record.pop("resource"), sender=getattr(sender, "name", ""), **record)


@before_task_publish.connect
def tell_of_publishes(headers: dict[str, Any], **_: Any) -> None:
    """Write which state is stored of a message that is published, where a file asks for that."""
    if LOG.with_name("publishes").exists():
        status = app.backend.get_task_meta(headers["id"], cache=False)["status"]
        write("publish", headers["id"], status=status)


@lock_extended.connect
def tell_of_renewals(event: LockExtendedEvent, **_: Any) -> None:
    """Write each renewal, where a file asks for that."""
    if LOG.with_name("renewals").exists():
        write("extended", event.resource)


@locked()
def step(self: Any, key: str) -> str:
    """Run as a part of a canvas; what it returns names it."""
    write("step", key, id=self.request.id, stamps=self.request.stamps)
    return key


asks = locked(name="tests.asks", lock_on_conflict=lambda contention: "defer")(step.run.__func__)


@locked(name="tests.becomes")
def becomes(self: Any, key: str, other: str, many: int = 0) -> str:
    """Become another step, or a chord of so many; one more is sent, of this very key."""
    write("became", key)
    step.delay(key)
    parts = [step.si(other) for _ in range(many)]
    return str(self.replace(chord(parts, join.s()) if many else step.si(other)))


@functools.cache
def node_clients() -> list[redis.Redis]:
    return [redis.Redis.from_url(url) for url in NODES.split(",")]


def lose(key: str) -> None:
    """Let a lock be another's for a moment, and have its holder renew at once, and so find out."""
    for node in node_clients():
        node.set(f"{{redlock}}:lock:{key}", "theirs", px=100)
    session = redlock_of(app).session
    session.watchdog.renew_by(session.clock.now())


def hold_on(self: Any, key: str, how: str) -> str:
    """Write that it has begun; then go on until it is told, or for longer than any test."""
    write("begin", key)
    ways: dict[str, Callable[[], Any]] = {
        "sleeps": lambda: time.sleep(100),
        "computes": lambda: all(sum(range(1000)) for _ in range(10**7)),
        "works in steps": lambda: [time.sleep(0.02) for _ in range(5000)],
        "asks": lambda: [(time.sleep(0.02), self.lock.ensure()) for _ in range(5000)],
        "logs": log_on,
        "takes others": lambda: take_others(key),
    }
    try:
        ways[how]()
    except LockLost as lost:
        write("told", key, ended=lost.body_ended)
        raise
    finally:
        write("over", key)
    return "went on"


def log_on() -> None:
    with Path(os.devnull).open("w") as nowhere:
        handler = logging.StreamHandler(nowhere)
        logger = logging.Logger("of the body")
        logger.addHandler(handler)
        while True:
            logger.info("a step")
            time.sleep(0.001)


def take_others(key: str) -> None:
    for n in range(10**9):
        with work.lock_for(f"{key}-{n % 5}", wait=5):
            pass


holds_on = locked(name="tests.holds_on", lock_ttl=TTL)(hold_on)
holds_on_late = locked(name="tests.holds_on_late", lock_ttl=TTL, acks_late=True)(hold_on)


@locked(name="tests.goes_on", lock_ttl=TTL)
def goes_on(self: Any, key: str) -> str:
    """Go on until a file says so; what strikes it is caught."""
    write("begin", key)
    while not LOG.with_name("go on").exists():
        with contextlib.suppress(LockLost):
            time.sleep(0.02)
    return "went on"


@locked(name="tests.waits", lock_ttl=TTL)
def waits(self: Any, key: str) -> None:
    """Go on until a file says so."""
    with written(key):
        wait_for_file("go on")
    write("waited", key, held=self.lock.held)


@locked(name="tests.gives_nobody_way", lock_ttl=TTL)
def gives_nobody_way(self: Any, key: str, seconds: float, *, in_c: bool) -> bool:
    """Keep the processor for so many s; in C, with the interpreter's lock, too."""
    write("begin", key)
    if in_c:
        ctypes.PyDLL(None).sleep(int(seconds))
    end = time.monotonic() + (0 if in_c else seconds)
    while time.monotonic() < end:
        sum(range(1000))
    return bool(self.lock.held)


@locked(name="tests.keeps_the_interpreter", lock_ttl=TTL)
def keeps_the_interpreter(self: Any, key: str, pipe: str) -> None:
    """Block in C with the interpreter's lock, until somebody opens a named pipe for writing.

    It begins once there is a file of that name with " may" behind it: its message is acknowledged.
    """
    write("begin", key)
    while not Path(f"{pipe} may").exists():
        time.sleep(0.02)
    ctypes.PyDLL(None).open(os.fsencode(pipe), os.O_RDONLY)


@locked(name="tests.kills_its_worker", lock_ttl=TTL, acks_late=True)
def kills_its_worker(self: Any, key: str) -> None:
    """Kill this process each time: in a pool of threads the worker's main one."""
    write("begin", key, id=self.request.id)
    os.kill(os.getpid(), signal.SIGKILL)


def swallow(self: Any, key: str, then: str) -> str:
    """Catch what says that the lock is lost, and end in another way."""
    first = not LOG.read_text().count(f'"swallowed:{then}"')
    write("begin", key)
    if not first:
        return "again"
    try:
        while self.lock.held:
            time.sleep(0.02)
        time.sleep(3)  # in which it is struck, in a pool that can
    except LockLost:
        pass
    write(f"swallowed:{then}", key)
    return str(ways_to_end(self, key)[then]())


swallows = locked(name="tests.swallows", lock_ttl=TTL)(swallow)


@locked(name="tests.ends_about_then", lock_ttl=TTL, acks_late=True)
def ends_about_then(self: Any, key: str, seconds: float, nested: bool = False) -> list[str]:
    """Lose the lock, and end so many s after its renewal began."""
    write("begin", key)
    ends: list[float] = []

    def lose_soon() -> None:
        lose(f"k:{key}")
        ends.append(time.monotonic() + seconds)

    threading.Thread(target=lose_soon).start()
    while not ends or time.monotonic() < ends[0]:
        if nested:
            with work.lock_for(f"nested-{key}"):
                pass
        else:
            time.sleep(0.0005)
    return ["ended"] * 30_000  # so that storing it takes a while, too


@locked(lock_ttl=TTL, autoretry_for=(LockLost,), default_retry_delay=0.1, max_retries=2)
def autoretried_loss(self: Any, key: str) -> int:
    write("begin", key)
    if self.request.retries == 0:
        lose(f"k:{key}")
        time.sleep(100)
    return int(self.request.retries)


def decide(contention: Contention) -> Any:
    """Write what is told, and say what the arguments ask for."""
    word = contention.args[1]
    write("asked", contention.args[0], resource=contention.resource, holder=contention.holder,
          deferrals=contention.deferrals, waited=contention.waited, task=contention.task.name,
          kwargs=dict(contention.kwargs))  # fmt: skip
    if word == "raise":
        raise KeyError("no word")
    if word == "at last defer":
        wait_for_file(f"{contention.args[0]} decides")
    if word == "later skip" and contention.deferrals < 2:
        return "defer"
    return word.split()[-1]


@locked(name="tests.decided", lock_on_conflict=decide, autoretry_for=(KeyError,))
def decided(self: Any, key: str, word: str, more: int = 0) -> str:
    write("begin", key)
    return key


@locked(name="tests.decided_late", lock_on_conflict=decide, acks_late=True)
def decided_late(self: Any, key: str, word: str) -> None:
    write("begin", key)
    raise ValueError("body")


class SlowToEnd(LockedTask):
    """Its hook goes on after its outcome is stored."""

    abstract = True

    def on_failure(self, error: Any, task_id: str, args: Any, *more: Any) -> None:
        write("hook", args[0])
        wait_for_file(f"{args[0]} hook ends")


slow_to_end = locked(base=SlowToEnd, lock_on_conflict=decide, acks_late=True,
                     name="tests.slow_to_end")(decided_late.run.__func__)  # fmt: skip


def once(self: Any, key: str, how: str = "", value: str = "") -> str:
    """Write that it runs; then end in the way that is asked for, the first time."""
    write("once", key, value=value, retries=self.request.retries)
    ways = ways_to_end(self, key) | {
        "": lambda: None,
        "retry": lambda: wait_to_retry(self, key),
        "die": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "stay": lambda: time.sleep(100),
        "wait": lambda: wait_for_file(key),
    }
    ways[how]()
    return value


def wait_to_retry(self: Any, key: str) -> None:
    """Retry once there is a file of the key's name; then go on until there is a second file."""
    if self.request.retries:
        wait_for_file(f"{key} again")
        return
    wait_for_file(key)
    self.retry(countdown=0.2, max_retries=3)


once_early = unique(name="tests.once_early")(once)
once_late = unique(name="tests.once_late", acks_late=True)(once)
once_skips = unique(name="tests.once_skips", lock_on_conflict="skip")(once)
once_fails = unique(name="tests.once_fails", lock_on_conflict="fail")(once)
once_careless = unique(base=Careless, on_failure=LockedTask.on_failure,
                       name="tests.once_careless")(once)  # fmt: skip
once_to_start = unique(name="tests.once_to_start", lock_unique_until="started")(once)
once_expires = unique(name="tests.once_expires", expires=100)(once)


class Unstoring(RedisBackend):
    """A result backend that takes no RETRY and no empty result."""

    def store_result(self, task_id: str, result: Any, state: str, *args: Any, **more: Any) -> Any:
        if state == "RETRY" or (state == "SUCCESS" and not result):
            raise ValueError("not stored")
        return super().store_result(task_id, result, state, *args, **more)


unstored = functools.partial(
    unique, backend=Unstoring(app=app, url=os.environ.get("TEST_BACKEND", "redis://nowhere"))
)
once_unstored = unstored(name="tests.once_unstored")(once)
once_unstored_late = unstored(name="tests.once_unstored_late", acks_late=True)(once)
once_by_args = unique(name="tests.once_by_args", lock_key=None, lock_args=["key"])(once)
DEBOUNCE = 2.0  # s: longer than a burst of sends mostly takes
debounced = {"lock_unique_for": None, "lock_debounce": DEBOUNCE}
latest = unique(name="tests.latest", **debounced)(once)
latest_late = unique(name="tests.latest_late", **debounced, acks_late=True)(once)

in_order = {"lock_unique_until": "started", "lock_on_duplicate": "newest"}
newest = unique(name="tests.newest", **in_order)(once)
newest_late = unique(name="tests.newest_late", **in_order, acks_late=True)(once)


@unique(name="tests.newest_paced", **in_order, acks_late=True)
def newest_paced(self: Any, key: str, seconds: float, value: int) -> int:
    write("paced", key, value=value)
    time.sleep(seconds)
    write("paced end", key, value=value)
    return value


@unique(name="tests.once_returns", lock_key="step:{key}")
def once_returns(self: Any, key: str) -> str:
    """Run as a part of a canvas."""
    write("once", key, value="", retries=self.request.retries)
    return key
