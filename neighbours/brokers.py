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


def rabbitmq(run: Run, queue_type: str, exchange_type: str) -> Seen:
    run.versions["RabbitMQ"] = servers.rabbitmq_version()
    conf = {"task_default_queue_type": queue_type, "task_default_exchange_type": exchange_type}
    with servers.rabbitmq() as url:
        return run.story(broker=url, conf=conf)


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
        partial(rabbitmq, queue_type="classic", exchange_type="direct"),
        distributions=("amqp",),
    ),
    Neighbour(
        "RabbitMQ, quorum queues",
        "brokers",
        "On a direct exchange, messages that wait fill the prefetch of a worker.",
        partial(rabbitmq, queue_type="quorum", exchange_type="topic"),
        distributions=("amqp",),
        verdict="works with this setting",
        setting='task_default_exchange_type = "topic"',
    ),
)
