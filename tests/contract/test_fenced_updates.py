"""An update of SQLAlchemy that carries the fencing token of a lock is never a late write."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Engine,
    ForeignKey,
    Integer,
    MetaData,
    String,
    Table,
    Update,
    create_engine,
    delete,
    event,
    func,
    select,
    text,
    update,
)
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.ext import asyncio as asynchronous
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    ORMExecuteState,
    Session,
    aliased,
    mapped_column,
    scoped_session,
    sessionmaker,
    with_loader_criteria,
)

from celery_redlock import Lock, LockLost, Redlock, RedlockError, SettingsError
from celery_redlock.sqlalchemy import fenced_update, fenced_update_async
from celery_redlock.testing import fake_nodes, locking_off
from tests import fork_server
from tests.conftest import eventually
from tests.integration.conftest import ROOT

pytestmark = pytest.mark.xdist_group("fenced updates")  # they share the servers
FIRST = 10  # cents, of each row
DATABASES = [
    "sqlite",
    pytest.param("postgresql", marks=pytest.mark.postgresql),
    pytest.param("mariadb", marks=pytest.mark.slow),
]
WITH_ROW_LOCKS = DATABASES[1:]
NEEDS = r"needs the column `fence BIGINT NOT NULL DEFAULT 0`, but "


class Tables(DeclarativeBase):
    """The tables of the tests."""


class Shop(Tables):
    __tablename__ = "shop"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String(40))


class Price(Tables):
    __tablename__ = "price"
    sku: Mapped[str] = mapped_column(String(40), primary_key=True)
    kind: Mapped[str] = mapped_column(String(40), default="price")
    shop: Mapped[int] = mapped_column(ForeignKey("shop.id"))
    cents: Mapped[int]
    written_by: Mapped[int] = mapped_column("fence", BigInteger, server_default="0")
    __mapper_args__: ClassVar[dict[str, str]] = {
        "polymorphic_on": "kind",
        "polymorphic_identity": "price",
    }


class Offer(Price):
    __mapper_args__: ClassVar[dict[str, str]] = {"polymorphic_identity": "offer"}


PRICES: Any = Price.__table__


@dataclass(frozen=True)
class Locks:
    """Locks on one resource. late: of a holder that has lost it; later: of the next holder."""

    late: Lock
    later: Lock


@pytest.fixture
def locks() -> Iterator[Locks]:
    with contextlib.ExitStack() as stack:
        nodes = [node.url for node in stack.enter_context(fake_nodes(3))]
        first, second = (stack.enter_context(Redlock(nodes)) for _ in range(2))
        first.trust()
        late = first.lock("price:tea", fencing=True, renew=False).acquire()
        first.break_lock("price:tea")
        later = second.lock("price:tea", wait=60, fencing=True).acquire()
        assert late.fencing_token < later.fencing_token
        yield Locks(late, later)
        later.release()


@pytest.fixture(params=DATABASES)
def engine(request: pytest.FixtureRequest, database_url: Callable[[str], str]) -> Iterator[Engine]:
    """Give an engine of a database with three prices: tea and milk of one shop, coal of another."""
    made = create_engine(database_url(request.param))
    Tables.metadata.drop_all(made)
    Tables.metadata.create_all(made)
    with Session(made) as session, session.begin():
        session.add_all([Shop(id=1, name="corner"), Shop(id=2, name="yard")])
        session.flush()
        rows = [("tea", Price, 1), ("milk", Offer, 1), ("coal", Price, 2)]
        session.add_all([kind(sku=sku, shop=shop, cents=FIRST) for sku, kind, shop in rows])
    yield made
    made.dispose()


@contextlib.contextmanager
def connected(engine: Engine) -> Iterator[Connection]:
    with engine.connect() as connection:
        yield connection


@contextlib.contextmanager
def in_session(engine: Engine) -> Iterator[Session]:
    with Session(engine) as session:
        yield session


@contextlib.contextmanager
def in_scope(engine: Engine) -> Iterator[scoped_session[Session]]:
    sessions = scoped_session(sessionmaker(engine))
    try:
        yield sessions
    finally:
        sessions.remove()


WRITERS = [connected, in_session, in_scope]
STATEMENTS = {"core": PRICES, "orm": Price}


def cents(engine: Engine) -> dict[str, int]:
    with engine.connect() as connection:
        return dict(connection.execute(select(PRICES.c.sku, PRICES.c.cents)).all())


def fences(engine: Engine) -> dict[str, int]:
    with engine.connect() as connection:
        return dict(connection.execute(select(PRICES.c.sku, PRICES.c.fence)).all())


def write(engine: Engine, lock: Lock, to: int, *where: Any) -> int:
    with Session(engine) as session, session.begin():
        return fenced_update(session, update(Price).where(*where).values(cents=to), lock)


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("of", STATEMENTS)
class TestAnUpdate:
    def test_is_refused_after_a_later_holder_and_allowed_twice_before(
        self, engine: Engine, locks: Locks, writer: Any, of: str
    ) -> None:
        def run(lock: Lock, to: int) -> int:
            statement = update(STATEMENTS[of]).where(PRICES.c.sku == "tea").values(cents=to)
            with writer(engine) as given:
                rows = fenced_update(given, statement, lock)
                given.commit()
            return rows

        assert [run(locks.late, 11), run(locks.late, 12), run(locks.late, 12)] == [1, 1, 1]
        assert [run(locks.later, 13), run(locks.later, 13)] == [1, 1]
        tokens = f"{locks.later.fencing_token}, and this one's is {locks.late.fencing_token}"
        with pytest.raises(LockLost, match=f"later holder has written: its token is {tokens}"):
            run(locks.late, 14)
        assert cents(engine)["tea"] == 13
        assert fences(engine)["tea"] == locks.later.fencing_token

    def test_of_no_row_is_0(self, engine: Engine, locks: Locks, writer: Any, of: str) -> None:
        statement = update(STATEMENTS[of]).where(PRICES.c.sku == "salt").values(cents=11)
        with writer(engine) as given:
            assert fenced_update(given, statement, locks.late) == 0

    def test_writes_all_rows_or_none_also_if_the_error_is_caught(
        self, engine: Engine, locks: Locks, writer: Any, of: str
    ) -> None:
        write(engine, locks.later, 20, Price.sku == "milk")
        everything = update(STATEMENTS[of]).values(cents=11)
        with writer(engine) as given:
            given.execute(update(PRICES).where(PRICES.c.sku == "coal").values(shop=1))
            with pytest.raises(LockLost):
                fenced_update(given, everything, locks.late)
            given.commit()
        assert cents(engine) == {"tea": FIRST, "milk": 20, "coal": FIRST}
        assert fences(engine)["tea"] == 0
        with engine.connect() as connection:  # the caller's own write stays
            assert connection.scalar(select(PRICES.c.shop).where(PRICES.c.sku == "coal")) == 1
        with writer(engine) as given:
            assert fenced_update(given, everything, locks.later) == 3

    def test_ends_with_the_transaction_of_its_caller(
        self, engine: Engine, locks: Locks, writer: Any, of: str
    ) -> None:
        statement = update(STATEMENTS[of]).values(cents=11)
        with writer(engine) as given:
            assert fenced_update(given, statement, locks.late) == 3
            given.rollback()
        assert set(cents(engine).values()) == {FIRST}
        assert set(fences(engine).values()) == {0}


def test_a_filter_that_the_update_makes_false_refuses_nothing(engine: Engine, locks: Locks) -> None:
    assert write(engine, locks.late, 11, Price.cents == FIRST) == 3
    assert write(engine, locks.late, 11, Price.cents == FIRST) == 0


def test_without_values_the_fence_alone_is_raised(engine: Engine, locks: Locks) -> None:
    with engine.begin() as connection:
        assert fenced_update(connection, update(PRICES), locks.later) == 3
    assert set(fences(engine).values()) == {locks.later.fencing_token}
    assert set(cents(engine).values()) == {FIRST}


@pytest.mark.parametrize(
    "statement",
    [
        update(PRICES).values(fence=1),
        update(PRICES).values({PRICES.c.fence: 1}),
        update(PRICES).ordered_values((PRICES.c.fence, 1)),
        update(Price).values(written_by=1),
        update(Price).values({Price.written_by: Price.written_by + 1}),
        update(Price).values(fence=1),
    ],
)
def test_an_own_value_of_the_fence_is_refused(engine: Engine, locks: Locks, statement: Any) -> None:
    with Session(engine) as session, pytest.raises(SettingsError, match="leave it out: it is set"):
        fenced_update(session, statement, locks.late)


def test_objects_of_the_session_are_as_the_rows(engine: Engine, locks: Locks) -> None:
    write(engine, locks.later, 20, Price.sku == "milk")
    with Session(engine) as session, session.begin():
        tea = session.get_one(Price, "tea")
        with pytest.raises(LockLost):
            fenced_update(session, update(Price).values(cents=11), locks.late)
        assert tea.cents == FIRST
        fenced_update(session, update(Price).values(cents=12), locks.later)
        assert (tea.cents, tea.written_by) == (12, locks.later.fencing_token)


def test_a_class_of_a_shared_table_is_refused_by_its_own_rows_alone(
    engine: Engine, locks: Locks
) -> None:
    write(engine, locks.later, 20, Price.sku == "tea")
    with Session(engine) as session, session.begin():
        assert fenced_update(session, update(Offer).values(cents=11), locks.late) == 1
    assert cents(engine) == {"tea": 20, "milk": 11, "coal": FIRST}


def test_other_tables_may_be_in_the_filter(engine: Engine, locks: Locks) -> None:
    corner = select(Shop.id).where(Shop.name == "corner")
    assert write(engine, locks.late, 11, Price.shop.in_(corner)) == 2
    write(engine, locks.later, 20, Price.sku == "milk")
    joined = update(Price).where(Price.shop == Shop.id, Shop.name == "corner").values(cents=12)
    for _ in range(2):
        with Session(engine) as session, session.begin(), pytest.raises(LockLost):
            fenced_update(session, joined, locks.late)
    assert cents(engine) == {"tea": 11, "milk": 20, "coal": FIRST}
    with Session(engine) as session, session.begin():
        assert fenced_update(session, joined, locks.later) == 2


def test_options_of_the_statement_are_kept(engine: Engine, locks: Locks) -> None:
    with Session(engine) as session, session.begin():
        session.get_one(Price, "tea")
        for strategy in ("evaluate", "fetch", False):
            statement = update(Price).values(cents=11).where(Price.cents > 0)
            statement = statement.execution_options(synchronize_session=strategy)
            assert fenced_update(session, statement, locks.late) == 3
    with engine.begin() as connection:
        elsewhere = update(Table("price", MetaData(), *copied(), schema="elsewhere"))
        there = elsewhere.execution_options(schema_translate_map={"elsewhere": None})
        assert fenced_update(connection, there.values(cents=12), locks.late) == 3


def copied() -> list[Column[Any]]:
    return [Column(c.name, c.type, primary_key=c.primary_key) for c in PRICES.columns]


# which rows the SELECT of a refused one sees: those of the UPDATE, in its transaction


def test_a_session_that_reads_from_a_replica_asks_where_it_writes(
    engine: Engine, locks: Locks
) -> None:
    class Routed(Session):
        """As in SQLAlchemy's own recipe."""

        def get_bind(self, *_: Any, clause: Any = None, **__: Any) -> Any:
            return engine if self._flushing or isinstance(clause, Update) else behind

    behind = create_engine("sqlite://")  # a replica, before it has the later holder's write
    Tables.metadata.create_all(behind)
    write(engine, locks.later, 20, Price.sku == "milk")
    with Routed() as session, session.begin(), pytest.raises(LockLost):
        fenced_update(session, update(Price).values(cents=11), locks.late)
    behind.dispose()
    assert cents(engine) == {"tea": FIRST, "milk": 20, "coal": FIRST}


ONLY_TEA = with_loader_criteria(Price, Price.sku == "tea")
CHANGES: dict[str, Callable[[Any], Any]] = {
    "option": lambda statement: statement.options(ONLY_TEA),
    "filter": lambda statement: statement.where(Price.sku == "tea"),
}


@pytest.mark.parametrize("strategy", ["evaluate", "fetch", False])
@pytest.mark.parametrize("change", CHANGES)
def test_events_of_a_session_that_filter_an_update_filter_what_refuses_it(
    engine: Engine, locks: Locks, change: str, strategy: Any
) -> None:
    def narrow(state: ORMExecuteState) -> None:
        if state.is_update:
            state.statement = CHANGES[change](state.statement)

    write(engine, locks.later, 20, Price.sku == "milk")
    statement = update(Price).values(cents=11)
    statement = statement.execution_options(synchronize_session=strategy)
    with Session(engine) as session, session.begin():
        event.listen(session, "do_orm_execute", narrow)
        assert fenced_update(session, statement, locks.late) == 1
    with Session(engine) as session, session.begin():  # an option of the statement itself
        assert fenced_update(session, CHANGES[change](statement), locks.late) == 1
    assert cents(engine) == {"tea": 11, "milk": 20, "coal": FIRST}


def test_events_of_a_session_that_filter_what_it_reads_hide_no_later_holder(
    engine: Engine, locks: Locks
) -> None:
    """As for rows that are marked as deleted."""

    def narrow(state: ORMExecuteState) -> None:
        if state.is_select:
            state.statement = state.statement.options(ONLY_TEA)

    write(engine, locks.later, 20, Price.sku == "milk")
    with Session(engine) as session, session.begin():
        event.listen(session, "do_orm_execute", narrow)
        with pytest.raises(LockLost):
            fenced_update(session, update(Price).values(cents=11), locks.late)
    assert cents(engine) == {"tea": FIRST, "milk": 20, "coal": FIRST}


@pytest.mark.parametrize("of", [PRICES.alias(), aliased(Price)])
def test_an_alias_is_as_its_table(engine: Engine, locks: Locks, of: Any) -> None:
    # of MariaDB SQLAlchemy would fetch an alias' keys by a join of all rows
    statement = update(of).values(cents=11).execution_options(synchronize_session=False)
    with Session(engine) as session, session.begin():
        assert fenced_update(session, statement, locks.late) == 3
    write(engine, locks.later, 20, Price.sku == "milk")
    with Session(engine) as session, session.begin(), pytest.raises(LockLost):
        fenced_update(session, statement, locks.late)


# what is refused


@pytest.mark.parametrize("at", ["engine", "connection", "session"])
def test_without_a_transaction_nothing_is_written(engine: Engine, locks: Locks, at: str) -> None:
    each = create_engine(engine.url, isolation_level="AUTOCOMMIT") if at == "engine" else engine
    with contextlib.ExitStack() as stack:
        stack.callback(each.dispose)
        given: Any = stack.enter_context(each.connect())
        if at == "connection":
            given = given.execution_options(isolation_level="AUTOCOMMIT")
        if at == "session":
            each = engine.execution_options(isolation_level="AUTOCOMMIT")
            given = stack.enter_context(Session(each))
        with pytest.raises(RedlockError, match="needs a transaction, because it writes all rows"):
            fenced_update(given, update(Price).values(cents=11), locks.late)
    assert set(cents(engine).values()) == {FIRST}


def test_a_lock_without_a_token_is_refused(engine: Engine, locks: Locks) -> None:
    statement = update(Price).values(cents=11)
    with (
        locking_off(),
        Redlock(["redis://127.0.0.1:1"]).lock("r") as lock,
        Session(engine) as session,
        pytest.raises(RedlockError, match="lock_fencing=True"),
    ):
        fenced_update(session, statement, lock)
    with Session(engine) as session, pytest.raises(SettingsError, match=r"lock=None: .*lock_fenc"):
        fenced_update(session, statement, None)  # type: ignore[arg-type]
    locks.later.release()
    with Session(engine) as session, pytest.raises(RedlockError, match="is not acquired"):
        fenced_update(session, statement, locks.later)


def test_a_table_without_the_column_is_refused(engine: Engine, locks: Locks) -> None:
    bare, small = (
        Table("bare", MetaData(), Column("cents", Integer)),
        Table("small", MetaData(), Column("fence", Integer)),
    )
    with engine.connect() as connection:
        with pytest.raises(SettingsError, match=f"=bare: the table {NEEDS}it has no such column"):
            fenced_update(connection, update(bare), locks.late)
        with pytest.raises(SettingsError, match=rf"=small: the table {NEEDS}its column is Integer"):
            fenced_update(connection, update(small), locks.late)


def test_the_column_may_have_another_key(engine: Engine, locks: Locks) -> None:
    keyed = Table(
        "price", MetaData(), Column("cents", Integer), Column("fence", BigInteger, key="t")
    )
    with engine.begin() as connection:
        assert fenced_update(connection, update(keyed).values(cents=11), locks.later) == 3
        with pytest.raises(SettingsError, match="fence=9: leave it out"):
            fenced_update(connection, update(keyed).values(t=9), locks.later)
    assert set(fences(engine).values()) == {locks.later.fencing_token}


def test_values_in_an_order_are_refused(engine: Engine, locks: Locks) -> None:
    statement = update(Price).ordered_values((Price.cents, 1))
    with Session(engine) as session, pytest.raises(SettingsError, match=r"give them to values\("):
        fenced_update(session, statement, locks.late)


def test_a_fence_that_is_null_is_refused(engine: Engine, locks: Locks) -> None:
    loose = Table("loose", MetaData(), Column("id", Integer), Column("fence", BigInteger))
    loose.drop(engine, checkfirst=True)
    loose.create(engine)
    with engine.begin() as connection:
        connection.execute(loose.insert(), [{"id": 1, "fence": None}, {"id": 2, "fence": 0}])
        with pytest.raises(RedlockError, match="NOT NULL DEFAULT 0`, and a row has NULL"):
            fenced_update(connection, update(loose).values(id=3), locks.late)
        assert connection.scalar(select(func.count()).where(loose.c.id == 3)) == 0


@pytest.mark.parametrize("statement", [text("UPDATE price SET cents = 1"), select(Price)])
def test_another_statement_is_refused(engine: Engine, locks: Locks, statement: Any) -> None:
    with engine.connect() as connection, pytest.raises(SettingsError, match=r"an update\(...\)"):
        fenced_update(connection, statement, locks.late)


@pytest.mark.parametrize("of", ["subquery", "join"])
def test_a_filter_that_writes_is_refused(engine: Engine, locks: Locks, of: str) -> None:
    """The SELECT of a refused row would write again, and match other rows."""
    gone = delete(Shop).returning(Shop.id).cte()
    filters = {"subquery": Price.shop.in_(select(gone.c.id)), "join": Price.shop == gone.c.id}
    statement = update(Price).where(filters[of]).values(cents=11)
    with Session(engine) as session, pytest.raises(SettingsError, match="run that statement first"):
        fenced_update(session, statement, locks.late)


def test_rows_are_not_returned(engine: Engine, locks: Locks) -> None:
    statement = update(Price).values(cents=1).returning(Price.sku)
    with Session(engine) as session, pytest.raises(SettingsError, match=r"with returning\(\): "):
        fenced_update(session, statement, locks.late)


def test_what_is_missing_is_named() -> None:
    code = "import sys; sys.modules['sqlalchemy'] = None; import celery_redlock.sqlalchemy"
    ended = fork_server.run([sys.executable, "-c", code], cwd=ROOT)
    assert "celery_redlock.sqlalchemy needs SQLAlchemy 2.0 or newer: pip" in ended.stderr


def test_no_other_part_of_the_package_imports_it() -> None:
    code = (
        "import sys, celery_redlock, celery_redlock.beat, celery_redlock.operate.cli.group\n"
        "print([n for n in sys.modules if 'sqlalchemy' in n or n.endswith('.fenced_rows')])"
    )
    ended = fork_server.run([sys.executable, "-c", code], cwd=ROOT)
    assert ended.stdout == "[]\n", ended.stderr


# asyncio


@pytest.mark.postgresql
def test_a_coroutine_writes_the_same(database_url: Callable[[str], str], locks: Locks) -> None:
    url = database_url("postgresql")
    plain = create_engine(url)
    Tables.metadata.drop_all(plain)
    Tables.metadata.create_all(plain)
    with Session(plain) as session, session.begin():
        session.add(Shop(id=1, name="corner"))
        session.flush()
        session.add_all([Price(sku=sku, shop=1, cents=FIRST) for sku in ("tea", "milk")])
    asyncio.run(_write_in_coroutines(url, locks))
    assert cents(plain) == {"tea": 13, "milk": 13}
    plain.dispose()


async def _write_in_coroutines(url: str, locks: Locks) -> None:
    engine = asynchronous.create_async_engine(url)
    sessions = asynchronous.async_scoped_session(
        asynchronous.async_sessionmaker(engine), scopefunc=asyncio.current_task
    )
    async with engine.begin() as connection, asynchronous.AsyncSession(engine) as session:
        statement = update(Price).values(cents=11)
        with pytest.raises(SettingsError, match="for async ones await fenced_update_async"):
            fenced_update(session, statement, locks.late)  # type: ignore[arg-type]
        assert await fenced_update_async(connection, update(PRICES), locks.late) == 2
        await connection.commit()
        assert await fenced_update_async(session, statement, locks.late) == 2
        await session.commit()
        await fenced_update_async(sessions, statement.values(cents=13), locks.later)
        await sessions.commit()
        with pytest.raises(LockLost):
            await fenced_update_async(session, statement, locks.late)
        with pytest.raises(SettingsError, match="for others call fenced_update"):
            await fenced_update_async(Session(), statement, locks.late)  # type: ignore[arg-type]
    await sessions.remove()
    await engine.dispose()


# two transactions at once


def waits(engine: Engine) -> bool:
    """Return whether a transaction waits for a row that another one has written."""
    asked = {
        "postgresql": "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'",
        # not innodb_trx, which shows to those who ask often what it has shown before
        "mysql": "SELECT variable_value FROM information_schema.global_status"
        " WHERE variable_name = 'INNODB_ROW_LOCK_CURRENT_WAITS'",
    }
    with engine.connect() as connection:
        return int(connection.scalar(text(asked[engine.dialect.name]))) > 0


LEVELS = ["READ COMMITTED", "REPEATABLE READ"]
ROWS = {"one row": Price.sku == "tea", "all rows": Price.cents > 0}


@pytest.mark.parametrize("engine", WITH_ROW_LOCKS, indirect=True)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("of", ROWS)
def test_an_update_that_waited_for_a_later_holder_is_refused(
    engine: Engine, locks: Locks, level: str, of: str
) -> None:
    at_level = create_engine(engine.url, isolation_level=level)
    with ThreadPoolExecutor() as threads, Session(engine) as later:
        fenced_update(later, update(Price).where(Price.sku == "tea").values(cents=20), locks.later)
        late = threads.submit(write, at_level, locks.late, 11, ROWS[of])
        eventually(lambda: waits(engine))
        later.commit()
        with pytest.raises((LockLost, OperationalError)) as caught:
            late.result()
    at_level.dispose()
    if isinstance(caught.value, OperationalError):  # of PostgreSQL, whose snapshot was older
        assert (engine.dialect.name, level) == ("postgresql", "REPEATABLE READ")
        assert "could not serialize access due to concurrent update" in str(caught.value)
    assert cents(engine) == {"tea": 20, "milk": FIRST, "coal": FIRST}


@pytest.mark.parametrize("engine", WITH_ROW_LOCKS, indirect=True)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("of", ROWS)
def test_a_snapshot_that_is_older_than_a_later_holder_hides_nothing(
    engine: Engine, locks: Locks, level: str, of: str
) -> None:
    at_level = create_engine(engine.url, isolation_level=level)
    with at_level.connect() as late:
        late.execute(select(PRICES)).all()
        write(engine, locks.later, 20, Price.sku == "tea")
        with pytest.raises((LockLost, OperationalError)) as caught:
            fenced_update(late, update(Price).where(ROWS[of]).values(cents=11), locks.late)
        if isinstance(caught.value, OperationalError):
            assert (engine.dialect.name, level) == ("postgresql", "REPEATABLE READ")
        late.commit()
    at_level.dispose()
    assert cents(engine) == {"tea": 20, "milk": FIRST, "coal": FIRST}


@pytest.mark.parametrize("engine", WITH_ROW_LOCKS, indirect=True)
def test_a_later_holder_waits_for_the_end_of_an_earlier_write(engine: Engine, locks: Locks) -> None:
    with ThreadPoolExecutor() as threads, Session(engine) as late:
        fenced_update(late, update(Price).values(cents=11), locks.late)
        later = threads.submit(write, engine, locks.later, 20, Price.sku == "tea")
        eventually(lambda: waits(engine))
        late.commit()
        assert later.result() == 1
    assert cents(engine) == {"tea": 20, "milk": 11, "coal": 11}


@pytest.mark.parametrize("engine", WITH_ROW_LOCKS, indirect=True)
def test_an_update_that_is_rolled_back_refuses_nothing(engine: Engine, locks: Locks) -> None:
    with ThreadPoolExecutor() as threads, Session(engine) as later:
        fenced_update(later, update(Price).values(cents=20), locks.later)
        late = threads.submit(write, engine, locks.late, 11, Price.sku == "tea")
        eventually(lambda: waits(engine))
        later.rollback()
        assert late.result() == 1
    assert cents(engine) == {"tea": 11, "milk": FIRST, "coal": FIRST}


@pytest.mark.parametrize("engine", DATABASES[2:], indirect=True)
@pytest.mark.parametrize("writer", WRITERS)
def test_a_deadlock_is_told_as_one(engine: Engine, locks: Locks, writer: Any) -> None:
    """InnoDB ends the whole transaction then, so there is no savepoint to roll back to."""

    def write_milk() -> None:
        with writer(engine) as late:
            late.execute(update(PRICES).where(PRICES.c.sku == "tea").values(cents=11))
            begun.set()
            fenced_update(late, update(Price).where(Price.sku == "milk"), locks.late)

    begun = threading.Event()
    with ThreadPoolExecutor() as threads, engine.connect() as other:
        # it has written more, so the other one is the victim
        other.execute(Shop.__table__.insert(), [{"id": n, "name": "far"} for n in range(3, 99)])
        other.execute(update(PRICES).where(PRICES.c.sku == "milk").values(cents=12))
        late = threads.submit(write_milk)
        begun.wait()
        eventually(lambda: waits(engine))
        other.execute(update(PRICES).where(PRICES.c.sku == "tea").values(cents=12))
        with pytest.raises(OperationalError, match="Deadlock found"):
            late.result()
        other.commit()
    assert cents(engine) == {"tea": 12, "milk": 12, "coal": FIRST}


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
@pytest.mark.parametrize("journal", ["WAL", "DELETE"])
def test_an_old_snapshot_of_sqlite_writes_nothing(
    engine: Engine, locks: Locks, journal: str
) -> None:
    def begin(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN")

    with engine.connect() as connection:
        connection.exec_driver_sql(f"PRAGMA journal_mode={journal}")
    reader = create_engine(engine.url, connect_args={"timeout": 0})
    event.listen(reader, "begin", begin)
    with reader.connect() as late:
        late.execute(select(PRICES)).all()
        if journal == "WAL":
            write(engine, locks.later, 20, Price.sku == "tea")
            with pytest.raises(DBAPIError, match="database is locked"):
                fenced_update(late, update(PRICES).values(cents=11), locks.late)
        else:  # who reads keeps others from writing
            assert fenced_update(late, update(PRICES).values(cents=11), locks.late) == 3
            late.commit()
            write(engine, locks.later, 20, Price.sku == "tea")
    reader.dispose()
    assert cents(engine)["tea"] == 20


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
def test_a_transaction_that_the_caller_begins_in_sqlite_is_one(
    engine: Engine, locks: Locks
) -> None:
    """Of SQLAlchemy's own recipe: the driver is in autocommit, and an event begins."""
    made = create_engine(engine.url)

    def connect(driver: Any, _: object) -> None:
        driver.isolation_level = None

    event.listen(made, "connect", connect)
    with made.connect() as connection, pytest.raises(RedlockError, match="needs a transaction"):
        fenced_update(connection, update(PRICES).values(cents=11), locks.late)
    event.listen(made, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
    with made.connect() as connection:
        assert fenced_update(connection, update(PRICES).values(cents=11), locks.late) == 3
        connection.rollback()
    made.dispose()
    assert set(cents(engine).values()) == {FIRST}
