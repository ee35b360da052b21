"""The brokers: each runs the story, with the results in a Valkey beside it."""

from __future__ import annotations

from functools import partial

from neighbours import servers
from neighbours.row import Neighbour, Seen
from neighbours.run import Run


def redis(run: Run) -> Seen:
    with servers.redis() as broker:
        run.versions["Redis"] = servers.version_of(broker)
        return run.story(broker=broker.url)


def rabbitmq(run: Run, queue_type: str) -> Seen:
    run.versions["RabbitMQ"] = servers.rabbitmq_version()
    with servers.rabbitmq() as url:
        return run.story(broker=url, conf={"task_default_queue_type": queue_type})


NEIGHBOURS = (
    Neighbour(
        "Redis",
        "brokers",
        "A killed worker's messages are back in seconds.",
        redis,
        distributions=("redis",),
    ),
    Neighbour(
        "RabbitMQ, classic queues",
        "brokers",
        "A killed worker's messages are back as its connection ends.",
        partial(rabbitmq, queue_type="classic"),
        distributions=("amqp",),
    ),
    Neighbour(
        "RabbitMQ, quorum queues",
        "brokers",
        "Messages that wait fill a worker's prefetch, unless the exchange is a topic exchange.",
        partial(rabbitmq, queue_type="quorum"),
        distributions=("amqp",),
    ),
)
