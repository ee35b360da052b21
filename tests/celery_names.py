"""Private names of Celery, kombu, billiard and redis-py without which the package does less.

No run and no worker looks for them: a test does, with each Celery that CI installs. What the
package does without one costs neither a lock nor a message, and `otherwise` says what it costs.
"""

from __future__ import annotations

from dataclasses import dataclass

from celery_redlock.compatibility import PrivateName


@dataclass(frozen=True)
class LesserName(PrivateName):
    """A private name that may be missing. is_optional: it is, with a version that CI installs."""

    otherwise: str = ""
    is_optional: bool = False


_NATIVE = "kombu.transport.native_delayed_delivery"
_REQUEST = "celery.worker.request:Request"
_CONSUMER = "celery.worker.consumer.consumer:Consumer"
_STRATEGY = "celery.worker.strategy:default"
_REDIS = "kombu.transport.redis:Channel"
_HELD = "a deferral waits in a worker, as with other queues than RabbitMQ's quorum queues"
_SLOWER = "a deferral takes longer"
_VIRTUAL = "kombu.transport.virtual.base"
_LATER = "a dead worker's messages come back after the visibility timeout"
_UNREAD = "a busy worker may have a message that it has not noted, as without this package"
_LAST = "a message that a worker gives back goes to the end of its queue"
_CUT = "a soft time limit is held off whatever handles it"
_RATE = "what waited in a worker for its lock does not wait for Celery's rate limit as well"
_ENDS = "a worker may end with its broker, and is started anew"
_OF_CHILD = "the lock of a run that is killed there stays until its lease ends"
_TWICE = "a message may be ended, or told of, twice"
_BESIDE = "a beat that has lost its lock saves what it sent before, or sends what it has begun"

LESSER = (
    LesserName("billiard.einfo:ExceptionInfo", "describe a deferral", otherwise=_SLOWER),
    LesserName("billiard.einfo:ExceptionWithTraceback", "describe a deferral", otherwise=_SLOWER),
    LesserName("celery.app.trace:ExceptionInfo", "describe a deferral", otherwise=_SLOWER),
    LesserName("billiard.pool:SIG_SOFT_TIMEOUT", "send a message whole", otherwise=_CUT),
    LesserName("billiard.pool:soft_timeout_sighandler", "send a message whole", otherwise=_CUT),
    LesserName(
        "billiard.process:current_process", "number metrics", "", otherwise="pids number them"
    ),
    LesserName(
        "celery.app.utils:find_app",
        "start the workers of a drill",
        otherwise="the command drill starts no worker",
    ),
    LesserName(
        "celery.app.routes:MapRoute",
        "ask for the queue of a task without a send",
        otherwise="lock_for asks for its queue wherever task_routes is set",
    ),
    LesserName(
        "celery.app.task:Task.apply_async.send_task",
        "compare a send with earlier ones as it is published",
        otherwise="a unique send is not deduplicated",
    ),
    LesserName(
        "celery.app.task:Task._dump_pydantic_arguments",
        "make a key of a Pydantic model",
        otherwise="a key of a model is refused, or differs from that of its dump",
        is_optional=True,
    ),
    LesserName(
        "celery.app.task:Task._get_exec_options",
        "find the queue of a send",
        "",
        otherwise="a router sees a task's queue, exchange and routing key alone",
    ),
    LesserName(
        "celery._state:_task_stack",
        "switch locks off in tests",
        otherwise="for tests",
        is_optional=True,
    ),
    LesserName(
        "celery.app.annotations:resolve_all",
        "find lock options of a task that takes no lock",
        "anno, task",
        otherwise="where annotations are set, such an option is not refused",
    ),
    LesserName(
        "celery.app.autoretry:add_autoretry_behaviour",
        "lock around each try",
        "task, ...",
        otherwise="the lock of an adopted task with autoretry is taken around its retry, too",
    ),
    LesserName(
        "celery.app.autoretry:add_autoretry_behaviour._orig_run",
        "lock around each try",
        otherwise="as above",
    ),
    LesserName(
        "celery.app.base:Celery._finalize_mutex",
        "check an app that finalizes at its end",
        otherwise="what is wrong with it is raised earlier",
    ),
    LesserName(
        "celery.app.base:Celery._pending",
        "tell an app's own tasks from shared ones",
        otherwise="an app with shared locked tasks needs nodes at a worker's start",
    ),
    LesserName(
        "celery.backends.base:DisabledBackend",
        "find out whether results are stored",
        otherwise="a warning for each state that no backend takes",
    ),
    LesserName(
        "celery.backends.redis:RedisBackend.on_connection_error",
        "end the wait for a result backend",
        "max_retries, exc, intervals, retries",
        otherwise="a result backend that hangs delays what waits for its state",
        is_optional=True,  # redis-py may be older than what Celery asks for
    ),
    LesserName(
        "celery.concurrency:get_implementation", "see whether a pool forks", "cls",
        otherwise=_OF_CHILD,
    ),
    LesserName(
        "celery.local:Proxy._get_current_object", "find the app of a child", "",
        otherwise="a child connects with its first lock",
    ),
    LesserName(
        "celery.utils.quorum_queues:detect_quorum_queues", "see how to delay", "app, driver_type",
        otherwise=_HELD,
    ),
    LesserName(f"{_NATIVE}:MAX_LEVEL", "delay a message", otherwise=_HELD),
    LesserName(
        f"{_NATIVE}:calculate_routing_key", "delay a message", "countdown, routing_key",
        otherwise=_HELD,
    ),
    LesserName(f"{_NATIVE}:level_name", "delay a message", "level, ...", otherwise=_HELD),
    LesserName("kombu.utils.json:dumps", "send to a queue's head", "s, ...", otherwise=_LAST),
    LesserName(f"{_REDIS}._put", "send to a queue's head", "queue, message, ...", otherwise=_LAST),
    LesserName(f"{_REDIS}._q_for_pri", "send to a queue's head", "queue, pri", otherwise=_LAST),
    LesserName(
        f"{_REDIS}._get_message_priority", "send to a queue's head", "message, reverse",
        otherwise=_LAST,
    ),
    LesserName(f"{_VIRTUAL}:Transport._callbacks", "name a worker lease in a delivery tag",
               otherwise=_LATER),
    LesserName(f"{_REDIS}._fanout_queues", "leave what is sent to each worker", otherwise=_LATER),
    LesserName(f"{_REDIS}._in_poll", "read what was popped", otherwise=_UNREAD),
    LesserName(f"{_VIRTUAL}:QoS.can_consume", "read what was popped", "", otherwise=_UNREAD),
    LesserName(f"{_VIRTUAL}:QoS._quick_ack", "forget a message that was moved", otherwise=_LATER),
    LesserName(
        f"{_REQUEST}.on_accepted", "begin nothing that was moved while it waited for a thread",
        "pid, time_accepted", otherwise="it begins, and finds its lock taken",
    ),
    LesserName(
        f"{_REDIS}._expires", "let a queue expire", otherwise="it may stay", is_optional=True
    ),  # since kombu 5.7
    LesserName(
        "kombu.entity:Queue.consume.basic_consume", "record the queue of a message",
        otherwise="a message goes back by its exchange and routing key",
    ),
    LesserName("kombu.connection:Connection.close", "survive a lost broker", "", otherwise=_ENDS),
    LesserName(
        f"{_CONSUMER}.connection_for_read", "survive a lost broker", "heartbeat", otherwise=_ENDS
    ),
    LesserName(
        f"{_CONSUMER}.connect.connection_for_read", "survive a lost broker", otherwise=_ENDS
    ),
    LesserName(
        f"{_CONSUMER}.call_soon_ack", "acknowledge in turn", "p, ...",
        otherwise="greenlets may acknowledge at once: before Celery 5.7 they do not",
        is_optional=True,
    ),  # since Celery 5.7
    LesserName(
        f"{_CONSUMER}._limit_task", "keep a rate limit", "request, bucket, tokens", otherwise=_RATE
    ),
    LesserName(
        f"{_CONSUMER}._limit_post_eta", "keep a rate limit", "request, bucket, tokens",
        otherwise=_RATE,
    ),
    LesserName(f"{_CONSUMER}._limit_move_to_pool", "keep it", "request", otherwise=_RATE),
    LesserName(f"{_STRATEGY}._limit_post_eta", "keep a rate limit", otherwise=_RATE),
    LesserName(
        f"{_STRATEGY}.apply_eta_task", "dispatch a message once",
        otherwise="a message that was dispatched comes once more, and finds its lock taken",
    ),
    LesserName(
        f"{_REQUEST}._eta_timer_entry", "cancel Celery's timer",
        otherwise="a message that was dispatched is looked at once more", is_optional=True,
    ),  # since Celery 5.7
    LesserName(f"{_REQUEST}._already_revoked", "revoke a message once", otherwise=_TWICE),
    LesserName(f"{_REQUEST}._already_cancelled", "leave it to the broker", otherwise=_TWICE),
    LesserName(f"{_REQUEST}.reject", "tell an end from a message handed back", "requeue",
               otherwise=_OF_CHILD),
    LesserName(f"{_REQUEST}.terminate", "tell a child that its message ends", "pool, signal",
               otherwise=_OF_CHILD),
    LesserName("redis.connection:parse_url", "read a Sentinel's address", "url",
               otherwise="a pool of connections reads it"),
    LesserName(
        "redis.sentinel:Sentinel._force_master_ip", "find a primary", otherwise="as it is named",
        is_optional=True,
    ),  # redis-py 5 has none
    LesserName("celery.beat:PersistentScheduler._store", "save nothing", otherwise=_BESIDE),
    LesserName("celery.beat:Scheduler.producer", "send nothing", otherwise=_BESIDE),
    LesserName("celery.beat:Scheduler.sync", "save nothing", "", otherwise=_BESIDE),
    LesserName("kombu.messaging:Producer.publish", "retry nothing", otherwise=_BESIDE),
)  # fmt: skip
