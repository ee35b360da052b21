"""The task classes of others: each runs the story in an app that has the class with a lock."""

from __future__ import annotations

from functools import partial

from neighbours import servers
from neighbours.backends import DJANGO, PSYCOPG
from neighbours.row import REFUSED, WITH_SETTING, Neighbour, Seen
from neighbours.run import Run

FLASK = "Flask==3.1.3"
TENANTS = {
    "ROOT_URLCONF": "",
    "TENANT_APPS": ["django.contrib.contenttypes"],
    "TENANT_MODEL": "tenants.Tenant",
    "TENANT_DOMAIN_MODEL": "tenants.Domain",
    "DATABASE_ROUTERS": ["django_tenants.routers.TenantSyncRouter"],
    "SHARED_APPS": ["django_tenants", "neighbours.tenants", "django.contrib.contenttypes"],
    "INSTALLED_APPS": ["django_tenants", "neighbours.tenants", "django.contrib.contenttypes"],
    "DEFAULT_AUTO_FIELD": "django.db.models.AutoField",
}
TENANT_REQUIREMENTS = ("django-tenants==4.0.1", DJANGO, PSYCOPG)
IN_DJANGO = {"DJANGO_SETTINGS_MODULE": "neighbours.django_site"}


def of_app(run: Run, app: str) -> Seen:
    return run.story(app=app)


def django_task(run: Run) -> Seen:
    with servers.postgresql() as url:
        run.versions["PostgreSQL"] = servers.postgresql_version(url)
        return run.story(
            env=IN_DJANGO,
            module="neighbours.on_commit",
            app="neighbours.django_app",
            tasks="neighbours.django_tables",
            more={"database": url, "base": "celery_redlock.django:LockedDjangoTask"},
        )


def tenants(run: Run, *, alone: bool) -> Seen:
    with servers.postgresql() as url, servers.rabbitmq() as broker:
        run.versions["PostgreSQL"] = servers.postgresql_version(url)
        run.versions["RabbitMQ"] = servers.rabbitmq_version()
        return run.story(
            broker=broker,
            env=IN_DJANGO,
            module="neighbours.tenants.story",
            app="neighbours.tenants.app",
            tasks="neighbours.tenants.tables",
            more={
                "database": url, "engine": "django_tenants.postgresql_backend",
                "settings": TENANTS, "alone": alone,
            },
        )  # fmt: skip


NEIGHBOURS = (
    Neighbour(
        "Django's DjangoTask",
        "task_classes",
        "Derive from `celery_redlock.django.LockedDjangoTask`; a send on commit has its lock, too.",
        django_task,
        requirements=(DJANGO, PSYCOPG),
        distributions=("celery", "django"),
    ),
    Neighbour(
        "Flask's FlaskTask",
        "task_classes",
        "Let `FlaskTask` derive from `LockedTask`; each body has its app context.",
        partial(of_app, app="neighbours.flask_app"),
        requirements=(FLASK,),
    ),
    Neighbour(
        "flask-celeryext",
        "task_classes",
        "Derive one class from `LockedTask` and `AppContextTask`; each body has its app context.",
        partial(of_app, app="neighbours.celeryext_app"),
        requirements=("flask-celeryext==0.5.1", FLASK),
        verdict=WITH_SETTING,
        setting='app.config["redlock_nodes"], in lower case, as it is handed on as it is',
    ),
    Neighbour(
        "tenant-schemas-celery",
        "task_classes",
        "Over Redis, a killed worker's messages come back after the visibility timeout: its "
        "callable key might mean no lock.",
        partial(tenants, alone=False),
        requirements=("tenant-schemas-celery==5.0.0", *TENANT_REQUIREMENTS),
        distributions=("tenant-schemas-celery", "django-tenants", "django"),
        verdict=WITH_SETTING,
        setting="base=LockedTenantTask, of LockedTask and TenantTask, and the tenant in lock_key",
    ),
    Neighbour(
        "tenant-schemas-celery, with LockedTask alone",
        "task_classes",
        "Celery would run its body in the schema public, and log why.",
        partial(tenants, alone=True),
        requirements=("tenant-schemas-celery==5.0.0", *TENANT_REQUIREMENTS),
        distributions=("tenant-schemas-celery", "django-tenants", "django"),
        verdict=REFUSED,
        error="derive one class from LockedTask and TenantTask",
        faults=frozenset((REFUSED,)),
    ),
    Neighbour(
        "celery-batches",
        "task_classes",
        "A run takes several messages, which one lock cannot cover. With `lock_key=False` it runs.",
        partial(of_app, app="neighbours.batches_app"),
        requirements=("celery-batches==0.11", "celery==5.6.3"),
        verdict=REFUSED,
        error="Strategy",
        faults=frozenset((REFUSED,)),
    ),
    Neighbour(
        "Pydantic models",
        "task_classes",
        "With `pydantic=True`, the key of a model is the key of what it dumps to.",
        partial(of_app, app="neighbours.pydantic_app"),
        requirements=("pydantic==2.14.4",),
    ),
)
