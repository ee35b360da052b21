"""The applications that are run, or that are named as not run.

Each is installed as it is, with a database of its own. Its settings lock the tasks of a plugin, and
one of the application's own tasks, by `redlock_tasks`.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from neighbours import servers
from neighbours.row import NOT_RUN, Neighbour, Seen
from neighbours.run import Run

HERE = Path(__file__).parent / "adopted"
MIGRATE = ("django-admin", "migrate", "--verbosity", "0")


def adopted(
    run: Run, app: str, own: str, arguments: Any, env: Mapping[str, str], *,
    lock: Mapping[str, Any] | None = None, sender: str = "", extensions: tuple[str, ...] = (),
    prepare: tuple[tuple[str, ...], ...] = (MIGRATE,), **setup: Any,
) -> Seen:  # fmt: skip
    """Run the story in an application. app: the module of its Celery app.

    own: the name of a task of its own, which is locked, too. arguments: of a call of it, for its
    lock. lock: its entry in `redlock_tasks`. sender: a module whose `send()` sends it; empty means
    that its `apply_async` does.
    extensions: of PostgreSQL. prepare: commands that set it up. env: variables; "{broker}" in one
    is the URL of a Valkey, "{name}", "{user}", "{host}" and "{port}" are of the database.
    """
    with ExitStack() as stack:
        database = stack.enter_context(servers.postgresql())
        valkey = stack.enter_context(servers.valkey())
        for extension in extensions:
            psql = [servers.program("psql", "postgresql-client"), "-q", database, "-c"]
            subprocess.run([*psql, f"CREATE EXTENSION {extension}"], check=True)
        url = urlsplit(database)
        told = {
            "broker": valkey.url, "valkey_port": str(valkey.port), "folder": str(run.folder),
            "name": url.path.lstrip("/"), "user": url.username or "", "host": url.hostname or "",
            "port": str(url.port or ""), "password": url.password or "",
        }  # fmt: skip
        return run.story(
            env={name: value.format(**told) for name, value in env.items()},
            module="neighbours.adopted.story",
            broker=valkey.url,
            backend=valkey.url,
            app=app,
            tasks="neighbours.adopted.sent",
            more={
                "own": own, "arguments": arguments, "lock": lock or {}, "sender": sender,
                "database": database, "prepare": prepare,
            },
            **setup,
        )  # fmt: skip


def pretix(run: Run) -> Seen:
    return adopted(
        run,
        "pretix.celery_app",
        "pretix.base.services.notifications.notify",
        [[0]],
        {
            "DJANGO_SETTINGS_MODULE": "neighbours.adopted.pretix_settings",
            "PRETIX_PRETIX_DATADIR": "{folder}/data",
            "PRETIX_DATABASE_BACKEND": "postgresql",
            "PRETIX_DATABASE_NAME": "{name}",
            "PRETIX_DATABASE_USER": "{user}",
            "PRETIX_DATABASE_PASSWORD": "{password}",
            "PRETIX_DATABASE_HOST": "{host}",
            "PRETIX_DATABASE_PORT": "{port}",
            "PRETIX_CELERY_BROKER": "{broker}",
            "PRETIX_CELERY_BACKEND": "{broker}",
        },
    )


def weblate(run: Run) -> Seen:
    return adopted(
        run,
        "weblate.utils.celery",
        "weblate.utils.tasks.ping",
        [],
        {"DJANGO_SETTINGS_MODULE": "neighbours.adopted.weblate_settings"},
        prepare=(),  # neither these tasks nor the worker's start needs a table
    )


def nautobot(run: Run) -> Seen:
    return adopted(
        run,
        "neighbours.adopted.nautobot_app",
        "nautobot.extras.jobs.run_job",
        ["nautobot.core.jobs.groups.RefreshDynamicGroupCaches"],
        {
            "NAUTOBOT_CONFIG": str(HERE / "nautobot_config.py"),
            "NAUTOBOT_ROOT": "{folder}/nautobot",
            "NAUTOBOT_SECRET_KEY": "of a run alone, and long enough for what checks its length",
            "NAUTOBOT_DB_NAME": "{name}",
            "NAUTOBOT_DB_USER": "{user}",
            "NAUTOBOT_DB_PASSWORD": "{password}",
            "NAUTOBOT_DB_HOST": "{host}",
            "NAUTOBOT_DB_PORT": "{port}",
            "NAUTOBOT_REDIS_HOST": "127.0.0.1",
            "NAUTOBOT_REDIS_PORT": "{valkey_port}",
        },
        lock={"key": "job:{job_class_path}"},
        sender="neighbours.adopted.nautobot_job",
        prepare=(("nautobot-server", "migrate", "--run-syncdb", "--verbosity", "0"),),
    )


def indico(run: Run) -> Seen:
    return adopted(
        run,
        "neighbours.adopted.indico_app",
        "delete_previous_registration_file",
        [0, 0, "default", "uploaded"],
        {"INDICO_CONFIG": str(HERE / "indico_conf.py")},
        extensions=("pg_trgm", "unaccent"),
        prepare=(("indico", "db", "prepare"),),
    )


INDICO = (*("indico==3.3.14", "celery==5.6.3", "kombu==5.6.2", "redis==6.4.0", "hiredis==3.4.0"),)
WEBLATE = (
    *("weblate[postgres]==2026.10.1", "celery==5.6.3", "kombu==5.6.2", "redis==6.4.0"),
    "hiredis==3.4.2",
)

NEIGHBOURS: tuple[Neighbour, ...] = (
    Neighbour(
        "Indico",
        "applications",
        "`CELERY_CONFIG` in `indico.conf` has the settings, and imports the story's tasks.",
        requirements=INDICO,
        distributions=("indico",),
        python="3.12",
        verdict=NOT_RUN,
        reason="no run has passed whole, as Indico's own logging hides which message waits.",
        by_hand="Give its `logging.yaml` a logger `celery_redlock` of level INFO. Then put "
        "`run=indico` in `neighbours/applications.py`.",
    ),
    Neighbour(
        "Nautobot",
        "applications",
        "The story's tasks are of a plugin. Nautobot's own `run_job` is locked for each job class, "
        "and a job waits for its lock, too. A deferral shows in the job results.",
        nautobot,
        requirements=(
            "nautobot==3.2.7", "celery==5.6.3", "kombu==5.7.0", "redis==8.1.0", "hiredis==3.5.0",
        ),
        distributions=("nautobot",),
    ),
    Neighbour(
        "pretix",
        "applications",
        "The story's tasks are of a plugin. pretix's own `notify`, which is sent on commit, waits "
        "for its lock, too.",
        pretix,
        requirements=(
            "pretix==2026.8.0", "celery==5.6.3", "kombu==5.6.2", "redis==7.4.1", "hiredis==3.5.0",
        ),
        distributions=("pretix",),
    ),
    Neighbour(
        "Weblate",
        "applications",
        "With `disable_existing_loggers`, as in its example, a worker logs neither that it is "
        "ready nor what waits.",
        requirements=WEBLATE,
        distributions=("weblate",),
        python="3.12",
        verdict=NOT_RUN,
        reason="its workers start, and no run has come to its end yet.",
        by_hand="Put `run=weblate` in `neighbours/applications.py`, and run it.",
    ),
)  # fmt: skip
