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
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from celery import bootsteps
from kombu.common import Broadcast
from kombu.entity import Exchange, Queue

from celery_redlock.compatibility import find

_DELAY_MODULE = "kombu.transport.native_delayed_delivery:"
_MAX_LEVEL = find(f"{_DELAY_MODULE}MAX_LEVEL", None)
_level_name = find(f"{_DELAY_MODULE}level_name", None)
_calculate_routing_key = find(f"{_DELAY_MODULE}calculate_routing_key", None)
_detect_quorum_queues = find("celery.utils.quorum_queues:detect_quorum_queues", None)
# else a deferral waits in a worker for its countdown, as with any other queue
_CAN_DELAY = None not in (_MAX_LEVEL, _level_name, _calculate_routing_key, _detect_quorum_queues)

_MapRoute = find("celery.app.routes:MapRoute", None)  # else no entry of task_routes is known

QUEUE_INFO = "redlock_queue"  # in the delivery info of a message, the queue that it came through

# Source for both: kombu.transport.native_delayed_delivery
DELAYED_EXCHANGE = (
    "celery_delayed_delivery"  # the exchange by which RabbitMQ brings back what it kept
)
_DELAY_PREFIX = re.compile(r"^(?:(?:[01]\.){28})+")


@dataclass(frozen=True)
class Route:
    """Where a message was published to, before RabbitMQ may have delayed it.

    exchange: its name, "" for the default exchange; None if RabbitMQ delayed the message and its
    exchange was not recorded. queue: the queue that it came through, None if unknown.
    """

    exchange: str | None = None
    routing_key: str = ""
    queue: str | None = None

    @classmethod
    def of(
        cls,
        address: Mapping[str, Any] | None,
        original_exchange: str | None = None,
        queue: str | None = None,
    ) -> Route:
        """Return the route in a run's delivery info, or in the options of a send.

        original_exchange: of a message that RabbitMQ delayed.
        """
        address = address or {}
        exchange = address.get("exchange") or ""
        key = str(address.get("routing_key") or "")
        exchange = str(getattr(exchange, "name", exchange))
        if exchange == DELAYED_EXCHANGE:
            return cls(original_exchange, _DELAY_PREFIX.sub("", key), queue)
        return cls(exchange, key, queue)

    @property
    def home_queue(self) -> str | None:
        """The one queue that a message came through; None if unknown."""
        return self.routing_key if self.queue is None and self.exchange == "" else self.queue

    def reaches(self, queue: Queue, headers: Mapping[str, Any]) -> bool:
        """Return whether a message to here comes into a queue, by its declared bindings.

        headers: of the message. False if that is known to the broker alone.
        """
        if self.exchange == "":
            return bool(queue.name == self.routing_key)
        return any(
            self.exchange in (None, exchange.name) and self._fits(exchange, key, arguments, headers)
            for exchange, key, arguments in bindings_of(queue)
        )

    def _fits(
        self, exchange: Exchange, key: str, arguments: Mapping[str, Any], headers: Mapping[str, Any]
    ) -> bool:
        if exchange.type == "direct":
            return key == self.routing_key
        if exchange.type == "headers":
            return _has_headers(headers, arguments)
        if exchange.type == "fanout" and self.exchange is not None:
            return True
        return exchange.type in ("fanout", "topic") and self.has_topic(key)

    def has_topic(self, binding: str) -> bool:
        """Return whether its routing key fits a binding of a topic exchange."""
        # word by word: a pattern with several "#" would try each way to part the words among them
        words, parts = (key.split(".") if key else [] for key in (self.routing_key, binding))
        counts = {0}  # of words that the parts of the binding so far may stand for
        for part in parts:
            if part == "#":
                counts = set(range(min(counts, default=len(words) + 1), len(words) + 1))
            else:
                counts = {
                    count + 1
                    for count in counts
                    if count < len(words) and part in ("*", words[count])
                }
        return len(words) in counts


def _has_headers(headers: Mapping[str, Any], arguments: Mapping[str, Any]) -> bool:
    """Return whether a headers exchange hands a message on by a binding with these arguments.

    Source: https://www.rabbitmq.com/tutorials/amqp-concepts#exchange-headers
    """
    mode = arguments.get("x-match", "all")
    required = {
        name: value
        for name, value in arguments.items()
        if name != "x-match" and (mode.endswith("-with-x") or not name.startswith("x-"))
    }
    matches = [
        name in headers and value in (None, headers[name]) for name, value in required.items()
    ]
    return any(matches) if mode.startswith("any") else all(matches)


def bindings_of(queue: Queue) -> Iterator[tuple[Exchange, str, Mapping[str, Any]]]:
    """Give each exchange that a queue is declared to be bound to, with key and arguments."""
    if queue.exchange:
        yield (
            queue.exchange,
            str(queue.routing_key or ""),
            getattr(queue, "binding_arguments", None) or {},
        )
    for binding in queue.bindings or ():
        yield binding.exchange, str(binding.routing_key or ""), binding.arguments or {}


def queue_of(app: Any, route: Route, cache: dict[tuple[str | None, str], str]) -> str:
    """Return the queue that a message came through, or the one that its route leads to.

    If none is declared there, it is the routing key. cache: queues found before, by
    exchange and routing key; changed.
    """
    if route.queue is not None:
        return route.queue
    key = route.routing_key
    cached = cache.get((route.exchange, key))
    if cached is not None:
        return cached
    reached = _queue_reached(app, route, {})
    if reached is None:
        return key
    cache[route.exchange, key] = reached
    return reached


def _queue_reached(app: Any, route: Route, headers: Mapping[str, Any]) -> str | None:
    """Return the first declared queue that a message to here comes into, None if there is none.

    One that is bound by this very key goes before those whose topic fits.
    """
    reached = [queue for queue in app.amqp.queues.values() if route.reaches(queue, headers)]
    if not reached:
        return None
    key = route.routing_key
    bound_by_key = (
        queue for queue in reached if key in [bound for _, bound, _ in bindings_of(queue)]
    )
    return str(next(bound_by_key, reached[0]).name)


class FixedRoute:
    """A router for one send, which returns the route that was found before.

    route_options: the options that the route has set or changed.
    """

    def __init__(self, route_options: Mapping[str, Any]) -> None:
        self.route_options = route_options

    def route(self, options: Mapping[str, Any], *_: Any, **__: Any) -> dict[str, Any]:
        """Return the options of the send with its route; what was added to headers stays."""
        routed = {**options, **self.route_options}
        if self.route_options.get("headers") and options.get("headers"):
            routed["headers"] = {**self.route_options["headers"], **options["headers"]}
        return routed


def route_send(
    task: Any, args: Any, kwargs: Any, options: Mapping[str, Any], own_names: Collection[str]
) -> tuple[str | None, FixedRoute]:
    """Find the route of a send; return its queue, None if unknown, and the route to send it by.

    A router of the user's own may count its calls, so that it is asked once for each send.
    options: as of `send_task`, which takes those in `own_names` for itself.
    """
    router = options.get("router") or task.app.amqp.router
    task_name = options.get("route_name") or task.name
    options_to_route = {name: value for name, value in options.items() if name not in own_names}
    routed = router.route(dict(options_to_route), task_name, args, kwargs, task)
    changed = {
        name: value for name, value in routed.items() if value is not options_to_route.get(name)
    }
    return _queue_to(task, routed), FixedRoute(changed)


def routed_queue(task: Any, args: Any = (), kwargs: Any = None) -> str | None:
    """Return the queue to which a task is routed, without a send; None if it is unknown.

    A function that routes may count its calls, or choose at random, so that none is called.
    """
    options = _routing_of(task)
    router = task.app.amqp.router
    if all(type(route) is _MapRoute for route in getattr(router, "routes", [router]) or ()):
        return _queue_to(task, router.route(options, task.name, args, kwargs or {}, task))
    return _queue_to(task, options) if options.get("queue") else None


def queue_of_call(task: Any, args: Any, kwargs: Any) -> str:
    """Return the queue to which a call would be sent that runs here instead; "" if unknown."""
    return route_send(task, args, kwargs, _routing_of(task), ())[0] or ""


def _queue_to(task: Any, options: Mapping[str, Any]) -> str | None:
    """Return the queue that the options of a send lead to, None if the broker alone knows it.

    Source: celery.app.amqp: `send_task_message`, of a queue's exchange and routing key.
    """
    queue = options.get("queue")
    route = Route.of(options)
    if queue is not None and not (route.exchange and route.routing_key):
        name = str(getattr(queue, "name", queue))
        declared = queue if hasattr(queue, "exchange") else task.app.amqp.queues.get(name)
        exchange = getattr(declared, "exchange", None)
        exchange_type = options.get("exchange_type") or getattr(exchange, "type", "direct")
        if exchange_type == "direct" or (not route.exchange and exchange_type == "fanout"):
            return name
        if not route.exchange and exchange is not None:
            own_key = str(getattr(declared, "routing_key", ""))
            if exchange_type == "topic" and route.routing_key in ("", own_key):
                return name
            route = Route(str(exchange.name), route.routing_key or own_key)
    if route.exchange == "":
        return route.routing_key
    headers = {"task": task.name, **(options.get("headers") or {})}
    return _queue_reached(task.app, route, headers)


def _routing_of(task: Any) -> dict[str, Any]:
    """Return the options of a task that a router may read."""
    get_options = getattr(task, "_get_exec_options", None)
    if get_options is not None:
        return dict(get_options())
    return {name: getattr(task, name, None) for name in ("queue", "exchange", "routing_key")}


def has_quorum_queues(app: Any) -> bool:
    """Return whether Celery lets the broker, a RabbitMQ, keep delayed messages."""
    driver = driver_of(app)
    return driver == "amqp" and bool(_CAN_DELAY and _detect_quorum_queues(app, driver)[0])


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
        for exchange, key, _ in list(bindings_of(queue))[: 1 if queue.exchange else None]
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
        exchange(channel).bind_to(DELAYED_EXCHANGE, routing_key=topic)
        queue(channel).bind_to(exchange.name, routing_key=topic)


def has_way_back(app: Any, route: Route) -> bool:
    """Return whether a message can be put back without a copy of it for other queues.

    kombu's virtual transports carry a fan-out past all queues. A message whose queue is unknown
    goes back to its exchange.
    """
    is_fanned_out = any(
        exchange.type == "fanout" and exchange.name == route.exchange
        for queue in app.amqp.queues.values()
        for exchange, _, _ in bindings_of(queue)
    )
    return not is_fanned_out or (route.queue is not None and driver_of(app) == "amqp")


def whole_seconds(countdown: float) -> float:
    """Return a countdown, s, as RabbitMQ can keep it: whole seconds from 1 upwards."""
    return float(max(1, math.ceil(countdown)))


def delay_options(route: Route, countdown: float) -> dict[str, Any]:
    """Return the options of a publish that has RabbitMQ keep a message and bring it back.

    countdown: s, as of `whole_seconds`. Source: celery.app.base: Celery.send_task.
    """
    delay_key = _calculate_routing_key(int(countdown), route.routing_key)
    delay_exchange = Exchange(_level_name(_MAX_LEVEL), type="topic")
    return {
        "exchange": delay_exchange,
        "routing_key": delay_key,
        "exchange_type": "topic",
        "declare": [],
    }


def send_options(app: Any, route: Route) -> dict[str, Any]:
    """Return the options of a publish that bring a message back to where it came from, at once.

    A queue that goes with its consumer is not declared anew, nor one that the app does not know: it
    is there in most cases, for the message came through it. Source: celery.app.amqp.
    """
    key = route.routing_key
    home_queue = route.home_queue
    if home_queue is None:
        exchange = DELAYED_EXCHANGE if route.exchange is None else route.exchange
        # said to be a topic: by a direct exchange Celery would take an empty key for none
        return {"exchange": exchange, "routing_key": key, "exchange_type": "topic", "declare": []}
    declared = app.amqp.queues.get(home_queue)
    is_lasting = declared is not None and not (declared.auto_delete or declared.exclusive)
    declare = [declared] if is_lasting else []
    return {
        "queue": Queue(home_queue),
        "exchange": "",
        "routing_key": home_queue,
        "declare": declare,
    }


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
        if not hasattr(consume, QUEUE_INFO):
            channel.basic_consume = _recording(consume)


def _recording(consume: Callable[..., Any]) -> Callable[..., Any]:
    def basic_consume(queue: str, *args: Any, callback: Any = None, **options: Any) -> Any:
        def deliver(message: Any) -> Any:
            delivery_info = getattr(message, "delivery_info", None)
            if isinstance(delivery_info, dict):
                delivery_info[QUEUE_INFO] = queue
            return callback(message)

        return consume(queue, *args, callback=callback and deliver, **options)

    functools.update_wrapper(basic_consume, consume)
    setattr(basic_consume, QUEUE_INFO, True)
    return basic_consume
