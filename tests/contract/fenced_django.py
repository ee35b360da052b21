"""What `test_fenced_django` runs in a process whose Django has settings: `python -m` with JSON.

The JSON is that of one entry of DATABASES. Prints what was found.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import django
from django.conf import settings

GIVEN: dict[str, Any] = json.loads(sys.argv[1])
ENGINE = GIVEN["ENGINE"].rpartition(".")[2]
LEVELS = ["read committed", "repeatable read"]


def at(level: str) -> dict[str, Any]:
    if ENGINE == "mysql":
        return {**GIVEN, "OPTIONS": {"isolation_level": level}}
    if ENGINE == "postgresql":
        from psycopg import IsolationLevel

        isolation = IsolationLevel[level.upper().replace(" ", "_")]
        return {**GIVEN, "OPTIONS": {"isolation_level": isolation}}
    return {**GIVEN, "OPTIONS": {"timeout": 0}}


class Router:
    """Writes of `Elsewhere` go to another connection than its reads."""

    def db_for_write(self, model: type[object], **hints: object) -> str | None:
        return "later" if model.__name__ == "Elsewhere" else None


if ENGINE == "mysql":
    import pymysql

    pymysql.install_as_MySQLdb()
settings.configure(
    DATABASES={"default": GIVEN, "later": GIVEN, **{level: at(level) for level in LEVELS}},
    DATABASE_ROUTERS=[Router()],
    DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
)
django.setup()

from django.db import DatabaseError, connection, connections, models, transaction  # noqa: E402

from celery_redlock import Lock, LockLost, Redlock, RedlockError  # noqa: E402
from celery_redlock.django import fenced_update  # noqa: E402
from celery_redlock.testing import locking_off  # noqa: E402
from tests.conftest import eventually  # noqa: E402

FIRST = 10  # cents, of each row


class Shop(models.Model):
    name = models.CharField(max_length=40)

    class Meta:
        app_label = "shop"


class Price(models.Model):
    sku = models.CharField(max_length=40, primary_key=True)
    shop = models.ForeignKey(Shop, models.CASCADE)
    cents = models.IntegerField(default=FIRST)
    lock = models.IntegerField(default=0)
    fence = models.BigIntegerField(db_default=0)

    class Meta:
        app_label = "shop"


class Elsewhere(Price):
    class Meta:
        app_label = "shop"
        proxy = True


class Child(Price):
    pieces = models.IntegerField(default=0)

    class Meta:
        app_label = "shop"


class Bare(models.Model):
    cents = models.IntegerField()

    class Meta:
        app_label = "shop"


class Small(models.Model):
    fence = models.IntegerField()

    class Meta:
        app_label = "shop"


class Loose(models.Model):
    cents = models.IntegerField()
    fence = models.BigIntegerField(null=True)

    class Meta:
        app_label = "shop"


class NotesEach(models.QuerySet[Any]):
    """Has an update of its own, as of a library that stores who has written."""

    def update(self, **values: Any) -> int:
        return super().update(**values, note="kept")


class HidesMilk(models.Manager[Any]):
    def get_queryset(self) -> Any:
        return super().get_queryset().exclude(sku="milk")


class Noted(models.Model):
    sku = models.CharField(max_length=40)
    shop = models.ForeignKey(Shop, models.CASCADE)
    note = models.CharField(max_length=40, default="")
    cents = models.IntegerField(default=FIRST)
    fence = models.BigIntegerField(db_default=0)
    objects = NotesEach.as_manager()
    some = HidesMilk()

    class Meta:
        app_label = "shop"
        base_manager_name = "some"


ALL = (Shop, Price, Child, Loose, Noted)


def setup() -> None:
    """Give the tables the rows that each scenario begins with."""
    for model in (Child, Price, Noted, Shop, Loose):
        models.QuerySet(model).delete()
    corner, yard = Shop.objects.create(name="corner"), Shop.objects.create(name="yard")
    for sku, shop in (("tea", corner), ("milk", corner), ("coal", yard)):
        Price.objects.create(sku=sku, shop=shop)
        Noted.objects.create(sku=sku, shop=shop)


def cents() -> dict[str, int]:
    return dict(Price.objects.order_by("sku").values_list("sku", "cents"))


def write(rows: Any, lock: Lock, to: int, using: str = "default") -> int | str:
    """Return the rows that are written in a transaction; or the error."""
    try:
        with transaction.atomic(using=using):
            return fenced_update(rows, lock, cents=to)
    except LockLost:
        return "lost"
    except DatabaseError as error:
        return str(error).partition("\n")[0]


def refused(act: Callable[[], object]) -> str:
    try:
        with transaction.atomic():
            act()
    except RedlockError as error:
        return str(error)
    return ""


TEA = Price.objects.filter(sku="tea")
JOINED = Price.objects.filter(shop__name="corner")
TWO = Price.objects.exclude(sku="coal")
GROUPED = TWO.annotate(counted=models.Count("shop")).filter(counted=1)
DISTINCT = TWO.distinct()


class Scenarios:
    """Each method is one; late is a lock with a smaller token than later."""

    def __init__(self, late: Lock, later: Lock) -> None:
        self.late = late
        self.later = later

    def one_row(self) -> object:
        holders = [self.late, self.late, self.later, self.later, self.late]
        told = [write(TEA, lock, 11) for lock in holders]
        fence = TEA.get().fence == self.later.fencing_token
        return [told, fence, write(Price.objects.filter(sku="salt"), self.late, 1)]

    def all_or_none(self) -> object:
        write(Price.objects.filter(sku="milk"), self.later, 20)
        with transaction.atomic():
            Price.objects.filter(sku="coal").update(lock=7)
            with contextlib.suppress(LockLost):
                fenced_update(Price.objects.all(), self.late, cents=11)
        kept = Price.objects.get(sku="coal").lock
        return [cents(), kept, write(Price.objects.order_by("cents"), self.later, 21)]

    def rolled_back(self) -> object:
        with transaction.atomic():
            rows = fenced_update(Price.objects.all(), self.late, cents=11)
            transaction.set_rollback(True)
        return [rows, sorted({*cents().values()})]

    def expressions_and_a_field_that_is_called_lock(self) -> object:
        with transaction.atomic():
            fenced_update(TEA, self.late, lock=3, cents=models.F("cents") + 1)
            fenced_update(TEA, self.late)
        return [TEA.get().lock, TEA.get().cents]

    def other_tables(self) -> object:
        told = [write(rows, self.late, 11) for rows in (JOINED, GROUPED, DISTINCT)]
        write(Price.objects.filter(sku="milk"), self.later, 20)
        told += [write(rows, self.late, 12) for rows in (JOINED, GROUPED, DISTINCT)]
        found = cents()
        return [told, found, [write(rows, self.later, 13) for rows in (JOINED, GROUPED, DISTINCT)]]

    def managers_of_the_model(self) -> object:
        """Not one that hides rows, and each update is that of the queryset's own class."""
        found = []
        for rows in (Noted.objects.all(), Noted.objects.filter(shop__name="corner")):
            setup()
            written = write(rows, self.late, 11)
            found.append([written, sorted(Noted.objects.values_list("sku", "note"))])
        return found

    def rows_of_a_select_for_update(self) -> object:
        """A later holder has written a row, and writes it again meanwhile: SKIP LOCKED skips it."""
        if ENGINE == "sqlite3":
            return ["lost", "lost", {**cents(), "milk": 20}]
        write(Price.objects.filter(sku="milk"), self.later, 20)
        told = []
        with transaction.atomic(using="later"):
            again = Price.objects.using("later").filter(sku="milk")
            if ENGINE == "postgresql":  # InnoDB waits for it
                fenced_update(again, self.later, cents=21)
            for rows in (Price.objects.all(), JOINED):
                told.append(write(rows.select_for_update(skip_locked=True), self.late, 11))
            transaction.set_rollback(True, using="later")
        return [*told, cents()]

    def of_a_router(self) -> object:
        rows = Elsewhere.objects.filter(sku="tea")
        return [
            refused(lambda: fenced_update(rows, self.late)),
            write(rows, self.late, 11, "later"),
        ]

    def autocommit(self) -> object:
        try:
            fenced_update(TEA, self.late, cents=11)
        except RedlockError as error:
            told = str(error)
        return [told, cents()["tea"]]

    def fields(self) -> object:
        late = self.late
        Loose.objects.create(cents=1)
        return [
            refused(lambda: fenced_update(Bare.objects.all(), late)),
            refused(lambda: fenced_update(Small.objects.all(), late)),
            refused(lambda: fenced_update(Child.objects.all(), late, pieces=3)),
            refused(lambda: fenced_update(Loose.objects.all(), late, cents=3)),
            refused(lambda: fenced_update(TEA, late, fence=3)),
            Loose.objects.get().cents,
        ]

    def other_querysets(self) -> object:
        grouped = Price.objects.values("shop").annotate(counted=models.Count("sku"))
        given: list[Any] = [
            Price, TEA.get(), Price.objects.all()[:1], JOINED[:1], TEA.union(TWO), grouped
        ]  # fmt: skip
        told = [
            refused(lambda rows=rows: fenced_update(rows, self.late, cents=3)) for rows in given
        ]
        return [*told, sorted({*cents().values()})]

    def values_of_annotations(self) -> object:
        double = models.F("cents") * 2
        joined, plain = (rows.annotate(double=double) for rows in (JOINED, TWO))
        value = models.F("double")
        told = refused(lambda: fenced_update(joined, self.late, cents=value))
        way = Price.objects.filter(pk__in=JOINED).annotate(double=double)
        with transaction.atomic():
            written = [fenced_update(rows, self.late, cents=value) for rows in (plain, way)]
        return [told, [written, cents()]]

    def tokens(self) -> object:
        with locking_off(), Redlock(["redis://127.0.0.1:1"]).lock("r") as lock:
            return [refused(lambda: fenced_update(TEA, lock, cents=11)), cents()["tea"]]

    def waited(self) -> object:
        """A later holder commits while the late update waits for its row."""
        if ENGINE == "sqlite3":
            return {}
        told = {}
        for name, rows in {"own": TEA, "all": Price.objects.all(), "joined": JOINED}.items():
            for level in LEVELS:
                setup()
                with ThreadPoolExecutor() as threads, transaction.atomic(using="later"):
                    fenced_update(TEA.using("later"), self.later, cents=20)
                    late = threads.submit(in_thread, rows.using(level), self.late, 11, level)
                    eventually(waits)
                    commit_now("later")
                    told[f"{name} {level}"] = [late.result(), cents()]
        return told

    def old_snapshot(self) -> object:
        told = {}
        for name, rows in {"own": TEA, "all": Price.objects.all(), "joined": JOINED}.items():
            for level in LEVELS:
                setup()
                if ENGINE == "sqlite3":
                    connection.cursor().execute("PRAGMA journal_mode=WAL")
                with transaction.atomic(using=level):
                    list(Price.objects.using(level))
                    write(TEA.using("later"), self.later, 20, "later")
                    found = write(rows.using(level), self.late, 11, level)
                told[f"{name} {level}"] = [found, cents()]
        return told

    def moved_to_the_filter(self) -> object:
        """A later holder makes a row match the filter, after the snapshot of the late one."""
        told = {}
        for name, rows in {"own": Price.objects.filter(lock=0), "joined": JOINED}.items():
            for level in LEVELS:
                setup()
                corner = Shop.objects.get(name="corner")
                Price.objects.filter(sku="coal").update(lock=1)
                with transaction.atomic(using=level):
                    list(Price.objects.using(level))
                    with transaction.atomic(using="later"):
                        coal = Price.objects.using("later").filter(sku="coal")
                        fenced_update(coal, self.later, cents=20, lock=0, shop=corner)
                    found = write(rows.using(level), self.late, 11, level)
                told[f"{name} {level}"] = [found, cents()]
        return told


def commit_now(alias: str) -> None:
    """Commit the transaction of a block before the end of it, which then commits nothing."""
    connections[alias].connection.commit()


def in_thread(*given: Any) -> int | str:
    try:
        return write(*given)
    finally:
        connections.close_all()


def waits() -> bool:
    asked = {
        "postgresql": "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'",
        "mysql": "SELECT variable_value FROM information_schema.global_status"
        " WHERE variable_name = 'INNODB_ROW_LOCK_CURRENT_WAITS'",
    }
    with connection.cursor() as cursor:
        cursor.execute(asked[ENGINE])
        return int(cursor.fetchone()[0]) > 0


def main() -> dict[str, object]:
    with connection.schema_editor() as editor:
        for model in ALL:
            editor.create_model(model)
    found = {}
    with locking_off():
        redlock = Redlock(["redis://127.0.0.1:1"])
        late, later = (redlock.lock(name, fencing=True).acquire() for name in ("a", "b"))
        scenarios = Scenarios(late, later)
        for name, scenario in vars(Scenarios).items():
            if not name.startswith("_"):
                setup()
                found[name] = scenario(scenarios)
    connections.close_all()
    return found


if __name__ == "__main__":
    print(json.dumps(main()))
