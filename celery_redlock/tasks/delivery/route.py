"""Where a message came from, and where it goes back to.

An exchange may give one message to several queues: its copies share an id, and each is to run. So
a deferral goes back to the queue that its copy came through, and not to its exchange. The worker
asks its consumer for that queue: neither AMQP nor kombu's virtual transports write it into a
message.

Where quorum queues are in use, Celery lets RabbitMQ keep a delayed message. It comes back by
another exchange, with the delay before its routing key, and to each queue that is bound to its
topic. Those that it was not put back to let it go.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from celery import bootsteps
from celery.utils.quorum_queues import detect_quorum_queues
from kombu.common import Broadcast
from kombu.entity import Exchange, Queue
from kombu.transport.native_delayed_delivery import MAX_LEVEL, calculate_routing_key, level_name

QUEUE = "redlock_queue"  # the property of a delivery, never of a message, that names its queue

# Source for both: kombu.transport.native_delayed_delivery
CAME_BACK = "celery_delayed_delivery"  # the exchange by which RabbitMQ brings back what it kept
_DELAYED = re.compile(r"^(?:(?:[01]\.){28})+")


@dataclass(frozen=True)
class Route:
    """Where a message was published to, before RabbitMQ may have kept it back.

    exchange: its name, "" for the default one; None if RabbitMQ kept the message back and nobody
    noted it. queue: the one that it came through, None if unknown.
    """

    exchange: str | None = None
    routing_key: str = ""
    queue: str | None = None

    @classmethod
    def of(
        cls, where: Mapping[str, Any] | None, noted: str | None = None, queue: str | None = None
    ) -> Route:
        """Read it from a run's delivery info or from the options of a send.

        noted: the exchange of a message that RabbitMQ kept back.
        """
        where = where or {}
        exchange, key = where.get("exchange") or "", str(where.get("routing_key") or "")
        exchange = str(getattr(exchange, "name", exchange))
        if exchange == CAME_BACK:
            return cls(noted, _DELAYED.sub("", key), queue)
        return cls(exchange, key, queue)

    @property
    def home(self) -> str | None:
        """The one queue that a message came through; None if unknown."""
        return self.routing_key if self.queue is None and self.exchange == "" else self.queue

    def reaches(self, queue: Queue) -> bool:
        """Return whether a message to here comes into a queue, by its declared bindings."""
        if self.exchange == "":
            return bool(queue.name == self.routing_key)
        return any(self._fits(*binding) for binding in bindings_of(queue))

    def _fits(self, exchange: Exchange, binding: str) -> bool:
        if self.exchange not in (None, exchange.name):
            return False
        if exchange.type == "direct":
            return binding == self.routing_key
        return (exchange.type == "fanout" and self.exchange is not None) or self.has_topic(binding)

    def has_topic(self, binding: str) -> bool:
        """Return whether its routing key fits a binding of a topic exchange."""
        # word by word: a pattern with several "#" would try each way to part the words among them
        words, parts = (key.split(".") if key else [] for key in (self.routing_key, binding))
        begun = {0}  # how many words the binding may have taken so far
        for part in parts:
            if part == "#":
                begun = set(range(min(begun, default=len(words) + 1), len(words) + 1))
            else:
                begun = {i + 1 for i in begun if i < len(words) and part in ("*", words[i])}
        return len(words) in begun


def bindings_of(queue: Queue) -> Iterator[tuple[Exchange, str]]:
    """Give each exchange that a queue is declared to be bound to, with the key of the binding."""
    if queue.exchange:
        yield queue.exchange, str(queue.routing_key or "")
    for binding in queue.bindings or ():
        yield binding.exchange, str(binding.routing_key or "")


def queue_of(app: Any, route: Route, known: dict[tuple[str | None, str], str]) -> str:
    """Return the queue that a message came through, or the first one that a send to here reaches.

    A declared queue that is bound by this very key goes before those whose topic fits; if there is
    none, it is the routing key. known: queues found before, by exchange and routing key.
    """
    if route.queue is not None:
        return route.queue
    key = route.routing_key
    found = known.get((route.exchange, key))
    if found is not None:
        return found
    reached = [queue for queue in app.amqp.queues.values() if route.reaches(queue)]
    if not reached:
        return key
    exact = (queue for queue in reached if key in [bound for _, bound in bindings_of(queue)])
    name = known[route.exchange, key] = str(next(exact, reached[0]).name)
    return name


def queue_of_send(
    task: Any, args: Any, kwargs: Any, call_options: Mapping[str, Any] | None = None
) -> str:
    """Return the name of the queue that a send of these arguments goes to.

    call_options: Celery's options of the send; None: the task's own routing.
    """
    options = {**task._get_exec_options(), **(call_options or {})}
    if not options.get("routing_key") or options.get("queue"):
        options = task.app.amqp.router.route(options, task.name, args, kwargs, task)
        if options.get("queue") is not None:
            return str(getattr(options["queue"], "name", options["queue"]))
    return queue_of(task.app, Route.of(options), {})


def has_quorum_queues(app: Any) -> bool:
    """Return whether Celery lets the broker, a RabbitMQ, keep delayed messages."""
    driver = driver_of(app)
    return driver == "amqp" and bool(detect_quorum_queues(app, driver)[0])


def driver_of(app: Any) -> str:
    """Return the kind of broker in kombu's word: "amqp", "redis" and so on."""
    return str(app.producer_pool.connections.connection.transport.driver_type)


def is_kept_by_broker(app: Any, route: Route) -> bool:
    """Return whether RabbitMQ can keep a delayed message to here, and bring it back."""
    return bool(_bindings_of_delay(app, route))


def _bindings_of_delay(app: Any, route: Route) -> list[tuple[Queue, Exchange, str]]:
    """Return the bindings by which RabbitMQ brings a delayed message back to here.

    Source: kombu.transport.native_delayed_delivery, celery.worker.consumer.delayed_delivery: a
    queue is bound by its own exchange, else by its other bindings; direct exchanges and broadcasts
    are left out. What fits no queue would be dropped in silence.
    """
    if not route.routing_key or not has_quorum_queues(app):
        return []
    return [
        (queue, exchange, key)
        for queue in app.amqp.queues.values()
        if not isinstance(queue, Broadcast) and route.queue in (None, queue.name)
        for exchange, key in list(bindings_of(queue))[: 1 if queue.exchange else None]
        if exchange.type != "direct"
        and route.exchange in (None, exchange.name)
        and route.has_topic(key)
    ]


def bind_to_delay(app: Any, route: Route, channel: Any) -> None:
    """Bind the queues that a delayed message to here is brought back to.

    A worker does so at its start, but not for a queue that is added later, and not if its user may
    not. Without a binding RabbitMQ confirms the message, and drops it once its delay has ended.
    Raises a channel error if a queue or the delay is not there, or may not be bound.
    Source: kombu.transport.native_delayed_delivery, which leaves its channel open.
    """
    for queue, exchange, key in _bindings_of_delay(app, route):
        topic = key if key.startswith("#") else f"#.{key}"
        exchange(channel).bind_to(CAME_BACK, routing_key=topic)
        queue(channel).bind_to(exchange.name, routing_key=topic)


def has_way_back(app: Any, route: Route) -> bool:
    """Return whether a message can be put back without a copy of it for other queues.

    kombu's virtual transports carry a fan-out past all queues. A message whose queue is unknown
    goes back to its exchange.
    """
    is_fanned_out = any(
        exchange.type == "fanout" and exchange.name == route.exchange
        for queue in app.amqp.queues.values()
        for exchange, _ in bindings_of(queue)
    )
    return not is_fanned_out or (route.queue is not None and driver_of(app) == "amqp")


def whole_seconds(countdown: float) -> float:
    """Return a countdown, s, as RabbitMQ can keep it: whole seconds from 1 upwards."""
    return float(max(1, math.ceil(countdown)))


def delay_options(route: Route, countdown: float) -> dict[str, Any]:
    """Return the options of a publish that has RabbitMQ keep a message and bring it back.

    countdown: s, as of `whole_seconds`. Source: celery.app.base: Celery.send_task.
    """
    kept = calculate_routing_key(int(countdown), route.routing_key)
    first = Exchange(level_name(MAX_LEVEL), type="topic")
    return {"exchange": first, "routing_key": kept, "exchange_type": "topic", "declare": []}


def send_options(app: Any, route: Route) -> dict[str, Any]:
    """Return the options of a publish that bring a message back to where it came from, at once.

    A queue that goes with its consumer is not declared anew, nor one that the app does not know: it
    is there in most cases, for the message came through it. Source: celery.app.amqp.
    """
    key, home = route.routing_key, route.home
    if home is None:
        exchange = CAME_BACK if route.exchange is None else route.exchange
        # said to be a topic: by a direct exchange Celery would take an empty key for none
        return {"exchange": exchange, "routing_key": key, "exchange_type": "topic", "declare": []}
    declared = app.amqp.queues.get(home)
    lasts = declared is not None and not (declared.auto_delete or declared.exclusive)
    declare = [declared] if lasts else []
    return {"queue": Queue(home), "exchange": "", "routing_key": home, "declare": declare}


class RecordQueueNames(bootsteps.StartStopStep):
    """Has each delivery to a worker say through which queue it came.

    Source: kombu.entity: Queue.consume calls its channel's `basic_consume`, of whatever transport,
    with a callback for this queue alone; what that gets has a `delivery_info`.
    """

    name = "celery_redlock queue names"
    requires = ("celery.worker.consumer.tasks:Tasks",)

    def start(self, parent: Any) -> None:
        """Take part in what the consumer is about to consume, also after a lost connection."""
        channel = parent.task_consumer.channel
        consume = channel.basic_consume
        if not hasattr(consume, QUEUE):
            channel.basic_consume = _naming(consume)


def _naming(consume: Callable[..., Any]) -> Callable[..., Any]:
    def basic_consume(queue: str, *args: Any, callback: Any = None, **options: Any) -> Any:
        def deliver(message: Any) -> Any:
            where = getattr(message, "delivery_info", None)
            if isinstance(where, dict):
                where[QUEUE] = queue
            return callback(message)

        return consume(queue, *args, callback=callback and deliver, **options)

    functools.update_wrapper(basic_consume, consume)
    setattr(basic_consume, QUEUE, True)
    return basic_consume
