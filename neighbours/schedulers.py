"""The schedulers: each runs below `LockedScheduler` in two beats, of which the leader is killed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from neighbours import servers
from neighbours.backends import DJANGO, PSYCOPG
from neighbours.beat_schedule import SCHEDULE
from neighbours.row import NOT_RUN, WITH_SETTING, Neighbour, Seen
from neighbours.run import Run

DJANGO_SCHEDULER = "django_celery_beat.schedulers:DatabaseScheduler"
SQLALCHEMY_SCHEDULER = "sqlalchemy_celery_beat.schedulers:DatabaseScheduler"
DB_SCHEDULER = "celery_db_scheduler:DynamicDatabaseScheduler"


def beats(
    run: Run, scheduler: str = "", conf: Mapping[str, Any] | None = None, **more: Any
) -> Seen:
    settings = {"include": ["neighbours.beat_notes"], "beat_schedule": SCHEDULE, **(conf or {})}
    if scheduler:
        settings["redlock_beat_scheduler"] = scheduler
    return run.story(module="neighbours.beats", conf=settings, **more)


def redbeat(run: Run) -> Seen:
    with servers.valkey() as valkey:
        conf = {"redbeat_redis_url": valkey.url}
        return beats(run, "redbeat.RedBeatScheduler", conf)


def django(run: Run) -> Seen:
    with servers.postgresql() as url:
        run.versions["PostgreSQL"] = servers.postgresql_version(url)
        return beats(
            run,
            DJANGO_SCHEDULER,
            env={"DJANGO_SETTINGS_MODULE": "neighbours.django_site"},
            app="neighbours.django_app",
            tasks="neighbours.django_tables",
            more={"database": url, "apps": ["django_celery_beat"]},
        )


def sqlalchemy(run: Run) -> Seen:
    with servers.postgresql() as url:
        run.versions["PostgreSQL"] = servers.postgresql_version(url)
        conf = {"beat_dburi": url.replace("postgresql", "postgresql+psycopg", 1)}
        return beats(run, SQLALCHEMY_SCHEDULER, conf)


def db_scheduler(run: Run) -> Seen:
    with servers.postgresql() as url:
        run.versions["PostgreSQL"] = servers.postgresql_version(url)
        return beats(
            run,
            DB_SCHEDULER,
            {"beat_schedule": {}},  # it reads its table alone
            env={"DATABASE_URL": url.replace("postgresql", "postgresql+psycopg", 1)},
            tasks="neighbours.db_scheduler_tables",
        )


NEIGHBOURS = (
    Neighbour(
        "Celery's scheduler",
        "schedulers",
        "Its last runs are in a file, so all beats need one disk; a WARNING says so.",
        beats,
        distributions=("celery",),
    ),
    Neighbour(
        "celery-redbeat",
        "schedulers",
        "Its own lock is switched off.",
        redbeat,
        requirements=("celery-redbeat==2.4.2",),
        verdict=WITH_SETTING,
        setting='redlock_beat_scheduler = "redbeat.RedBeatScheduler"',
    ),
    Neighbour(
        "django-celery-beat",
        "schedulers",
        "A beat that takes over reads the last runs from the database.",
        django,
        requirements=("django-celery-beat==2.9.0", DJANGO, PSYCOPG),
        verdict=WITH_SETTING,
        setting=f'redlock_beat_scheduler = "{DJANGO_SCHEDULER}"',
    ),
    Neighbour(
        "sqlalchemy-celery-beat",
        "schedulers",
        "A beat that takes over reads the last runs from the database.",
        sqlalchemy,
        requirements=("sqlalchemy-celery-beat==0.9.1", "SQLAlchemy==2.1.9", PSYCOPG),
        verdict=WITH_SETTING,
        setting=f'redlock_beat_scheduler = "{SQLALCHEMY_SCHEDULER}"',
    ),
    Neighbour(
        "celery-db-scheduler",
        "schedulers",
        "It reads its table alone, and needs Python 3.12 and, with SQLAlchemy 2.1, greenlet.",
        db_scheduler,
        requirements=("celery-db-scheduler==1.0.0", "SQLAlchemy[asyncio]==2.1.9", PSYCOPG),
        python="3.13",
        verdict=WITH_SETTING,
        setting=f'redlock_beat_scheduler = "{DB_SCHEDULER}"',
    ),
    Neighbour(
        "celery-mongobeat",
        "schedulers",
        "It saves a run before the send, so that a killed beat may leave one out.",
        verdict=NOT_RUN,
        reason="It needs MongoDB, whose server no registry of packages has.",
        by_hand="Start mongod, and run the beats with celery_mongobeat.beat:MongoScheduler.",
    ),
)
