"""The backends: each runs the story, with its messages in a Valkey unless it needs another."""

from __future__ import annotations

from neighbours import servers
from neighbours.row import NOT_RUN, Neighbour, Seen
from neighbours.run import Run

PSYCOPG = "psycopg[binary]==3.3.9"
DJANGO = "Django==5.2.19"


def redis(run: Run) -> Seen:
    with servers.redis() as backend:
        run.versions["Redis"] = servers.version_of(backend)
        return run.story(backend=backend.url)


def rpc(run: Run) -> Seen:
    run.versions["RabbitMQ"] = servers.rabbitmq_version()
    with servers.rabbitmq() as url:
        return run.story(broker=url, backend="rpc://")


def sqlalchemy(run: Run) -> Seen:
    with servers.postgresql() as url:
        run.versions["PostgreSQL"] = servers.postgresql_version(url)
        return run.story(backend=url.replace("postgresql", "db+postgresql+psycopg", 1))


def django_db(run: Run) -> Seen:
    with servers.postgresql() as url:
        run.versions["PostgreSQL"] = servers.postgresql_version(url)
        return run.story(
            env={"DJANGO_SETTINGS_MODULE": "neighbours.django_site"},
            app="neighbours.django_app",
            tasks="neighbours.django_tables",
            backend="django-db",
            more={"database": url, "apps": ["django_celery_results"]},
        )


def filesystem(run: Run) -> Seen:
    results = run.folder / "results"
    results.mkdir()
    return run.story(backend=results.as_uri())


def memcached(run: Run) -> Seen:
    with servers.memcached(run.folder / "memcached.log") as port:
        run.versions["memcached"] = servers.memcached_version()
        return run.story(backend=f"cache+memcached://127.0.0.1:{port}/")


NEIGHBOURS = (
    Neighbour(
        "Redis results",
        "backends",
        "DEFERRED is what `AsyncResult.state` gives of a task that waits.",
        redis,
        distributions=("redis",),
    ),
    Neighbour(
        "rpc",
        "backends",
        "Only the process that sent a task sees DEFERRED, and its result.",
        rpc,
        distributions=("amqp",),
    ),
    Neighbour(
        "SQLAlchemy",
        "backends",
        "DEFERRED and its fields are in the table `celery_taskmeta`.",
        sqlalchemy,
        requirements=("SQLAlchemy==2.1.9", PSYCOPG),
    ),
    Neighbour(
        "django-db",
        "backends",
        "DEFERRED is a state of django-celery-results, in a column that its admin shows.",
        django_db,
        requirements=("django-celery-results==2.6.0", DJANGO, PSYCOPG),
    ),
    Neighbour(
        "Filesystem results",
        "backends",
        "All workers and callers need the same folder.",
        filesystem,
        distributions=("celery",),
    ),
    Neighbour(
        "memcached",
        "backends",
        "DEFERRED is shown until the server drops it, as it may drop each result.",
        memcached,
        requirements=("pymemcache==4.0.0",),
    ),
    Neighbour(
        "MongoDB results",
        "backends",
        "Celery's backend stores any state as text, and so DEFERRED.",
        verdict=NOT_RUN,
        reason="Debian 12 has no server, and packages of PyPI and npm fetch it from elsewhere.",
        by_hand="Start mongod, and run the story with backend mongodb://127.0.0.1:27017/results.",
    ),
)
