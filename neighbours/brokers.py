"""The brokers: each runs the story, with the results in a Valkey beside it."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from functools import partial
from typing import Any

from neighbours import servers
from neighbours.row import DOES_NOT, NOT_RUN, Neighbour, Seen
from neighbours.run import Run

FORGETS = frozenset(("lost", "redelivery"))  # of a broker that keeps no unacknowledged message


def redis(run: Run) -> Seen:
    with servers.redis() as broker:
        run.versions["Redis"] = servers.version_of(broker)
        return run.story(broker=broker.url)


def rabbitmq(run: Run, queue_type: str) -> Seen:
    run.versions["RabbitMQ"] = servers.rabbitmq_version()
    with servers.rabbitmq() as url:
        return run.story(broker=url, conf={"task_default_queue_type": queue_type})


def valkey(run: Run) -> Seen:
    with servers.valkey() as broker:
        run.versions["Valkey"] = servers.version_of(broker)
        return run.story(broker=broker.url)


def sqs(run: Run) -> Seen:
    """Run with the SQS of moto, which answers as Amazon's does."""
    command = [str(run.python), "-m", "moto.server", "-p"]
    env = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    log = run.folder / "moto.log"
    with servers.server(lambda port: [*command, str(port)], log, env=env) as port:
        options = {"is_secure": False, "region": "eu-west-1", "visibility_timeout": 30}
        conf = {"broker_transport_options": {**options, "polling_interval": 0.2}}
        return run.story(env, broker=f"sqs://a:b@localhost:{port}", conf=conf)


def filesystem(run: Run) -> Seen:
    folders = {name: run.folder / name for name in ("messages", "processed", "control")}
    for folder in folders.values():
        folder.mkdir()
    options = {
        "data_folder_in": str(folders["messages"]), "data_folder_out": str(folders["messages"]),
        "processed_folder": str(folders["processed"]), "control_folder": str(folders["control"]),
    }  # fmt: skip
    return forgetful(run, broker="filesystem://", conf={"broker_transport_options": options})


def sqlalchemy(run: Run) -> Seen:
    with servers.postgresql() as url:
        run.versions["PostgreSQL"] = servers.postgresql_version(url)
        return forgetful(run, broker=f"sqla+postgresql+psycopg{url.removeprefix('postgresql')}")


def forgetful(run: Run, **setup: Any) -> Seen:
    """Run with a broker of which each worker has to warn at its start."""
    seen = run.story(patience=15, **setup)
    logs = [path.read_text() for path in run.folder.glob("worker-*.log")]
    if not all("such a broker never redelivers" in log for log in logs):
        return replace(seen, differences=(*seen.differences, "no warning at the start"))
    return replace(seen, shows={**seen.shows, "at a worker's start": "a WARNING"})


def celery_redis_plus(run: Run) -> Seen:
    with servers.valkey() as broker:
        run.versions["Valkey"] = servers.version_of(broker)
        conf = {
            "broker_transport": "celery_redis_plus:Transport",
            "broker_transport_options": {"visibility_timeout": 30},
        }
        return run.story(broker=broker.url, conf=conf)


def pgmq(run: Run) -> Seen:
    """Run with the queues that the client's own SQL makes, without the extension."""
    with servers.postgresql() as url:
        run.versions["PostgreSQL"] = servers.postgresql_version(url)
        make = "import sys; from psycopg import connect; from pgmq.install import *; "
        make += "connect(sys.argv[1], autocommit=True).execute(get_embedded_install_sql())"
        subprocess.run([str(run.python), "-c", make, url], check=True)
        conf = {
            "broker_transport_options": {
                "init_extension": False, "visibility_timeout": 30, "wait_time_seconds": 1,
            }
        }  # fmt: skip
        return run.story(broker=f"pgmq{url.removeprefix('postgresql')}", conf=conf)


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
    Neighbour(
        "Valkey",
        "brokers",
        "A killed worker's messages are back in seconds.",
        valkey,
        distributions=("redis",),
    ),
    Neighbour(
        "Amazon SQS",
        "brokers",
        "A killed worker's messages come back, and no worker hears a revoke: SQS has no broadcast.",
        sqs,
        ("kombu[sqs]==5.7.0", "boto3==1.44.8", "pycurl==7.49.0", "moto[server]==5.2.5"),
        faults=frozenset(("revoke",)),
        distributions=("boto3", "pycurl", "moto"),
    ),
    Neighbour(
        "Filesystem",
        "brokers",
        "It keeps no unacknowledged message: what a killed worker ran or held is lost.",
        filesystem,
        verdict=DOES_NOT,
        distributions=("kombu",),
        faults=FORGETS,
    ),
    Neighbour(
        "SQLAlchemy (PostgreSQL)",
        "brokers",
        "It keeps no unacknowledged message: what a killed worker ran or held is lost.",
        sqlalchemy,
        ("SQLAlchemy==2.1.9", "psycopg[binary]==3.3.9"),
        verdict=DOES_NOT,
        faults=FORGETS | {"revoke"},
    ),
    Neighbour(
        "celery-redis-plus",
        "brokers",
        "A killed worker's messages are back after the visibility timeout.",
        celery_redis_plus,
        ("celery-redis-plus==0.4.1", "redis==7.4.1"),
        python="3.13",
    ),
    Neighbour(
        "PGMQ",
        "brokers",
        "A killed worker's messages come back. A command to the workers, as a revoke, is an error.",
        pgmq,
        ("pgmq==1.1.4", "psycopg[binary]==3.3.9", "psycopg-pool==3.3.3"),
        distributions=("pgmq", "psycopg"),
        faults=frozenset(("revoke",)),
    ),
    Neighbour(
        "Kafka",
        "brokers",
        "It has not been tried.",
        verdict=NOT_RUN,
        reason="neither PyPI, npm nor Debian has its server",
        by_hand="start a broker, and run the story with broker_url = confluentkafka://host:9092",
    ),
    Neighbour(
        "MongoDB",
        "brokers",
        "kombu keeps no unacknowledged message there, and a worker warns of that at its start.",
        verdict=NOT_RUN,
        reason="neither PyPI, npm nor Debian 12 has its server",
        by_hand="start mongod, and run the story with broker_url = mongodb://host:27017/broker",
    ),
    Neighbour(
        "Google Cloud Pub/Sub",
        "brokers",
        "It has not been tried.",
        verdict=NOT_RUN,
        reason="neither PyPI, npm nor Debian has its emulator",
        by_hand="start the emulator of the Google Cloud CLI, name it in PUBSUB_EMULATOR_HOST,"
        " and run the story with broker_url = gcpubsub://projects/any",
    ),
)
